"""A run of workloads as one document: JSON for programs, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fastroof.bench.machine import Machine, this_machine
from fastroof.bench.timing import Measured, measure
from fastroof.bench.workload import Setup, Workload
from fastroof.errors import FastroofError

__all__ = ["BenchReport", "ReportFile", "report_document", "run_workloads"]


@dataclass(frozen=True)
class BenchReport:
    """Measured workloads, and what they were measured on.

    Attributes
    ----------
    machine : Machine
        As it was before the first workload.
    load_average_after : float
        As it was after the last.
    settings : dict
        model, gpu, threads, rounds and quick.
    results : tuple of Measured
        In the order in which they ran.
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
        What they were made of.
    workloads : iterable of Workload
        Each is asked for when the one before it is done, so that their arrays need not fit together.
    rounds : int
        Times that each is run after its first call.
    progress : callable
        Called with a workload's name before it runs.

    Returns
    -------
    BenchReport
        Medians, baselines, machine.

    Raises
    ------
    FastroofError
        If rounds is no whole number of at least 1, or a baseline disagrees.
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise FastroofError(f"rounds must be a whole number of at least 1, got {rounds!r}")
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
    """Let go of what the workload's functions hold."""
    return replace(measured, workload=replace(measured.workload, run=_done, baselines=()))


def _done() -> None:
    """Stand for a workload that has run."""


def report_document(report: BenchReport) -> dict[str, Any]:
    """Return the report as the JSON document that ``fastroof bench --help`` describes."""
    return {
        "machine": {
            "cpu": report.machine.cpu,
            "cores": report.machine.cores,
            "load_average_before": report.machine.load_average,
            "load_average_after": report.load_average_after,
        },
        "versions": report.machine.versions,
        "settings": report.settings,
        "results": [
            {
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
            for one in report.results
        ],
    }


class ReportFile:
    """A JSON file that is there when everything ran, and untouched when it did not.

    A context manager: a hidden file beside ``path`` is opened at the start, so that a place that cannot
    be written to is refused before minutes of work, and takes the name ``path`` in :meth:`write`.

    Parameters
    ----------
    path : Path
        A file of that name is replaced.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._building = path.parent / f".{path.name}.{uuid.uuid4().hex}"

    def __enter__(self) -> Self:
        if os.path.isdir(self.path):
            raise FastroofError(
                f"{self.path} is a folder, need a file's name, like {self.path / 'bench.json'}"
            )
        try:
            self._building.touch()
        except OSError as error:
            raise self._failed(error) from None
        return self

    def write(self, document: dict[str, Any]) -> None:
        """Write the document, whole."""
        try:
            self._building.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            os.replace(self._building, self.path)
        except OSError as error:
            raise self._failed(error) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._building.unlink()

    def _failed(self, error: OSError) -> FastroofError:
        if not os.path.isdir(self.path.parent):
            return FastroofError(
                f"{self.path}: there is no folder {self.path.parent}; make it, or name another"
            )
        return FastroofError(f"{self.path} cannot be written: {error.strerror or error}")
