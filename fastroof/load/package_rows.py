"""Select and join rows of the package's files as rows of an operator."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Bools, Longs
from fastroof.config.gpu import GpuSpec
from fastroof.file_access import matches
from fastroof.load.families import codes_of
from fastroof.load.rows import impossible_sizes, word_codes
from fastroof.load.write import sort_rows
from fastroof.operators.external_rows import ExternalRows, PackageFile, Raw, version_order
from fastroof.operators.registry import OPERATORS
from fastroof.units import US_PER_S


class Place(NamedTuple):
    """A file of the package; ``requested`` is the version that it replaces, if another one."""

    path: Path
    requested: str

    @property
    def version(self) -> str:
        """The version of the file's folder."""
        return self.path.parent.name


def versions_of(folder: Path, file: str) -> list[str]:
    """Versions of an engine or library with a file, oldest first; not builds named by their commit."""
    names = (path.parent.name for path in folder.glob(f"*/{file}.parquet"))
    return sorted((name for name in names if not name.startswith(BUILD)), key=version_order)


def paired_version(system_file: Path, library: str) -> str:
    """Return the package's version of NCCL or oneCCL for a system; empty if it names none."""
    text = system_file.read_text(encoding="utf-8") if system_file.is_file() else ""
    version = re.search(rf"^\s*{library}_version:\s*['\"]?([\w.]+)", text, re.MULTILINE)
    return version[1] if version else ""


def find_place(system: Path, file: PackageFile, engine: str, version: str) -> Place | None:
    """Find a file of a version, or of the nearest version that has it."""
    places = [(engine, version)]
    if file.backend is not None:
        yaml = system.parents[1] / f"{system.name}.yaml"
        places.insert(0, (file.backend, paired_version(yaml, file.backend)))
    for owner, requested in places:
        folder = system / file.folder / owner
        have = versions_of(folder, file.file)
        if have:
            older = [v for v in have if version_order(v) <= version_order(requested)]
            newest = older or (have[:1] if requested else have)
            served = requested if requested in have else newest[-1]
            return Place(folder / served / f"{file.file}.parquet", "" if served == requested else requested)
    return None


BUILD: Final = "dev-"
"""Start of a version that is a commit. The one in aisimulate, of SGLang, launched each call from the host:
its GEMMs of one row take 24 us or more, of SGLang 0.5.14 3 us."""

NOT_READ: Final = {
    "dsv41_module_perf": "launched from the host without CUDA graphs: blocks of DeepSeek-V4.1-Flash take 0.8 "
    "to 3 ms at any number of tokens from 1 to 1,025"
}
"""Files of the package that no operator reads, and why."""

_FEW: Final = 1e-3
"""Share of a dtype's rows that may exceed its peak by chance."""

_CHANCE: Final = 3
"""Number of rows that may exceed the peak by chance in any table."""

PACKAGE_FILES: Final = tuple(
    (operator.name, file) for operator in OPERATORS.values() for file in operator.package_files
)
"""Operator and file of every file of the package that has rows of an operator."""


def unread_files(system: Path) -> dict[str, dict[str, str]]:
    """Tables of a system that no operator reads, and why, by the source that would have them."""
    readers = {(file.folder, file.file, file.backend) for _, file in PACKAGE_FILES}
    found: dict[str, dict[str, str]] = {}
    for path in sorted(system.rglob("*")):
        if path.suffix != ".parquet" and not path.stem.endswith("_perf"):
            continue
        folder, owner, version = ("", "", "", *path.relative_to(system).parts)[-4:-1]
        engine = None if owner in ENGINES else owner
        if path.stem in NOT_READ:
            why = NOT_READ[path.stem]
        elif version.startswith(BUILD):
            why = "of a commit, not of a release"
        elif (folder, path.stem, engine) not in readers:
            why = "not read: no operator has its rows"
        elif path.suffix != ".parquet":
            why = "not read: not a Parquet file"
        else:
            continue
        name = path.relative_to(system.parent).as_posix()
        found.setdefault(source_name(owner, version), {})[name] = why
    return found


