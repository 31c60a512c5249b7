"""All that aiconfigurator-core measured on one GPU, converted into a folder of sources."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from fastroof.config.gpu import load_gpu
from fastroof.load.aiconfigurator import read_places
from fastroof.load.measured import MeasuredTable
from fastroof.load.own import PROVENANCE_FILE, Source, list_sources, load_own
from fastroof.load.package_provenance import package_provenance
from fastroof.load.package_sources import ENGINES, PackageSource, package_sources
from fastroof.load.write import write_source
from fastroof.processors import usable_processors

__all__ = ["IMPORTED", "Progress", "import_system"]

IMPORTED: Final = "imported"
"""Of provenance.toml: of what a source was imported by the name of its GPU. Nobody else's sources have it."""

MAX_THREADS: Final = 4

QUICK: Final = 3
"""Level of Zstandard: a tenth more bytes than the highest, in a tenth of its time."""

Progress = Callable[[int, int, str], None]
"""Called with how many files were read, of how many, and the one that is read next."""

_Kernel = tuple[Any, ...]
_Of = tuple[str, str]
"""An engine, none for a library, and an operator."""


def import_system(
    data: Path,
    system: str,
    gpu: str,
    folder: Path,
    *,
    made_from: str,
    shipped: Path,
    progress: Progress | None = None,
) -> list[str]:
    """Convert what the package measured on a GPU into a new folder of sources.

    Parameters
    ----------
    data : Path
        The package's systems/data.
    system, gpu : str
        The package's name of the GPU, and fastroof's.
    folder : Path
        Gets a folder a source.
    made_from : str
        What their provenance says that they were imported of.
    shipped : Path
        A folder of sources: what they have of the package is not converted again.
    progress : callable, optional
        Told of each file before it is read.

    Returns
    -------
    list of str
        Names of the sources.

    Raises
    ------
    TableError
        If a file of the package does not hold what its columns promise.

    Notes
    -----
    Of versions that are not in use an operator is taken where it has a kernel that the newer ones lack.
    """
    have = list_sources(shipped) if any(shipped.glob(f"*/{PROVENANCE_FILE}")) else []
    sources = package_sources(data, system, {pair for source in have for pair in _files(source)})
    others = [source for source in sources if not source.is_in_use]
    repeated = {place.operator for source in others for place in source.places}
    known: dict[_Of, set[_Kernel]] = {}
    for operator in repeated if have else ():
        for table in load_own(shipped, when_needed=True).candidates(operator):
            known.setdefault((table.engine, operator), set()).update(table.groups())
    spec = load_gpu(gpu)
    total, read, lock = sum(len(source.places) for source in sources), 0, threading.Lock()

    def count(name: str) -> None:
        nonlocal read
        with lock:
            if progress is not None:
                progress(read, total, name)
            read += 1

    def tables_of(source: PackageSource) -> Mapping[str, MeasuredTable]:
        about = package_provenance(data.parents[1], system, gpu, source.name, source.engine, source.version)
        about = {"rank": source.rank, IMPORTED: made_from, **about}
        return read_places(data, spec, source.name, about, source.places, {}, count).tables

    def convert(source: PackageSource) -> dict[_Of, set[_Kernel]]:
        tables = tables_of(source)
        _write(folder, tables)
        return {(source.engine, name): set(tables[name].groups()) for name in repeated & tables.keys()}

    # sorting and compressing leave the interpreter to other threads
    with ThreadPoolExecutor(min(MAX_THREADS, usable_processors())) as threads:
        for kernels in threads.map(convert, (source for source in sources if source.is_in_use)):
            for of, keys in kernels.items():
                known.setdefault(of, set()).update(keys)
    for source in others:
        new = {}
        for operator, table in tables_of(source).items():
            # what a library has may lie in an engine's source
            engines = (source.engine,) if source.engine else ("", *ENGINES)
            old = set().union(*(known.get((engine, operator), ()) for engine in engines))
            if not old.issuperset(table.groups()):
                new[operator] = table
                known.setdefault((source.engine, operator), set()).update(table.groups())
        _write(folder, new)
    if progress is not None:
        progress(total, total, "")
    return sorted(path.name for path in folder.iterdir())


def _files(source: Source) -> Iterator[tuple[str, str]]:
    """Operators and files of the package that a source was made from."""
    for operator, about in source.provenance.get("operators", {}).items():
        for file in about.get("files", {}):
            yield operator, file


def _write(folder: Path, tables: Mapping[str, MeasuredTable]) -> None:
    if not tables:
        return
    first = next(iter(tables.values()))
    operators = {name: first.provenance["operators"][name] for name in tables}
    columns = {name: table.columns for name, table in tables.items()}
    provenance = {**first.provenance, "operators": operators}
    write_source(folder / first.source, columns, provenance, compression_level=QUICK)
