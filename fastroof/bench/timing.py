"""Rounds: a workload and its baselines by turns, so that all of them meet the same load."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fastroof.bench.workload import Baseline, Workload
from fastroof.errors import FastroofError

__all__ = ["Measured", "check_agreement", "measure", "seconds_of"]

NS_PER_S: Final = 1e9


@dataclass(frozen=True)
class Measured:
    """How long a workload takes.

    Attributes
    ----------
    workload : Workload
        What was timed.
    first_s : float
        The first call, which compiles the loops or loads them from their cache, s.
    rounds_s : tuple of float
        The later calls, s.
    baseline_ns : dict of str to float
        Median time a unit of each baseline, ns.
    """

    workload: Workload
    first_s: float
    rounds_s: tuple[float, ...]
    baseline_ns: dict[str, float]

    @property
    def ns_per_unit(self) -> float:
        """Median time a unit, ns."""
        return statistics.median(self.rounds_s) / self.workload.count * NS_PER_S

    @property
    def units_per_s(self) -> float:
        """Units a second."""
        return NS_PER_S / self.ns_per_unit

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the caller's arrays that move a second, B/s; 0 where nothing streams."""
        return self.workload.bytes_per_unit * self.units_per_s

    @property
    def ratios(self) -> dict[str, float]:
        """How many times as fast as each baseline."""
        return {name: ns / self.ns_per_unit for name, ns in self.baseline_ns.items()}


def check_agreement(workload: Workload, answers: Any) -> None:
    """Compare a workload's answers with its baselines'.

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
                f"{workload.name}: fastroof and {baseline.name} differ in how many answers they give: "
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
        What to time.
    rounds : int
        Times that each of them is run after a first, untimed one.

    Returns
    -------
    Measured
        Medians over the rounds, the first call apart.

    Raises
    ------
    FastroofError
        If a baseline's answers are not fastroof's.
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
    """Run once: the seconds it took and its answers."""
    began = time.perf_counter()
    answers = work.run()
    took = time.perf_counter() - began
    return (float(answers), None) if work.reports_seconds else (took, answers)
