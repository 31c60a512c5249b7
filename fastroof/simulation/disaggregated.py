"""Disaggregated serving: a pool of prefill engines, a pool of decode engines, and the link between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Floats
from fastroof.arrow import arrow_schema
from fastroof.caching import lazy_property
from fastroof.checks import is_number, one_of, shown, whole_number
from fastroof.columns import Column
from fastroof.compiled.simulation import replicas as loops
from fastroof.compiled.simulation.state import FINISHED, Record
from fastroof.errors import SimulationError
from fastroof.models import Layout
from fastroof.plan.memory import PlanMemory, window_kv_bytes
from fastroof.simulation.engine import FOUND_COUNTERS, Outcomes, added_up, too_long, with_rejected
from fastroof.simulation.front_end import passage
from fastroof.simulation.prompt_tree import GIVEN, PREFIX_CACHES, source_of_hits
from fastroof.simulation.replicas import MOST_REPLICAS, engines_of, merged, run_schedulers
from fastroof.simulation.requests import request_table
from fastroof.simulation.settings import EngineSettings, running_tokens
from fastroof.simulation.simulation import Simulation
from fastroof.simulation.trace import Trace
from fastroof.simulation.trace_files import load_trace
from fastroof.simulation.trace_sessions import places_of
from fastroof.units import US_PER_MS, US_PER_S

if TYPE_CHECKING:
    import pyarrow as pa

    from fastroof.plan import StepPlan


FIRST_TOKENS: Final = ("transfer", "prefill", "decode")
"""Who computes a request's first token, and when the client gets it: see :class:`Link`."""


class Pool(NamedTuple):
    """Equal engines behind one router."""

    plan: StepPlan
    settings: EngineSettings
    replicas: int = 1
    routing: str = "round_robin"
    prefix_cache: str = GIVEN


class Link(NamedTuple):
    """How a prompt's KV cache gets from a prefill engine to a decode engine.

    Attributes
    ----------
    bytes_per_s : float, optional
        Bandwidth from one GPU to a GPU of another engine, B/s; by default NVLink of the slower GPU. 50e9 is a
        400 Gb/s NIC.
    latency_us : float, default 0
        Latency of each transfer, us.
    is_shared : bool, default True
        Whether a prefill engine sends one prompt at a time, in the order in which they are ready; else each
        transfer gets the full bandwidth.
    first_token : str
        ``transfer``: the prefill engine computes it, and the client gets it when the decode engine has it and
        the KV cache. ``prefill``: the client gets it when the prefill engine has computed it. ``decode``: the
        decode engine recomputes the prompt's last token and with it the first token.
    """

    bytes_per_s: float | None = None
    latency_us: float = 0.0
    is_shared: bool = True
    first_token: str = "transfer"


class PooledOutcomes(NamedTuple):
    """The outcomes of requests: of all as clients see them, of each pool by its own clock and order."""

    outcomes: Outcomes
    prefill: Outcomes
    decode: Outcomes | None
    prefill_replica: Any
    transfer_us: Floats


def whole_kv_bytes(plan: StepPlan) -> PlanMemory:
    """Return the memory that a sequence takes in all layers on all GPUs; without weights and room."""
    model = plan.model
    return PlanMemory.of_sequence(
        model.kv_bytes_per_token(Layout(), plan.kv_dtype),
        plan.memory.window,
        window_kv_bytes(model, Layout(), plan.kv_dtype),
        model.state_bytes(Layout()),
    )


def takes_us(prefill: StepPlan, decode: StepPlan, prompts: Any, link: Link) -> Floats:
    """Return the transfer times of prompts' KV caches, us, without waiting for the link."""
    rate = link.bytes_per_s
    if rate is None:
        rate = min(plan.gpu.nvlink_bytes_per_s for plan in (prefill, decode))
    gpus = min(plan.tp * plan.layout.pp for plan in (prefill, decode))
    sent_bytes = whole_kv_bytes(decode).kv_bytes(prompts)
    lasts_us: Floats = np.asarray(sent_bytes / (rate * gpus) * US_PER_S + link.latency_us)
    return lasts_us