def source_name(owner: str, version: str) -> str:
    """Name of the source of an engine's or library's version."""
    return f"aiconfigurator-{owner}-{version}"


@dataclass(frozen=True)
class Part:
    """Rows of one operator from one file."""

    place: Place
    name: str
    raw: Raw
    columns: dict[str, Array]
    left_out: dict[str, int]
    note: str = ""


def select(operator: str, rows: ExternalRows, gpu: GpuSpec) -> tuple[dict[str, Array], dict[str, int]]:
    """Return the rows to keep, and how many are left out by their first reason."""
    keep = np.ones(len(rows.columns["latency_us"]), bool)
    left_out = {}
    for reason, mask in rows.left_out.items():
        count = int((keep & mask).sum())
        if count:
            left_out[reason] = count
        keep &= ~mask
    columns = {name: values[keep] for name, values in rows.columns.items()}
    slower = _slower_kernels(operator, columns)
    if slower.any():
        left_out["slower of two kernels for the same sizes"] = int(slower.sum())
        columns = {name: values[~slower] for name, values in columns.items()}
    # invalid sizes first: their work is meaningless
    for find in (_no_sizes, partial(_impossible, gpu=gpu)):
        impossible = find(operator, columns)
        if impossible:
            left_out |= {reason: int(mask.sum()) for reason, mask in impossible.items()}
            possible = ~np.any(list(impossible.values()), axis=0)
            columns = {name: values[possible] for name, values in columns.items()}
    return columns, left_out


def _no_sizes(operator: str, columns: Mapping[str, Array]) -> dict[str, Bools]:
    """Mark rows of invalid sizes, by reason."""
    schema = OPERATORS[operator]
    found = {f"more {one.size} than {one.largest}": one.rows for one in impossible_sizes(schema, columns)}
    for column in (*schema.keys, *schema.axes):
        if column.kind == "int":
            below: Bools = columns[column.name] < column.minimum
            if below.any():
                found[f"{column.name} below {column.minimum}"] = below
    return found


def _impossible(operator: str, columns: Mapping[str, Array], gpu: GpuSpec) -> dict[str, Bools]:
    """Mark rows that the GPU cannot have run, by reason."""
    work = OPERATORS[operator].work(columns, gpu)
    dtypes = columns.get("dtype", columns.get("kv_dtype", np.full(len(work.flops), "bf16", object)))
    no_units = np.isnan(work.peak_flops_per_s) & ~np.isnan(work.flops)
    # the largest sizes overflow
    with np.errstate(over="ignore"):
        rate = work.flops / (columns["latency_us"] / US_PER_S)
    too_fast, refused = rate > work.peak_flops_per_s, rate > work.limit_flops_per_s
    found = {
        f"{gpu.name} has no units for {d}": no_units & (dtypes == d) for d in sorted(set(dtypes[no_units]))
    }
    for dtype in sorted(set(dtypes[too_fast])):
        of_dtype = dtypes == dtype
        few = max(_FEW * int(of_dtype.sum()), _CHANCE)
        number = int((refused & of_dtype).sum())
        if number > few:
            found[f"computes in another dtype than {dtype}: {number} rows beat its peak on {gpu.name}"] = (
                of_dtype
            )
            too_fast &= ~of_dtype
        elif (too_fast & of_dtype).sum() > few:
            # over an fp8 cache a kernel may compute in fp8
            too_fast &= refused | ~of_dtype
    if too_fast.any():
        found[f"faster than the peak of {gpu.name}"] = too_fast
    return found


def _slower_kernels(operator: str, columns: Mapping[str, Array]) -> Bools:
    """Mark all but the fastest kernel of the same sizes, which engines pick."""
    point = point_codes(operator, columns)
    kernel = word_codes(columns["kernel"])
    order = np.lexsort((columns["latency_us"], point))
    first = order[np.unique(point[order], return_index=True)[1]]
    return np.asarray(kernel != kernel[first][point])


