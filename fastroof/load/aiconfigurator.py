"""Read the measured tables of NVIDIA's aisimulate or aiconfigurator-core into fastroof's schema.

Either package (Apache-2.0, https://github.com/ai-dynamo) has one Parquet file per kernel family, system,
backend and version. Only its data files are read; it is never imported, and needs none of its dependencies.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastroof.columns import Column
from fastroof.config.gpu import GpuSpec, load_gpu
from fastroof.documents import read_toml
from fastroof.errors import TableError
from fastroof.file_access import is_folder
from fastroof.load.family_checks import flag_unsound
from fastroof.load.measured import MeasuredTable, MeasuredTables
from fastroof.load.package_rows import (
    BUILD,
    PACKAGE_FILES,
    PACKAGES,
    Part,
    Place,
    find_place,
    joined,
    operator_provenance,
    package_provenance,
    select,
    source_name,
    words_of,
)
from fastroof.load.rows import read_columns
from fastroof.load.write import Codec, write_source
from fastroof.operators.external_rows import PackageFile, Raw
from fastroof.operators.registry import OPERATORS

MODULES: Final = tuple(package.module for package in PACKAGES)
"""Modules that may have the tables, the preferred one first."""

INSTALL: Final = "pip install 'fastroof[tables]'"

NO_VERSION: Final = "not in the package, of no version"
"""Why a table is absent that the engine has on no release: one of another engine's kernels, as a rule."""

SYSTEMS: Final = {
    "a100_sxm": "a100",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "b60": "b60",
    "gb200": "gb200",
    "gb300": "gb300",
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx_pro_6000",
}
"""The package's systems with tables, and fastroof's names of their GPUs."""


def installed_root() -> Path:
    """Return the folder of the installed aisimulate_core or aiconfigurator_core, without importing it."""
    for module in MODULES:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations:
            return Path(spec.submodule_search_locations[0])
    raise TableError(
        f"neither aisimulate nor aiconfigurator-core is installed: run {INSTALL}, or pass root= with a copy"
    )


def system_of(name: str) -> str:
    """Return the package's system of a GPU."""
    if name in SYSTEMS:
        return name
    gpu = load_gpu(name).name
    for system, ours in SYSTEMS.items():
        if ours == gpu:
            return system
    raise TableError(f"no package has tables of {gpu}; they have tables of {', '.join(SYSTEMS.values())}")


def available(root: Path | None = None) -> list[tuple[str, str, str]]:
    """List every (system, backend, version) with a GEMM table, which can be imported."""
    data = data_folder(root)
    files = data.glob("*/gemm/*/*/gemm_perf.parquet")
    places = (path.relative_to(data).parts for path in files)
    return sorted(
        (parts[0], parts[2], parts[3])
        for parts in places
        if parts[0] in SYSTEMS and not parts[3].startswith(BUILD)
    )


def import_aiconfigurator(
    system: str, backend: str, version: str, root: Path | None = None, files: Collection[str] | None = None
) -> MeasuredTables:
    """Read the tables of one system, serving framework and version."""
    data = data_folder(root)
    system = system_of(system)
    _check_available(data, system, backend, version)
    gpu = load_gpu(SYSTEMS[system])
    source = source_name(backend, version)
    provenance = package_provenance(data.parents[1], system, gpu.name, source, backend, version)
    places: list[PackagePlace] = []
    ignored: dict[str, str] = {}
    for operator, file in _selected_files(files):
        place = find_place(data / system, file, backend, version)
        if place is None:
            ignored[f"{system}/{file.folder}/{file.backend or backend}/{file.file}"] = NO_VERSION
        else:
            places.append(PackagePlace(operator, file, place))
    imported = read_places(data, gpu, source, provenance, places, ignored)
    if not imported.tables:
        absent = "; ".join(f"{name}: {reason}" for name, reason in imported.ignored.items())
        raise TableError(f"nothing to import of {backend} {version} for {system}: {absent}")
    return imported


NOT_READ: Final = "not read: "
"""Start of the reason why a faulty file is absent."""

_FAULTS: Final = (TableError, ArithmeticError, LookupError, TypeError, ValueError)
"""Errors of reading or converting a file whose columns or values are not those of the known releases."""


class PackagePlace(NamedTuple):
    """A file of the package, and the operator whose rows it gives."""

    operator: str
    file: PackageFile
    place: Place