def _check(prefill: Pool, decode: Pool, trace: Trace, link: Link) -> None:
    one, other = prefill.plan, decode.plan
    if (one.model, one.kv_dtype) != (other.model, other.kv_dtype):
        raise SimulationError(
            f"prefill and decode need one model and kv_dtype, got {one.model.name} with {one.kv_dtype} KV "
            f"and {other.model.name} with {other.kv_dtype} KV"
        )
    one_of("first_token", link.first_token, FIRST_TOKENS, SimulationError)
    if link.bytes_per_s is not None and not (is_number(link.bytes_per_s) and link.bytes_per_s > 0):
        raise SimulationError(f"bytes_per_s must be above 0, got {shown(link.bytes_per_s)}")
    if not is_number(link.latency_us) or link.latency_us < 0:
        raise SimulationError(f"latency_us must be microseconds of at least 0, got {shown(link.latency_us)}")
    if trace.is_closed:
        raise SimulationError(
            "closed loops are not simulated with two pools, which run one after the other; give arrivals, "
            "such as a Workload at the clients' rate"
        )
    if trace.has_parents:
        raise SimulationError(
            "sessions are not simulated with two pools, which run one after the other; leave parents out, or "
            "give replicas"
        )
    for pool in (prefill, decode):
        whole_number("replicas", pool.replicas, most=MOST_REPLICAS, error=SimulationError)
        if pool.settings.timeout_s < math.inf:
            raise SimulationError("timeout_s is not supported with two pools; leave it out")


def _prefilled(trace: Trace) -> Trace:
    """Return the trace of prefill engines: the first token of each request."""
    return replace(trace, output_tokens=np.ones_like(trace.output_tokens))


def _part(trace: Trace, kept: Any, *, with_ids: bool = False) -> Trace:
    """Return some requests, with given prefix hits and, if asked, the ids of blocks."""
    ids: dict[str, Any] = {}
    if with_ids and trace.hash_ids is not None and trace.hash_offsets is not None:
        counts = np.diff(trace.hash_offsets)[kept]
        ids = {
            "hash_ids": trace.hash_ids[places_of(trace.hash_offsets[:-1][kept], counts)],
            "hash_offsets": np.concatenate([[0], np.cumsum(counts)]),
            "hash_block_size": trace.hash_block_size,
        }
    return Trace(
        trace.arrival_s[kept],
        trace.input_tokens[kept],
        trace.output_tokens[kept],
        trace.cached_tokens[kept],
        **ids,
        name=trace.name,
    )


def _decoded(trace: Trace, arrival_us: Floats, first_token: str) -> Trace:
    """Return the trace of decode engines: prompts are in the KV cache."""
    again = first_token == "decode"
    prompts, outputs = trace.input_tokens, trace.output_tokens
    return Trace(
        arrival_us / US_PER_S,
        prompts if again else prompts + 1,
        outputs if again else outputs - 1,
        prompts - 1 if again else prompts,
        name=trace.name,
    )


def pools_too_long(trace: Trace, prefill: EngineSettings, decode: EngineSettings) -> Bools:
    """Find requests that can never run in one of the pools."""
    return too_long(_prefilled(trace), prefill) | too_long(
        replace(trace, cached_tokens=np.maximum(trace.input_tokens - 1, 0)), decode
    )


def run_pools(
    prefill: Pool,
    decode: Pool,
    trace: Trace,
    link: Link = Link(),  # noqa: B008 (immutable)
    *,
    time_scale: float = 1.0,
    seed: int = 0,
) -> PooledOutcomes:
    """Serve a trace with a pool of prefill engines, behind their front ends, and one of decode engines."""
    _check(prefill, decode, trace, link)
    way = passage(prefill.plan.profile.front_end, trace, prefill.replicas)
    pooled = _run_pools(prefill, decode, way.arrived, link, time_scale=time_scale, seed=seed)
    if way.arrived is trace:
        return pooled
    return pooled._replace(
        outcomes=way.seen(pooled.outcomes),
        prefill_replica=way.placed(pooled.prefill_replica),
        transfer_us=way.placed(pooled.transfer_us),
    )


