"""The most sessions at once within limits on percentiles: clients of a closed loop, each with one open."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastroof.checks import shown
from fastroof.errors import SimulationError
from fastroof.simulation.capacity_runs import UNIT_RATE, given_run
from fastroof.simulation.capacity_search import NO_LIMIT, Limits, Measurement, parsed_limits
from fastroof.simulation.fleet import Fleet, fleet_of
from fastroof.simulation.fleet_run import run_pools
from fastroof.simulation.pools import refuse_never_run
from fastroof.simulation.scaled_replicas import fewest_that_keep
from fastroof.simulation.session_runs import session_starts
from fastroof.simulation.settings import running_tokens
from fastroof.simulation.step_range import step_error
from fastroof.traces.trace import Trace
from fastroof.traces.workload import Workload

if TYPE_CHECKING:
    from fastroof.plan import StepPlan


@dataclass(frozen=True)
class MostSessions:
    """The most sessions, or single requests, that a deployment serves at once within limits.

    ``sessions`` is 0 if not even one is within them, and all that there are if ``limit`` is ``none``.
    ``low`` and ``high`` are those with all steps one standard error longer, and shorter. ``seen`` has what
    was measured by number of clients.
    """

    sessions: int
    limit: str
    low: int
    high: int
    relative_error: float | None
    basis: str
    replicas: int
    gpus: int
    requests: int
    simulations: int
    seen: dict[int, Measurement] = field(repr=False)
    limits: Limits = field(repr=False)

    @property
    def at_capacity(self) -> dict[str, float]:
        """The limited percentiles with that number, ms, by limit; empty if it is 0."""
        return self.limits.by_name(self.seen.get(self.sessions))

    def document(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        plain = {name: value for name, value in vars(self).items() if name not in ("seen", "limits")}
        simulated = [
            {
                "sessions": clients,
                "holds": self.limits.holds(one),
                "served_per_s": one.served_per_s,
                **self.limits.by_name(one),
            }
            for clients, one in sorted(self.seen.items())
        ]
        return {**plain, "at_capacity": self.at_capacity, "simulated": simulated}


def most_sessions(
    fleet: Fleet | StepPlan,
    trace_or_workload: Trace | Workload,
    *,
    goodput: float | None = None,
    with_range: bool = True,
    threads: int = 1,
    **options: Any,
) -> MostSessions:
    """Find the most sessions that a fleet serves at once within limits on percentiles.

    So many clients start together, and each has one session after the other, those of
    :meth:`fastroof.Trace.by_clients`; all requests count. Options are those of :func:`fastroof.capacity`.
    """
    whole = fleet_of(fleet, options).without_rules()
    trace = given_run(trace_or_workload, UNIT_RATE).trace
    if trace.is_closed:
        raise SimulationError(f"{shown(trace.name)} has {trace.clients} clients; the answer is their number")
    limits = parsed_limits(options, goodput, float("inf"))
    pools = whole.serving(trace)
    refuse_never_run(pools, trace, "leave such requests out")
    most = session_starts(trace).sessions if trace.has_parents else len(trace)
    by_scale: dict[float, dict[int, Measurement]] = {}

    def found(scale: float) -> int:
        seen = by_scale[scale] = {}

        def breaks(clients: int) -> bool:
            closed = trace.by_clients(clients)
            outcomes = run_pools(pools, closed, whole.link, time_scale=scale, threads=threads)
            seen[clients] = limits.measure(closed, outcomes)
            return not limits.holds(seen[clients])

        return (fewest_that_keep(breaks, most) or most + 1) - 1

    sessions = found(1.0)
    seen = by_scale[1.0]
    kv_len = running_tokens(trace, pools[-1].plan)
    at = seen[max(sessions, 1)]
    error = step_error(pools[-1].plan, at.decodes, kv_len, has_drafts=pools[-1].drafting is not None)
    low = high = sessions
    if with_range and error.is_known:
        high, low = (found(scale) for scale in error.time_scales)
    return MostSessions(
        sessions=sessions,
        limit=NO_LIMIT if sessions == most else limits.binding(seen[sessions + 1]),
        low=min(low, sessions),
        high=max(high, sessions),
        relative_error=error.relative if error.is_known else None,
        basis=error.basis,
        replicas=sum(pool.replicas for pool in pools),
        gpus=sum(pool.gpus for pool in pools),
        requests=len(trace),
        simulations=sum(map(len, by_scale.values())),
        seen=seen,
        limits=limits,
    )
