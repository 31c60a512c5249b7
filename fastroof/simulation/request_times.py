"""What each request of a simulation saw, and which requests kept their limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Floats
from fastroof.checks import is_number, shown
from fastroof.errors import BatchError
from fastroof.simulation.outcomes import FINISHED
from fastroof.simulation.percentiles import percentile
from fastroof.units import US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from fastroof.simulation.outcomes import Outcomes
    from fastroof.simulation.trace import Trace

__all__ = ["LIMITS", "RequestTimes", "checked_limits"]

LIMITS: Final = ("ttft_ms", "tpot_ms", "e2e_ms")
"""What a limit may be on."""


class RequestTimes(NamedTuple):
    """Times of requests, an element a request in the order that the outcomes have."""

    ttft_ms: Floats
    tpot_ms: Floats
    e2e_ms: Floats
    is_finished: Bools
    has_gaps: Bools

    @classmethod
    def of(cls, trace: Trace, outcomes: Outcomes) -> RequestTimes:
        """Work out the times of an engine's outcomes."""
        finished = np.asarray(outcomes.status) == FINISHED
        first_us, arrival_us = outcomes.first_us, outcomes.arrival_us
        last_us = np.where(finished, outcomes.last_us, np.nan)
        gaps = trace.output_tokens - 1.0
        gaps[gaps == 0.0] = np.nan
        return cls(
            (first_us - arrival_us) / US_PER_MS,
            (last_us - first_us) / gaps / US_PER_MS,
            (last_us - arrival_us) / US_PER_MS,
            finished,
            trace.output_tokens > 1,
        )

    def of_finished(self, name: str) -> Floats:
        """Times of the requests that finished, where they have such a time: what percentiles are over."""
        values: Floats = getattr(self, name)
        kept = self.is_finished & self.has_gaps if name == "tpot_ms" else self.is_finished
        return values if kept.all() else values[kept]

    def percentile(self, name: str, percent: float) -> float:
        """Return a percentile over all requests, where one that did not finish took for ever."""
        values: Floats = getattr(self, name)
        if not self.is_finished.all():
            values = np.where(self.is_finished, values, math.inf)
        if name == "tpot_ms" and not self.has_gaps.all():
            values = values[self.has_gaps]
        return percentile(values, percent)

    def within(self, limits: Mapping[str, float]) -> Bools:
        """Which requests finished and kept all limits; an output of one token keeps any TPOT."""
        kept = self.is_finished.copy()
        for name, limit_ms in limits.items():
            values: Floats = getattr(self, name)
            within = values <= limit_ms
            kept &= within | ~self.has_gaps if name == "tpot_ms" else within
        return kept

    def goodput(self, limits: Mapping[str, float], duration_us: float) -> dict[str, Any]:
        """Say how many requests kept all limits, and how many of them a second."""
        kept = int(self.within(limits).sum())
        return {
            "limits": dict(limits),
            "requests": kept,
            "share": kept / len(self.ttft_ms),
            "requests_per_s": kept / duration_us * US_PER_S if duration_us > 0.0 else math.nan,
        }


def checked_limits(given: Mapping[str, Any]) -> dict[str, float]:
    """Return limits as floats by name, those that were given."""
    limits = {}
    for name, value in given.items():
        if value is None:
            continue
        if not is_number(value) or value <= 0:
            raise BatchError(f"{name} must be milliseconds above 0, got {shown(value)}")
        limits[name] = float(value)
    return limits
