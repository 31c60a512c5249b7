"""The loop behind serving estimates: a plan and many closed loops of clients in, their steady state out.

A scenario is reduced to two steps, one of decodes alone and one with prompts mixed in, whose composition
is the mean that a decoding request sees (see :func:`fastroof.serving.estimate` for the formulas).
Compositions are real numbers (see fastroof.compiled.mean_steps).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fastroof.arrays import Floats
from fastroof.compiled.jit import jit
from fastroof.compiled.kv_room import held_tokens
from fastroof.compiled.mean_steps import (
    mean_decode_attention_us,
    mean_decode_rows_us,
    mean_mixed_step_us,
    prompt_steps_us,
)
from fastroof.compiled.steps import MAX_KV_LEN, PlanParts, open_plan

__all__ = [
    "CODE_KV",
    "CODE_SEQS",
    "CODE_SIZES",
    "CODE_TOKENS",
    "CODE_WHOLE_PROMPT",
    "ESTIMATE_ROWS",
    "ServingOptions",
    "serving_estimates",
]

CODE_SIZES = 1
"""A size that no scenario has."""
CODE_KV = 2
"""One request alone is larger than the KV cache."""
CODE_WHOLE_PROMPT = 3
"""Prompts are not chunked, and one is larger than a step."""
CODE_TOKENS = 4
"""A step of more tokens than the plan times."""
CODE_SEQS = 5
"""A step of more sequences than the plan times."""

# Rows of the answer; tokens are those of all clients.
TTFT_US, TPOT_US, REQUEST_US, TOKENS_PER_US, WAIT_US, DECODE_STEP_US, MIXED_STEP_US = range(7)
EFFECTIVE_CONCURRENCY, MIXED_SHARE, DECODES, PREFILL_TOKENS, PROMPTS, KV_LEN = range(7, 13)
ESTIMATE_ROWS = 13

MAX_QUEUE = 0.999
"""Utilisation at which waiting for the token budget is no longer worked out, but follows from its rate."""


class ServingOptions(NamedTuple):
    """What all scenarios of a call have in common; 0 requests a client is the steady state alone.

    Of the KV cache of a token ``window_share`` is kept of the last ``window`` tokens of a sequence alone.
    """

    max_kv_tokens: float
    max_seqs: float
    osl_reserved: float
    is_chunked: bool
    requests_per_client: float
    frontend_us_per_token: float
    window: float = 0.0
    window_share: float = 0.0


class SteadyState(NamedTuple):
    """Mean composition of a scenario's steps, real numbers.

    ``admitted`` requests fit the KV cache, ``running`` of them fit the token budget too; ``room`` tokens of
    a step are left for prompts, of which ``arrivals`` come in a step and each takes ``prompt_steps``.
    """

    admitted: float
    running: float
    is_bound: bool
    room: float
    prompt_steps: float
    arrivals: float
    decodes: float
    mixed_share: float
    prefill_tokens: float


@jit
def _steady_state(
    isl: float, osl: float, concurrency: float, budget: float, options: ServingOptions
) -> SteadyState:
    """What the mean steps of a closed loop hold."""
    a_request = held_tokens(isl + options.osl_reserved * osl, options.window, options.window_share)
    # a whole prompt is begun where the decodes leave room for it
    most = budget if options.is_chunked else budget - isl + 1.0
    admitted = min(concurrency, options.max_kv_tokens / a_request, options.max_seqs, most)
    room = budget - (admitted - 1.0)
    if not options.is_chunked:
        room = math.floor(room / isl) * isl
    prompt_steps = max(1.0, isl / room)
    gaps = osl - 1.0
    # a request comes in one step and is prefilled from the next on; the last of these says its first token
    cycle_steps = osl + prompt_steps
    arrivals = (admitted - 1.0) / cycle_steps
    if arrivals * isl >= room:
        # more prompts than the budget takes: every step is full of them
        if options.is_chunked:
            room = min(budget * isl / (gaps + isl), budget - min(gaps, 1.0))
        else:
            room = max(math.floor(budget / (gaps + isl)), 1.0) * isl
        arrivals = room / isl
        prompt_steps = max(1.0, isl / room)
        running = min(admitted, arrivals * (gaps + prompt_steps))
        decodes = min(max(arrivals * gaps, min(gaps, 1.0)), admitted)
        return SteadyState(admitted, running, True, room, prompt_steps, arrivals, decodes, 1.0, room)
    decodes = min(gaps, 1.0) + (admitted - 1.0) * gaps / cycle_steps
    mixed_share = 0.0
    prefill_tokens = 0.0
    if arrivals > 0.0:
        busy = 1.0 - math.exp(-arrivals * prompt_steps)
        mixed_share = max(busy, arrivals * isl / room) if gaps > 0.0 else 1.0
        prefill_tokens = min(arrivals * isl / mixed_share, room, budget - decodes)
    return SteadyState(
        admitted, admitted, False, room, prompt_steps, arrivals, decodes, mixed_share, prefill_tokens
    )


@jit
def _burst_us(
    arena: Floats,
    plan: PlanParts,
    isl: float,
    osl: float,
    budget: float,
    state: SteadyState,
    is_chunked: bool,
) -> tuple[float, float]:
    """Mean time to first token where all requests come at once, us, and the tokens of a step."""
    room = budget - (state.admitted - 1.0)
    if not is_chunked:
        room = math.floor(room / isl) * isl
    a_step = max(1.0, math.floor(room / isl))
    groups = state.admitted / a_step
    if groups < 1.0:
        new_tokens = state.admitted * isl
        return mean_mixed_step_us(arena, plan, 0.0, 0.0, new_tokens, isl, room), new_tokens
    decodes = 0.5 * (state.admitted - 1.0) * min(osl - 1.0, 1.0)
    new_tokens = min(a_step * isl, room)
    attention_us = mean_decode_attention_us(arena, plan, decodes, isl, osl)
    step_us = mean_mixed_step_us(arena, plan, attention_us, decodes, new_tokens, isl, room)
    return step_us * max(1.0, isl / room) * 0.5 * (groups + 1.0), new_tokens + decodes


@jit
def _scenario(
    arena: Floats,
    plan: PlanParts,
    isl: float,
    osl: float,
    concurrency: float,
    budget: float,
    options: ServingOptions,
    out: Any,
) -> tuple[int, float]:
    """Estimate one scenario into its column of the answer. Returns a code, and what it needed."""
    if not (1.0 <= isl <= MAX_KV_LEN and 1.0 <= osl <= MAX_KV_LEN):
        return CODE_SIZES, 0.0
    if not (1.0 <= concurrency <= MAX_KV_LEN and 1.0 <= budget <= MAX_KV_LEN):
        return CODE_SIZES, 0.0
    held = held_tokens(isl + osl, options.window, options.window_share)
    if held > options.max_kv_tokens or isl + osl > MAX_KV_LEN:
        return CODE_KV, held
    if not options.is_chunked and isl > budget:
        return CODE_WHOLE_PROMPT, isl
    state = _steady_state(isl, osl, concurrency, budget, options)
    gaps = osl - 1.0

    attention_us = mean_decode_attention_us(arena, plan, state.decodes, isl, osl)
    decode_us = 0.0
    if gaps > 0.0:
        decode_us = mean_decode_rows_us(arena, plan, state.decodes) + attention_us
    mixed_us = 0.0
    if state.mixed_share > 0.0:
        mixed_us = mean_mixed_step_us(
            arena, plan, attention_us, state.decodes, state.prefill_tokens, isl, state.room
        )
    step_us = decode_us + state.mixed_share * (mixed_us - decode_us)

    # a prompt comes while a step runs, waits for its end and for earlier prompts, and is prefilled
    beside = max(state.decodes - min(gaps, 1.0), 0.0)
    wait_us = 0.0
    others = 0.0
    if state.admitted > 1.0:
        square = decode_us**2 + state.mixed_share * (mixed_us**2 - decode_us**2)
        # alone, a request never finds a step running
        wait_us = min(state.admitted - 1.0, 1.0) * square / (2.0 * step_us)
        others = state.arrivals * square / step_us**2
        load = min(state.arrivals * isl / state.room, MAX_QUEUE)
        wait_us += 0.5 * min(load / (1.0 - load), 1.0) * state.mixed_share * mixed_us
    beside_us = mean_decode_attention_us(arena, plan, beside, isl, osl)
    own = prompt_steps_us(arena, plan, isl, state.room, others, beside, beside_us)
    ttft_us = wait_us + own.us

    # Little's law: clients in all over requests a second is the time from one request to the next
    steady_us = ttft_us
    if state.is_bound:
        ttft_us = max(steady_us, concurrency / state.arrivals * mixed_us - gaps * step_us)
    elif concurrency > state.admitted:
        ttft_us += (concurrency / state.admitted - 1.0) * (ttft_us + gaps * step_us)
    not_fitting_us = ttft_us - steady_us
    tokens = max(own.tokens, state.decodes + state.prefill_tokens)
    if options.requests_per_client > 0.0:
        burst_us, burst_tokens = _burst_us(arena, plan, isl, osl, budget, state, options.is_chunked)
        ttft_us += (burst_us - steady_us) / options.requests_per_client
        tokens = max(tokens, burst_tokens)
    ttft_us += options.frontend_us_per_token * isl

    request_us = ttft_us + gaps * step_us
    out[TTFT_US] = ttft_us
    out[TPOT_US] = step_us if gaps > 0.0 else math.nan
    out[REQUEST_US] = request_us
    out[TOKENS_PER_US] = concurrency * osl / request_us
    out[WAIT_US] = not_fitting_us
    out[DECODE_STEP_US] = decode_us
    out[MIXED_STEP_US] = mixed_us
    out[EFFECTIVE_CONCURRENCY] = state.running
    out[MIXED_SHARE] = state.mixed_share
    out[DECODES] = state.decodes
    out[PREFILL_TOKENS] = state.prefill_tokens
    out[PROMPTS] = state.prefill_tokens / isl
    out[KV_LEN] = isl + 0.5 * osl
    seqs = max(own.seqs, state.decodes + state.prefill_tokens / isl)
    if seqs > plan.max_seqs:
        return CODE_SEQS, seqs
    # a full step is a sum that may come out a rounding above its budget
    if tokens > plan.max_tokens * (1.0 + 1e-12):
        return CODE_TOKENS, tokens
    return 0, 0.0


@jit
def serving_estimates(
    arena: Floats,
    isl: Floats,
    osl: Floats,
    concurrency: Floats,
    max_batched_tokens: Floats,
    options: ServingOptions,
    out: Floats,
) -> tuple[int, int, float]:
    """Estimate scenarios: ``out`` has a column a scenario, its rows are named above.

    Stops at the first that the plan cannot time: returns a code, its place and what it needed.
    """
    plan = open_plan(arena)
    for i in range(len(isl)):
        code, needed = _scenario(
            arena, plan, isl[i], osl[i], concurrency[i], max_batched_tokens[i], options, out[:, i]
        )
        if code != 0:
            return code, i, needed
    return 0, 0, 0.0