def _run_pools(
    prefill: Pool, decode: Pool, trace: Trace, link: Link, *, time_scale: float, seed: int
) -> PooledOutcomes:
    """Serve a trace with both pools, by their own clocks."""
    rejected = pools_too_long(trace, prefill.settings, decode.settings)
    kept = np.flatnonzero(~rejected)
    if not len(kept):
        raise SimulationError(f"no request of {trace.name} can run in both pools: give more blocks or GPUs")
    fit = _part(trace, kept)
    options: dict[str, Any] = {"time_scale": time_scale, "seed": seed}
    prefilled = run_schedulers(
        prefill.plan,
        _prefilled(_part(trace, kept, with_ids=True)),
        prefill.settings,
        prefill.replicas,
        prefill.routing,
        prefix_cache=prefill.prefix_cache,
        **options,
    )
    goes_on = np.flatnonzero((fit.output_tokens > 1) | (link.first_token == "decode"))
    there_us = _arrivals_us(prefill, decode, fit, prefilled, goes_on, link)
    first_us, last_us = prefilled.first_us.copy(), prefilled.last_us.copy()
    preemptions, replica = prefilled.preemptions.copy(), np.full(len(fit), -1, np.int32)
    transfer_us = np.full(len(fit), math.nan)
    decoded: Outcomes | None = None
    records = [_record(prefilled)]
    counters = [prefilled.counters]
    gaps_us = np.empty(0)
    if len(goes_on):
        handed = _decoded(_part(fit, goes_on), there_us, link.first_token)
        # requests that are handed over, by arrival at the decode pool
        who = goes_on[handed.order]
        decoded = run_schedulers(
            decode.plan, handed, decode.settings, decode.replicas, decode.routing, **options
        )
        transfer_us[who] = decoded.arrival_us - prefilled.last_us[who]
        last_us[who], replica[who] = decoded.last_us, decoded.replica
        preemptions[who] += decoded.preemptions
        if link.first_token == "decode":
            first_us[who] = decoded.first_us
        elif link.first_token == "transfer":
            first_us[who] = decoded.arrival_us
        records.append(_record(decoded))
        counters.append(decoded.counters)
        if link.first_token != "decode":
            gaps_us = decoded.first_us - first_us[who]
    found = {name: prefilled.counters[name] for name in FOUND_COUNTERS if name in prefilled.counters}
    whole = merged(records)
    loops.count_gaps(gaps_us, whole)
    outcomes = Outcomes(
        prefilled.arrival_us,
        first_us,
        last_us,
        preemptions,
        np.full(len(fit), FINISHED, np.uint8),
        replica,
        whole.gaps,
        whole.series,
        float(whole.width_us[0]),
        added_up([{name: one[name] for name in one if name not in found} for one in counters]) | found,
        prefilled.cached_tokens,
    )
    prefill_replica = prefilled.replica
    if rejected.any():
        outcomes = with_rejected(outcomes, trace, rejected)
        prefill_replica = _spread(prefill_replica, rejected, -1)
        transfer_us = _spread(transfer_us, rejected, math.nan)
    return PooledOutcomes(outcomes, prefilled, decoded, prefill_replica, transfer_us)


def _arrivals_us(
    prefill: Pool, decode: Pool, trace: Trace, prefilled: Outcomes, goes_on: Any, link: Link
) -> Floats:
    """Return when each request's KV cache arrives at its decode engine, us."""
    ready_us = prefilled.last_us[goes_on]
    lasts_us = takes_us(prefill.plan, decode.plan, trace.input_tokens[goes_on], link)
    if not link.is_shared:
        unshared_us: Floats = ready_us + lasts_us
        return unshared_us
    there_us: Floats = np.empty_like(ready_us)
    order = np.argsort(ready_us, kind="stable")
    links = np.ascontiguousarray(prefilled.replica[goes_on])
    loops.link_ends(ready_us, lasts_us, links, order, np.zeros(prefill.replicas), there_us)
    return there_us


def _record(outcomes: Outcomes) -> Record:
    return Record(outcomes.gaps, outcomes.series, np.array([outcomes.bin_us]))


def _spread(values: Any, rejected: Bools, fill: float) -> Any:
    """Insert ``fill`` for rejected requests."""
    whole = np.full(len(rejected), fill, values.dtype)
    whole[~rejected] = values
    return whole


ON_TOO_LONG: Final = ("error", "reject")

TRANSFER_COLUMNS: Final = (
    Column("prefill_replica", "int", "", "engine that prefilled it, from 0; empty if none did", 0),
    Column("transfer_ms", "float", "ms", "from the end of its prefill until its KV cache has arrived"),
)
"""Columns of :attr:`DisaggregatedSimulation.requests` after those of any simulation."""


