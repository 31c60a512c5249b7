"""Where measured tables lie: the one place that knows what a name or a path of tables means.

What names a GPU, as :func:`fastroof.load_gpu` takes it, means the tables that ship, the user's own and those
of an installed package. A path means the folder there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastroof.config.gpu import GPU_FILE, GpuSpec, gpu_named, gpu_names, load_gpu
from fastroof.errors import GpuError, TableError
from fastroof.file_access import exists, is_file, is_folder, matches
from fastroof.load.by_name import PROVENANCE, ensure_imported, table_folders

Progress = Callable[[int, int, str], None]
"""Called with files converted, files in all and the file's name while a package's tables are imported."""

PACKAGE_PREFIX: Final = "package:"

NAMED_WORDS: Final = "GPU, GPU/SOURCE, a folder, or package:GPU/BACKEND/VERSION"
"""What tables may be named by, for help texts and errors."""


class FoundTables(NamedTuple):
    """Folders of tables that a name or a path means."""

    folders: tuple[Path, ...]
    """Of one GPU's sources if ``gpu`` is known, else the folder given; empty if nothing was measured."""

    gpu: GpuSpec | None = None
    source: str | None = None


def find_tables(name: str | Path, *, progress: Progress | None = None, imports: bool = True) -> FoundTables:
    """Find the tables of a GPU's name, a GPU/SOURCE, or a folder."""
    path = Path(name)
    if isinstance(name, str) and "/" not in name:
        # a folder with the name of a GPU is ./name
        if (spec := gpu_named(name)) is not None:
            return FoundTables(_folders(spec.name, progress, imports), spec)
        if not exists(path):
            try:
                load_gpu(name)
            except GpuError as error:
                raise GpuError(f"{error}; or the path of a folder of tables") from None
    if is_folder(path):
        return FoundTables((path,))
    if path.name == GPU_FILE and is_file(path):
        return FoundTables((path.parent,))
    if isinstance(name, str) and not exists(path):
        gpu, _, source = name.partition("/")
        spec = gpu_named(gpu)
        if spec is not None and source and "/" not in source:
            return FoundTables(_folders(spec.name, progress, imports), spec, source)
    raise TableError(f"{name} is not a folder of measured tables; need {NAMED_WORDS}")


def find_tables_of(gpu: Any, *, progress: Progress | None = None) -> FoundTables:
    """Find the tables of a GPU given as :func:`fastroof.load_gpu` takes it: beside a gpu.toml, or by name."""
    spec = gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu)
    is_shipped = spec.name in gpu_names() and load_gpu(spec.name) == spec
    if not is_shipped and isinstance(gpu, str | Path) and exists(Path(gpu)):
        folder = Path(gpu) if is_folder(Path(gpu)) else Path(gpu).parent
        return FoundTables((folder,) if matches(folder, f"*/{PROVENANCE}") else ())
    if spec.name not in gpu_names():
        return FoundTables((), spec)
    with suppress(TableError):  # what cannot be imported is missing: the datasheet model stands in
        return FoundTables(_folders(spec.name, progress, True), spec)
    return FoundTables((), spec)


def _folders(gpu: str, progress: Progress | None, imports: bool) -> tuple[Path, ...]:
    """Folders of a GPU's sources, after importing those of an installed package if that was not done."""
    try:
        if imports:
            ensure_imported(gpu, progress=progress)
    except TableError as error:
        if not table_folders(gpu):
            raise
        warnings.warn(f"{gpu} is served by the tables that are there: {error}", stacklevel=6)
    return table_folders(gpu)
