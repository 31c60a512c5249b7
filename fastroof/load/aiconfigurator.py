"""Read the measured tables of NVIDIA's package aiconfigurator-core into fastroof's own schema.

The package (Apache-2.0, https://github.com/ai-dynamo/aiconfigurator) holds one Parquet file a kernel
family, system, backend and version. Only its data files are read: it is not imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array
from fastroof.columns import Column
from fastroof.config.gpu import load_gpu
from fastroof.errors import TableError
from fastroof.load.family_checks import flag_unsound
from fastroof.load.measured import MeasuredTable, MeasuredTables
from fastroof.load.package_places import find_place
from fastroof.load.package_rows import PACKAGE_FILES, Part, joined, point_codes, select
from fastroof.load.rows import read_columns
from fastroof.load.write import Format, write_source
from fastroof.operators.foreign_rows import PackageFile, Raw
from fastroof.operators.registry import OPERATORS

__all__ = ["available", "convert_aiconfigurator", "import_aiconfigurator", "installed_root"]


PACKAGE: Final = "aiconfigurator_core"
INSTALL: Final = "pip install aiconfigurator-core==0.12.0"

_NOWHERE: Final = "not in the package, of no version"

SYSTEMS: Final = {
    "a100_sxm": "a100",
    "b200_sxm": "b200",
    "gb200": "gb200",
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "l40s": "l40s",
}
"""The package's systems that fastroof has a gpu.toml for, and its name there."""