def point_codes(operator: str, columns: Mapping[str, Array]) -> Longs:
    """Code of each row, equal for equal keys and axes."""
    schema = OPERATORS[operator]
    return codes_of(columns[column.name] for column in (*schema.keys, *schema.axes))


def joined(operator: str, parts: list[dict[str, Array]]) -> dict[str, Array]:
    """Join and sort the rows of an operator from all files."""
    return sort_rows(operator, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


class Package(NamedTuple):
    """A package that has the tables: its module, its name on PyPI and its repository."""

    module: str
    name: str
    url: str


PACKAGES: Final = (
    Package("aisimulate_core", "aisimulate", "https://github.com/ai-dynamo/aisimulate"),
    Package("aiconfigurator_core", "aiconfigurator-core", "https://github.com/ai-dynamo/aiconfigurator"),
)
"""The successor first: it has every table of aiconfigurator-core 0.12.0 but six, and 214 more."""

ENGINES: Final = ("vllm", "trtllm", "sglang")
"""Folders of engines; rows of a library name the engine in which they were measured."""


def package_of(folder: Path) -> Package:
    """Package in a folder, by the folder's name or the metadata next to it."""
    packages = (package for package in PACKAGES if package.module == folder.name)
    with_metadata = (package for package in PACKAGES if _metadata(folder, package))
    return next(packages, next(with_metadata, PACKAGES[-1]))


def package_version(folder: Path) -> str:
    """Version of the package in a folder by the metadata next to it; "unknown" without."""
    infos = _metadata(folder, package_of(folder))
    return infos[-1].name.split("-")[1].removesuffix(".dist") if infos else "unknown"


def _metadata(folder: Path, package: Package) -> list[Path]:
    return matches(folder.parent, f"{package.name.replace('-', '_')}-*.dist-info")


def package_provenance(
    package: Path, system: str, gpu: str, source: str, engine: str, version: str
) -> dict[str, Any]:
    """Provenance of a source of an engine's version, or of a library if ``engine`` is empty."""
    where = {
        "gpu": gpu,
        "name": source,
        "package": package_of(package).name,
        "package_version": package_version(package),
        "url": package_of(package).url,
        "licence": "Apache-2.0",
        "copyright": "Copyright (c) NVIDIA CORPORATION & AFFILIATES. All rights reserved.",
        "changes": "rows selected, columns renamed, latency multiplied by 1e3 from ms to us, element "
        "counts turned into bytes, rows sorted",
        "system": system,
    }
    return where | ({"framework": engine, "framework_version": version} if engine else {})


def words_of(parts: list[Part], name: str) -> str:
    """Distinct values of a text column over the files."""
    return ", ".join(sorted({word for p in parts for word in set(p.raw.get(name, ()))}))


def operator_provenance(operator: str, columns: Mapping[str, Array], parts: list[Part]) -> dict[str, Any]:
    """Provenance of one operator's rows."""
    codes = point_codes(operator, columns)
    repeats = np.bincount(codes)
    provenance: dict[str, Any] = {"rows": len(columns["latency_us"]), "points": len(repeats)}
    provenance["kernels"] = sorted(set(columns["kernel"]))
    if repeats.max() > 1:
        provenance["repeats"] = _repeats(codes, columns)
    provenance["files"] = {part.name: _file_provenance(part) for part in parts}
    return provenance


def _repeats(codes: Longs, columns: Mapping[str, Array]) -> str:
    latency = columns["latency_us"]
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
    if part.place.requested:
        provenance["version"] = part.place.version
        provenance["stands_for"] = f"{part.place.requested}, which has no such file"
    versions = words_of([part], "version")
    if versions and versions != part.place.version:
        provenance["version_in_rows"] = versions
    engine, frameworks = path.parents[1].name, words_of([part], "framework")
    if engine in ENGINES and frameworks and frameworks.casefold() != engine:
        provenance["framework_in_rows"] = frameworks
    if legacy:
        provenance["timing"] = "the package marks it legacy: no record of the collector, clocks or replays"
    if part.left_out:
        provenance["left_out"] = part.left_out
    if part.note:
        provenance["note"] = part.note
    return provenance
