"""Compiled loops that a wheel carries, by level of processors; the one at run time selects its level.

They lie next to the sources that they are compiled from. Whoever can write there can change those as well, so
a file's digest is all that is checked: it detects damage. `.ci/wheel` makes them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import llvmlite
import llvmlite.binding as llvm
import numba
from numba.core import config

FOLDER: Final = Path(__file__).parent / "loops"
BUILT_WITH: Final = "built_with.json"

_V3: Final = "avx avx2 bmi bmi2 cx16 f16c fma lzcnt movbe popcnt sahf sse3 sse4.1 sse4.2 ssse3 xsave"
LEVELS: Final = {
    "x86-64-v4": f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl".split(),
    "x86-64-v3": _V3.split(),
    "neoverse-n1": ["crc", "fp-armv8", "lse", "neon"],
}
"""LLVM's names of processors that loops are shipped for, best first, and the features that each needs.

Arm's servers since Neoverse N1 (Graviton2, Grace) have its features. LLVM sees these; the others are for half
precision, integer dot products and acquiring loads, which no loop has.
"""

_DIGEST_BYTES: Final = hashlib.sha256().digest_size

Cpu = tuple[str, str, str]
"""What Numba compiles for: system, processor and features, as its ``magic_tuple``."""


def compiler_versions() -> dict[str, str]:
    """Return what compiled code depends on besides the sources: releases, and Python's minor version."""
    return {
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "python": f"{sys.implementation.cache_tag}{sys.abiflags}",
    }


@cache
def host_levels() -> tuple[str, ...]:
    """Return the levels whose code this processor runs, best first."""
    has = llvm.get_host_cpu_features()
    return tuple(level for level, needs in LEVELS.items() if all(has.get(feature) for feature in needs))


def shipped_cpus(own: Cpu) -> tuple[Cpu, ...]:
    """Return the processors whose shipped code may be used instead of code for this one, best first.

    Who sets ``NUMBA_CPU_NAME`` or ``NUMBA_CPU_FEATURES`` gets code for that processor only.
    """
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None:  # type: ignore[attr-defined]
        return (own,)
    return tuple((own[0], level, "") for level in host_levels())


def read_shipped(version: str | None, name: str) -> bytes:
    """Return the content of a shipped file once its digest is verified."""
    data = (FOLDER / f"loops-{version}" / name).read_bytes()
    payload = data[_DIGEST_BYTES:]
    # damaged machine code would not raise but run
    if hashlib.sha256(payload).digest() != data[:_DIGEST_BYTES]:
        raise ValueError(f"{name} is damaged")
    return payload


class ShippedLoops(NamedTuple):
    """The compiled loops of this installation, and why they are not used; no reason if they are."""

    number: int
    level: str
    why_not: str


def shipped_loops(version: str | None) -> ShippedLoops:
    """Describe the compiled loops that came with this installation."""
    try:
        built: dict[str, Any] = json.loads((FOLDER / BUILT_WITH).read_bytes())
    except OSError:
        return ShippedLoops(0, "", "this installation has none")
    number, levels = int(built["loops"]), built["levels"]
    differing = [
        f"{name} {built[name]} (here {here})"
        for name, here in compiler_versions().items()
        if built[name] != here
    ]
    if differing:
        return ShippedLoops(number, "", f"they are for {', '.join(differing)}")
    if not (FOLDER / f"loops-{version}").is_dir():
        return ShippedLoops(number, "", "they are for other sources, or other NUMBA_ settings")
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None:  # type: ignore[attr-defined]
        return ShippedLoops(number, "", "NUMBA_CPU_NAME or NUMBA_CPU_FEATURES is set")
    for level in host_levels():
        if level in levels:
            return ShippedLoops(number, level, "")
    return ShippedLoops(number, "", f"they are for {', '.join(levels)}, which this processor does not run")
