"""What measured tables there are, where they came from, and which of them serve; no row is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from fastroof.errors import GpuError, TableError
from fastroof.load import load_measured
from fastroof.load.aiconfigurator import import_aiconfigurator
from fastroof.load.by_name import source_kind
from fastroof.load.measured import MeasuredTables
from fastroof.load.own import list_sources
from fastroof.load.rows import count_rows


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


PACKAGE_PREFIX: Final = "package:"

NAMED_WORDS: Final = "GPU, GPU/SOURCE, a folder, or package:GPU/BACKEND/VERSION"
"""What :func:`load_named` takes, for helps and errors."""


def load_named(word: str) -> MeasuredTables:
    """Load measured tables that a word names."""
    if word.startswith(PACKAGE_PREFIX):
        parts = word.removeprefix(PACKAGE_PREFIX).split("/")
        if len(parts) != 3 or not all(parts):
            raise TableError(f"{word!r} names no tables of the package; write package:h200/vllm/0.24.0")
        gpu, backend, version = parts
        return import_aiconfigurator(gpu, backend, version)
    if Path(word).is_dir():
        return load_measured(Path(word))
    gpu, slash, source = word.partition("/")
    if slash and gpu and source and "/" not in source:
        try:
            return load_measured(gpu, source=source)
        except GpuError:
            raise TableError(f"{word!r} is neither a folder nor GPU/SOURCE; need {NAMED_WORDS}") from None
    return load_measured(word)
