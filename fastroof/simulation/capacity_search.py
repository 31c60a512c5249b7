"""The search for a capacity: one trace simulated at many rates, each compared with the limits."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.checks import is_number, shown
from fastroof.compiled.simulation.records import FINISHED
from fastroof.errors import SimulationError, TraceError
from fastroof.simulation.answers import FIRST_GAP_EXPONENT
from fastroof.simulation.requests import RequestTimes, checked_ms, gap_percentile, gap_values_us
from fastroof.simulation.session_runs import in_rows_of, requests_per_session, session_starts, sped_up
from fastroof.simulation.steady import PIECES, Run, error_of_mean
from fastroof.traces.trace import Trace
from fastroof.units import US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from fastroof.simulation.engine import Outcomes


GOODPUT: Final = "goodput"
"""Name of the limit on the share of requests within the limits of each request."""

THROUGHPUT: Final = "throughput"
"""Name of the implicit limit: requests may not arrive faster than they are served."""

_NAME: Final = re.compile(r"(ttft|tpot|itl|e2e)_(?:mean|p(\d{1,3})(?:_(\d{1,3}))?)_ms")
_OF_REQUESTS: Final = ("ttft_ms", "tpot_ms", "e2e_ms")
_EXAMPLES: Final = "ttft_p99_ms, tpot_p90_ms, itl_mean_ms or e2e_p99_9_ms (99.9)"
FIFTHS: Final = 5


def limit_name(metric: str, percentile: float | None) -> str:
    """Return the name of a limit: ``ttft_p99_ms``, of the mean ``ttft_mean_ms``."""
    if percentile is None:
        return f"{metric}_mean_ms"
    digits = f"{percentile:.3f}".rstrip("0").rstrip(".").replace(".", "_")
    return f"{metric}_p{digits}_ms"


class PercentileLimit(NamedTuple):
    """A percentile, or the mean, and its maximum."""

    name: str
    metric: str
    percent: float | None
    most_ms: float


class Measurement(NamedTuple):
    """The measurements of a simulation that limits apply to."""

    values_ms: tuple[float, ...]
    goodput: float
    growth: float
    served_per_s: float
    decodes: float
    in_system: float


class Limits(NamedTuple):
    """All limits of a search."""

    percentiles: tuple[PercentileLimit, ...]
    of_request: dict[str, float]
    goodput: float
    growth: float

    def scaled(self, factor: float) -> Limits:
        """Return the limits with times multiplied by a factor."""
        return self._replace(
            percentiles=tuple(each._replace(most_ms=each.most_ms * factor) for each in self.percentiles),
            of_request={name: most_ms * factor for name, most_ms in self.of_request.items()},
        )

    def measure(self, trace: Trace, outcomes: Outcomes, counted: slice | Longs | None = None) -> Measurement:
        """Measure a simulation as far as the limits need; percentiles of gaps are over all requests."""
        span = slice(0, len(trace)) if counted is None else counted
        times = RequestTimes.of(trace, outcomes).of_places(span)
        values = tuple(_percentile_ms(each, times, outcomes.gaps) for each in self.percentiles)
        finished = times.is_finished
        lost = 1.0 - float(finished.mean())
        arrival_us = outcomes.arrival_us[span]
        growth = max(_growth(arrival_us[finished], times.ttft_ms[finished]), lost)
        served_per_s = _served_per_s(outcomes, span)
        steps = max(int(outcomes.counters["steps"]), 1)
        decodes = (int(trace.output_tokens.sum()) - len(trace)) / steps
        e2e_ms = times.e2e_ms[finished]
        in_system = served_per_s * float(e2e_ms.mean()) * US_PER_MS / US_PER_S if len(e2e_ms) else 0.0
        return Measurement(values, self.goodput_of(times), growth, served_per_s, decodes, in_system)

    def measure_run(self, run: Run, outcomes: Outcomes) -> Measurement:
        """Measure the requests of a run that count; those of all open sessions are in the system."""
        measured = self.measure(run.trace, outcomes, run.places(outcomes))
        return measured if run.session is None else measured._replace(in_system=run.open_requests(outcomes))

    def by_name(self, measured: Measurement | None) -> dict[str, float]:
        """Return the measured percentiles, ms, by limit; empty without a measurement."""
        names = (limit.name for limit in self.percentiles)
        return {} if measured is None else dict(zip(names, measured.values_ms, strict=True))

    def goodput_of(self, times: RequestTimes) -> float:
        """Return the share of requests within the limits of each request; 1 without any."""
        return float(times.within(self.of_request).mean()) if self.of_request else 1.0

    def excess_of(self, name: str, times: RequestTimes) -> float:
        """Return the log excess of one limit for some requests; nan for limits that others share."""
        if name == GOODPUT:
            missed = 1.0 - self.goodput_of(times)
            return math.log(missed / (1.0 - self.goodput)) if missed and self.goodput < 1.0 else math.nan
        for limit in self.percentiles:
            if limit.name == name and limit.metric != "itl_ms":
                value = times.percentile(limit.metric, limit.percent)
                return math.log(value / limit.most_ms) if 0.0 < value < math.inf else math.nan
        return math.nan

    def keeps(self, measured: Measurement) -> bool:
        """Whether all limits on times hold, whatever the throughput."""
        # nan: no request has such a time, and so none breaks the limit
        return measured.goodput >= self.goodput and not any(
            value > limit.most_ms for value, limit in zip(measured.values_ms, self.percentiles, strict=True)
        )

    def holds(self, measured: Measurement) -> bool:
        """Whether all limits hold and the queue does not grow."""
        return measured.growth <= self.growth and self.keeps(measured)

    def excess(self, measured: Measurement) -> float:
        """Return the log excess of the worst limit, below 0 if all hold; nan if unknown."""
        over = [
            math.log(value / limit.most_ms)
            for value, limit in zip(measured.values_ms, self.percentiles, strict=True)
            if 0.0 < value < math.inf
        ]
        all_hold = self.holds(measured)
        worst = max(over, default=math.nan)
        return worst if (worst <= 0.0) == all_hold else math.nan

    def binding(self, measured: Measurement) -> str:
        """Return the name of the limit that is exceeded most; ``throughput`` if no other is."""
        over = {
            limit.name: value / limit.most_ms
            for value, limit in zip(measured.values_ms, self.percentiles, strict=True)
            if value > limit.most_ms
        }
        if over:
            return max(over, key=lambda name: over[name])
        return GOODPUT if measured.goodput < self.goodput else THROUGHPUT


def _served_per_s(outcomes: Outcomes, span: slice | Longs) -> float:
    """Return the requests/s that finished while the counted ones arrived, or in the whole run."""
    arrival_us, last_us = outcomes.arrival_us, outcomes.last_us[np.asarray(outcomes.status) == FINISHED]
    first, last = float(arrival_us[span][0]), float(arrival_us[span][-1])
    if len(arrival_us[span]) < len(arrival_us) and last > first:
        return int(np.count_nonzero((last_us > first) & (last_us <= last))) / (last - first) * US_PER_S
    whole_us = float(last_us.max()) - float(arrival_us[0]) if len(last_us) else math.inf
    return len(last_us) / whole_us * US_PER_S


def parsed_limits(limits: Mapping[str, Any], goodput: float | None, growth: float) -> Limits:
    """Parse limits given by name; None means no limit."""
    percentiles, of_request = [], {}
    for name, value in limits.items():
        if value is None:
            continue
        match = _NAME.fullmatch(name)
        percent = None if match is None or match[2] is None else float(f"{match[2]}.{match[3] or 0}")
        if (match is None and name not in _OF_REQUESTS) or (percent is not None and percent > 100.0):
            raise SimulationError(
                f"unknown limit {shown(name)}; limits on percentiles are like {_EXAMPLES}, limits of each "
                f"request, with goodput, are {', '.join(_OF_REQUESTS)}"
            )
        limit_ms = checked_ms(name, value, SimulationError)
        if match is None:
            of_request[name] = limit_ms
        else:
            percentiles.append(PercentileLimit(name, f"{match[1]}_ms", percent, limit_ms))
    if goodput is not None and not (is_number(goodput) and 0 < goodput <= 1):
        raise SimulationError(f"goodput must be a share of requests above 0, up to 1, got {shown(goodput)}")
    if (goodput is None) != (not of_request):
        given_name = "goodput" if of_request == {} else ", ".join(of_request)
        raise SimulationError(
            f"{given_name}: goodput is the share of requests within ttft_ms, tpot_ms or e2e_ms, so give "
            f"both; a limit on a percentile is like {_EXAMPLES}"
        )
    if not percentiles and not of_request:
        raise SimulationError(f"a capacity needs a limit, like {_EXAMPLES}")
    return Limits(tuple(percentiles), of_request, 0.0 if goodput is None else float(goodput), growth)


def _percentile_ms(limit: PercentileLimit, times: RequestTimes, gaps: Longs) -> float:
    if limit.metric == "itl_ms":
        values_us = gap_values_us(len(gaps), FIRST_GAP_EXPONENT)
        return gap_percentile(gaps, values_us, limit.percent) / US_PER_MS
    return times.percentile(limit.metric, limit.percent)


def _growth(arrival_us: Floats, ttft_ms: Floats) -> float:
    """Return the growth of TTFT from the second to the last fifth, as a share of the elapsed time."""
    fifth = len(arrival_us) // FIFTHS
    if not fifth:
        return 0.0
    passed_us = float(arrival_us[-fifth:].mean() - arrival_us[fifth : 2 * fifth].mean())
    grown_us = float(ttft_ms[-fifth:].mean() - ttft_ms[fifth : 2 * fifth].mean()) * US_PER_MS
    if passed_us <= 0.0:
        return math.inf if grown_us > 0.0 else 0.0
    return grown_us / passed_us


Outcome = TypeVar("Outcome")

LOWEST_SHARE: Final = 2.0**-12
"""Lowest rate that is tried, as a share of the first."""

CUTS: Final = 2
"""Number of linear cuts that must halve a bracket; else bisect."""

STEEPEST: Final = 3.0
"""Maximum log excess used in linear cuts, since waits of a growing queue are unbounded."""

HALVINGS: Final = 3
"""Halvings before the lowest rate is tried; if that fails, every rate does."""


class Bracket(NamedTuple):
    """The bracket of the largest rate: a rate within the limits, and one that is not."""

    within: float
    beyond: float


def printed_rate(per_s: float, unit: float = 1.0) -> float:
    """Return a rate, or ``unit`` times one, with the four digits that are printed of it."""
    return unit * float(f"{per_s / unit:.4g}")


def bracket(tried: MutableMapping[float, Outcome], holds: Callable[[Outcome], bool]) -> Bracket:
    """Bracket the largest rate by the tried ones: up to the first, from below, that does not hold."""
    within = 0.0
    for rate in sorted(tried):
        if not holds(tried[rate]):
            return Bracket(within, rate)
        within = rate
    return Bracket(within, math.inf)


def largest_rate(
    measured_at: Callable[[float], Outcome],
    holds: Callable[[Outcome], bool],
    start: float,
    *,
    tolerance: float,
    tried: MutableMapping[float, Outcome],
    highest: float = math.inf,
    excess: Callable[[Outcome], float] | None = None,
    unit: float = 1.0,
    growth: float = 2.0,
) -> Bracket:
    """Find the largest rate at which something holds, in four digits if the tolerance is no finer."""
    start, lowest = printed_rate(start, unit), printed_rate(start * LOWEST_SHARE, unit)
    widths: list[float] = []
    while True:
        found = bracket(tried, holds)
        within, beyond = found
        if within and beyond < math.inf:
            if beyond <= within * (1.0 + tolerance):
                return found
            widths.append(math.log(beyond / within))
            is_slow = len(widths) > CUTS and widths[-1] > widths[-1 - CUTS] / 2.0
            rate = None
            if excess is not None and not is_slow:
                rate = _cut(found, excess(tried[within]), excess(tried[beyond]), tolerance)
            if rate is None:
                # if only the lowest rate holds, the answer is rarely in the middle, and low rates take long
                rate = max(math.sqrt(within * beyond), beyond / 4.0)
            if not within < rate < beyond:
                return found
        else:
            outside = _outside(found, start, lowest, highest, growth)
            if outside is None:
                return found
            rate = outside
        # the rate that is printed is then one that was tried
        printed = printed_rate(rate, unit)
        rate = printed if within < printed < beyond else rate
        tried[rate] = measured_at(rate)


def _cut(found: Bracket, under: float, over: float, tolerance: float) -> float | None:
    """Return the root of the line between both ends of a bracket; None without one."""
    if not under < 0.0 < over:
        return None
    under, over = max(under, -STEEPEST), min(over, STEEPEST)
    width, aside = math.log(found.beyond / found.within), 0.45 * math.log1p(tolerance)
    at = width * under / (under - over)
    # a little beyond the root, seen from the end further away, so that this end moves, too
    at += -aside if at > width / 2.0 else aside
    return found.within * math.exp(min(max(at, aside), width - aside))


def _outside(found: Bracket, start: float, lowest: float, highest: float, growth: float) -> float | None:
    """Return the rate to try next without a bracket; None if nothing is left to try."""
    within, beyond = found
    if within:
        return min(max(growth * within, start), highest) if within < highest else None
    if beyond == math.inf:
        return min(start, highest)
    if beyond <= lowest:
        return None
    return beyond / growth if beyond > start * 0.5**HALVINGS else lowest


NO_LIMIT: Final = "none"
"""Limit of a capacity if no rate breaks a limit."""

_SLOPE_OVER: Final = 0.1
"""Relative decrease of the rate over which the slope of a percentile is taken."""

MOST_DOUBLINGS: Final = 20
"""Doublings of the first rate that are tried; at higher rates requests practically arrive at once."""

MOST_DOUBLINGS_KEPT: Final = 8
"""Doublings that are tried if even all requests at once keep the limits."""

Simulate = Callable[["Trace", float], "Outcomes"]
"""Simulates a trace with time-outs divided by the second argument."""


class FoundRate(NamedTuple):
    """The largest rate and the limit that binds."""

    requests_per_s: float
    limit: str


class CapacitySearch:
    """Searches for the largest rates of one trace under limits, and all simulations for them."""

    def __init__(
        self,
        run: Run | Trace,
        limits: Limits,
        simulate: Simulate,
        tolerance: float,
        *,
        scales_with_time: bool = True,
    ) -> None:
        self.run = run if isinstance(run, Run) else Run.whole(run)
        trace = self.run.trace
        if trace.is_closed:
            raise SimulationError(
                f"trace {shown(trace.name)} is a closed loop, whose clients send as fast as they are "
                "answered; a capacity is a rate: give arrivals"
            )
        self._base_per_s = self.run.per_s
        starts_s = session_starts(trace).start_s if trace.has_parents else trace.arrival_s
        if not (starts_s[0] < starts_s[-1] and 0.0 < self._base_per_s < math.inf):
            what = f"its {len(trace):,} requests all arrive at once; give at least two requests with"
            if trace.has_parents:
                what = "all of its sessions start at once; give at least two sessions with"
            raise SimulationError(
                f"trace {shown(trace.name)} has no rate to scale: {what} different arrivals"
            )
        self.trace = trace
        self.limits = limits
        self.tolerance = tolerance
        self._simulate = simulate
        self._scales = scales_with_time
        self._tried: dict[float, dict[float, Measurement]] = {}
        self._halves: dict[float, Measurement] = {}
        self.simulations = 0

    def tried(self, time_scale: float = 1.0) -> dict[float, Measurement]:
        """Return measurements by rate; inf is all requests at once."""
        return self._tried.setdefault(1.0 if self._scales else time_scale, {})

    def found(self, time_scale: float = 1.0, near: float | None = None) -> FoundRate:
        """Find the capacity; with steps of other times, to a tenth of the difference."""
        limits, tried = self.limits.scaled(1.0 / time_scale), self.tried(time_scale)
        apart = abs(math.log(time_scale))

        def measured_at(per_s: float) -> Measurement:
            self.simulations += 1
            return limits.measure_run(self.run, self._simulated(per_s / self._base_per_s, time_scale))

        if math.inf not in tried:
            tried[math.inf] = measured_at(math.inf)
        at_once = tried[math.inf]
        unit = requests_per_session(self.trace) or 1.0
        if near is not None:
            for share in (1.0 / (1.0 + 3.0 * self.tolerance), 1.0 + 3.0 * self.tolerance):
                per_s = printed_rate(near * share, unit)
                tried[per_s] = measured_at(per_s)
        # no request is served if each waits too long
        start = at_once.served_per_s or self._base_per_s
        doublings = MOST_DOUBLINGS_KEPT if limits.keeps(at_once) else MOST_DOUBLINGS
        rates = {per_s: measured for per_s, measured in tried.items() if per_s < math.inf}
        # the rate with other times is not far from the one that was found
        is_near = apart > 0.0 and any(map(self.limits.holds, rates.values()))
        span = largest_rate(
            measured_at, limits.holds, min(rates) if is_near else start,
            tolerance=max(self.tolerance, apart / 10.0), tried=rates, highest=start * 2.0**doublings,
            excess=limits.excess, unit=unit, growth=1.0 + 2.0 * apart if is_near else 2.0,
        )  # fmt: skip
        tried |= rates
        if span.beyond < math.inf:
            return FoundRate(span.within / time_scale, limits.binding(tried[span.beyond]))
        is_at_once = limits.keeps(at_once) or self.run.session is not None
        largest = at_once.served_per_s if is_at_once else span.within
        return FoundRate(largest / time_scale, NO_LIMIT)

    def measured_at(self, found: FoundRate) -> Measurement:
        """Return what was measured at a rate that was found; all at once if none is within the limits."""
        return self.tried().get(found.requests_per_s) or self.tried()[math.inf]

    def open_requests(self, found: FoundRate) -> float:
        """Return the requests of sessions that are open at a rate, without those that a queue keeps open."""
        tried, half = self.tried(), found.requests_per_s / 2.0
        shortest_s = min(
            (measured.in_system / rate for rate, measured in tried.items() if rate < math.inf), default=0.0
        )
        if found.limit in (NO_LIMIT, THROUGHPUT) and half:
            # at rates near the throughput all sessions queue
            if half not in self._halves:
                self._halves[half] = self.limits.measure_run(self.run, self._outcomes(half))
            shortest_s = min(shortest_s, self._halves[half].in_system / half)
        return found.requests_per_s * shortest_s

    def _simulated(self, factor: float, time_scale: float) -> Outcomes:
        """Simulate the trace at a rate; time-outs and delays are scaled with the steps."""
        if self.trace.has_parents:
            try:
                faster = sped_up(self.trace, factor, time_scale)
            except TraceError as error:
                raise SimulationError(
                    f"the delays of its sessions are too long for a capacity: {error}"
                ) from error
            return in_rows_of(self.trace, faster, self._simulate(faster, time_scale))
        return self._simulate(_sped_up(self.trace, factor), 1.0 if self._scales else time_scale)

    def sampling_error(self, found: FoundRate) -> float | None:
        """Return the relative standard error of a rate by chance, from pieces of its run; None if unknown.

        The error of the limited percentile, over its slope in the rate.
        """
        if not found.requests_per_s:
            return None
        is_at_once = found.limit == NO_LIMIT
        outcomes = self._outcomes(math.inf if is_at_once else found.requests_per_s)
        if found.limit in (NO_LIMIT, THROUGHPUT):
            # how long equal numbers of requests take to finish, one after the other
            ends = self._counted_ends_us(outcomes)
            spans = (
                np.diff(ends[np.linspace(0, len(ends) - 1, PIECES + 1).astype(int)]) if len(ends) else ends
            )
            return error_of_mean(np.log(np.maximum(spans, 1.0)))
        times = RequestTimes.of(self.trace, outcomes)
        places = self.run.places(outcomes)
        errors = [
            self.limits.excess_of(found.limit, times.of_places(some)) for some in self.run.pieces(places)
        ]
        fewer = self._outcomes(found.requests_per_s * (1.0 - _SLOPE_OVER))
        below = RequestTimes.of(self.trace, fewer)
        grown = self.limits.excess_of(found.limit, times.of_places(places))
        grown -= self.limits.excess_of(found.limit, below.of_places(self.run.places(fewer)))
        error = error_of_mean(errors)
        if error is None or not grown > 0.0:
            return None
        return error * -math.log1p(-_SLOPE_OVER) / grown

    def _outcomes(self, per_s: float) -> Outcomes:
        self.simulations += 1
        return self._simulated(per_s / self._base_per_s, 1.0)

    def _counted_ends_us(self, outcomes: Outcomes) -> Floats:
        """Return when the requests that count ended, sorted."""
        finished = np.asarray(outcomes.status) == FINISHED
        if self.run.session is None:
            return np.sort(outcomes.last_us[finished])[self.run.counted]
        places = self.run.places(outcomes)
        return np.sort(outcomes.last_us[places][finished[places]])


def _sped_up(trace: Trace, factor: float) -> Trace:
    """Return the same requests ``factor`` times as fast; inf is all at once."""
    faster = copy.copy(trace)
    arrival_s = trace.arrival_s / factor if factor < math.inf else np.zeros_like(trace.arrival_s)
    object.__setattr__(faster, "arrival_s", arrival_s)
    return faster
