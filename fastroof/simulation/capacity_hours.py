"""The fewest replicas for each hour of a trace, or of a workload with rates by the hour."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastroof.checks import shown
from fastroof.errors import SimulationError
from fastroof.simulation.capacity import FewestReplicas, fewest_replicas
from fastroof.simulation.capacity_runs import drawn_trace
from fastroof.simulation.trace import Trace
from fastroof.simulation.workload import DEFAULT_REQUESTS, Workload
from fastroof.simulation.workload_rates import MOST_HOURS
from fastroof.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastroof.plan import StepPlan


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


def fewest_by_hour(plan: StepPlan, trace_or_workload: Trace | Workload, **options: Any) -> HourlyReplicas:
    """Find the fewest replicas of each hour, as :func:`fewest_replicas` does for one rate.

    An hour of a workload has its rate throughout; that of a trace is its requests, repeated.
    """
    if isinstance(trace_or_workload, Workload) and trace_or_workload.hours:
        rates = trace_or_workload.hours
        plain: dict[str, Any] = {"hourly": None, "arrivals": "", "requests": DEFAULT_REQUESTS}
        found = {
            rate: fewest_replicas(plan, replace(trace_or_workload, rate=rate, **plain), **options)
            for rate in set(rates) - {0.0}
        }
        return HourlyReplicas(tuple(found.get(rate) for rate in rates), rates)
    parts = list(_hours_of(trace_or_workload))
    return HourlyReplicas(
        tuple(None if part is None else fewest_replicas(plan, part, **options) for part in parts),
        tuple(0.0 if part is None else len(part) / SECONDS_PER_HOUR for part in parts),
    )


def _hours_of(given: Trace | Workload) -> Iterator[Trace | None]:
    """Yield the requests of each hour."""
    trace = drawn_trace(given)
    if trace.has_parents:
        raise SimulationError(
            f"{shown(trace.name)} has sessions, which hours would cut; find the fewest replicas for all hours"
        )
    count = int(trace.duration_s // SECONDS_PER_HOUR) + 1
    if trace.is_closed or count > MOST_HOURS:
        what = "is a closed loop" if trace.is_closed else f"lasts {count:,} hours"
        raise SimulationError(
            f"{shown(trace.name)} {what}; replicas by the hour need arrivals over up to {MOST_HOURS:,} hours"
        )
    ends = trace.arrival_s.searchsorted([SECONDS_PER_HOUR * hour for hour in range(count + 1)])
    for hour in range(count):
        has_some = ends[hour] < ends[hour + 1]
        yield trace.sliced(SECONDS_PER_HOUR * hour, SECONDS_PER_HOUR * (hour + 1)) if has_some else None
