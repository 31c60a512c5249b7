"""Runs for a capacity: simulations of a fleet, and how long they must be, by shorter ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from fastroof.checks import shown
from fastroof.errors import SimulationError, TraceError
from fastroof.simulation.capacity_search import CapacitySearch, FoundRate, Simulate
from fastroof.simulation.fleet_run import run_pools
from fastroof.simulation.pools import EnginePool, Link
from fastroof.simulation.steady import (
    Run,
    affordable_requests,
    drawn_run,
    enough_requests,
    more_requests,
    steady_run,
)
from fastroof.traces.trace import Trace
from fastroof.traces.workload import Workload

if TYPE_CHECKING:
    from fastroof.simulation.engine import Outcomes

UNIT_RATE: Final = 1.0
"""Requests/s at which a search draws: over another rate, arrivals are those drawn at it, to the bit."""

LEAST_TURNOVERS: Final = 8.0
"""Sessions that count for each open one, at least: a quarter as many start before them."""


def given_run(traffic: Trace | Workload, rate: float | None = None) -> Run:
    """Return the requests given, all of which count: a trace, or a workload at a rate, by default its own."""
    if not isinstance(traffic, Trace | Workload):
        raise SimulationError(
            f"requests must be a Trace or a Workload, got {type(traffic).__name__}; load_trace makes a Trace"
        )
    return drawn_run(traffic, rate)


def run_of(traffic: Trace | Workload, requests: int, rate: float | None = None) -> Run:
    """Return a run of a trace, or of a workload at a rate; as given where it would last too long."""
    try:
        return steady_run(traffic, requests, rate)
    except TraceError:
        return drawn_run(traffic, rate)


class Searched(NamedTuple):
    """A search, its rate, and the rate's error by chance where it is known."""

    search: CapacitySearch
    found: FoundRate
    sampling_error: float | None = None

    @property
    def in_system(self) -> float:
        """Requests in the system at the rate, or of open sessions."""
        if self.search.run.session is None:
            return self.search.measured_at(self.found).in_system
        return self.search.open_requests(self.found)


def longer(
    given: Trace | Workload,
    first: Searched,
    searching: Callable[[Run], CapacitySearch],
    max_num_batched_tokens: int,
    tolerance: float,
) -> list[Searched]:
    """Search in a run that is long enough for a steady state, and then in one for the tolerance."""

    def most(done: Searched) -> int:
        decodes = done.search.measured_at(done.found).decodes
        return affordable_requests(done.search.run, decodes, max_num_batched_tokens)

    def searched(requests: int, near: float | None = None) -> Searched:
        search = searching(run_of(given, requests, UNIT_RATE))
        found = search.found(near=near or None)
        return Searched(search, found, search.sampling_error(found))

    requests = enough_requests(first.search.run.requests, first.in_system, most(first))
    tried = [searched(requests)]
    while first.search.run.session is not None and tried[-1].found.requests_per_s:
        # with sessions a short run ends while its first ones are open, and its rate is too high
        last = tried[-1]
        wanted = enough_of_sessions(last.search.run, requests, last.in_system, most(last))
        if wanted == requests:
            break
        requests = wanted
        tried.append(searched(requests))
    steady = tried[-1]
    if isinstance(given, Trace) or steady.search.run.is_repeated:
        # repeats are no new draws
        return tried
    more = more_requests(requests, steady.sampling_error, tolerance, most(steady))
    return tried if more == requests else [*tried, searched(more, steady.found.requests_per_s)]


def enough_of_sessions(run: Run, requests: int, in_system: float, affordable: int) -> int:
    """Return how many requests of sessions should count; raise if no more can, and too few do."""
    wanted = enough_requests(requests, in_system, affordable)
    if wanted == requests and run.requests < LEAST_TURNOVERS * in_system:
        sessions = run.counted.stop - run.counted.start
        raise SimulationError(
            f"{shown(run.trace.name)}: sessions stay open too long for a steady state, {sessions:,} are "
            f"simulated and {in_system / run.requests * sessions:,.0f} open at once; give shorter delays or "
            "steady=False (--no-steady), which counts the requests given"
        )
    return wanted


def fleet_runner(pools: Sequence[EnginePool], link: Link | None, threads: int) -> Simulate:
    """Return a function that simulates a trace on pools, with time-outs divided by a factor."""

    def run(trace: Trace, speedup: float) -> Outcomes:
        timed = pools
        if speedup != 1.0:
            timed = [
                pool._replace(settings=replace(pool.settings, timeout_s=pool.settings.timeout_s / speedup))
                for pool in pools
            ]
        return run_pools(timed, trace, link, threads=threads)

    return run
