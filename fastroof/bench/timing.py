"""Alternate timing of workloads and baselines, the machine, formatting of times and rates, and the report."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Final

import numpy as np

from fastroof._version import __version__
from fastroof.bench.workload import Baseline, Setup, Workload
from fastroof.checks import whole_number
from fastroof.errors import FastroofError
from fastroof.host import cpu_facts, usable_processors

NS_PER_S: Final = 1e9


@dataclass(frozen=True)
class Measured:
    """Times of a workload and its baselines: medians over rounds, without the first call.

    The first call compiles the loops or loads them from their cache. ``baseline_ns`` is the median time per
    unit of each baseline.
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
    """Raise FastroofError if a workload's answers differ from a baseline's by more than its rtol."""
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
    """Time a workload and its baselines alternately, after a first run of each that is not counted."""
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
    """The machine that times come from; its load average is nan if the system reports none."""

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
    facts = cpu_facts()
    if "model name" in facts:
        widest = next((w for w in VECTORS if w in facts.get("flags", "").split()), "no AVX")
        family, model = (facts.get(name, "?") for name in ("cpu family", "model"))
        return f"{facts['model name']} (family {family}, model {model}, {widest})"
    return platform.processor() or platform.machine()


_TIMES: Final = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns"))
_RATES: Final = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def time_of_ns(ns: float) -> str:
    """Format a time in the most readable unit."""
    factor, unit = next(((f, u) for f, u in _TIMES if ns >= f), _TIMES[-1])
    return f"{_three_digits(ns / factor)} {unit}"


def rate_of(units_per_s: float) -> str:
    """Format a rate in units per second: ``517 M/s``."""
    factor, prefix = next(((f, p) for f, p in _RATES if units_per_s >= f), _RATES[-1])
    return f"{_three_digits(units_per_s / factor)} {prefix}/s"


def share_of(share: float) -> str:
    """Format a share as a percentage."""
    return f"{share * 100.0:.0f} %" if share >= 0.0995 else f"{share * 100.0:.2g} %"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


@dataclass(frozen=True)
class BenchReport:
    """Measured workloads in the order they ran, and the machine before the first of them."""

    machine: Machine
    load_average_after: float
    settings: dict[str, Any]
    results: tuple[Measured, ...]


def run_workloads(
    setup: Setup,
    workloads: Iterable[Workload],
    rounds: int,
    *,
    progress: Callable[[str], None] = lambda name: None,
) -> BenchReport:
    """Time workloads one after the other, each built when the arrays of the previous one are released."""
    whole_number("rounds", rounds)
    machine = this_machine()
    results = []
    for workload in workloads:
        progress(workload.name)
        measured = measure(workload, rounds)
        results.append(replace(measured, workload=replace(workload, run=_done, baselines=())))
        del workload, measured
    settings = {
        "model": setup.model.name,
        "gpu": setup.gpu.name,
        "threads": setup.threads,
        "rounds": rounds,
        "quick": setup.quick,
    }
    return BenchReport(machine, this_machine().load_average, settings, tuple(results))


def _done() -> None:
    """Replace the function of a workload that has run."""


def report_document(report: BenchReport) -> dict[str, Any]:
    """Return the report as the JSON document described by ``fastroof bench --help``."""
    return {
        "machine": {
            "cpu": report.machine.cpu,
            "cores": report.machine.cores,
            "load_average_before": report.machine.load_average,
            "load_average_after": report.load_average_after,
        },
        "versions": report.machine.versions,
        "settings": report.settings,
        "results": [result_document(one) for one in report.results],
    }


def result_document(one: Measured) -> dict[str, Any]:
    """Return a measured workload in the form of the JSON document."""
    return {
        "name": one.workload.name,
        "title": one.workload.title,
        "unit": one.workload.unit,
        "count": one.workload.count,
        "first_call_s": one.first_s,
        "rounds_s": list(one.rounds_s),
        "ns_per_unit": one.ns_per_unit,
        "units_per_s": one.units_per_s,
        "bytes_per_unit": one.workload.bytes_per_unit,
        "bytes_per_s": one.bytes_per_s,
        "baseline_ns_per_unit": one.baseline_ns,
        "times_as_fast_as": one.ratios,
    }
