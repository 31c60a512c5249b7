"""The GPU and the tables that a command's options name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fastroof.defaults import DATASHEET, DEFAULT_GPU, MEASURED
from fastroof.errors import MissingTableError, TableError
from fastroof.progress import Phase, shown_progress

if TYPE_CHECKING:
    from fastroof import GpuSpec, Tables


def gpu_and_tables(gpu: str | None, tables: str | None, source: str | None) -> tuple[GpuSpec, Tables | None]:
    """Return the GPU and its measured tables; None if nothing was measured on it."""
    from fastroof import load_gpu
    from fastroof.tables.table_set import load_gpu_tables

    spec = load_gpu(gpu or DEFAULT_GPU)
    if tables == DATASHEET:
        return spec, None
    if tables is not None and tables != MEASURED:
        loaded = tables_of(tables, gpu and spec.name, source)
        return (loaded.gpu if gpu is None else spec), loaded
    with import_progress(spec.name) as progress:
        return spec, load_gpu_tables(gpu or DEFAULT_GPU, source=parse_source(source), progress=progress)


def measured_tables(gpu: str | None, tables: str | None, source: str | None) -> tuple[GpuSpec, Tables]:
    """Return the same, or raise MissingTableError if nothing was measured on the GPU."""
    from fastroof.load.by_name import missing_tables

    spec, measured = gpu_and_tables(gpu, tables, source)
    if measured is None:
        raise MissingTableError(missing_tables(spec.name))
    return spec, measured


def tables_of(name: str | None, gpu: str | None = None, source: str | None = None) -> Tables:
    """Load tables by a GPU's name or from a folder (default: those of ``gpu``)."""
    from fastroof import load_tables

    name, gpu = (gpu or DEFAULT_GPU, None) if name is None else (name, gpu)
    with import_progress(name) as progress:
        return load_tables(name, gpu=gpu, source=parse_source(source), progress=progress)


@contextmanager
def import_progress(gpu: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show the progress of an import from its first file on."""
    with ExitStack() as shown:
        tell: list[Phase] = []

        def progress(done: int, total: int, file: str) -> None:
            if not tell:
                words = f"converting the tables of {gpu}"
                tell.append(shown.enter_context(shown_progress(words, "files")))
            tell[0](done, total)

        yield progress


def source_files(gpu: str) -> list[Path]:
    """Return the provenance of each source of a GPU, which lies in the source's folder."""
    from fastroof.load.by_name import table_folders

    return [path for folder in table_folders(gpu) for path in sorted(folder.glob("*/provenance.toml"))]


def parse_source(text: str | None) -> str | dict[str, str] | None:
    """Read the name of a source, or ``OPERATOR=SOURCE,...``."""
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
