"""Convert all of the package's tables of one GPU into a folder of sources."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastroof.arrays import Array
from fastroof.config.gpu import load_gpu
from fastroof.documents import read_json
from fastroof.errors import TableError
from fastroof.host import usable_processors
from fastroof.load.aiconfigurator import NOT_READ, PackagePlace, read_places
from fastroof.load.family_checks import flag_unsound, siblings_of
from fastroof.load.measured import IMPORTED, MeasuredTables, Progress, rows_sha256
from fastroof.load.package_rows import (
    PACKAGE_FILES,
    Place,
    find_place,
    joined,
    package_provenance,
    paired_version,
    select,
    source_name,
    versions_of,
)
from fastroof.load.rows import read_columns
from fastroof.load.sources import PROVENANCE_FILE, Source, list_sources, load_sources
from fastroof.load.write import toml_text, write_source
from fastroof.operators.external_rows import version_order

ENGINES: Final = {"vllm": 200, "trtllm": 210, "sglang": 220}
"""Measured engines and the rank of their current version, which is the order without an engine.

All come after shipped tables, so that an import changes no existing result.
"""

PCIE_LINKED: Final = ("b60", "l40s", "rtx_pro_6000")
"""GPUs linked over PCIe: all-reduces of each version are of another host, so all versions are imported."""

LINK_OPERATORS: Final = ("allreduce",)

LIBRARY_RANK: Final = 230

OTHERS_RANK: Final = 240
"""First rank of versions that are not current, after all current ones and libraries."""

LAST_RANK: Final = 299
"""Rank of a version that was imported explicitly: before external programs' measurements only."""

VERSIONS_FILE: Final = "query_versions.yaml"


class PackageSource(NamedTuple):
    """Files of the package that become one source."""

    name: str
    owner: str
    engine: str
    version: str
    rank: int
    places: tuple[PackagePlace, ...]

    @property
    def is_current(self) -> bool:
        """Whether it is the package's current version of its engine or library."""
        return self.rank < OTHERS_RANK


class ShippedFile(NamedTuple):
    """A file of the package whose rows of an operator ship, at least in part, with a source."""

    source: str
    operator: str
    file: str


def package_sources(data: Path, system: str, shipped: Collection[ShippedFile] = ()) -> list[PackageSource]:
    """List the sources of a system's files."""
    folder = data / system
    engines = [engine for engine in ENGINES if any(folder.glob(f"*/{engine}/*/*.parquet"))]
    libraries = sorted({file.backend for _, file in PACKAGE_FILES if file.backend is not None})
    owners = [(engine, engine, current_version(data, system, engine), ENGINES[engine]) for engine in engines]
    pairs = data.parent / f"{system}.yaml"
    owners += [(library, "", paired_version(pairs, library), LIBRARY_RANK) for library in libraries]
    current: list[PackageSource] = []
    sources: list[PackageSource] = []
    for owner, engine, version, rank in owners:
        backend = None if engine else owner
        places = [
            PackagePlace(operator, file, place)
            for operator, file in PACKAGE_FILES
            if file.backend == backend
            and (place := find_place(folder, file, owner, version)) is not None
            and place.path.parents[1].name == owner
        ]
        if places:
            version = version if engine else places[0].place.version
            current.append(_source(owner, engine, version, rank, places))
            claimed = {(place.operator, place.place.path) for place in places}
            sources += _other_versions(folder, owner, engine, claimed)
    ranked = [one._replace(rank=OTHERS_RANK + i) for i, one in enumerate(sources)]
    return list(_without(data, [*current, *ranked], shipped))


FULL_CAMPAIGN: Final = (
    ("gemm", "gemm_perf"),
    ("attention", "context_attention_perf"),
    ("attention", "generation_attention_perf"),
    ("moe", "moe_perf"),
)
"""Folders and files of a version whose steps need no other version's GEMMs, attention or experts."""