def read_places(
    data: Path,
    gpu: GpuSpec,
    source: str,
    provenance: Mapping[str, Any],
    places: Sequence[PackagePlace],
    ignored: Mapping[str, str],
    progress: Callable[[str], None] | None = None,
    skips_faulty: bool = False,
) -> MeasuredTables:
    """Read files of the package as one source's tables; ``skips_faulty`` lists unreadable ones as absent."""
    parts: dict[str, list[Part]] = {}
    absent = dict(ignored)
    read: dict[tuple[Path, tuple[Column, ...]], Raw] = {}
    for operator, file, place in places:
        path = place.path
        name = path.relative_to(data).as_posix()
        if progress is not None:
            progress(name)
        try:
            # several operators have rows in one file
            if (path, file.columns) not in read:
                read[path, file.columns] = read_columns(path, file.columns, file.optional, label=name)
            raw = read[path, file.columns]
            rows = file.convert(raw)
            part = Part(place, name, raw, *select(operator, rows, gpu), rows.note)
        except _FAULTS as error:
            if not skips_faulty:
                raise
            absent[f"{name} ({operator})"] = f"{NOT_READ}{error}"
            continue
        if len(part.columns["latency_us"]):
            parts.setdefault(operator, []).append(part)
        else:
            absent[f"{name} ({operator})"] = f"no row that fastroof knows: {part.left_out}"
    about = {**provenance, "device": words_of([p for ps in parts.values() for p in ps], "device")}
    if absent:
        about["absent"] = absent
    columns = {op: joined(op, [p.columns for p in ps]) for op, ps in parts.items()}
    notes = {op: operator_provenance(op, columns[op], ps) for op, ps in parts.items()}
    about["operators"] = notes
    for op in parts:
        notes[op] |= OPERATORS[op].package_notes(columns, gpu)
    tables = {
        op: MeasuredTable(op, columns[op], source, tuple(p.name for p in parts[op]), about)
        for op in OPERATORS
        if op in columns
    }
    return MeasuredTables(gpu.name, tables, data, ignored=absent)


def write_imported(
    imported: MeasuredTables,
    bench_data: Path,
    overwrite: bool = False,
    rank: int | None = None,
    codec: Codec = "zstd",
) -> Path:
    """Write ``<bench_data>/<gpu>/<source>/``, with the flags set by hand in the source that it replaces."""
    table = next(iter(imported.tables.values()))
    columns = {name: t.columns for name, t in imported.tables.items()}
    folder = Path(bench_data) / imported.gpu / table.source
    provenance = _with_flags(table.provenance, folder / "provenance.toml")
    provenance = flag_unsound(provenance, imported.tables)
    if rank is not None:
        provenance = {"rank": rank, **provenance}
    return write_source(folder, columns, provenance, overwrite=overwrite, codec=codec)


def _with_flags(provenance: Mapping[str, Any], replaced: Path) -> dict[str, Any]:
    """Keep flags of the replaced source that were set by hand."""
    operators = {name: dict(about) for name, about in provenance["operators"].items()}
    if replaced.is_file():
        before = read_toml(replaced, TableError)
        for name, about in before.get("operators", {}).items():
            if name in operators:
                operators[name] |= {
                    flags: about[flags] for flags in ("outliers", "unsound") if flags in about
                }
    return {**provenance, "operators": operators}


# -- the package's folders -----------------------------------------------------------------------


def data_folder(root: Path | None = None) -> Path:
    """Return systems/data of the package in a folder (default: the installed one)."""
    package = installed_root() if root is None else Path(root)
    for folder in (package, *(package / module for module in MODULES)):
        if is_folder(folder / "systems" / "data"):
            return folder / "systems" / "data"
    raise TableError(
        f"{package} has no systems/data; need the folder {' or '.join(MODULES)} of an unpacked wheel"
    )


def _selected_files(files: Collection[str] | None) -> tuple[tuple[str, PackageFile], ...]:
    if files is None:
        return PACKAGE_FILES
    known = list(dict.fromkeys(file.file for _, file in PACKAGE_FILES))
    names = set(files)
    unknown = sorted(names - set(known))
    if unknown:
        raise TableError(f"unknown file {', '.join(unknown)}; use one of {', '.join(known)}")
    return tuple((operator, file) for operator, file in PACKAGE_FILES if file.file in names)


def _check_available(data: Path, system: str, backend: str, version: str) -> None:
    have: dict[str, list[str]] = {}
    for _, file in PACKAGE_FILES:
        if file.backend is None:
            files = list((data / system / file.folder).glob(f"*/*/{file.file}.parquet"))
            have[file.file] = sorted(f"{f.parts[-3]} {f.parts[-2]}" for f in files)
    if any(f"{backend} {version}" in names for names in have.values()):
        return
    listed = "; ".join(f"{name}: {', '.join(names)}" for name, names in have.items() if names)
    raise TableError(f"no table of {backend} {version} for {system}; available: {listed or 'none'}")
