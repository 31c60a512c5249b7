"""Pools of engines that only prefill, and of engines that only decode what these send them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Floats
from fastroof.checks import is_number, one_of, shown
from fastroof.compiled.simulation import transfers as loops
from fastroof.compiled.simulation.records import Record
from fastroof.errors import SimulationError
from fastroof.models import Layout
from fastroof.plan.memory import PlanMemory, window_kv_bytes
from fastroof.simulation.engine import too_long, with_rejected
from fastroof.simulation.outcomes import FINISHED, Outcomes, added_up
from fastroof.simulation.replicas import merged, run_replicas
from fastroof.simulation.settings import EngineSettings
from fastroof.simulation.trace import Trace
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = ["FIRST_TOKENS", "Link", "Pool", "PooledOutcomes", "run_pools"]

FIRST_TOKENS: Final = ("transfer", "prefill", "decode")
"""Who makes a request's first token, and when it is seen: see :class:`Link`."""


class Pool(NamedTuple):
    """Engines of one kind."""

    plan: StepPlan
    settings: EngineSettings
    replicas: int = 1
    routing: str = "round_robin"


class Link(NamedTuple):
    """How a prompt's KV cache gets from a prefill engine to a decode engine.

    Attributes
    ----------
    bytes_per_s : float, optional
        What one GPU sends to a GPU of another engine, B/s; by default over NVLink, of the slower GPU.
        50e9 is a 400 Gb/s NIC.
    latency_us : float, default 0
        Added to each transfer, us.
    is_shared : bool, default True
        Whether a prefill engine sends one prompt at a time, in the order in which they are ready; else each
        has all of the bandwidth.
    first_token : str
        ``transfer``: the prefill engine makes it, and it comes with the KV cache: it is seen when the decode
        engine has both. ``prefill``: it is seen when the prefill engine has made it. ``decode``: the decode
        engine computes the prompt's last token again, and makes it.
    """

    bytes_per_s: float | None = None
    latency_us: float = 0.0
    is_shared: bool = True
    first_token: str = "transfer"


class PooledOutcomes(NamedTuple):
    """What became of requests that were prefilled here and decoded there, in the trace's order."""

    outcomes: Outcomes
    prefill: Outcomes
    decode: Outcomes | None
    prefill_replica: Any
    transfer_us: Floats


def whole_kv_bytes(plan: StepPlan) -> PlanMemory:
    """Return what all layers and GPUs of a plan keep of a sequence; no weights, no room."""
    model = plan.model
    return PlanMemory(
        0,
        model.kv_bytes_per_token(Layout(), plan.kv_dtype),
        0,
        0,
        0,
        plan.memory.window,
        window_kv_bytes(model, Layout(), plan.kv_dtype),
        model.state_bytes(Layout()),
    )


def takes_us(prefill: StepPlan, decode: StepPlan, prompts: Any, link: Link) -> Floats:
    """Return what the transfer of prompts' KV caches takes, us, once it has the link."""
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
        raise SimulationError(f"a link needs bytes a second above 0, got {shown(link.bytes_per_s)}")
    if not is_number(link.latency_us) or link.latency_us < 0:
        raise SimulationError(f"latency_us must be microseconds of at least 0, got {shown(link.latency_us)}")
    if trace.is_closed:
        raise SimulationError(
            "clients of a closed loop wait for both pools, which are simulated one after the other: give "
            "arrivals, such as a Workload at the rate that the clients would have"
        )
    for pool in (prefill, decode):
        if pool.settings.timeout_s < math.inf:
            raise SimulationError(
                "clients that give up are simulated in one pool of engines: leave timeout_s away"
            )


def _prefilled(trace: Trace) -> Trace:
    """A trace as prefill engines see it: of each request the first token."""
    return replace(trace, output_tokens=np.ones_like(trace.output_tokens))


def _part(trace: Trace, kept: Any) -> Trace:
    """Some requests, whose prefix hits are those that the trace says."""
    return Trace(
        trace.arrival_s[kept],
        trace.input_tokens[kept],
        trace.output_tokens[kept],
        trace.cached_tokens[kept],
        name=trace.name,
    )


def _decoded(trace: Trace, arrival_us: Floats, first_token: str) -> Trace:
    """Requests as decode engines see them, with their prompts in the KV cache; not sorted yet."""
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
    """Which requests can never run in one of both pools; see :func:`fastroof.simulation.engine.too_long`."""
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
    """Serve a trace with engines that prefill and others that decode."""
    _check(prefill, decode, trace, link)
    rejected = pools_too_long(trace, prefill.settings, decode.settings)
    kept = np.flatnonzero(~rejected)
    if not len(kept):
        raise SimulationError(f"no request of {trace.name} can run in both pools: give more blocks or GPUs")
    fit = _part(trace, kept)
    options: dict[str, Any] = {"time_scale": time_scale, "seed": seed}
    prefilled = run_replicas(
        prefill.plan, _prefilled(fit), prefill.settings, prefill.replicas, prefill.routing, **options
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
        # those that are handed over, by arrival there
        who = goes_on[handed.order]
        decoded = run_replicas(
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
        added_up(counters),
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
    """When the KV cache of each request that is handed over is at its decode engine, us."""
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
    """Values of the requests that can run, and ``fill`` of the others."""
    whole = np.full(len(rejected), fill, values.dtype)
    whole[~rejected] = values
    return whole
