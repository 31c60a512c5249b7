"""Runs of closed loops: the start of all clients together, and trains of equal requests after it.

A run of ``r`` requests a client sees the start once and the steady state ``r - 1`` times. Requests of equal
lengths keep the groups that shared a step of prompts, so that the groups queue for each other in every cycle.
Formulas: :func:`fastroof.serving.estimate`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fastroof.arrays import Floats
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.lockstep import waits_for_others
from fastroof.compiled.mean_steps import (
    draft_mixed_us,
    mean_decode_attention_us,
    mean_mixed_step_us,
    mixed_decode_attention_us,
)
from fastroof.compiled.serving_options import ServingOptions, async_steps
from fastroof.compiled.steps import PlanParts
from fastroof.compiled.verification import Speculation

EVENLY = 0.4
"""Spread of lengths from which places become free evenly; between 0 and it both forms are mixed."""
TRAIN_SHARE = 0.7
"""Steps of prompts per output token from which prompts fill the cycle and no train forms."""


class Clients(NamedTuple):
    """Clients of a batch: in the engine, all of them, and the time of a request outside it, us."""

    inside: float
    every: float
    outside_us: float


class Burst(NamedTuple):
    """Requests that start together: mean TTFT and a step's time, us, its tokens, and steps of others."""

    ttft_us: float
    step_us: float
    tokens: float
    others: float


class Train(NamedTuple):
    """Equal requests that keep their groups: mean TTFT and a step's time, us, and what the steps hold.

    ``others`` is the number of other groups' steps that a request sees while it decodes; 0 us: no train.
    """

    ttft_us: float
    step_us: float
    tokens: float
    others: float


NO_TRAIN = Train(0.0, 0.0, 0.0, 0.0)


@jit_inline
def prompt_room(isl: float, budget: float, requests: float, tokens: float, is_chunked: bool) -> float:
    """Return the prompt tokens of a step next to the decodes of all other requests."""
    room = budget - (requests - 1.0) * tokens
    return room if is_chunked else max(math.floor(room / isl), 1.0) * isl


@jit
def burst_of(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    isl: float,
    osl: float,
    budget: float,
    admitted: float,
    is_chunked: bool,
) -> Burst:
    """Estimate ``admitted`` requests that come at once to an engine that mixes prompts with decodes."""
    room = prompt_room(isl, budget, admitted, speculation.tokens, is_chunked)
    a_step = max(1.0, math.floor(room / isl))
    groups = admitted / a_step
    if groups < 1.0:
        new_tokens = admitted * isl
        draft_us = 0.0
        if speculation.draft_at > 0:
            draft_us = draft_mixed_us(arena, speculation, 0.0, new_tokens, isl, osl, room)
        step_us = mean_mixed_step_us(arena, plan, speculation, 0.0, 0.0, new_tokens, isl, room)
        return Burst(step_us + draft_us, step_us + draft_us, new_tokens, 0.0)
    decodes = 0.5 * (admitted - 1.0) * min(osl - 1.0, 1.0)
    new_tokens = min(a_step * isl, room)
    attention_us = mean_decode_attention_us(arena, plan, speculation, decodes, isl, osl)
    attention_us = mixed_decode_attention_us(arena, plan, speculation, attention_us, decodes, isl, osl)
    step_us = mean_mixed_step_us(arena, plan, speculation, attention_us, decodes, new_tokens, isl, room)
    if speculation.draft_at > 0:
        step_us += draft_mixed_us(arena, speculation, decodes, new_tokens, isl, osl, room)
    each = max(1.0, isl / room)
    tokens = new_tokens + decodes * speculation.tokens
    return Burst(step_us * each * 0.5 * (groups + 1.0), step_us, tokens, (groups - 1.0) * each)


@jit_inline
def places_of(clients: float, most: float) -> float:
    """Return how many of the clients' requests run at once; a whole number if not all fit."""
    return clients if clients <= most else max(math.floor(most + 1e-9), 1.0)


@jit_inline
def start_us(first_us: float, place_us: float, clients: float, places: float, spread: float) -> float:
    """Return the mean TTFT of clients that start together, us.

    As many as have places wait ``first_us``; a place takes ``place_us`` from one request to the next.
    """
    if clients <= places:
        return first_us
    waves = math.floor(clients / places)
    # equal lengths: a request starts as the one that had its place before ends
    before = (0.5 * places * waves * (waves - 1.0) + (clients - waves * places) * waves) / clients
    equal_us = first_us + place_us * before
    behind = clients - places
    even_us = first_us * (1.0 + behind / clients) + place_us * behind * behind / (2.0 * clients * places)
    return equal_us + min(spread / EVENLY, 1.0) * (even_us - equal_us)


@jit_inline
def burst_share(burst: Burst, gaps: float) -> float:
    """Return the share of steps with prompts that requests of a burst see after their first token."""
    return 0.5 * burst.others / gaps if burst.others <= gaps else 1.0 - 0.5 * gaps / burst.others


@jit
def train_of(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    isl: float,
    osl: float,
    budget: float,
    clients: Clients,
    decode_us: float,
    options: ServingOptions,
) -> Train:
    """Estimate requests of equal lengths that all fit; ``ttft_us`` is the engine's."""
    if not options.is_closed or options.length_spread > 0.0 or clients.every <= 1.0 or decode_us <= 0.0:
        return NO_TRAIN
    if speculation.tokens > 1.0 or options.wait_steps > 0.0 or options.pause_steps > 0.0:
        return NO_TRAIN
    if waits_for_others(options.rules):
        return NO_TRAIN
    every, outside_us = clients.every, clients.outside_us
    room = prompt_room(isl, budget, every, 1.0, options.is_chunked)
    if room <= 0.0:
        return NO_TRAIN
    groups = every if isl > room else max(1.0, every * isl / room)
    if groups >= TRAIN_SHARE * osl:
        return NO_TRAIN
    # decode steps of others while a group that ended is on its way back
    missed = async_steps(options.steps_met) + math.ceil(outside_us / decode_us - 1e-9)
    queued = min(groups, 1.0 + missed)
    decodes = max(every * (1.0 - queued / groups), 0.0)
    attention_us = mean_decode_attention_us(arena, plan, speculation, decodes, isl, osl)
    attention_us = mixed_decode_attention_us(arena, plan, speculation, attention_us, decodes, isl, osl)
    new_tokens = min(every * isl, room)
    mixed_us = mean_mixed_step_us(arena, plan, speculation, attention_us, decodes, new_tokens, isl, room)
    each = max(1.0, isl / room)
    step_us = mixed_us
    mixed_us *= each
    # all groups decode in a step of prompts but those that queue, fewer at the end of the train
    others = (groups - queued + 0.5 * queued * (queued - 1.0) / groups) * each
    if groups <= 1.0:
        return Train(mixed_us, step_us, new_tokens, others)
    first = math.floor(queued)
    # the j-th of them waits for j steps of prompts, and ended j - 1 decode steps later than the first
    total_us = first * max(outside_us, missed * decode_us)
    total_us += 0.5 * first * ((first + 1.0) * mixed_us - (first - 1.0) * decode_us)
    total_us += (groups - first) * queued * mixed_us
    ttft_us = max(total_us / groups - outside_us, mixed_us)
    return Train(ttft_us, step_us, new_tokens, others)
