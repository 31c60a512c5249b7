"""Limits on percentiles by name, ``ttft_p99_ms``, and what a simulation has to say to each of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.checks import is_number, shown
from fastroof.errors import SimulationError
from fastroof.simulation.answers import FIRST_GAP_EXPONENT
from fastroof.simulation.percentiles import gap_values_us
from fastroof.simulation.request_times import RequestTimes
from fastroof.units import US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from fastroof.simulation.outcomes import Outcomes
    from fastroof.simulation.trace import Trace

__all__ = ["GOODPUT", "THROUGHPUT", "Limits", "PercentileLimit", "Seen", "parsed_limits"]

GOODPUT: Final = "goodput"
"""The limit on the share of requests that keep each request's own limits."""

THROUGHPUT: Final = "throughput"
"""The limit that is always there: requests may not arrive faster than they are served."""

_NAME: Final = re.compile(r"(ttft|tpot|itl|e2e)_p(\d{1,3})(?:_(\d{1,3}))?_ms")
_OF_REQUESTS: Final = ("ttft_ms", "tpot_ms", "e2e_ms")
_EXAMPLES: Final = "ttft_p99_ms, tpot_p90_ms, itl_p50_ms or e2e_p95_ms (p99_9 is 99.9)"
FIFTHS: Final = 5


class PercentileLimit(NamedTuple):
    """A percentile, and what it may be at most."""

    name: str
    of: str
    percent: float
    most_ms: float


class Seen(NamedTuple):
    """What a simulation has to say to limits."""

    values_ms: tuple[float, ...]
    goodput: float
    growth: float
    served_per_s: float
    decodes: float


class Limits(NamedTuple):
    """What percentiles of a simulation have to keep."""

    percentiles: tuple[PercentileLimit, ...]
    of_request: dict[str, float]
    goodput: float
    growth: float

    def scaled(self, factor: float) -> Limits:
        """Return the limits on times multiplied by a factor."""
        return self._replace(
            percentiles=tuple(each._replace(most_ms=each.most_ms * factor) for each in self.percentiles),
            of_request={name: most_ms * factor for name, most_ms in self.of_request.items()},
        )

    def seen(self, trace: Trace, outcomes: Outcomes) -> Seen:
        """Look at a simulation as far as the limits ask for it."""
        times = RequestTimes.of(trace, outcomes)
        values = tuple(_percentile_ms(each, times, outcomes.gaps) for each in self.percentiles)
        kept = float(times.within(self.of_request).mean()) if self.of_request else 1.0
        finished = times.is_finished
        lost = 1.0 - float(finished.mean())
        arrival_us, last_us = outcomes.arrival_us, outcomes.last_us
        if lost:
            arrival_us, last_us = arrival_us[finished], last_us[finished]
        growth = max(_growth(arrival_us, times.ttft_ms[finished] if lost else times.ttft_ms), lost)
        served_us = float(last_us.max()) - float(outcomes.arrival_us[0]) if len(last_us) else math.inf
        steps = max(int(outcomes.counters["steps"]), 1)
        decodes = (int(trace.output_tokens.sum()) - len(trace)) / steps
        return Seen(values, kept, growth, len(last_us) / served_us * US_PER_S, decodes)

    def keeps(self, seen: Seen) -> bool:
        """Whether all limits on times are kept, at whatever throughput."""
        # nan: no request has such a time, and so none breaks the limit
        return seen.goodput >= self.goodput and not any(
            value > limit.most_ms for value, limit in zip(seen.values_ms, self.percentiles, strict=True)
        )

    def holds(self, seen: Seen) -> bool:
        """Whether all limits are kept, by a queue that does not grow."""
        return seen.growth <= self.growth and self.keeps(seen)

    def excess(self, seen: Seen) -> float:
        """By how much the worst limit is missed, in ln, below 0 where all are kept; nan where none says."""
        over = [
            math.log(value / limit.most_ms)
            for value, limit in zip(seen.values_ms, self.percentiles, strict=True)
            if 0.0 < value < math.inf
        ]
        is_kept = self.holds(seen)
        worst = max(over, default=math.nan)
        return worst if (worst <= 0.0) == is_kept else math.nan

    def binding(self, seen: Seen) -> str:
        """Name the limit that was broken, by how far: ``throughput`` where no other was."""
        over = {
            limit.name: value / limit.most_ms
            for value, limit in zip(seen.values_ms, self.percentiles, strict=True)
            if value > limit.most_ms
        }
        if over:
            return max(over, key=lambda name: over[name])
        return GOODPUT if seen.goodput < self.goodput else THROUGHPUT


