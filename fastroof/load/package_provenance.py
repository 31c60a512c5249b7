"""What provenance.toml says of tables that come from aiconfigurator-core."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array, Longs
from fastroof.file_access import matches
from fastroof.load.package_rows import Part, point_codes

__all__ = ["DISTRIBUTION", "operator_provenance", "package_provenance", "package_version", "words_of"]

DISTRIBUTION: Final = "aiconfigurator_core"

ENGINES: Final = ("vllm", "trtllm", "sglang")
"""Folders of serving engines; rows of a library name the engine that they were measured in."""


def package_version(package: Path) -> str:
    """Version of the package that lies in a folder, by the metadata beside it; "unknown" without any."""
    infos = matches(package.parent, f"{DISTRIBUTION}-*.dist-info")
    return infos[-1].name.split("-")[1].removesuffix(".dist") if infos else "unknown"


def package_provenance(
    package: Path, system: str, gpu: str, source: str, engine: str, version: str
) -> dict[str, Any]:
    """Where a source comes from: an engine of that version, or a library where ``engine`` is empty."""
    where = {
        "gpu": gpu,
        "name": source,
        "package": "aiconfigurator-core",
        "package_version": package_version(package),
        "url": "https://github.com/ai-dynamo/aiconfigurator",
        "licence": "Apache-2.0",
        "copyright": "Copyright (c) NVIDIA CORPORATION & AFFILIATES. All rights reserved.",
        "changes": "rows selected, columns renamed, latency multiplied by 1e3 from ms to us, element "
        "counts turned into bytes, rows sorted",
        "system": system,
    }
    return where | ({"framework": engine, "framework_version": version} if engine else {})


def words_of(parts: list[Part], name: str) -> str:
    """Return the distinct words of a column of the files."""
    return ", ".join(sorted({word for p in parts for word in set(p.raw.get(name, ()))}))


def operator_provenance(operator: str, columns: Mapping[str, Array], parts: list[Part]) -> dict[str, Any]:
    """What the rows of one operator are, and of which files."""
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
    if part.place.asked:
        provenance["version"] = part.place.version
        provenance["stands_for"] = f"{part.place.asked}, which has no such file"
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
    return provenance
