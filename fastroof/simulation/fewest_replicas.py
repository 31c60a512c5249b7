"""The fewest replicas within limits on percentiles, in all or in each hour of a trace or workload."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from fastroof.checks import check_flag, shown, whole_number
from fastroof.errors import SimulationError
from fastroof.simulation.capacity_runs import enough_of_sessions, fleet_runner, given_run, run_of
from fastroof.simulation.capacity_search import Limits, Measurement, parsed_limits
from fastroof.simulation.fleet import Fleet, fleet_of
from fastroof.simulation.pools import refuse_never_run
from fastroof.simulation.scaled_replicas import fewest_that_keep
from fastroof.simulation.session_runs import requests_per_session
from fastroof.simulation.settings import MOST_REPLICAS
from fastroof.simulation.steady import LEAST_REQUESTS, Run, affordable_requests
from fastroof.traces.trace import Trace
from fastroof.traces.workload import DEFAULT_REQUESTS, Workload
from fastroof.traces.workload_rates import MOST_HOURS
from fastroof.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    from fastroof.plan import StepPlan


GROWTH: Final = 0.01
"""Share of the elapsed time by which queueing may grow, in addition to chance."""


@dataclass(frozen=True)
class FewestReplicas:
    """The fewest replicas within the limits; 0 if even the maximum is not enough."""

    replicas: int
    gpus: int
    limit: str
    requests_per_s: float
    seen: dict[int, Measurement] = field(repr=False)
    limits: Limits = field(repr=False)
    sessions_per_s: float | None = None

    @property
    def at_replicas(self) -> dict[str, float]:
        """The limited percentiles with these replicas, ms, by limit; empty if there are 0."""
        return self.limits.by_name(self.seen.get(self.replicas))

    def document(self) -> dict[str, Any]:
        """Return the answer as JSON values."""
        of_sessions = {} if self.sessions_per_s is None else {"sessions_per_s": self.sessions_per_s}
        return {
            "replicas": self.replicas,
            "gpus": self.gpus,
            "limit": self.limit,
            "requests_per_s": self.requests_per_s,
            **of_sessions,
            "at_replicas": self.at_replicas,
        }


def fewest_replicas(
    fleet: Fleet | StepPlan,
    trace_or_workload: Trace | Workload,
    *,
    goodput: float | None = None,
    most: int = 64,
    steady: bool = True,
    threads: int = 1,
    **options: Any,
) -> FewestReplicas:
    """Find the fewest replicas that serve requests at their own rate within limits on percentiles.

    They are the fewest copies of a fleet, or of the pool of a plan; options are those of
    :func:`fastroof.capacity`.
    """
    whole = fleet_of(fleet, options).without_rules()
    most = whole_number("most", most, 1, MOST_REPLICAS, SimulationError)
    check_flag("steady", steady, SimulationError)
    run = given_run(trace_or_workload)
    trace, per_s = run.trace, run.per_s
    is_steady = steady and not trace.is_closed and 0.0 < per_s < math.inf
    requests = max(LEAST_REQUESTS, len(trace))
    if is_steady:
        run = run_of(trace_or_workload, requests)
    # closed-loop clients send as fast as they are answered: their queue does not grow
    limits = parsed_limits(options, goodput, math.inf if trace.is_closed else _growth(run))
    pools = whole.serving(trace)
    refuse_never_run(pools, trace, "leave such requests out")
    each = sum(pool.replicas for pool in pools)
    measured: dict[int, Measurement] = {}

    def keeps(copies: int) -> bool:
        copied = [pool._replace(replicas=copies * pool.replicas) for pool in pools]
        outcomes = fleet_runner(copied, whole.link, threads)(run.trace, 1.0)
        measured[copies] = limits.measure_run(run, outcomes)
        return limits.holds(measured[copies])

    fewest = fewest_that_keep(keeps, most)
    while is_steady and fewest and run.session is not None:
        # with sessions a short run ends while its first ones are open
        in_system, decodes = min(one.in_system for one in measured.values()), measured[fewest].decodes
        affordable = affordable_requests(run, decodes, pools[0].settings.max_num_batched_tokens)
        wanted = enough_of_sessions(run, requests, in_system, affordable)
        if wanted == requests:
            break
        requests, run = wanted, run_of(trace_or_workload, wanted)
        limits = limits._replace(growth=_growth(run))
        measured.clear()
        fewest = fewest_that_keep(keeps, most)
    broken = [copies for copies, one in measured.items() if not limits.holds(one)]
    limit = limits.binding(measured[max(broken)]) if broken else "none"
    of_session = requests_per_session(trace)
    return FewestReplicas(
        fewest * each,
        fewest * sum(pool.gpus for pool in pools),
        limit,
        per_s,
        {copies * each: measured[copies] for copies in sorted(measured)},
        limits,
        None if of_session is None else per_s / of_session,
    )


def _growth(run: Run) -> float:
    """Return the share of the elapsed time by which queueing may grow in a run."""
    return max(GROWTH, 1.0 / math.sqrt(run.requests))


@dataclass(frozen=True)
class HourlyReplicas:
    """The fewest replicas of each hour, None for hours without requests, and the rates of the hours."""

    hours: tuple[FewestReplicas | None, ...]
    rates_per_s: tuple[float, ...]

    @property
    def peak(self) -> int:
        """The most replicas of any hour; 0 if some hour needs more than were tried."""
        counts = [each.replicas for each in self.hours if each is not None]
        return max(counts) if all(counts) else 0

    @property
    def gpu_hours(self) -> float:
        """GPU hours if replicas change on the hour; NaN if some hour needs more than were tried."""
        return float(sum(each.gpus for each in self.hours if each is not None)) if self.peak else math.nan

    @property
    def gpu_hours_at_peak(self) -> float:
        """GPU hours of the most replicas of any hour over all hours."""
        most = max((each.gpus for each in self.hours if each is not None), default=0)
        return float(most * len(self.hours)) if self.peak else math.nan

    def document(self) -> dict[str, Any]:
        """Return the answer as JSON values."""
        empty = {"replicas": 0, "gpus": 0, "limit": "none", "requests_per_s": 0.0, "at_replicas": {}}
        return {
            "hours": [
                {"hour": hour, **(empty if each is None else each.document()), "requests_per_s": rate}
                for hour, (each, rate) in enumerate(zip(self.hours, self.rates_per_s, strict=True))
            ],
            "peak": self.peak,
            "gpu_hours": self.gpu_hours,
            "gpu_hours_at_peak": self.gpu_hours_at_peak,
        }


def fewest_by_hour(
    fleet: Fleet | StepPlan, trace_or_workload: Trace | Workload, **options: Any
) -> HourlyReplicas:
    """Find the fewest replicas of each hour, as :func:`fewest_replicas` does for one rate.

    An hour of a workload has its rate throughout; that of a trace is its requests, repeated every hour.
    """
    if isinstance(trace_or_workload, Workload) and trace_or_workload.hours:
        rates = trace_or_workload.hours
        plain: dict[str, Any] = {"hourly": None, "arrivals": "", "requests": DEFAULT_REQUESTS}
        found = {
            rate: fewest_replicas(fleet, replace(trace_or_workload, rate=rate, **plain), **options)
            for rate in set(rates) - {0.0}
        }
        return HourlyReplicas(tuple(found.get(rate) for rate in rates), rates)
    parts = list(_hours_of(trace_or_workload))
    return HourlyReplicas(
        tuple(None if part is None else fewest_replicas(fleet, part, **options) for part in parts),
        tuple(0.0 if part is None else part.requests_per_s for part in parts),
    )


def _hours_of(traffic: Trace | Workload) -> Iterator[Trace | None]:
    """Yield the requests of each hour."""
    trace = given_run(traffic).trace
    if trace.has_parents:
        raise SimulationError(
            f"{shown(trace.name)} has sessions, which hours would cut; find the fewest replicas for all hours"
        )
    count = int(trace.arrival_s[-1] // SECONDS_PER_HOUR) + 1
    if trace.is_closed or count > MOST_HOURS:
        what = "is a closed loop" if trace.is_closed else f"lasts {count:,} hours"
        raise SimulationError(
            f"{shown(trace.name)} {what}; replicas by the hour need arrivals over up to {MOST_HOURS:,} hours"
        )
    ends = trace.arrival_s.searchsorted([SECONDS_PER_HOUR * hour for hour in range(count + 1)])
    for hour in range(count):
        has_some = ends[hour] < ends[hour + 1]
        yield trace.sliced(SECONDS_PER_HOUR * hour, SECONDS_PER_HOUR * (hour + 1)) if has_some else None
