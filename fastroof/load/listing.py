"""List measured tables, their sources, and which of them serve, without reading rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fastroof.config.gpu import load_gpu
from fastroof.errors import GpuError, TableError
from fastroof.load import load_measured
from fastroof.load.aiconfigurator import NO_VERSION, NOT_READ
from fastroof.load.by_name import find_tables, missing_tables, source_kind
from fastroof.load.measured import IMPORTED, MeasuredTables, Progress
from fastroof.load.package_import import LAST_RANK, OTHERS_RANK
from fastroof.load.sources import Source, list_sources, unknown_source
from fastroof.load.trees import is_tree


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
    missing: dict[str, str]
    """Operators and files of its version that it lacks, and why."""


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
                ListedTable(
                    operator, source.num_rows(operator), source.rank(operator), serving[operator] == number
                )
                for operator in source.files
            ),
            missing=_missing(source),
        )
        for number, source in enumerate(sources)
    ]


def _missing(source: Source) -> dict[str, str]:
    about = source.provenance
    if "package" not in about or "operators" not in about:
        return {}
    version = about.get("framework_version", "")
    files = {operator: _entries(one, "files") for operator, one in about["operators"].items()}
    read = {name for names in files.values() for name in names}
    missing = {}
    for what, why in _entries(about, "absent").items():
        name = what.rpartition(" (")[0]
        # a file's rows may all be of another operator
        if why != NO_VERSION and (name not in read or str(why).startswith(NOT_READ)):
            missing[what] = str(why).replace(f"{NOT_READ}{name}: ", NOT_READ)
    for operator, names in files.items():
        for other in (_entries(names, name).get("version") for name in names):
            if other is not None:
                missing[operator] = f"rows of {other}, which stand in for {version}"
    if IMPORTED in about and version and OTHERS_RANK <= about.get("rank", 0) < LAST_RANK:
        missing["kernels that other versions have"] = (
            f"not converted; `fastroof tables import aiconfigurator {source.gpu} --backend ENGINE "
            "--version VERSION` converts all of a version"
        )
    return missing


def _entries(about: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table in provenance; empty if the user edited it into something else."""
    found = about.get(name)
    return found if isinstance(found, Mapping) else {}


class TableSet(NamedTuple):
    """Tables that are loaded together: one source, or one GPU of a published tree."""

    folder: Path
    gpu: str | None
    source: str | None

    def load(self) -> MeasuredTables:
        """Read them."""
        return load_measured(self.folder, gpu=self.gpu, source=self.source)

    def place(self, operator: str) -> tuple[int, str]:
        """Where the source stands among those that have an operator: the least serves it."""
        if self.source is None:
            return (0, "")
        rank = next(s.rank(operator) for s in list_sources(self.folder) if s.name == self.source)
        return (rank, self.source)


def table_sets(
    name: str,
    gpu: str | None = None,
    source: str | None = None,
    *,
    progress: Progress | None = None,
    imports: bool = True,
) -> list[TableSet]:
    """List everything that can be loaded from a GPU's name or a folder, one source at a time."""
    folders, spec, of_name = find_tables(name, progress=progress, imports=imports)
    if not folders and spec is not None:
        raise TableError(missing_tables(spec.name))
    source = source if of_name is None else of_name
    if is_tree(folders[0]):
        return [TableSet(folders[0], one, None) for one in ([gpu] if gpu else _gpus_of_tree(folders[0]))]
    several = sorted(path.parent for path in folders[0].glob("*/gpu.toml"))
    if gpu is not None and several:
        several = [path for path in several if path.name == gpu]
        if not several:
            raise TableError(f"{folders[0]} has no folder of gpu {gpu!r}")
    places = [place for place in several if any(place.glob("*/provenance.toml"))] if several else folders
    sets = [TableSet(place, None, one.name) for place in places for one in list_sources(place)]
    if source is None:
        return sets
    matches = [one for one in sets if one.source == source]
    if not matches:
        raise unknown_source(folders[0], source, (str(one.source) for one in sets))
    return matches


def _gpus_of_tree(folder: Path) -> list[str | None]:
    """GPUs that folders of a tree are named after; None, the tree's own GPU, where that is one or unknown."""
    gpus = set()
    for path in folder.rglob("*"):
        if path.is_dir():
            with suppress(GpuError):
                gpus.add(load_gpu(path.name).name)
    return [*sorted(gpus)] if len(gpus) > 1 else [None]