def installed_root() -> Path:
    """Return the folder of the installed package aiconfigurator_core, which is not imported.

    Raises
    ------
    TableError
        If it is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise TableError(
            f"the package {PACKAGE} is not installed; run `{INSTALL}`, or give root= a copy of it"
        )
    return Path(spec.submodule_search_locations[0])


def available(root: Path | None = None) -> list[tuple[str, str, str]]:
    """List what can be imported: every (system, backend, version) with a GEMM table.

    Parameters
    ----------
    root : Path, optional
        The package's folder; the installed one if not given.

    Returns
    -------
    list of (str, str, str)
        Sorted; systems without a gpu.toml are left out.

    Raises
    ------
    TableError
        If the package is not installed or the folder is not that package.
    """
    data = _data_folder(root)
    files = data.glob("*/gemm/*/*/gemm_perf.parquet")
    places = (path.relative_to(data).parts for path in files)
    return sorted((parts[0], parts[2], parts[3]) for parts in places if parts[0] in SYSTEMS)


def import_aiconfigurator(
    system: str,
    backend: str,
    version: str,
    root: Path | None = None,
    files: Collection[str] | None = None,
) -> MeasuredTables:
    """Read the tables of one system, serving framework and version.

    Parameters
    ----------
    system : str
        A system of the package, as in ``"h100_sxm"``.
    backend : str
        ``"vllm"``, ``"sglang"`` or ``"trtllm"``.
    version : str
        Version of the backend, as in ``"0.24.0"``.
    root : Path, optional
        The package's folder; the installed one if not given.
    files : collection of str, optional
        Read only these of the package's files, as in ``["custom_allreduce_perf"]``; all if not given.

    Returns
    -------
    MeasuredTables
        Rows in the order :func:`fastroof.load.write.write_source` writes them. Every table carries
        the whole provenance; ``ignored`` says which families are absent and why.

    Raises
    ------
    TableError
        If the package, system, backend or version is absent (the error lists what there is), ``files``
        names one that fastroof does not read or all are absent, or a file does not hold what its
        columns promise.

    Notes
    -----
    ``latency_us = latency * 1e3``, one multiplication of the file's float64 milliseconds.
    """
    data = _data_folder(root)
    _check_available(data, system, backend, version)
    gpu = load_gpu(SYSTEMS[system])
    provenance = _package_provenance(data.parents[1], system, gpu.name, backend, version)
    parts: dict[str, list[Part]] = {}
    ignored: dict[str, str] = {}
    read: dict[tuple[Path, tuple[Column, ...]], Raw] = {}
    for operator, wanted in _wanted_files(files):
        place = find_place(data / system, wanted, backend, version)
        if place is None:
            ignored[f"{system}/{wanted.folder}/{wanted.backend or backend}/{wanted.file}"] = _NOWHERE
            continue
        path = place.path
        name = path.relative_to(data).as_posix()
        # several operators have rows in one file
        if (path, wanted.columns) not in read:
            read[path, wanted.columns] = read_columns(path, wanted.columns, wanted.optional, label=name)
        raw = read[path, wanted.columns]
        part = Part(place, name, raw, *select(operator, wanted.convert(raw), gpu))
        if len(part.columns["latency_us"]):
            parts.setdefault(operator, []).append(part)
        else:
            ignored[f"{name} ({operator})"] = f"no row that fastroof knows: {part.left_out}"
    if not parts:
        absent = "; ".join(f"{name}: {reason}" for name, reason in ignored.items())
        raise TableError(f"nothing to import of {backend} {version} for {system}: {absent}")
    provenance |= {"device": _one_word([p for ps in parts.values() for p in ps], "device")}
    if ignored:
        provenance["absent"] = ignored
    notes = {op: _operator_provenance(op, ps) for op, ps in parts.items()}
    provenance["operators"] = notes
    columns = {op: joined(op, ps) for op, ps in parts.items()}
    for op in parts:
        notes[op] |= OPERATORS[op].package_notes(columns, gpu)
    source = f"aiconfigurator-{backend}-{version}"
    tables = {
        op: MeasuredTable(op, columns[op], source, tuple(p.name for p in parts[op]), provenance)
        for op in OPERATORS
        if op in columns
    }
    return MeasuredTables(gpu.name, tables, data / system, ignored=ignored)


def convert_aiconfigurator(
    system: str,
    backend: str,
    version: str,
    bench_data: Path,
    root: Path | None = None,
    format: Format = "parquet",
    overwrite: bool = False,
    files: Collection[str] | None = None,
    rank: int | None = None,
) -> Path:
    """Import and write ``<bench_data>/<gpu>/aiconfigurator-<backend>-<version>/``.

    Parameters
    ----------
    system, backend, version, root, files
        As in :func:`import_aiconfigurator`.
    bench_data : Path
        The folder that holds one folder a GPU.
    format, overwrite
        As in :func:`fastroof.load.write.write_source`.
    rank : int, optional
        Place among the sources of the GPU, the lowest serves an operator; 100 if not given.

    Returns
    -------
    Path
        The folder that was written.

    Raises
    ------
    TableError
        As the two functions it joins.
    """
    imported = import_aiconfigurator(system, backend, version, root, files)
    table = next(iter(imported.tables.values()))
    columns = {name: t.columns for name, t in imported.tables.items()}
    folder = Path(bench_data) / imported.gpu / table.source
    provenance = _with_flags(table.provenance, folder / "provenance.toml")
    provenance = flag_unsound(provenance, imported.tables)
    if rank is not None:
        provenance = {"rank": rank, **provenance}
    return write_source(folder, columns, provenance, format, overwrite)


def _with_flags(provenance: Mapping[str, Any], replaced: Path) -> dict[str, Any]:
    """Keep what someone flagged in what is written over."""
    operators = {name: dict(about) for name, about in provenance["operators"].items()}
    if replaced.is_file():
        before = tomllib.loads(replaced.read_text(encoding="utf-8"))
        for name, about in before.get("operators", {}).items():
            if name in operators:
                operators[name] |= {
                    flags: about[flags] for flags in ("outliers", "unsound") if flags in about
                }
    return {**provenance, "operators": operators}


# -- the package's folders -----------------------------------------------------------------------


def _data_folder(root: Path | None) -> Path:
    package = installed_root() if root is None else Path(root)
    data = package / "systems" / "data"
    if not data.is_dir():
        raise TableError(f"{package} has no systems/data; need the folder {PACKAGE} of `{INSTALL}`")
    return data


def _wanted_files(files: Collection[str] | None) -> tuple[tuple[str, PackageFile], ...]:
    if files is None:
        return PACKAGE_FILES
    known = list(dict.fromkeys(file.file for _, file in PACKAGE_FILES))
    wanted = {files} if isinstance(files, str) else set(files)
    unknown = sorted(wanted - set(known))
    if unknown:
        raise TableError(f"fastroof reads no file {', '.join(unknown)}; need some of {', '.join(known)}")
    return tuple((operator, file) for operator, file in PACKAGE_FILES if file.file in wanted)


def _check_available(data: Path, system: str, backend: str, version: str) -> None:
    if system not in SYSTEMS:
        raise TableError(f"unknown system {system!r}; fastroof has a GPU for {', '.join(SYSTEMS)}")
    have: dict[str, list[str]] = {}
    for _, wanted in PACKAGE_FILES:
        if wanted.backend is None:
            files = list((data / system / wanted.folder).glob(f"*/*/{wanted.file}.parquet"))
            have[wanted.file] = sorted(f"{f.parts[-3]} {f.parts[-2]}" for f in files)
    if any(f"{backend} {version}" in names for names in have.values()):
        return
    listed = "; ".join(f"{name}: {', '.join(names)}" for name, names in have.items() if names)
    raise TableError(f"no table of {backend} {version} for {system}; there are {listed or 'none'}")


def _package_provenance(package: Path, system: str, gpu: str, backend: str, version: str) -> dict[str, Any]:
    infos = sorted(package.parent.glob(f"{PACKAGE}-*.dist-info"))
    return {
        "gpu": gpu,
        "name": f"aiconfigurator-{backend}-{version}",
        "package": "aiconfigurator-core",
        "package_version": infos[-1].name.split("-")[1].removesuffix(".dist") if infos else "unknown",
        "url": "https://github.com/ai-dynamo/aiconfigurator",
        "licence": "Apache-2.0",
        "copyright": "Copyright (c) NVIDIA CORPORATION & AFFILIATES. All rights reserved.",
        "changes": "rows selected, columns renamed, latency multiplied by 1e3 from ms to us, element "
        "counts turned into bytes, rows sorted",
        "system": system,
        "framework": backend,
        "framework_version": version,
    }


# -- what the provenance says --------------------------------------------------------------------


def _one_word(parts: list[Part], name: str) -> str:
    return ", ".join(sorted({word for p in parts for word in set(p.raw.get(name, ()))}))


def _operator_provenance(operator: str, parts: list[Part]) -> dict[str, Any]:
    columns = joined(operator, parts)
    repeats = np.bincount(point_codes(operator, columns))
    provenance: dict[str, Any] = {"rows": len(columns["latency_us"]), "points": len(repeats)}
    provenance["kernels"] = sorted(set(columns["kernel"]))
    if repeats.max() > 1:
        provenance["repeats"] = _repeats(operator, columns)
    provenance["files"] = {part.name: _file_provenance(part) for part in parts}
    return provenance


def _repeats(operator: str, columns: Mapping[str, Array]) -> str:
    codes, latency = point_codes(operator, columns), columns["latency_us"]
    count = np.bincount(codes)
    low, high = np.full(len(count), np.inf), np.zeros(len(count))
    np.minimum.at(low, codes, latency)
    np.maximum.at(high, codes, latency)
    apart = float((high / low).max() - 1.0)
    return (
        f"{int((count > 1).sum())} points were measured more than once, the times of one up to "
        f"{apart:.0%} apart; all rows are kept and a lookup takes the median"
    )


def _file_provenance(part: Part) -> dict[str, Any]:
    path = part.place.path
    meta = path.parent / "collection_meta.yaml"
    text = meta.read_text(encoding="utf-8") if meta.is_file() else ""
    legacy = re.search(r"^provenance:\s*legacy\b", text, re.MULTILINE)
    provenance: dict[str, Any] = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    if part.place.asked:
        provenance["version"] = part.place.version
        provenance["stands_for"] = f"{part.place.asked}, which has no such file"
    versions = _one_word([part], "version")
    if versions and versions != part.place.version:
        provenance["version_in_rows"] = versions
    if legacy:
        provenance["timing"] = "the package marks it legacy: no record of the collector, clocks or replays"
    if part.left_out:
        provenance["left_out"] = part.left_out
    return provenance
