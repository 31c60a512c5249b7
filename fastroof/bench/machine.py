"""What a time was measured on: the processor, its load, the versions of what ran."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from fastroof._version import __version__
from fastroof.processors import usable_processors

__all__ = ["Machine", "this_machine"]

VECTORS: Final = ("avx512f", "avx2", "avx")
"""Instruction sets that decide how many steps a loop takes at once, the widest first."""


@dataclass(frozen=True)
class Machine:
    """Where figures come from.

    Attributes
    ----------
    cpu : str
        Name of the processor, as the system gives it.
    cores : int
        Processors that this process may run on.
    load_average : float
        Processes that wanted to run, mean of the last minute; nan where the system does not say.
    versions : dict of str to str
        Of fastroof, numba, numpy and python.
    """

    cpu: str
    cores: int
    load_average: float
    versions: dict[str, str]


def this_machine() -> Machine:
    """Look at the machine this runs on."""
    versions = {"fastroof": __version__, "numba": version("numba"), "numpy": version("numpy")}
    versions["python"] = platform.python_version()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return Machine(_cpu_name(), usable_processors(), load, versions)


def _cpu_name() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        facts: dict[str, str] = {}
        for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
        if "model name" in facts:
            widest = next((w for w in VECTORS if w in facts.get("flags", "").split()), "no AVX")
            family, model = (facts.get(name, "?") for name in ("cpu family", "model"))
            return f"{facts['model name']} (family {family}, model {model}, {widest})"
    return platform.processor() or platform.machine()