def current_version(data: Path, system: str, engine: str) -> str:
    """Return the newest version with a full campaign on a system, or a newer one that the package names.

    Versions with some files only (vLLM 0.31.0 has no attention) would mix campaigns in one step.
    """
    versions = [set(versions_of(data / system / folder / engine, file)) for folder, file in FULL_CAMPAIGN]
    return max((*set.intersection(*versions), _named_version(data.parent, system, engine)), key=version_order)


def _named_version(systems: Path, system: str, engine: str) -> str:
    """Return the package's current version of an engine on a system; empty if it names none."""
    file = systems / VERSIONS_FILE
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found: dict[str, str] = {}
    section = place = ""
    for line in re.sub(r"#.*", "", text).splitlines():
        word = re.match(r"( *)([\w.-]+):", line)
        if word is None:
            continue
        if not word[1]:
            section, place = word[2], ""
        match = re.search(r"current:\s*[\"']?([\w.+-]+)", line)
        if match is None:
            place = word[2]
        elif word[2] == engine and (section == "defaults" or (section == "overrides" and place == system)):
            found[section] = match[1]
    return found.get("overrides", found.get("defaults", ""))


def _source(
    owner: str, engine: str, version: str, rank: int, places: Collection[PackagePlace]
) -> PackageSource:
    return PackageSource(source_name(owner, version), owner, engine, version, rank, tuple(places))


def _other_versions(
    folder: Path, owner: str, engine: str, claimed: Collection[tuple[str, Path]]
) -> list[PackageSource]:
    """Sources of other versions of an engine or library, newest first."""
    by_version: dict[str, list[PackagePlace]] = {}
    for operator, file in PACKAGE_FILES:
        if (file.backend or engine) != owner:
            continue
        below = folder / file.folder / owner
        for version in versions_of(below, file.file):
            place = Place(below / version / f"{file.file}.parquet", "")
            if (operator, place.path) not in claimed:
                by_version.setdefault(version, []).append(PackagePlace(operator, file, place))
    newest_first = sorted(by_version, key=version_order, reverse=True)
    return [_source(owner, engine, version, 0, by_version[version]) for version in newest_first]


def _without(
    data: Path, sources: list[PackageSource], shipped: Collection[ShippedFile]
) -> Iterator[PackageSource]:
    """Yield sources without the shipped files; empty ones are dropped."""
    for source in sources:
        # of an older file that stands in for another version's, a part of the rows may ship
        is_campaign = source.is_current and source.engine != ""
        used = {(one.operator, one.file) for one in shipped if one.source == source.name or not is_campaign}
        left = tuple(
            place
            for place in source.places
            if (place.operator, place.place.path.relative_to(data).as_posix()) not in used
        )
        if left:
            yield source._replace(places=left)


MAX_THREADS: Final = 4

QUICK: Final = 3
"""Zstandard level: a tenth more bytes than the highest in a tenth of its time."""


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
    """Convert the package's tables of a GPU into a new folder of sources."""
    have = list_sources(shipped) if any(shipped.glob(f"*/{PROVENANCE_FILE}")) else []
    sources = package_sources(data, system, {file for source in have for file in _files(source)})
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
        return read_places(data, spec, source.name, about, source.places, {}, count, skips_faulty=True)

    # sorting and compressing release the GIL
    with ThreadPoolExecutor(min(MAX_THREADS, usable_processors())) as threads:
        everything = list(threads.map(tables_of, sources))
        _warn_of_faults(gpu, everything)
        shipped_tables = load_sources(shipped) if have else None
        imported = list(_with_new_kernels(sources, everything, shipped_tables, links))
        siblings = [*imported, shipped_tables] if shipped_tables is not None else imported

        def write(measured: MeasuredTables) -> str:
            tables = measured.tables
            first = next(iter(tables.values()))
            operators = {name: first.provenance["operators"][name] for name in tables}
            about = {**first.provenance, "operators": operators}
            flagged = flag_unsound(about, tables, siblings_of(measured, siblings))
            columns = {name: table.columns for name, table in tables.items()}
            write_source(folder / first.source, columns, flagged, compression_level=QUICK)
            return first.source

        names = sorted(threads.map(write, imported))
    if progress is not None and total:
        progress(total, total, "")
    return names


