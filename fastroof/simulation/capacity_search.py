"""The search for a capacity: one trace at many rates, and what each simulation has to say to the limits."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.checks import is_number, shown, whole_number
from fastroof.errors import SimulationError
from fastroof.simulation.answers import FIRST_GAP_EXPONENT
from fastroof.simulation.engine import too_long
from fastroof.simulation.replicas import MOST_REPLICAS, run_replicas
from fastroof.simulation.requests import RequestTimes, gap_values_us
from fastroof.simulation.settings import EngineSettings
from fastroof.simulation.trace import Trace
from fastroof.simulation.workload import Workload
from fastroof.units import US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.simulation.engine import Outcomes


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


Outcome = TypeVar("Outcome")

LOWEST_SHARE: Final = 2.0**-12
"""The lowest rate that is tried, of the one that the search begins with: there requests hardly meet."""

CUTS: Final = 2
"""Cuts by a line in which a bracket has to become half as wide."""

STEEPEST: Final = 3.0
"""Excess, in ln, beyond which no line is drawn: waits grow without end where a queue does."""

HALVINGS: Final = 3
"""Halvings before the lowest rate is tried: what does not hold there holds nowhere."""


class Bracket(NamedTuple):
    """Where the largest rate lies."""

    kept: float
    broken: float


def bracket(tried: MutableMapping[float, Outcome], holds: Callable[[Outcome], bool]) -> Bracket:
    """Bracket the largest rate by what was tried: from below, up to the first that does not hold."""
    kept = 0.0
    for rate in sorted(tried):
        if not holds(tried[rate]):
            return Bracket(kept, rate)
        kept = rate
    return Bracket(kept, math.inf)


def largest_rate(
    seen_at: Callable[[float], Outcome],
    holds: Callable[[Outcome], bool],
    start: float,
    *,
    tolerance: float,
    tried: MutableMapping[float, Outcome],
    highest: float = math.inf,
    excess: Callable[[Outcome], float] | None = None,
) -> Bracket:
    """Find the largest rate at which something holds."""
    lowest = start * LOWEST_SHARE
    widths: list[float] = []
    while True:
        found = bracket(tried, holds)
        kept, broken = found
        if kept and broken < math.inf:
            if broken <= kept * (1.0 + tolerance):
                return found
            widths.append(math.log(broken / kept))
            is_slow = len(widths) > CUTS and widths[-1] > widths[-1 - CUTS] / 2.0
            rate = None
            if excess is not None and not is_slow:
                rate = _cut(found, excess(tried[kept]), excess(tried[broken]), tolerance)
            if rate is None:
                # where the lowest rate is kept, the answer is rarely in the middle, and low rates take long
                rate = max(math.sqrt(kept * broken), broken / 4.0)
            if not kept < rate < broken:
                return found
        else:
            outside = _outside(found, start, lowest, highest)
            if outside is None:
                return found
            rate = outside
        tried[rate] = seen_at(rate)


def _cut(found: Bracket, under: float, over: float, tolerance: float) -> float | None:
    """Where a line between both ends of a bracket is 0; None where there is none."""
    if not under < 0.0 < over:
        return None
    under, over = max(under, -STEEPEST), min(over, STEEPEST)
    width, aside = math.log(found.broken / found.kept), 0.45 * math.log1p(tolerance)
    at = width * under / (under - over)
    # beyond what the line says, seen from the end that is further away: then that end comes near
    at += -aside if at > width / 2.0 else aside
    return found.kept * math.exp(min(max(at, aside), width - aside))


def _outside(found: Bracket, start: float, lowest: float, highest: float) -> float | None:
    """What to try next without a bracket; None where there is nothing left."""
    kept, broken = found
    if kept:
        return min(max(2.0 * kept, start), highest) if kept < highest else None
    if broken == math.inf:
        return min(start, highest)
    if broken <= lowest:
        return None
    return broken / 2.0 if broken > start * 0.5**HALVINGS else lowest


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


def drawn_traces(given: Trace | Workload, draws: int, rate: float | None = None) -> list[Trace]:
    """Return requests, drawn so many times: by the seed of a workload and those after it."""
    if isinstance(given, Trace):
        if draws > 1:
            raise SimulationError(
                f"draws goes with a workload, whose requests can be drawn again; trace {shown(given.name)} "
                f"has one, got {draws}"
            )
        return [given]
    if not isinstance(given, Workload):
        raise SimulationError(f"requests are a Trace or a Workload, got {type(given).__name__}")
    has_rate = given.is_closed or given.requests_per_s is not None
    return [given.trace(None if has_rate else rate, given.seed + draw) for draw in range(draws)]


def check_room(trace: Trace, settings: EngineSettings) -> None:
    """Refuse a trace with a request that can never run, at any rate."""
    beyond = too_long(trace, settings)
    if not beyond.any():
        return
    i = int(beyond.argmax())
    others = int(beyond.sum()) - 1
    raise SimulationError(
        f"request {int(trace.order[i])} of {shown(trace.name)} ({int(trace.input_tokens[i]):,} + "
        f"{int(trace.output_tokens[i]):,} tokens){f' and {others:,} others' * bool(others)} can never run: "
        f"there are {settings.num_gpu_blocks:,} blocks of {settings.block_size} tokens, and steps of up to "
        f"{settings.max_num_batched_tokens:,}; give more of them or more GPUs, or leave such requests out"
    )


def deployment_runner(
    plan: StepPlan, settings: EngineSettings, replicas: int, routing: str, threads: int
) -> Run:
    """Return what simulates a trace on a deployment, its clients giving up so many times as early."""

    def run(trace: Trace, hurry: float) -> Outcomes:
        hurried = settings if hurry == 1.0 else replace(settings, timeout_s=settings.timeout_s / hurry)
        return run_replicas(plan, trace, hurried, replicas, routing, threads=threads)

    return run


GROWTH = 0.01
"""Queues may grow by as much of the time that passes, or by what is chance: as capacities have it."""


@dataclass(frozen=True)
class FewestReplicas:
    """The fewest replicas that keep the limits."""

    replicas: int
    gpus: int
    limit: str
    requests_per_s: float
    seen: dict[int, Seen] = field(repr=False)
    limits: Limits = field(repr=False)

    @property
    def at_replicas(self) -> dict[str, float]:
        """The limited percentiles with as many replicas, ms; empty where none will do."""
        seen = self.seen.get(self.replicas)
        names = [limit.name for limit in self.limits.percentiles]
        return {} if seen is None else dict(zip(names, seen.values_ms, strict=True))

    def document(self) -> dict[str, Any]:
        """Return the answer as values that JSON has."""
        return {
            "replicas": self.replicas,
            "gpus": self.gpus,
            "limit": self.limit,
            "requests_per_s": self.requests_per_s,
            "at_replicas": self.at_replicas,
        }


def fewest_replicas(
    plan: StepPlan,
    trace_or_workload: Trace | Workload,
    *,
    goodput: float | None = None,
    routing: str = "round_robin",
    most: int = 64,
    threads: int = 1,
    **options: Any,
) -> FewestReplicas:
    """Find the fewest replicas that serve requests at the rate they have, within limits on percentiles."""
    most = whole_number("most", most, 1, MOST_REPLICAS, SimulationError)
    trace = drawn_traces(trace_or_workload, 1)[0]
    chosen = {name: options.pop(name) for name in EngineSettings.__dataclass_fields__ if name in options}
    growth = max(GROWTH, 1.0 / math.sqrt(len(trace)))
    # the clients of a closed loop send as fast as they are answered: their queue does not grow
    limits = parsed_limits(options, goodput, math.inf if trace.is_closed else growth)
    settings = EngineSettings.of_plan(plan, **chosen)
    check_room(trace, settings)
    seen: dict[int, Seen] = {}

    def keeps(replicas: int) -> bool:
        run = deployment_runner(plan, settings, replicas, routing, threads)
        seen[replicas] = limits.seen(trace, run(trace, 1.0))
        return limits.holds(seen[replicas])

    fewest = fewest_that_keep(keeps, most)
    broken = [replicas for replicas, one in seen.items() if not limits.holds(one)]
    limit = limits.binding(seen[max(broken)]) if broken else "none"
    return FewestReplicas(
        fewest,
        fewest * plan.layout.world_size,
        limit,
        trace.requests_per_s,
        dict(sorted(seen.items())),
        limits,
    )


def fewest_that_keep(keeps: Callable[[int], bool], most: int) -> int:
    """Find the least number from 1 on that will do, by doubling and bisection; 0 where ``most`` does not."""
    below, number = 0, 1
    while not keeps(number):
        if number == most:
            return 0
        below, number = number, min(2 * number, most)
    while number - below > 1:
        middle = (below + number) // 2
        if keeps(middle):
            number = middle
        else:
            below = middle
    return number
