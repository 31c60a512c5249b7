"""Pools of engines that prefill and that decode, and the link between them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Floats
from fastroof.checks import is_number, one_of, shown, true_or_false, whole_number
from fastroof.errors import SimulationError
from fastroof.memory.plan_memory import PlanMemory, window_kv_bytes
from fastroof.models import Layout
from fastroof.plan.calls import rank_rules
from fastroof.simulation.engine import too_long
from fastroof.simulation.replicas import MOST_REPLICAS
from fastroof.simulation.settings import EngineSettings
from fastroof.traces.prompt_tree import GIVEN
from fastroof.traces.trace import Trace
from fastroof.units import US_PER_S

if TYPE_CHECKING:
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


def sent_in_us(prefill: Pool, decode: Pool, prompts: Any, link: Link) -> Floats:
    """Return :func:`takes_us` of pools; an error if that is longer than numbers are."""
    with np.errstate(over="ignore"):
        lasts_us = takes_us(prefill.plan, decode.plan, prompts, link)
    if not np.isfinite(lasts_us).all():
        raise SimulationError(
            f"a transfer over a link of {shown(link.bytes_per_s)} B/s with a latency of "
            f"{shown(link.latency_us)} us never ends; give more bytes_per_s or less latency_us"
        )
    return lasts_us


def check_pools(prefill: Pool, decode: Pool, link: Link) -> None:
    """Raise an error if the pools or their link are invalid."""
    if not isinstance(link, Link):
        raise SimulationError(f"link must be a Link, got {shown(link)}; use fastroof.simulation.Link")
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
    for name in ("is_shared", "back_pressure", "by_layer"):
        true_or_false(name, getattr(link, name), SimulationError)
    for pool in (prefill, decode):
        whole_number("replicas", pool.replicas, most=MOST_REPLICAS, error=SimulationError)
        if pool.plan.layout.pp > 1:
            raise SimulationError(
                f"pools of engines with {pool.plan.layout.pp} pipeline stages are not simulated; compile the "
                "plan with pp=1"
            )
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


def prefilled_trace(trace: Trace) -> Trace:
    """Return the trace of prefill engines: the first token of each request."""
    return replace(trace, output_tokens=np.ones_like(trace.output_tokens))


def has_feedback(pool: Pool, trace: Trace, link: Link) -> bool:
    """Whether what happens in the decode pool changes the prefill pool, or transfers what is prefilled."""
    is_given_up = pool.settings.timeout_s < math.inf
    return trace.is_closed or trace.has_parents or is_given_up or link.back_pressure or link.by_layer


def pools_too_long(trace: Trace, prefill: EngineSettings, decode: EngineSettings) -> Bools:
    """Find requests that can never run in one of the pools."""
    return too_long(prefilled_trace(trace), prefill) | too_long(
        replace(trace, cached_tokens=np.maximum(trace.input_tokens - 1, 0)), decode
    )
