"""Run a set of workloads, and convert the results to a JSON document."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from fastroof.bench.timing import Machine, Measured, measure, this_machine
from fastroof.bench.workload import Setup, Workload
from fastroof.checks import whole_number


@dataclass(frozen=True)
class BenchReport:
    """Measured workloads, and the machine they were measured on.

    Attributes
    ----------
    machine : Machine
        State before the first workload.
    load_average_after : float
        Load average after the last.
    settings : dict
        model, gpu, threads, rounds and quick.
    results : tuple of Measured
        In execution order.
    """

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
    """Time workloads one after the other.

    Parameters
    ----------
    setup : Setup
        The setup that the workloads were built from.
    workloads : iterable of Workload
        Each is built when the previous one is done, so that their arrays need not fit into memory together.
    rounds : int
        Number of timed runs of each after its first call.
    progress : callable
        Called with a workload's name before it runs.

    Returns
    -------
    BenchReport
        Medians, baselines, machine.

    Raises
    ------
    FastroofError
        If rounds is not a whole number of at least 1, or a baseline disagrees.
    """
    whole_number("rounds", rounds)
    machine = this_machine()
    results = []
    for workload in workloads:
        progress(workload.name)
        results.append(_without_arrays(measure(workload, rounds)))
        del workload
    settings = {
        "model": setup.model.name,
        "gpu": setup.gpu.name,
        "threads": setup.threads,
        "rounds": rounds,
        "quick": setup.quick,
    }
    return BenchReport(machine, this_machine().load_average, settings, tuple(results))


def _without_arrays(measured: Measured) -> Measured:
    """Release the arrays that the workload's functions hold."""
    return replace(measured, workload=replace(measured.workload, run=_done, baselines=()))


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
