"""How few replicas serve requests as they come within limits on percentiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastroof.checks import whole_number
from fastroof.errors import SimulationError
from fastroof.simulation.deployment_runs import check_room, deployment_runner, drawn_traces
from fastroof.simulation.percentile_limits import Limits, Seen, parsed_limits
from fastroof.simulation.replicas import MOST_REPLICAS
from fastroof.simulation.settings import EngineSettings

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.simulation.trace import Trace
    from fastroof.simulation.workload import Workload

__all__ = ["FewestReplicas", "fewest_replicas"]

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
