"""The GPU and the measured tables that a command names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from fastroof.cli.progress import Progress, shown_progress
from fastroof.errors import GpuError, TableError
from fastroof.file_access import exists, is_folder, matches

if TYPE_CHECKING:
    from fastroof import GpuSpec, Tables
    from fastroof.load import MeasuredTables

__all__ = [
    "DEFAULT_GPU",
    "TableSet",
    "fetch_tables",
    "gpu_and_tables",
    "import_progress",
    "parse_source",
    "table_sets",
    "tables_of",
]

DEFAULT_GPU: Final = "h100"


def gpu_and_tables(gpu: str | None, tables: str | None, source: str | None) -> tuple[GpuSpec, Tables | None]:
    """Return the GPU and its measured tables; None where nothing was measured on it."""
    from fastroof import load_gpu, load_tables
    from fastroof.load.by_name import table_folders

    spec = load_gpu(gpu or DEFAULT_GPU)
    if tables is not None:
        loaded = tables_of(tables, gpu and spec.name, source)
        return (loaded.gpu if gpu is None else spec), loaded
    own = _own_folder(gpu or DEFAULT_GPU)
    if own is None:
        fetch_tables(spec.name)
    folders = table_folders(spec.name) if own is None else matches(own, "*/provenance.toml")
    if folders:
        return spec, load_tables(spec.name if own is None else own, source=parse_source(source))
    if source is not None:
        raise TableError(f"{spec.name} has no measured tables, so no source {source!r}; leave out --source")
    return spec, None


def tables_of(name: str, gpu: str | None = None, source: str | None = None) -> Tables:
    """Load tables by the name of a GPU, or from a folder."""
    from fastroof import load_gpu, load_tables

    if not _is_path(name) and _own_folder(name) is None:
        fetch_tables(name)
        return load_tables(load_gpu(name).name, gpu=gpu, source=parse_source(source))
    return load_tables(_folders(name)[0], gpu=gpu, source=parse_source(source))


def fetch_tables(gpu: str) -> None:
    """Bring in what a package measured on a GPU, where that was not done, and show how far it is."""
    from fastroof import load_gpu
    from fastroof.load.by_name import ensure_imported

    with import_progress(gpu) as progress, suppress(TableError):
        ensure_imported(load_gpu(gpu).name, progress=progress)


@contextmanager
def import_progress(gpu: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show how far an import is, from the first file on: most often there is none to be made."""
    with ExitStack() as shown:
        tell: list[Progress] = []

        def progress(done: int, total: int, file: str) -> None:
            if not tell:
                words = f"converting the tables of {gpu}"
                tell.append(shown.enter_context(shown_progress(words, "files", quiet=False)))
            tell[0](done, total)

        yield progress


def parse_source(text: str | None) -> str | dict[str, str] | None:
    """Read the name of a source, or ``OPERATOR=SOURCE,...`` of those that are not the default's."""
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


def _is_path(name: str) -> bool:
    path = Path(name)
    return is_folder(path) or path.name != name


def _own_folder(gpu: str) -> Path | None:
    """Return the folder of a gpu.toml that ``--gpu`` names by its path; None for a GPU's name."""
    from fastroof import gpu_names, load_gpu

    path = Path(gpu)
    if not exists(path):
        return None
    spec = load_gpu(gpu)
    if spec.name in gpu_names() and load_gpu(spec.name) == spec:
        return None
    return path if is_folder(path) else path.parent


def _folders(name: str, fetch: bool = True) -> tuple[Path, ...]:
    """Folders of sources that a GPU's name or a path means."""
    from fastroof import load_gpu
    from fastroof.load.by_name import table_folders

    if _is_path(name):
        return (Path(name),)
    own = _own_folder(name)
    if own is not None:
        return (own,)
    if fetch:
        fetch_tables(name)
    return table_folders(load_gpu(name).name)


class TableSet(NamedTuple):
    """Tables that are loaded together: one source, or one GPU of a published tree."""

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


def table_sets(
    name: str, gpu: str | None = None, source: str | None = None, *, fetch: bool = True
) -> list[TableSet]:
    """List everything that can be loaded from a GPU's name or a folder, one source at a time."""
    from fastroof import load_gpu
    from fastroof.load.by_name import missing_tables
    from fastroof.load.own import list_sources
    from fastroof.load.trees import is_tree

    folders = _folders(name, fetch)
    if not folders:
        raise TableError(missing_tables(load_gpu(name).name))
    if not folders[0].is_dir():
        raise TableError(f"{name} is not a folder: give a GPU's name or a folder of measured tables")
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
    named = [one for one in sets if one.source == source]
    if not named:
        names = ", ".join(dict.fromkeys(str(one.source) for one in sets))
        raise TableError(f"{folders[0]} has no source {source!r}; its sources are {names}")
    return named


def _gpus_of_tree(folder: Path) -> list[str | None]:
    """GPUs that folders of a tree are named after; None, the tree's own GPU, where that is one or unknown."""
    from fastroof import load_gpu

    gpus = set()
    for path in folder.rglob("*"):
        if path.is_dir():
            with suppress(GpuError):
                gpus.add(load_gpu(path.name).name)
    return [*sorted(gpus)] if len(gpus) > 1 else [None]