class DisaggregatedSimulation(Simulation):
    """The results of a simulation with prefill and decode engines.

    Everything of :class:`Simulation` is over both pools; ``replica`` is the decode engine, empty if a request
    ended with its prefill. Made by :func:`simulate_disaggregated`.

    Parameters
    ----------
    prefill, decode : Pool
        The pools of engines.
    trace : Trace
        The requests.
    link : Link
        The link between the pools.
    time_scale : float
        Factor on the time of every step in both pools.

    Attributes
    ----------
    prefill, decode : Pool
        The pools of engines.
    link : Link
        The link between the pools.
    pooled : PooledOutcomes
        The outcomes of requests, in all and in each pool.
    """

    def __init__(
        self, prefill: Pool, decode: Pool, trace: Trace, link: Link, *, time_scale: float = 1.0
    ) -> None:
        self.prefill, self.decode, self.link = prefill, decode, link
        self.pooled: PooledOutcomes = run_pools(prefill, decode, trace, link, time_scale=time_scale)

        def rerun(scale: float) -> Outcomes:
            return run_pools(prefill, decode, trace, link, time_scale=time_scale * scale).outcomes

        super().__init__(
            decode.plan,
            trace,
            decode.settings,
            self.pooled.outcomes,
            replicas=prefill.replicas + decode.replicas,
            rerun=rerun,
        )

    @property
    def engines(self) -> int:
        """Number of engines that step independently, in both pools."""
        return sum(engines_of(pool.plan) * pool.replicas for pool in (self.prefill, self.decode))

    @property
    def gpus(self) -> int:
        """GPUs of all engines, of both pools."""
        pools = (self.prefill, self.decode)
        return sum(int(pool.plan.layout.world_size) * pool.replicas for pool in pools)

    @property
    def made_from(self) -> dict[str, str]:
        """The inputs of the results: plans and settings of both pools, their link, the trace."""
        settings = {f"fastroof.prefill.{name}": str(of) for name, of in vars(self.prefill.settings).items()}
        pools = {
            f"fastroof.{name}.replicas": str(pool.replicas)
            for name, pool in (("prefill", self.prefill), ("decode", self.decode))
        }
        link = {f"fastroof.link.{name}": str(value) for name, value in self.link._asdict().items()}
        plan = {f"prefill.{name}": value for name, value in self.prefill.plan.made_from.items()}
        return {**super().made_from, **plan, **settings, **pools, **link}

    @lazy_property
    def requests(self) -> pa.Table:
        """Requests as a table, a row each, in the order of the trace's file.

        Returns
        -------
        pyarrow.Table
            As :attr:`Simulation.requests`, then ``prefill_replica`` and ``transfer_ms``.
        """
        import pyarrow as pa

        table = request_table(self.trace, self.outcomes, self.times, self.made_from)
        replica, transfer = arrow_schema(TRANSFER_COLUMNS, {})
        prefilled = self.trace.in_file_order(self.pooled.prefill_replica)
        sent_ms = self.trace.in_file_order(self.pooled.transfer_us / US_PER_MS)
        table = table.append_column(replica, pa.array(prefilled, replica.type, mask=prefilled < 0))
        return table.append_column(transfer, pa.array(sent_ms, transfer.type, from_pandas=True))

    def summary(self, **given: Any) -> dict[str, Any]:
        """Return the results of the whole run.

        Parameters
        ----------
        **given
            As in :meth:`Simulation.summary`.

        Returns
        -------
        dict
            As in :meth:`Simulation.summary`, and ``transfer_ms``, ``{mean, p50, p90, p95, p99}`` of requests
            that were handed over; ``pools``: of ``prefill`` and ``decode``, their ``tp``, ``replicas``,
            ``steps`` and ``busy``, the share of the run in which steps ran.
        """
        from fastroof.simulation.answers import duration_us
        from fastroof.simulation.requests import spread

        answers = super().summary(**given)
        sent_us = self.pooled.transfer_us
        answers["transfer_ms"] = spread(sent_us[np.isfinite(sent_us)] / US_PER_MS)
        over_us = duration_us(self.outcomes)
        answers["pools"] = {
            name: {
                "tp": pool.plan.tp,
                "replicas": pool.replicas,
                "steps": outcomes.counters["steps"] if outcomes else 0,
                "busy": _busy(outcomes, pool, over_us) if outcomes else 0.0,
            }
            for name, pool, outcomes in (
                ("prefill", self.prefill, self.pooled.prefill),
                ("decode", self.decode, self.pooled.decode),
            )
        }
        return answers


