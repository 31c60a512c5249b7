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
    """One operator of a source."""

    operator: str
    rows: int
    rank: int
    serves: bool


@dataclass(frozen=True)
class ListedSource:
    """One source."""

    gpu: str
    source: str
    kind: Literal["shipped", "imported", "own"]
    folder: Path
    licence: str | None
    operators: tuple[ListedTable, ...]


def list_tables(folders: Iterable[Path]) -> list[ListedSource]:
    """List the sources of the folders of one GPU."""
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