def parsed_limits(given: Mapping[str, Any], goodput: float | None, growth: float) -> Limits:
    """Make limits of what was given by name, those that are None left out."""
    percentiles, of_request = [], {}
    for name, value in given.items():
        if value is None:
            continue
        match = _NAME.fullmatch(name)
        percent = math.nan if match is None else float(f"{match[2]}.{match[3] or 0}")
        if name not in _OF_REQUESTS and not percent <= 100.0:
            raise SimulationError(
                f"no limit is called {shown(name)}: one on a percentile is like {_EXAMPLES}; one of each "
                f"request, with a goodput, {', '.join(_OF_REQUESTS)}"
            )
        if not is_number(value) or value <= 0:
            raise SimulationError(f"{name} must be milliseconds above 0, got {shown(value)}")
        if match is None:
            of_request[name] = float(value)
        else:
            percentiles.append(PercentileLimit(name, f"{match[1]}_ms", percent, float(value)))
    if goodput is not None and not (is_number(goodput) and 0 < goodput <= 1):
        raise SimulationError(f"goodput must be a share of requests, above 0 up to 1, got {shown(goodput)}")
    if (goodput is None) != (not of_request):
        said = "goodput" if of_request == {} else ", ".join(of_request)
        raise SimulationError(
            f"{said}: a goodput is the share of requests that keep ttft_ms, tpot_ms or e2e_ms, so give both; "
            f"a limit on a percentile is like {_EXAMPLES}"
        )
    if not percentiles and not of_request:
        raise SimulationError(f"a capacity needs a limit, like {_EXAMPLES}")
    return Limits(tuple(percentiles), of_request, 0.0 if goodput is None else float(goodput), growth)


def _percentile_ms(limit: PercentileLimit, times: RequestTimes, gaps: Longs) -> float:
    if limit.of == "itl_ms":
        return _gap_percentile_us(gaps, limit.percent) / US_PER_MS
    return times.percentile(limit.of, limit.percent)


def _gap_percentile_us(gaps: Longs, percent: float) -> float:
    """A percentile of all gaps between two tokens; nan without a gap."""
    upto = np.cumsum(gaps)
    total = int(upto[-1])
    if not total:
        return math.nan
    place = (total - 1) * (percent / 100.0)
    below = math.floor(place)
    bins = np.searchsorted(upto, (below, min(below + 1, total - 1)), side="right")
    low, high = gap_values_us(len(gaps), FIRST_GAP_EXPONENT)[bins].tolist()
    return float(low + (high - low) * (place - below))


def _growth(arrival_us: Floats, ttft_ms: Floats) -> float:
    """How fast times to first token grow, of the time that passes, from the second to the last fifth."""
    fifth = len(arrival_us) // FIFTHS
    if not fifth:
        return 0.0
    passed_us = float(arrival_us[-fifth:].mean() - arrival_us[fifth : 2 * fifth].mean())
    grown_us = float(ttft_ms[-fifth:].mean() - ttft_ms[fifth : 2 * fifth].mean()) * US_PER_MS
    if passed_us <= 0.0:
        return math.inf if grown_us > 0.0 else 0.0
    return grown_us / passed_us