def _busy(outcomes: Outcomes, pool: Pool, over_us: float) -> float:
    engines = pool.replicas * pool.plan.layout.dp
    return float(outcomes.counters["busy_us"]) / engines / over_us if over_us > 0.0 else math.nan


def simulate_disaggregated(
    prefill_plan: StepPlan,
    decode_plan: StepPlan,
    trace: Any,
    prefill_replicas: int = 1,
    decode_replicas: int = 1,
    *,
    link: Link = Link(),  # noqa: B008 (immutable)
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    prefill_routing: str = "round_robin",
    decode_routing: str = "round_robin",
    prefix_cache: str = "auto",
    on_too_long: str = "error",
    time_scale: float = 1.0,
) -> DisaggregatedSimulation:
    """Serve a trace with prefill engines and decode engines, request by request.

    Parameters
    ----------
    prefill_plan, decode_plan : StepPlan
        Plans with the same model and KV dtype; layouts and GPUs may differ.
    trace : Trace or what :func:`fastroof.load_trace` takes
        The requests, with arrivals.
    prefill_replicas, decode_replicas : int, default 1
        Number of engines of each kind.
    link : Link
        The link between the pools: bandwidth, latency, and who computes the first token.
    prefill, decode : mapping, optional
        Settings of each kind of engine, by the names of :class:`EngineSettings`; by default the engine's and
        the plan's memory.
    prefill_routing, decode_routing : str
        As ``routing`` of :func:`fastroof.simulate`; ``prefix_aware`` is for prefill engines.
    prefix_cache : {"auto", "given", "lru"}
        Where hits of prefill engines come from, as in :func:`fastroof.simulate`.
    on_too_long : {"error", "reject"}
        What happens to a request that can never run in one of the pools.
    time_scale : float, default 1
        Factor on the time of every step, not of transfers.

    Returns
    -------
    DisaggregatedSimulation
        The times of every request, and results derived from them.

    Raises
    ------
    SimulationError
        If the plans do not match, a setting is invalid, or a request can never run.
    TraceError
        If the trace cannot be read.

    Notes
    -----
    A prompt is computed on a prefill engine, its KV cache is sent over the link, and a decode engine
    continues with the prompt as context. Layer-wise transfers, blocks held until they are sent, and back
    pressure of full decode engines are not simulated. The closed form is
    :func:`fastroof.serving.estimate_disaggregated`.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.simulation import Link, simulate_disaggregated
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    >>> trace = fastroof.Trace([0.0, 0.1, 0.2], [4000, 2000, 500], [100, 50, 1])
    >>> sim = simulate_disaggregated(plan, plan, trace, 2, link=Link(50e9))
    >>> sim.requests["prefill_replica"].to_pylist(), sim.requests["replica"].to_pylist()
    ([0, 1, 0], [0, 0, None])
    >>> round(sim.requests["transfer_ms"][0].as_py(), 3)
    10.486
    """
    one_of("on_too_long", on_too_long, ON_TOO_LONG, SimulationError)
    one_of("prefix_cache", prefix_cache, PREFIX_CACHES, SimulationError)
    requests = trace if isinstance(trace, Trace) else load_trace(trace)
    prefix_cache = source_of_hits(requests, prefix_cache)
    prompts, whole = (running_tokens(requests, plan) for plan in (prefill_plan, decode_plan))
    first = EngineSettings.of_plan(prefill_plan, kv_len=prompts, **(prefill or {}))
    then = EngineSettings.of_plan(decode_plan, kv_len=whole, **(decode or {}))
    if on_too_long == "error":
        beyond = pools_too_long(requests, first, then)
        if beyond.any():
            row = int(beyond.argmax())
            prompt, output = int(requests.input_tokens[row]), int(requests.output_tokens[row])
            raise SimulationError(
                f"request {int(requests.order[row])} of {requests.name} ({prompt:,} + {output:,} tokens) "
                f"can never run in both pools, the first of {int(beyond.sum()):,}; give more num_gpu_blocks, "
                'GPUs or max_num_batched_tokens, or on_too_long="reject"'
            )
    return DisaggregatedSimulation(
        Pool(prefill_plan, first, prefill_replicas, prefill_routing, prefix_cache),
        Pool(decode_plan, then, decode_replicas, decode_routing),
        requests,
        link,
        time_scale=time_scale,
    )
