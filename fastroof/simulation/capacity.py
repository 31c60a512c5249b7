"""How many requests a second a deployment serves within limits on percentiles."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from fastroof.checks import check_flag, is_number, shown, whole_number
from fastroof.errors import SimulationError
from fastroof.plan.compile import check_plan
from fastroof.simulation.capacity_search import (
    CapacitySearch,
    FoundRate,
    Limits,
    Seen,
    check_room,
    deployment_runner,
    drawn_traces,
    parsed_limits,
)
from fastroof.simulation.settings import EngineSettings
from fastroof.simulation.step_range import StepError, step_error
from fastroof.simulation.trace import Trace

if TYPE_CHECKING:
    import pyarrow as pa

    from fastroof.plan import StepPlan
    from fastroof.simulation.workload import Workload

MOST_TOLERANCE: Final = 0.5
MOST_DRAWS: Final = 1000

ANY_RATE: Final = 1.0
"""Requests a second of a workload that has no rate: it is what is searched for."""


@dataclass(frozen=True)
class Capacity:
    """The largest rate that a deployment keeps its limits at."""

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
    simulations: int
    seen: dict[float, Seen] = field(repr=False)
    limits: Limits = field(repr=False)

    @property
    def requests_per_s_per_gpu(self) -> float:
        """Requests a second over the GPUs of all replicas."""
        return self.requests_per_s / self.gpus

    @property
    def at_capacity(self) -> dict[str, float]:
        """The limited percentiles at this rate, ms by the names of their limits; empty where it is 0."""
        seen = self.seen.get(math.inf if self.limit == "none" else self.requests_per_s)
        if seen is None:
            return {}
        names = [limit.name for limit in self.limits.percentiles]
        return dict(zip(names, seen.values_ms, strict=True))

    @property
    def simulated(self) -> pa.Table:
        """A row a rate that was simulated, rising."""
        import pyarrow as pa

        rows = [
            {
                "requests_per_s": per_s,
                "holds": self.limits.holds(seen),
                "served_per_s": seen.served_per_s,
                "growth": seen.growth,
                "goodput": seen.goodput,
                **{
                    limit.name: value
                    for limit, value in zip(self.limits.percentiles, seen.values_ms, strict=True)
                },
            }
            for per_s, seen in sorted(self.seen.items())
        ]
        return pa.Table.from_pylist(rows)

    def document(self) -> dict[str, Any]:
        """Return all of it as values that JSON has."""
        kept_out = ("seen", "limits")
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in kept_out}
        derived = {"requests_per_s_per_gpu": self.requests_per_s_per_gpu, "at_capacity": self.at_capacity}
        return {**plain, **derived, "simulated": self.simulated.to_pylist()}


def capacity(
    plan: StepPlan,
    trace_or_workload: Trace | Workload,
    *,
    goodput: float | None = None,
    replicas: int = 1,
    routing: str = "round_robin",
    tolerance: float = 0.01,
    draws: int = 1,
    with_range: bool = True,
    threads: int = 1,
    max_num_batched_tokens: int | None = 2048,
    max_num_seqs: int | None = 256,
    num_gpu_blocks: int | None = None,
    block_size: int | None = 16,
    async_scheduling: bool | None = None,
    order: str | None = None,
    chunked_prefill: bool | None = None,
    reserve_output: bool | None = None,
    timeout_s: float | None = None,
    **limits: Any,
) -> Capacity:
    """Find the largest rate of requests that a deployment serves within limits on percentiles.

    Parameters
    ----------
    plan : StepPlan
        What times the steps.
    trace_or_workload : Trace or Workload
        Which requests. At other rates they are the same ones and their arrivals are scaled, so that two
        rates, or two deployments, differ by what serves them and not by what was drawn.
    goodput : float, optional
        Share of requests that have to keep ``ttft_ms``, ``tpot_ms`` and ``e2e_ms``, those that are given.
    replicas : int, default 1
        Engines that the requests are spread over.
    routing : str, default "round_robin"
        How, see :func:`fastroof.simulation.replicas.run_replicas`.
    tolerance : float, default 0.01
        How near the largest rate is searched for, relative, up to 0.5.
    draws : int, default 1
        Of a workload: how often its requests are drawn anew, by the seeds after its own, to see what that
        does to the answer.
    with_range : bool, default True
        Whether ``low`` and ``high`` are searched for.
    threads : int, default 1
        Threads that replicas are shared over, where they do not depend on each other.
    max_num_batched_tokens, max_num_seqs, num_gpu_blocks, block_size, async_scheduling : optional
        As :func:`fastroof.simulate` has them; None is the engine's own.
    order, chunked_prefill, reserve_output, timeout_s : optional
        Likewise.
    **limits : float
        Limits, ms, named by what of and which percentile: ``ttft_p99_ms``, ``tpot_p90_ms``, ``itl_p50_ms``
        (of all gaps between tokens), ``e2e_p99_9_ms``; with ``goodput`` also ``ttft_ms``, ``tpot_ms`` and
        ``e2e_ms`` of each request. A request that does not finish takes for ever.

    Returns
    -------
    Capacity
        The rate, the limit that binds, and what the errors of steps and of drawing do to it.

    Raises
    ------
    SimulationError
        If a limit is unknown or no number above 0, there is none, an option is wrong, or the requests have
        no rate.

    Notes
    -----
    A percentile need not rise with the rate. The answer is the largest rate that was tried and keeps all
    limits, with none that was tried below it failing; the next one above it, at most ``tolerance`` away,
    fails. Nothing below a 4096th of what is served of requests at once is tried.

    A trace ends, and so a queue that grows from its first request to its last could keep a limit just
    because it was cut off. A rate at which it does is refused: where times to first token grow by more than
    ``tolerance`` of the time that passes, and more than by chance (``1 / sqrt(requests)``). The limit then is
    ``throughput``.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.simulation import Workload
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"), runtime="vllm")
    >>> load = Workload(rate=10, requests=500, input_tokens=1000, output_tokens=100, seed=1)
    >>> most = fastroof.capacity(plan, load, ttft_p99_ms=500, tpot_p99_ms=30)
    >>> most.low <= most.requests_per_s <= most.high, most.limit
    (True, 'tpot_p99_ms')
    """
    check_plan("plan", plan, SimulationError)
    replicas = whole_number("replicas", replicas, error=SimulationError)
    draws = whole_number("draws", draws, 1, MOST_DRAWS, SimulationError)
    check_flag("with_range", with_range, SimulationError)
    if not is_number(tolerance) or not 0 < tolerance <= MOST_TOLERANCE:
        raise SimulationError(
            f"tolerance must be a number above 0 and up to {MOST_TOLERANCE}, got {shown(tolerance)}"
        )
    traces = drawn_traces(trace_or_workload, draws, ANY_RATE)
    growth = max(tolerance, 1.0 / math.sqrt(len(traces[0])))
    asked = parsed_limits(limits, goodput, growth)
    settings = EngineSettings.of_plan(
        plan,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        num_gpu_blocks=num_gpu_blocks,
        block_size=block_size,
        async_scheduling=async_scheduling,
        order=order,
        chunked_prefill=chunked_prefill,
        reserve_output=reserve_output,
        timeout_s=timeout_s,
    )
    for trace in traces:
        check_room(trace, settings)
    run = deployment_runner(plan, settings, replicas, routing, threads)
    is_scaled = math.isinf(settings.timeout_s)
    search = CapacitySearch(traces[0], asked, run, tolerance, scales_with_time=is_scaled)
    found = search.found()
    error = _step_error(plan, search, found)
    low, high = found, found
    if with_range and error.is_known:
        faster, slower = error.time_scales
        low, high = search.found(slower), search.found(faster)
    searches = [search]
    rates = [found.requests_per_s]
    for trace in traces[1:]:
        again = CapacitySearch(trace, asked, run, tolerance, scales_with_time=is_scaled)
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
        sampling_error=_sampling_error(rates),
        tolerance=float(tolerance),
        replicas=replicas,
        gpus=replicas * plan.layout.world_size,
        requests=len(traces[0]),
        simulations=sum(each.simulations for each in searches),
        seen=dict(search.tried()),
        limits=asked,
    )


def _step_error(plan: StepPlan, search: CapacitySearch, found: FoundRate) -> StepError:
    """How far off the steps at capacity may be."""
    trace, tried = search.trace, search.tried()
    seen = tried.get(found.requests_per_s) or tried[math.inf]
    outputs = trace.output_tokens.astype(float)
    kv_len = float((outputs * (trace.input_tokens + outputs / 2.0)).sum() / outputs.sum())
    return step_error(plan, seen.decodes, kv_len)


def _sampling_error(rates: list[float]) -> float | None:
    """Relative standard error of one of some draws; None where it is not known."""
    if len(rates) == 1 or not min(rates) > 0.0:
        return None
    logs = [math.log(rate) for rate in rates]
    mean = math.fsum(logs) / len(logs)
    return math.sqrt(math.fsum((log - mean) ** 2 for log in logs) / (len(logs) - 1))