def _warn_of_faults(gpu: str, everything: Iterable[MeasuredTables]) -> None:
    """Warn of files that could not be read; provenance lists each."""
    faults = [reason for one in everything for reason in one.ignored.values() if reason.startswith(NOT_READ)]
    if faults:
        more = f" and {len(faults) - 1} others" if len(faults) > 1 else ""
        warnings.warn(f"tables of {gpu} lack a file of the package{more}: {faults[0]}", stacklevel=2)


def _with_new_kernels(
    sources: Sequence[PackageSource],
    everything: Iterable[MeasuredTables],
    shipped: MeasuredTables | None,
    always: Collection[str] = (),
) -> Iterator[MeasuredTables]:
    """Yield tables of current sources; of older ones only operators with new kernels (or in ``always``)."""
    known: dict[tuple[str, str], set[tuple[Any, ...]]] = {}
    repeated = {place.operator for source in sources if not source.is_current for place in source.places}
    for operator in repeated:
        for table in () if shipped is None else shipped.candidates(operator):
            known.setdefault((table.engine, operator), set()).update(table.groups())
    for source, measured in zip(sources, everything, strict=True):
        # a library's kernels may be in an engine's source
        engines = (source.engine,) if source.engine else ("", *ENGINES)
        new = {}
        for operator, table in measured.tables.items():
            kernels = set(table.groups()) if operator in repeated else set()
            before = set().union(*(known.get((engine, operator), ()) for engine in engines))
            if source.is_current or operator in always or not before.issuperset(kernels):
                new[operator] = table
                known.setdefault((source.engine, operator), set()).update(kernels)
        if new:
            yield replace(measured, tables=new)


LISTED: Final = Path(__file__).with_name("package_sources")
"""What :func:`import_system` makes of the pinned package: each GPU's sources, without their rows."""


def listed_sources(gpu: str, inputs: str) -> dict[str, dict[str, Any]]:
    """Provenance of a GPU's sources by name; empty if they were listed for other inputs, or not at all."""
    file = LISTED / f"{gpu}.json"
    listed = read_json(file, TableError) if file.is_file() else {}
    return listed["sources"] if listed.get("made_from") == inputs else {}


def write_listed(folder: Path, sources: Mapping[str, Mapping[str, Any]], made_from: str) -> list[str]:
    """Write sources whose tables are converted when they are needed."""
    for name, provenance in sources.items():
        (folder / name).mkdir()
        (folder / name / PROVENANCE_FILE).write_text(
            toml_text({**provenance, IMPORTED: made_from}), encoding="utf-8"
        )
    return sorted(sources)


def import_table(data: Path, system: str, source: Source, operator: str) -> dict[str, Array]:
    """Convert one table of an imported source; its rows must be those that provenance lists."""
    names = source.provenance.get("operators", {}).get(operator, {}).get("files", {})
    gpu, parts = load_gpu(source.gpu), []
    for one, file in PACKAGE_FILES:
        for name in names if one == operator else ():
            if name.startswith(f"{system}/{file.folder}/") and name.endswith(f"/{file.file}.parquet"):
                raw = read_columns(data / name, file.columns, file.optional, label=name)
                parts.append(select(operator, file.convert(raw), gpu)[0])
    columns = joined(operator, parts) if parts else {}
    expected = source.hashes[source.files[operator].name]["rows_sha256"]
    if not columns or rows_sha256(operator, columns) != expected:
        package = source.provenance[IMPORTED].split(",")[0]
        raise TableError(
            f"{', '.join(names) or data}: not the {operator} rows of {package}; "
            f"install it again, or run fastroof tables import aiconfigurator {source.gpu}"
        )
    return columns


def _files(source: Source) -> Iterator[ShippedFile]:
    """Operators and package files that a source was made from."""
    for operator, about in source.provenance.get("operators", {}).items():
        for file in about.get("files", {}):
            yield ShippedFile(source.name, operator, file)
