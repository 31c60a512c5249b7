"""Pools of engines, and the link between those that prefill and those that decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Floats
from fastroof.checks import is_number, one_of, shown, true_or_false, whole_number
from fastroof.compiled.simulation import records
from fastroof.compiled.simulation.scaling import MOST_CHECKS
from fastroof.errors import SimulationError
from fastroof.memory.plan_memory import PlanMemory
from fastroof.plan.calls import rank_rules
from fastroof.plan.speculation import SpeculatedPlan
from fastroof.plan.start import check_hand_over
from fastroof.simulation.autoscaling import Autoscaler
from fastroof.simulation.drafts import Drafting
from fastroof.simulation.engine import refuse_too_long, too_long
from fastroof.simulation.kv_tiers import NO_TIERS, Tiers
from fastroof.simulation.settings import MOST_REPLICAS, EngineSettings
from fastroof.traces.prompt_tree import GIVEN, LRU
from fastroof.traces.trace import Trace
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan


FIRST_TOKENS: Final = ("transfer", "prefill", "decode")
"""Who computes a request's first token, and when the client gets it: see :class:`Link`."""


ROUTERS: Final = {
    "round_robin": records.ROUND_ROBIN,
    "least_outstanding": records.LEAST_OUTSTANDING,
    "least_load": records.LEAST_LOAD,
    "least_kv": records.LEAST_KV,
    "power_of_two": records.POWER_OF_TWO,
    "prefix_aware": records.PREFIX_AWARE,
}

POOLED_ROUTINGS: Final = tuple(ROUTERS)
"""Ways to choose the replica of a request where each has a simulated prefix cache."""

ROUTINGS: Final = tuple(name for name in POOLED_ROUTINGS if name != "prefix_aware")
"""Ways to choose the replica of a request where prefix hits are given."""


def ranks_of(plan: StepPlan) -> int:
    """Return the number of schedulers of a plan's engine: one a rank and a batch in its pipeline stages."""
    return int(plan.layout.batches_in_flight)


def engines_of(plan: StepPlan) -> int:
    """Return how many engines of one replica step independently: one, or its ranks if not in lockstep."""
    rules = rank_rules(plan)
    return rules.ranks // rules.together


class EnginePool(NamedTuple):
    """A pool as it is simulated; with an autoscaler it begins with ``replicas``."""

    plan: StepPlan
    settings: EngineSettings
    replicas: int = 1
    router: str = "round_robin"
    prefix_cache: str = GIVEN
    tiers: Tiers = NO_TIERS
    autoscaler: Autoscaler | None = None
    drafting: Drafting | None = None

    @property
    def arena(self) -> Floats:
        """What the loops read: of the slowest pipeline stage, with the draft."""
        if self.drafting is not None:
            return self.drafting.loops.arena
        return self.plan.bottleneck.arena if self.plan.layout.pp > 1 else self.plan.arena

    @property
    def beyond(self) -> int:
        """Tokens after the next one for which a decode has blocks."""
        if self.drafting is None:
            return 0
        return self.drafting.loops.tokens - 1 + self.lookahead

    @property
    def lookahead(self) -> int:
        """Those of them that it does not verify."""
        settings = self.settings
        if self.drafting is None:
            return 0
        return self.drafting.lookahead(settings.order == "mixed", settings.reserve_output)

    @property
    def most_replicas(self) -> int:
        """Maximum number of replicas."""
        return self.replicas if self.autoscaler is None else self.autoscaler.max_replicas

    @property
    def engines(self) -> int:
        """Maximum number of engines that step independently."""
        return engines_of(self.plan) * self.most_replicas

    @property
    def gpus(self) -> int:
        """Maximum number of GPUs."""
        return int(self.plan.layout.world_size) * self.most_replicas


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
    back_pressure : bool, default False
        Whether a prompt keeps its blocks until it is sent, and is sent once its decode engine has a slot and
        blocks for it. Else both are at hand.
    by_layer : bool, default False
        Whether each layer's KV cache is sent as soon as the step that completes the prompt has computed it.
        Not with ``back_pressure``, which asks for room when a prompt is complete.
    """

    bytes_per_s: float | None = None
    latency_us: float = 0.0
    is_shared: bool = True
    first_token: str = "transfer"
    back_pressure: bool = False
    by_layer: bool = False


def whole_kv_bytes(plan: StepPlan) -> PlanMemory:
    """Return the memory that a sequence takes in all layers on all GPUs; without weights and room."""
    return SpeculatedPlan(plan, plan.arena).whole_kv_bytes()


def takes_us(
    prefill: StepPlan, decode: StepPlan, prompts: Any, link: Link, drafting: Drafting | None = None
) -> Floats:
    """Return the transfer times of prompts' KV caches, us, without waiting for the link."""
    rate = link.bytes_per_s
    if rate is None:
        rate = min(plan.gpu.nvlink_bytes_per_s for plan in (prefill, decode))
    gpus = min(plan.tp * plan.layout.pp for plan in (prefill, decode))
    sent = whole_kv_bytes(decode) if drafting is None else drafting.loops.whole_kv_bytes()
    sent_bytes = sent.kv_bytes(prompts)
    lasts_us: Floats = np.asarray(sent_bytes / (rate * gpus) * US_PER_S + link.latency_us)
    return lasts_us


