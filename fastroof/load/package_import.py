"""All that aiconfigurator-core measured on one GPU, converted into a folder of sources."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fastroof.config.gpu import load_gpu
from fastroof.load.aiconfigurator import read_places
from fastroof.load.family_checks import flag_unsound, siblings_of
from fastroof.load.measured import MeasuredTables
from fastroof.load.own import PROVENANCE_FILE, Source, list_sources, load_own
from fastroof.load.package_provenance import package_provenance
from fastroof.load.package_sources import (
    ENGINES,
    LINK_OPERATORS,
    PCIE_LINKED,
    PackageSource,
    package_sources,
)
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
    """Convert what the package measured on a GPU into a new folder of sources."""
    have = list_sources(shipped) if any(shipped.glob(f"*/{PROVENANCE_FILE}")) else []
    sources = package_sources(data, system, {pair for source in have for pair in _files(source)})
    spec = load_gpu(gpu)
    links = LINK_OPERATORS if gpu in PCIE_LINKED else ()
    total, read, lock = sum(len(source.places) for source in sources), 0, threading.Lock()

    def count(name: str) -> None:
        nonlocal read
        with lock:
            if progress is not None:
                progress(read, total, name)
            read += 1

    def tables_of(source: PackageSource) -> MeasuredTables:
        about = package_provenance(data.parents[1], system, gpu, source.name, source.engine, source.version)
        about = {"rank": source.rank, IMPORTED: made_from, **about}
        return read_places(data, spec, source.name, about, source.places, {}, count)

    # sorting and compressing leave the interpreter to other threads
    with ThreadPoolExecutor(min(MAX_THREADS, usable_processors())) as threads:
        everything = list(threads.map(tables_of, sources))
        beside = load_own(shipped) if have else None
        wanted = list(_with_new_kernels(sources, everything, beside, links))
        siblings = [*wanted, beside] if beside is not None else wanted

        def write(measured: MeasuredTables) -> str:
            tables = measured.tables
            first = next(iter(tables.values()))
            operators = {name: first.provenance["operators"][name] for name in tables}
            about = {**first.provenance, "operators": operators}
            flagged = flag_unsound(about, tables, siblings_of(measured, siblings))
            columns = {name: table.columns for name, table in tables.items()}
            write_source(folder / first.source, columns, flagged, compression_level=QUICK)
            return first.source

        names = sorted(threads.map(write, wanted))
    if progress is not None and total:
        progress(total, total, "")
    return names


def _with_new_kernels(
    sources: Sequence[PackageSource],
    everything: Iterable[MeasuredTables],
    shipped: MeasuredTables | None,
    always: Collection[str] = (),
) -> Iterator[MeasuredTables]:
    """Yield tables of the sources in use, and of the others the operators that add a kernel, or always."""
    known: dict[tuple[str, str], set[tuple[Any, ...]]] = {}
    repeated = {place.operator for source in sources if not source.is_in_use for place in source.places}
    for operator in repeated:
        for table in () if shipped is None else shipped.candidates(operator):
            known.setdefault((table.engine, operator), set()).update(table.groups())
    for source, measured in zip(sources, everything, strict=True):
        # what a library has may lie in an engine's source
        engines = (source.engine,) if source.engine else ("", *ENGINES)
        new = {}
        for operator, table in measured.tables.items():
            kernels = set(table.groups()) if operator in repeated else set()
            before = set().union(*(known.get((engine, operator), ()) for engine in engines))
            if source.is_in_use or operator in always or not before.issuperset(kernels):
                new[operator] = table
                known.setdefault((source.engine, operator), set()).update(kernels)
        if new:
            yield replace(measured, tables=new)


def _files(source: Source) -> Iterator[tuple[str, str]]:
    """Operators and files of the package that a source was made from."""
    for operator, about in source.provenance.get("operators", {}).items():
        for file in about.get("files", {}):
            yield operator, file
