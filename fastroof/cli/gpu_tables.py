"""The GPU and the measured tables that a command names."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from fastroof.errors import GpuError, TableError

if TYPE_CHECKING:
    from fastroof import GpuSpec, Tables
    from fastroof.load import MeasuredTables

__all__ = [
    "DEFAULT_GPU",
    "TableSet",
    "gpu_and_tables",
    "gpu_folder",
    "parse_source",
    "table_sets",
    "tables_of",
]

DEFAULT_GPU: Final = "h100"


def gpu_folder(gpu: str) -> Path:
    """Return the folder that holds a GPU's gpu.toml and its sources."""
    from fastroof import load_gpu
    from fastroof.config.paths import bench_data_root

    spec = load_gpu(gpu)
    shipped = bench_data_root() / spec.name
    path = Path(gpu)
    # A name wins over a path of the same spelling, as in load_gpu.
    if path.exists() and (not shipped.is_dir() or load_gpu(spec.name) != spec):
        return path if path.is_dir() else path.parent
    return shipped


def gpu_and_tables(gpu: str | None, tables: str | None, source: str | None) -> tuple[GpuSpec, Tables | None]:
    """Return the GPU and its measured tables; None where nothing was measured on it.

    Parameters
    ----------
    gpu : str or None
        What ``--gpu`` says; without it the GPU of the tables, else the default.
    tables : str or None
        A folder of measured tables instead of those that ship with fastroof.
    source : str or None
        Which source of them, as :func:`parse_source` reads it.
    """
    from fastroof import load_gpu, load_tables

    spec = load_gpu(gpu or DEFAULT_GPU)
    if tables is not None:
        loaded = tables_of(tables, gpu and spec.name, source)
        return (loaded.gpu if gpu is None else spec), loaded
    folder = gpu_folder(gpu or DEFAULT_GPU)
    if any(folder.glob("*/provenance.toml")):
        return spec, load_tables(folder, source=parse_source(source))
    if source is not None:
        raise TableError(f"{spec.name} has no measured tables, so no source {source!r}; leave out --source")
    return spec, None


def tables_of(name: str, gpu: str | None = None, source: str | None = None) -> Tables:
    """Load tables by the name of a GPU that ships with fastroof, or from a folder."""
    from fastroof import load_tables

    return load_tables(_folder(name), gpu=gpu, source=parse_source(source))


def parse_source(text: str | None) -> str | dict[str, str] | None:
    """Read the name of a source, or ``OPERATOR=SOURCE,...`` of those that are not the default's.

    Raises
    ------
    TableError
        If it is written otherwise, or an operator is given twice.

    Examples
    --------
    >>> parse_source("allreduce=mine,gemm=theirs")
    {'allreduce': 'mine', 'gemm': 'theirs'}
    """
    if text is None or "=" not in text:
        return text
    sources: dict[str, str] = {}
    for pair in text.split(","):
        operator, equals, name = (part.strip() for part in pair.partition("="))
        if not (operator and equals and name) or operator in sources:
            raise TableError(
                f"--source {text} is neither a source nor OPERATOR=SOURCE,... of different operators"
            )
        sources[operator] = name
    return sources


def _folder(name: str) -> Path:
    path = Path(name)
    return path if path.is_dir() or path.name != name else gpu_folder(name)


class TableSet(NamedTuple):
    """Tables that are loaded together: one source, or one GPU of a published tree.

    Attributes
    ----------
    folder : Path
        Where they lie.
    gpu : str or None
        Which GPU, where the folder holds several.
    source : str or None
        Which source; None for a tree, which is one.
    """

    folder: Path
    gpu: str | None
    source: str | None

    def load(self) -> MeasuredTables:
        """Read them."""
        from fastroof.load import load_measured

        return load_measured(self.folder, gpu=self.gpu, source=self.source)

    def place(self, operator: str) -> tuple[int, str]:
        """Where the source stands among those that have an operator: the least serves it."""
        from fastroof.load.own import list_sources

        if self.source is None:
            return (0, "")
        rank = next(s.rank(operator) for s in list_sources(self.folder) if s.name == self.source)
        return (rank, self.source)


def table_sets(name: str, gpu: str | None = None, source: str | None = None) -> list[TableSet]:
    """List everything that can be loaded from a GPU's name or a folder, one source at a time.

    Raises
    ------
    TableError
        If the folder does not exist, or does not hold the GPU or source that was asked for.
    GpuError
        If the name is neither a GPU's nor a folder.
    """
    from fastroof.load.own import list_sources
    from fastroof.load.trees import is_tree

    folder = _folder(name)
    if not folder.is_dir():
        raise TableError(f"{name} is not a folder: give a GPU's name or a folder of measured tables")
    if is_tree(folder):
        return [TableSet(folder, one, None) for one in ([gpu] if gpu else _gpus_of_tree(folder))]
    several = sorted(path.parent for path in folder.glob("*/gpu.toml"))
    if gpu is not None and several:
        several = [path for path in several if path.name == gpu]
        if not several:
            raise TableError(f"{folder} has no folder of gpu {gpu!r}")
    sets = []
    for place in several or [folder]:
        if several and not any(place.glob("*/provenance.toml")):
            continue
        names = [s.name for s in list_sources(place)]
        if source is not None and source not in names:
            raise TableError(f"{place} has no source {source!r}; its sources are {', '.join(names)}")
        sets += [TableSet(place, None, one) for one in names if source in (None, one)]
    return sets


def _gpus_of_tree(folder: Path) -> list[str | None]:
    """GPUs that folders of a tree are named after; None, the tree's own GPU, where that is one or unknown."""
    from fastroof import load_gpu

    gpus = set()
    for path in folder.rglob("*"):
        if path.is_dir():
            with suppress(GpuError):
                gpus.add(load_gpu(path.name).name)
    return [*sorted(gpus)] if len(gpus) > 1 else [None]
