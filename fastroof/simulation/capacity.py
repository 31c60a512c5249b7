"""The largest request rate within limits on percentiles."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

from fastroof.checks import check_flag, is_number, shown, whole_number
from fastroof.errors import SimulationError
from fastroof.simulation.capacity_runs import (
    UNIT_RATE,
    Searched,
    fleet_runner,
    given_run,
    longer,
    run_of,
)
from fastroof.simulation.capacity_search import (
    CapacitySearch,
    FoundRate,
    Limits,
    Measurement,
    parsed_limits,
)
from fastroof.simulation.fleet import Fleet, fleet_of
from fastroof.simulation.pools import EnginePool, refuse_never_run
from fastroof.simulation.session_runs import requests_per_session
from fastroof.simulation.steady import Run
from fastroof.simulation.step_range import StepError, step_error
from fastroof.traces.trace import Trace

if TYPE_CHECKING:
    import pyarrow as pa

    from fastroof.plan import StepPlan
    from fastroof.traces.workload import Workload

MOST_TOLERANCE: Final = 0.5
MOST_DRAWS: Final = 1000


@dataclass(frozen=True)
class Capacity:
    """The largest request rate that a deployment serves within limits.

    Attributes
    ----------
    requests_per_s : float
        Rate of the whole deployment: the one to draw a workload at, or the mean of a trace. 0 if no tried
        rate is within the limits. If ``limit`` is ``none``, the throughput when all requests, or sessions,
        arrive at once.
    limit : str
        The limit that fails first at a higher rate: its name, ``goodput``, ``throughput`` (requests arrive
        faster than they are served) or ``none`` (no rate breaks a limit).
    low, high : float
        The rate with all steps one standard error longer, and shorter; the rate itself if that error is
        unknown.
    relative_error : float or None
        Standard error of a step's time, in ln; None if unknown.
    basis : str
        The source of that error.
    sampling_error : float or None
        Relative standard error of the rate by chance: over the draws, or with one from the pieces of its run.
        None if unknown, as for limits on gaps between tokens with one draw.
    tolerance : float
        Relative tolerance of the rate.
    replicas, gpus : int
        Replicas, and GPUs of all of them.
    requests, counted : int
        Requests of each simulation, and those that percentiles are over: the ramp before and the drain after
        them do not count.
    simulations : int
        Number of simulations.
    seen : dict of float to Measurement
        Measurements by rate; ``inf`` is all requests at once.
    limits : Limits
        The limits.
    requests_per_session : float or None
        With sessions, the requests of each: their starts/s times this are ``requests_per_s``.
    """

    requests_per_s: float
    limit: str
    low: float
    high: float
    relative_error: float | None
    basis: str
    sampling_error: float | None
    tolerance: float
    replicas: int
    gpus: int
    requests: int
    counted: int
    simulations: int
    seen: dict[float, Measurement] = field(repr=False)
    limits: Limits = field(repr=False)
    requests_per_session: float | None = None

    @property
    def sessions_per_s(self) -> float | None:
        """Session starts/s; None without sessions."""
        each = self.requests_per_session
        return None if each is None else self.requests_per_s / each

    @property
    def open_sessions(self) -> float | None:
        """Mean number of sessions that are open at once at this rate; None without sessions."""
        if self.requests_per_session is None or not self.requests_per_s:
            return None
        return self._at_rate.in_system / self.requests_per_session if self._at_rate else None

    @property
    def _at_rate(self) -> Measurement | None:
        return self.seen.get(math.inf if self.limit == "none" else self.requests_per_s)

    @property
    def requests_per_s_per_gpu(self) -> float:
        """Requests/s divided by the GPUs of all replicas."""
        return self.requests_per_s / self.gpus

    @property
    def at_capacity(self) -> dict[str, float]:
        """The limited percentiles at this rate, ms, by limit; empty if the rate is 0."""
        return self.limits.by_name(self._at_rate)

    @property
    def simulated(self) -> pa.Table:
        """A row per simulated rate, ascending: the rate, whether limits hold, and what was measured."""
        import pyarrow as pa

        rows = [
            {
                "requests_per_s": per_s,
                "holds": self.limits.holds(measured),
                "served_per_s": measured.served_per_s,
                "growth": measured.growth,
                "goodput": measured.goodput,
                **self.limits.by_name(measured),
            }
            for per_s, measured in sorted(self.seen.items())
        ]
        return pa.Table.from_pylist(rows)

    def document(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        hidden = ("seen", "limits", *(["requests_per_session"] if self.requests_per_session is None else []))
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in hidden}
        derived = {"requests_per_s_per_gpu": self.requests_per_s_per_gpu, "at_capacity": self.at_capacity}
        if self.requests_per_session is not None:
            derived |= {"sessions_per_s": self.sessions_per_s, "open_sessions": self.open_sessions}
        return {**plain, **derived, "simulated": self.simulated.to_pylist()}


def capacity(
    fleet: Fleet | StepPlan,
    trace_or_workload: Trace | Workload,
    *,
    goodput: float | None = None,
    tolerance: float = 0.01,
    draws: int = 1,
    steady: bool = True,
    with_range: bool = True,
    threads: int = 1,
    **options: Any,
) -> Capacity:
    """Find the largest request rate that a fleet serves within limits on percentiles.

    Parameters
    ----------
    fleet : Fleet or StepPlan
        The engines: a fleet, or the plan of one pool. Their numbers are fixed.
    trace_or_workload : Trace or Workload
        The requests. Other rates scale the arrivals of the same requests, so that rates and deployments are
        compared on equal draws. With sessions they scale the starts (and recorded arrivals), not the delays.
    goodput : float, optional
        Share of requests that must be within ``ttft_ms``, ``tpot_ms`` and ``e2e_ms``, as far as given.
    tolerance : float, default 0.01
        Relative tolerance of the rate, up to 0.5.
    draws : int, default 1
        For a workload: number of draws, with the seeds after its own, to estimate the sampling error.
    steady : bool, default True
        Whether more requests of a workload are drawn, or a trace is repeated, until ramp and drain do not
        matter; else percentiles are over the requests given, all of them.
    with_range : bool, default True
        Whether to search for ``low`` and ``high``, to a tenth of the steps' error; of two pools, transfers
        are as much slower and faster as steps.
    threads : int, default 1
        Threads that run independent replicas.
    **options
        Limits, ms, named by time and percentile: ``ttft_p99_ms``, ``tpot_p90_ms``, ``itl_p50_ms`` (over all
        gaps between tokens), ``e2e_p99_9_ms``; with ``goodput`` also ``ttft_ms``, ``tpot_ms`` and ``e2e_ms``
        of each request. The times of an unfinished request count as inf. For a plan also the options of its
        :class:`~fastroof.simulation.Pool`: ``replicas``, ``router``, settings of the engine.

    Returns
    -------
    Capacity
        The rate, the binding limit, and the effect of step errors and sampling.

    Raises
    ------
    SimulationError
        If a limit is unknown or not a number above 0, no limit is given, an option is invalid, the requests
        have no rate, or sessions stay open for too long for a steady state.

    Notes
    -----
    A percentile need not rise with the rate. The answer is the largest tried rate within all limits below
    which no tried rate fails; the next tried rate, at most ``tolerance`` above, fails. Tried rates
    have the four digits that are printed, unless ``tolerance`` is finer. The lowest is 1/4096 of the
    throughput when all requests arrive at once.

    By default at least 20,000 requests count, and 50 for each one in the system; a quarter as many precede
    them and a sixteenth follow. A workload is drawn up to 80,000 until the sampling error is within
    ``tolerance``, as far as a simulation has at most some 2 million steps. That error is the standard error
    of the binding percentile over 16 pieces of the run, over its slope in the rate. A trace is repeated as a
    whole, and its pieces are those of the trace; a ramp of rates likewise. No repeat finds the blocks of
    another in a prefix cache. Percentiles of gaps (``itl``) count all requests.

    With sessions all of this is in sessions: 50 count for each open one, at least 8. Requests count that
    arrive between the starts of the first counted session and of the one after the last.

    A queue that grows for the whole trace could stay within a limit only because the trace ends. Such a rate
    is rejected, with the limit ``throughput``: times to first token grow by more than ``tolerance`` of the
    elapsed time and by more than chance (``1 / sqrt(requests)``).

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.simulation import Workload
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    >>> load = Workload(rate=10, requests=500, isl=1000, osl=100, seed=1)
    >>> most = fastroof.capacity(plan, load, ttft_p99_ms=500, tpot_p99_ms=30)
    >>> most.low <= most.requests_per_s <= most.high, most.limit
    (True, 'tpot_p99_ms')
    """
    whole = fleet_of(fleet, options).without_rules()
    draws = whole_number("draws", draws, 1, MOST_DRAWS, SimulationError)
    check_flag("with_range", with_range, SimulationError)
    if not is_number(tolerance) or not 0 < tolerance <= MOST_TOLERANCE:
        raise SimulationError(
            f"tolerance must be a number above 0 and up to {MOST_TOLERANCE}, got {shown(tolerance)}"
        )
    check_flag("steady", steady, SimulationError)
    as_given = given_run(trace_or_workload, UNIT_RATE)
    trace = as_given.trace
    if draws > 1 and isinstance(trace_or_workload, Trace):
        raise SimulationError(
            f"draws needs a workload, whose requests can be drawn again; trace {shown(trace.name)} has one "
            f"draw, got {draws}"
        )
    parsed = parsed_limits(options, goodput, math.inf)
    pools = whole.serving(trace)
    refuse_never_run(pools, trace, "leave such requests out")
    simulate, first = fleet_runner(pools, whole.link, threads), pools[0].settings
    is_scaled = math.isinf(first.timeout_s) and not trace.has_parents

    def searching(run: Run) -> CapacitySearch:
        # beyond the tolerance, chance lets a queue grow
        limited = parsed._replace(growth=max(tolerance, 1.0 / math.sqrt(run.requests)))
        return CapacitySearch(run, limited, simulate, tolerance, scales_with_time=is_scaled)

    alone = searching(as_given)
    tried = [Searched(alone, alone.found())]
    if steady:
        tried += longer(
            trace_or_workload, tried[0], searching, first.max_num_batched_tokens, float(tolerance)
        )
    search, found, sampling_error = tried[-1]
    error = _step_error(pools[-1], search, found)
    low, high = found, found
    if with_range and error.is_known:
        faster, slower = error.time_scales
        low, high = search.found(slower), search.found(faster)
    searches = [each.search for each in tried]
    rates = [found.requests_per_s]
    for draw in range(1, draws):
        assert not isinstance(trace_or_workload, Trace)
        drawn = replace(trace_or_workload, seed=trace_or_workload.seed + draw)
        again = searching(
            run_of(drawn, search.run.requests, UNIT_RATE) if steady else given_run(drawn, UNIT_RATE)
        )
        rates.append(again.found(near=found.requests_per_s or None).requests_per_s)
        searches.append(again)
    return Capacity(
        requests_per_s=found.requests_per_s,
        limit=found.limit,
        # rates that the same simulations bracket: rounding alone could turn them about
        low=min(low.requests_per_s, found.requests_per_s),
        high=max(high.requests_per_s, found.requests_per_s),
        relative_error=error.relative if error.is_known else None,
        basis=error.basis,
        sampling_error=sampling_error if draws == 1 else _of_draws(rates),
        tolerance=float(tolerance),
        replicas=sum(pool.replicas for pool in pools),
        gpus=sum(pool.gpus for pool in pools),
        requests=len(search.trace),
        counted=search.run.requests,
        simulations=sum(each.simulations for each in searches),
        seen=dict(search.tried()),
        limits=search.limits,
        requests_per_session=requests_per_session(search.trace),
    )


def _step_error(pool: EnginePool, search: CapacitySearch, found: FoundRate) -> StepError:
    """Return the error of steps at capacity."""
    trace, measured = search.trace, search.measured_at(found)
    outputs = trace.output_tokens.astype(float)
    kv_len = float((outputs * (trace.input_tokens + outputs / 2.0)).sum() / outputs.sum())
    return step_error(pool.plan, measured.decodes, kv_len, has_drafts=pool.drafting is not None)


def _of_draws(rates: list[float]) -> float | None:
    """Return the relative standard error of one draw; None if unknown."""
    if not min(rates) > 0.0:
        return None
    logs = [math.log(rate) for rate in rates]
    mean = math.fsum(logs) / len(logs)
    return math.sqrt(math.fsum((log - mean) ** 2 for log in logs) / (len(logs) - 1))