def sent_in_us(prefill: EnginePool, decode: EnginePool, prompts: Any, link: Link) -> Floats:
    """Return :func:`takes_us` of pools; an error if that is longer than numbers are."""
    with np.errstate(over="ignore"):
        lasts_us = takes_us(prefill.plan, decode.plan, prompts, link, decode.drafting)
    if not np.isfinite(lasts_us).all():
        raise SimulationError(
            f"a transfer over a link of {shown(link.bytes_per_s)} B/s with a latency of "
            f"{shown(link.latency_us)} us never ends; give more bytes_per_s or less latency_us"
        )
    return lasts_us


def check_pool(pool: EnginePool, trace: Trace) -> None:
    """Raise an error if a pool cannot serve a trace."""
    replicas = whole_number("replicas", pool.replicas, most=MOST_REPLICAS, error=SimulationError)
    one_of("router", pool.router, POOLED_ROUTINGS if pool.prefix_cache == LRU else ROUTINGS, SimulationError)
    if pool.plan.layout.pp > 1 and (pool.settings.pause_steps or pool.settings.min_free_slots_delay):
        raise SimulationError(
            "prefill_schedule_interval, prefill_decode_interval and min_free_slots_delay are not simulated "
            "with pipeline stages; leave them out, or use pp=1"
        )
    rule = pool.autoscaler
    if rule is None:
        return
    if replicas > rule.max_replicas:
        raise SimulationError(
            f"replicas {replicas}, with which autoscaling begins, is above max_replicas {rule.max_replicas}"
        )
    checks = trace.duration_s / rule.interval_s
    if checks > MOST_CHECKS:
        raise SimulationError(
            f"trace {shown(trace.name)} lasts {trace.duration_s:,.0f} s, {checks:,.0f} checks of interval_s "
            f"{rule.interval_s:g}; at most {MOST_CHECKS:,}"
        )


def check_link(prefill: EnginePool, decode: EnginePool, link: Any) -> None:
    """Raise an error if the link of two pools is invalid."""
    if not isinstance(link, Link):
        raise SimulationError(f"link must be a Link, got {shown(link)}; use fastroof.simulation.Link")
    check_hand_over(prefill.plan, decode.plan, SimulationError)
    one_of("first_token", link.first_token, FIRST_TOKENS, SimulationError)
    if link.bytes_per_s is not None and not (is_number(link.bytes_per_s) and link.bytes_per_s > 0):
        raise SimulationError(f"bytes_per_s must be above 0, got {shown(link.bytes_per_s)}")
    if not is_number(link.latency_us) or link.latency_us < 0:
        raise SimulationError(f"latency_us must be microseconds of at least 0, got {shown(link.latency_us)}")
    for name in ("is_shared", "back_pressure", "by_layer"):
        true_or_false(name, getattr(link, name), SimulationError)
    if link.back_pressure and link.by_layer:
        raise SimulationError(
            "back_pressure and by_layer exclude each other: a decode engine is asked for room when a prompt "
            "is complete, and by then its layers are sent; give one of them"
        )
    if link.back_pressure and rank_rules(decode.plan).in_lockstep:
        raise SimulationError(
            "back_pressure needs decode engines of one rank, or whose ranks step independently; got dp "
            f"{decode.plan.layout.dp} in lockstep"
        )
    timeouts_s = [pool.settings.timeout_s for pool in (prefill, decode)]
    if timeouts_s[0] != timeouts_s[1]:
        raise SimulationError(
            f"timeout_s must be the same in both pools, got {timeouts_s[0]:g} for prefill and "
            f"{timeouts_s[1]:g} for decode"
        )


def never_run(pools: Sequence[EnginePool], trace: Trace) -> Bools:
    """Find requests that can never run in one of the pools."""
    if len(pools) == 1:
        return too_long(trace, pools[0].settings, pools[0].beyond)
    prefill, decode = pools
    prompts = replace(trace, output_tokens=np.ones_like(trace.output_tokens))
    decodes = replace(trace, cached_tokens=np.maximum(trace.input_tokens - 1, 0))
    return too_long(prompts, prefill.settings, prefill.beyond) | too_long(
        decodes, decode.settings, decode.beyond
    )


def refuse_never_run(pools: Sequence[EnginePool], trace: Trace, alternative: str) -> None:
    """Raise for the first request that can never run; the message ends with an alternative."""
    if len(pools) == 1:
        refuse_too_long(trace, pools[0].settings, alternative, pools[0].beyond)
        return
    beyond = never_run(pools, trace)
    if beyond.any():
        row = int(beyond.argmax())
        prompt, output = int(trace.input_tokens[row]), int(trace.output_tokens[row])
        raise SimulationError(
            f"request {int(trace.order[row])} of {trace.name} ({prompt:,} + {output:,} tokens) "
            f"can never run in both pools, the first of {int(beyond.sum()):,}; give more num_gpu_blocks, "
            f"GPUs or max_num_batched_tokens, or {alternative}"
        )
