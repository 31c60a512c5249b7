"""The search for a capacity: one trace at many rates, and what each simulation has to say to the limits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from fastroof.checks import shown
from fastroof.errors import SimulationError
from fastroof.simulation.largest_rate import bracket, largest_rate
from fastroof.simulation.percentile_limits import Limits, Seen

if TYPE_CHECKING:
    from fastroof.simulation.outcomes import Outcomes
    from fastroof.simulation.trace import Trace

__all__ = ["NO_LIMIT", "CapacitySearch", "FoundRate", "Run"]

NO_LIMIT: Final = "none"
"""What binds where even all requests at once keep every limit."""

MOST_DOUBLINGS: Final = 20
"""Rates up to so many doublings of what is served are tried; beyond, requests as good as arrive at once."""

Run = Callable[["Trace", float], "Outcomes"]
"""Simulates a trace whose requests are given up as many times as early as the second argument says."""


class FoundRate(NamedTuple):
    """A capacity."""

    requests_per_s: float
    limit: str


class CapacitySearch:
    """The largest rates of one trace under limits, and everything that was simulated for them."""

    def __init__(
        self, trace: Trace, limits: Limits, run: Run, tolerance: float, *, scales_with_time: bool = True
    ) -> None:
        if trace.is_closed:
            raise SimulationError(
                f"trace {shown(trace.name)} is a closed loop: its clients send as fast as they are answered. "
                "A capacity is searched among rates: give arrivals"
            )
        if not 0.0 < trace.requests_per_s < math.inf:
            raise SimulationError(
                f"trace {shown(trace.name)} has no rate that could be scaled: its {len(trace):,} requests "
                "all arrive at once. Give at least two, and arrivals that differ"
            )
        self.trace = trace
        self.limits = limits
        self.tolerance = tolerance
        self._run = run
        self._scales = scales_with_time
        self._base_per_s = trace.requests_per_s
        self._tried: dict[float, dict[float, Seen]] = {}
        self.simulations = 0

    def tried(self, time_scale: float = 1.0) -> dict[float, Seen]:
        """What was seen, by the rate; at inf where all requests came at once."""
        return self._tried.setdefault(1.0 if self._scales else time_scale, {})

    def found(self, time_scale: float = 1.0, near: float | None = None) -> FoundRate:
        """Find the capacity."""
        limits, tried = self.limits.scaled(1.0 / time_scale), self.tried(time_scale)

        def seen_at(per_s: float) -> Seen:
            self.simulations += 1
            return limits.seen(*self._simulated(per_s / self._base_per_s, time_scale))

        if math.inf not in tried:
            tried[math.inf] = seen_at(math.inf)
        at_once = tried[math.inf]
        if limits.keeps(at_once):
            return FoundRate(at_once.served_per_s / time_scale, NO_LIMIT)
        if near is not None:
            for per_s in (near / (1.0 + 3.0 * self.tolerance), near * (1.0 + 3.0 * self.tolerance)):
                tried[per_s] = seen_at(per_s)
        # nothing is served at once where each waits too long
        start = at_once.served_per_s or self._base_per_s
        rates = {per_s: seen for per_s, seen in tried.items() if per_s < math.inf}
        span = largest_rate(
            seen_at, limits.holds, start,
            tolerance=self.tolerance, tried=rates, highest=start * 2.0**MOST_DOUBLINGS, excess=limits.excess,
        )  # fmt: skip
        tried |= rates
        limit = NO_LIMIT if span.broken == math.inf else limits.binding(tried[span.broken])
        return FoundRate(span.kept / time_scale, limit)

    def broken_at(self) -> float:
        """The lowest rate that was tried and does not keep the limits, inf where all at once do."""
        return bracket(self.tried(), self.limits.holds).broken

    def _simulated(self, factor: float, time_scale: float) -> tuple[Trace, Outcomes]:
        """Simulate the trace at a rate; what is given up, and when, is on the clock of its steps."""
        trace = _sped_up(self.trace, factor)
        return trace, self._run(trace, 1.0 if self._scales else time_scale)


def _sped_up(trace: Trace, factor: float) -> Trace:
    """The same requests so many times as fast, at inf all at once."""
    faster = copy.copy(trace)
    arrival_s = trace.arrival_s / factor if factor < math.inf else np.zeros_like(trace.arrival_s)
    object.__setattr__(faster, "arrival_s", arrival_s)
    return faster
