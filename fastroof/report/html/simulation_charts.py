"""What a simulation's page draws: series, times of requests by arrival, and distributions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.report.html.table import rounded
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.simulation.request_times import RequestTimes
    from fastroof.simulation.simulation import Simulation

__all__ = ["cumulative", "distributions", "requests_over_time", "series_values"]

POINTS: Final = 240
"""Points of a distribution."""

MOST_DOTS: Final = 2000
"""Requests that are drawn one by one; of more, percentiles of stretches."""

STRETCHES: Final = 120
FEWEST: Final = 20
"""Requests of a stretch, in the mean: of fewer a percentile says little."""


def series_values(sim: Simulation) -> dict[str, list[Any]]:
    """Return the series of a simulation as lists, few digits each."""
    table = sim.series()
    return {name: [rounded(value) for value in table[name].to_pylist()] for name in table.column_names}


def requests_over_time(sim: Simulation, name: str) -> dict[str, Any]:
    """Return a time of requests by their arrival: single ones, or percentiles of stretches."""
    values: Floats = getattr(sim.times, name)
    there = sim.times.is_finished & np.isfinite(values)
    arrival_s, times_ms = sim.outcomes.arrival_us[there] / US_PER_S, values[there]
    if len(times_ms) <= MOST_DOTS:
        return {"time_s": _short(arrival_s), "ms": _short(times_ms)}
    count = min(STRETCHES, len(times_ms) // FEWEST)
    edges = np.linspace(arrival_s.min(), arrival_s.max(), count + 1)
    place = np.clip(np.searchsorted(edges, arrival_s, side="right") - 1, 0, count - 1)
    order = np.argsort(place, kind="stable")
    bounds = np.searchsorted(place[order], np.arange(count + 1))
    sorted_ms = times_ms[order]
    middles: list[float] = []
    halves: list[float] = []
    tails: list[float] = []
    for i in range(count):
        of_stretch = sorted_ms[bounds[i] : bounds[i + 1]]
        if len(of_stretch):
            middles.append(float(edges[i] + edges[i + 1]) / 2.0)
            half, tail = np.percentile(of_stretch, (50, 99)).tolist()
            halves.append(half)
            tails.append(tail)
    named = {"time_s": middles, "p50": halves, "p99": tails}
    return {key: [rounded(value) for value in listed] for key, listed in named.items()}


def cumulative(values: Floats) -> dict[str, list[Any]]:
    """Return a distribution as shares of values up to each of some points, dense in its tail."""
    if not len(values):
        return {"ms": [], "share": []}
    ordered = np.sort(values)
    ranks = _ranks(len(ordered))
    return {"ms": _short(ordered[ranks]), "share": _short((ranks + 1) / len(ordered))}


def _ranks(count: int) -> Longs:
    """Ranks to draw: evenly over all, and ever denser towards the last."""
    if count <= POINTS:
        return np.arange(count)
    even = np.linspace(0, count - 1, POINTS // 2)
    tail = count - np.geomspace(1.0, count / 10.0, POINTS // 2)
    return np.unique(np.concatenate([even, tail]).astype(np.int64))


def _gaps(counts: Longs, middles_us: Floats) -> dict[str, list[Any]]:
    """A distribution from a histogram."""
    total = int(counts.sum())
    if not total:
        return {"ms": [], "share": []}
    there = np.flatnonzero(counts)
    upto = np.cumsum(counts[there])
    kept = np.unique(np.searchsorted(upto, _ranks(total), side="right"))
    return {"ms": _short(middles_us[there[kept]] / 1e3), "share": _short(upto[kept] / total)}


def distributions(sim: Simulation, with_range: bool) -> dict[str, dict[str, Any]]:
    """Return the distributions of TTFT, TPOT, ITL and E2E."""
    from fastroof.simulation.percentiles import gap_values_us
    from fastroof.simulation.request_times import RequestTimes

    runs: list[tuple[str, RequestTimes, Longs]] = [("here", sim.times, sim.outcomes.gaps)]
    if with_range:
        for name, run in zip(("fast", "slow"), sim.scaled_runs, strict=True):
            runs.append((name, RequestTimes.of(sim.trace, run), run.gaps))
    middles_us = gap_values_us(len(sim.outcomes.gaps), 0)
    found: dict[str, dict[str, Any]] = {}
    for quantity in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        found[quantity] = {
            name: _gaps(gaps, middles_us) if quantity == "itl_ms" else cumulative(times.of_finished(quantity))
            for name, times, gaps in runs
        }
    return found


def _short(values: Floats) -> list[Any]:
    return [rounded(float(value)) for value in values if not math.isnan(value)]
