"""Timing a workload and its baselines in alternation, the machine, and formatting of times and rates."""

from __future__ import annotations

import os
import platform
import statistics
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastroof._version import __version__
from fastroof.bench.workload import Baseline, Workload
from fastroof.caching import usable_processors
from fastroof.errors import FastroofError

NS_PER_S: Final = 1e9


@dataclass(frozen=True)
class Measured:
    """Times of a workload and its baselines.

    Attributes
    ----------
    workload : Workload
        The timed workload.
    first_s : float
        The first call, which compiles the loops or loads them from their cache, s.
    rounds_s : tuple of float
        Times of the later calls, s.
    baseline_ns : dict of str to float
        Median time per unit of each baseline, ns.
    """

    workload: Workload
    first_s: float
    rounds_s: tuple[float, ...]
    baseline_ns: dict[str, float]

    @property
    def ns_per_unit(self) -> float:
        """Median time per unit, ns."""
        return statistics.median(self.rounds_s) / self.workload.count * NS_PER_S

    @property
    def units_per_s(self) -> float:
        """Units per second."""
        return NS_PER_S / self.ns_per_unit

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the caller's arrays moved per second, B/s; 0 for workloads without streams."""
        return self.workload.bytes_per_unit * self.units_per_s

    @property
    def ratios(self) -> dict[str, float]:
        """Speed relative to each baseline."""
        return {name: ns / self.ns_per_unit for name, ns in self.baseline_ns.items()}


def check_agreement(workload: Workload, answers: Any) -> None:
    """Check that a workload's answers agree with its baselines'.

    Raises
    ------
    FastroofError
        If they differ by more than the baseline's rtol.
    """
    for baseline in workload.baselines:
        if baseline.rtol is None:
            continue
        other = np.ravel(baseline.run())
        mine = np.ravel(answers)[: len(other)]
        if len(mine) != len(other):
            raise FastroofError(
                f"{workload.name}: fastroof and {baseline.name} return different numbers of answers: "
                f"{len(mine)} and {len(other)}"
            )
        within = np.abs(mine - other) <= baseline.rtol * np.abs(other)
        if not within.all():
            at = int(np.argmin(within))
            raise FastroofError(
                f"{workload.name}: fastroof and {baseline.name} differ at {workload.unit} {at}: "
                f"{mine[at]} and {other[at]}"
            )


def measure(workload: Workload, rounds: int) -> Measured:
    """Time a workload and its baselines.

    Parameters
    ----------
    workload : Workload
        The workload.
    rounds : int
        Number of timed runs of each after a first, untimed one.

    Returns
    -------
    Measured
        Medians over the rounds; the first call is separate.

    Raises
    ------
    FastroofError
        If a baseline's answers differ from fastroof's.
    """
    first_s, answers = seconds_of(workload)
    check_agreement(workload, answers)
    del answers
    for baseline in workload.baselines:
        if baseline.rtol is None:
            baseline.run()
    mine: list[float] = []
    others: dict[str, list[float]] = {baseline.name: [] for baseline in workload.baselines}
    for _ in range(rounds):
        mine.append(seconds_of(workload)[0])
        for baseline in workload.baselines:
            others[baseline.name].append(seconds_of(baseline)[0] / baseline.count)
    medians = {name: statistics.median(seconds) * NS_PER_S for name, seconds in others.items()}
    return Measured(workload, first_s, tuple(mine), medians)


def seconds_of(work: Workload | Baseline) -> tuple[float, Any]:
    """Run once, and return the seconds and the answers."""
    began = time.perf_counter()
    answers = work.run()
    took = time.perf_counter() - began
    return (float(answers), None) if work.reports_seconds else (took, answers)


VECTORS: Final = ("avx512f", "avx2", "avx")
"""Instruction sets that determine the width of a loop, the widest first."""


@dataclass(frozen=True)
class Machine:
    """The machine that times come from.

    Attributes
    ----------
    cpu : str
        Name of the processor reported by the system.
    cores : int
        Processors available to this process.
    load_average : float
        Mean number of runnable processes over the last minute; nan if the system does not report it.
    versions : dict of str to str
        Versions of fastroof, numba, numpy and python.
    """

    cpu: str
    cores: int
    load_average: float
    versions: dict[str, str]


def this_machine() -> Machine:
    """Return a description of this machine."""
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


_TIMES: Final = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns"))
_RATES: Final = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def time_of_ns(ns: float) -> str:
    """Format a time in the most readable unit.

    Examples
    --------
    >>> time_of_ns(1.934), time_of_ns(310_000_000.0)
    ('1.93 ns', '310 ms')
    """
    factor, unit = next(((f, u) for f, u in _TIMES if ns >= f), _TIMES[-1])
    return f"{_three_digits(ns / factor)} {unit}"


def rate_of(units_per_s: float) -> str:
    """Format a rate in units per second: ``517 M/s``.

    Examples
    --------
    >>> rate_of(517e6), rate_of(1.25)
    ('517 M/s', '1.25 /s')
    """
    factor, prefix = next(((f, p) for f, p in _RATES if units_per_s >= f), _RATES[-1])
    return f"{_three_digits(units_per_s / factor)} {prefix}/s"


def share_of(share: float) -> str:
    """Format a share as a percentage.

    Examples
    --------
    >>> share_of(0.612), share_of(0.0134)
    ('61 %', '1.3 %')
    """
    return f"{share * 100.0:.0f} %" if share >= 0.0995 else f"{share * 100.0:.2g} %"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
