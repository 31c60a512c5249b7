"""What measured tables there are, where they came from, and which of them serve; no row is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastroof.load.by_name import source_kind
from fastroof.load.own import list_sources
from fastroof.load.rows import count_rows

__all__ = ["ListedSource", "ListedTable", "list_tables"]


@dataclass(frozen=True)
class ListedTable:
    """One operator of a source.

    Attributes
    ----------
    operator : str
        Its name.
    rows : int
        Measured rows.
    rank : int
        Place of the source among those that have it.
    serves : bool
        Whether lookups ask it first, where no engine is named.
    """

    operator: str
    rows: int
    rank: int
    serves: bool


@dataclass(frozen=True)
class ListedSource:
    """One source.

    Attributes
    ----------
    gpu, source : str
        The GPU it was measured on, and its name.
    kind : str
        ``"shipped"``, ``"imported"`` or ``"own"``.
    folder : Path
        Where it lies.
    licence : str or None
        As its provenance says.
    operators : tuple of ListedTable
        Its tables.
    """

    gpu: str
    source: str
    kind: Literal["shipped", "imported", "own"]
    folder: Path
    licence: str | None
    operators: tuple[ListedTable, ...]


def list_tables(folders: Iterable[Path]) -> list[ListedSource]:
    """List the sources of the folders of one GPU.

    Parameters
    ----------
    folders : iterable of Path
        GPU folders or source folders, in the order in which they are read: of sources of one name that both
        have an operator the first one's counts.

    Returns
    -------
    list of ListedSource
        By folder, then by name.

    Raises
    ------
    TableError
        If a folder has no source, or a file is no table.

    Examples
    --------
    >>> from fastroof.load.by_name import table_folders
    >>> {source.kind for source in list_tables(table_folders("h100")[:1])}
    {'shipped'}
    """
    sources = [source for folder in folders for source in list_sources(folder)]
    having: dict[str, dict[str, int]] = {}
    for number, source in enumerate(sources):
        for operator in source.files:
            having.setdefault(operator, {}).setdefault(source.name, number)
    serving = {
        operator: min(numbers.values(), key=lambda n: (sources[n].rank(operator), sources[n].name))
        for operator, numbers in having.items()
    }
    return [
        ListedSource(
            gpu=source.gpu,
            source=source.name,
            kind=source_kind(source),
            folder=source.folder,
            licence=source.provenance.get("licence"),
            operators=tuple(
                ListedTable(operator, count_rows(path), source.rank(operator), serving[operator] == number)
                for operator, path in source.files.items()
            ),
        )
        for number, source in enumerate(sources)
    ]
