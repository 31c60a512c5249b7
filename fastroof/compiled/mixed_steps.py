"""Closed loops of an engine that mixes prompts into decode steps.

A scenario is reduced to two steps, a decode step and one with prompts mixed in, each composed as the mean
that a decoding request sees (formulas: :func:`fastroof.serving.estimate`; numbers are real, see
fastroof.compiled.mean_steps). A step's time does not change its composition: a cached prefix and a draft are
added to steps composed without them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fastroof.arrays import Floats
from fastroof.compiled import serving_options as S
from fastroof.compiled.closed_runs import (
    Clients,
    burst_of,
    burst_share,
    places_of,
    prompt_room,
    start_us,
    train_of,
)
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.lockstep import NO_OTHERS, OtherRanks, others_idle, together_us, waits_for_others
from fastroof.compiled.mean_steps import (
    draft_decode_us,
    draft_mixed_us,
    draft_prefix_us,
    draft_prompt_us,
    mean_decode_attention_us,
    mean_decode_rows_us,
    mean_decode_step_us,
    mean_mixed_step_us,
    mixed_decode_attention_us,
    prompt_steps_us,
)
from fastroof.compiled.request_sums import prefix_in_window
from fastroof.compiled.serving_options import (
    ServingOptions,
    held_room,
    most_admitted,
    steps_ahead,
    steps_waited,
)
from fastroof.compiled.steps import PlanParts, window_prices_us
from fastroof.compiled.verification import Speculation, decode_steps

MAX_QUEUE = 0.999
"""Utilization above which waiting for the token budget follows from its rate instead of a queue."""

HELD_ROUNDS = 3
"""Iterations of held prompts and arrivals, which depend on each other."""


class SteadyState(NamedTuple):
    """The mean composition of a scenario's steps."""

    admitted: float
    running: float
    is_bound: bool
    room: float
    prompt_steps: float
    arrivals: float
    decodes: float
    mixed_share: float
    prefill_tokens: float
    held_steps: float
    held_prompts: float
    queue_steps: float
    cycle_steps: float
    paused: float


@jit_inline
def _queue_steps(others: float, cycle_steps: float, own_steps: float) -> float:
    """Return the number of steps that a prompt waits for prompts of ``others`` clients."""
    work = others * own_steps
    spare = cycle_steps - work
    return 0.5 * (math.sqrt(spare * spare + 2.0 * own_steps * work) - spare)


@jit_inline
def most_places(isl: float, osl: float, budget: float, options: ServingOptions, tokens: float) -> float:
    """Return the number of requests, ``tokens`` a step each, that can run at once."""
    a_request = held_room(isl + options.osl_reserved * osl, options)
    most = most_admitted(isl, budget, options.is_chunked, tokens, False)
    return float(min(options.max_kv_tokens / a_request, options.max_num_seqs, most))


@jit
def _steady_state(
    isl: float,
    osl: float,
    concurrency: float,
    budget: float,
    options: ServingOptions,
    speculation: Speculation,
) -> SteadyState:
    """Compose the mean steps of a closed loop."""
    tokens = speculation.tokens
    admitted = min(concurrency, most_places(isl, osl, budget, options, tokens))
    room = prompt_room(isl, budget, admitted, tokens, options.is_chunked)
    prompt_steps = max(1.0, isl / room)
    gaps = osl - 1.0
    output_steps = decode_steps(osl, speculation.accepted)
    # at random times, a request arrives in one step and is prefilled from the next on; the last makes its
    # first token
    cycle_steps = (output_steps + steps_waited(options.steps_met)) + prompt_steps
    arrivals = (admitted - 1.0) / cycle_steps
    held_steps, held_prompts = 0.0, 0.0
    if options.wait_steps > 0.0 and admitted > 1.0 and gaps > 0.0:
        # the first of those held back waits for all of it, others half as long on average; a client whose
        # request waits sends no other
        for _ in range(HELD_ROUNDS):
            held_prompts = min(arrivals * options.wait_steps, max(room / isl - 1.0, 0.0))
            held_steps = held_prompts / arrivals * (1.0 + 0.5 * held_prompts) / (1.0 + held_prompts)
            arrivals = (admitted - 1.0) / (cycle_steps + held_steps)
        cycle_steps += held_steps
    paused = 0.0
    # while requests wait for places, and for prompts that take several steps, an engine does not pause
    if options.pause_steps > 0.0 and admitted > 1.0 and gaps > 0.0 and admitted >= concurrency:
        window = options.pause_steps + 1.0
        for _ in range(HELD_ROUNDS):
            # from a step with prompts to the next: at least the pause, then until a request arrives
            steps = window + math.exp(-arrivals * window) / (1.0 - math.exp(-arrivals))
            paused = window / steps
            held_prompts = arrivals * steps - 1.0
            held_steps = paused * 0.5 * options.pause_steps
            arrivals = (admitted - 1.0) / (cycle_steps + held_steps)
        cycle_steps += held_steps
    queue_steps = _queue_steps(admitted - 1.0, cycle_steps, isl / room)
    if arrivals * isl >= room:
        # more prompts than the budget: every step is full of them
        if options.is_chunked:
            room = min(budget * isl / (output_steps * tokens + isl), budget - min(output_steps, 1.0) * tokens)
        else:
            room = max(math.floor(budget / (output_steps * tokens + isl)), 1.0) * isl
        arrivals = room / isl
        prompt_steps = max(1.0, isl / room)
        running = min(admitted, arrivals * (output_steps + prompt_steps))
        decodes = min(max(arrivals * output_steps, min(output_steps, 1.0)), admitted)
        return SteadyState(
            admitted, running, True, room, prompt_steps, arrivals, decodes, 1.0, room, 0.0, 0.0, 0.0,
            admitted / arrivals, 0.0,
        )  # fmt: skip
    decodes = min(output_steps, 1.0) + (admitted - 1.0) * output_steps / cycle_steps
    mixed_share = 0.0
    prefill_tokens = 0.0
    if arrivals > 0.0:
        busy = 1.0 - math.exp(-arrivals * prompt_steps)
        if held_prompts > 0.0:
            busy = arrivals * prompt_steps / (1.0 + held_prompts)
        mixed_share = max(busy, arrivals * isl / room) if gaps > 0.0 else 1.0
        prefill_tokens = min(arrivals * isl / mixed_share, room, budget - decodes * tokens)
    return SteadyState(
        admitted,
        admitted,
        False,
        room,
        prompt_steps,
        arrivals,
        decodes,
        mixed_share,
        prefill_tokens,
        held_steps,
        held_prompts,
        queue_steps,
        cycle_steps,
        paused,
    )


@jit
def _other_ranks(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    isl: float,
    osl: float,
    concurrency: float,
    with_requests: float,
    state: SteadyState,
    options: ServingOptions,
) -> OtherRanks:
    """Describe the other ranks' steps, with all of their requests."""
    output_steps = decode_steps(osl, speculation.accepted)
    arrivals = state.admitted / state.cycle_steps
    if state.is_bound:
        share = 1.0
    elif state.held_prompts > 0.0:
        share = arrivals * state.prompt_steps / (1.0 + state.held_prompts)
    else:
        # room that a prompt's last chunk leaves in a step is used by other prompts if they wait for it
        free = max(1.0 - arrivals * isl / state.room, 0.0)
        steps = state.prompt_steps + free * (math.ceil(state.prompt_steps - 1e-9) - state.prompt_steps)
        share = 1.0 - (1.0 - min(steps / state.cycle_steps, 1.0)) ** state.admitted
    share = min(max(share, arrivals * isl / state.room), 1.0)
    prefill_tokens = min(arrivals * isl / share, state.room)
    decodes = (state.admitted - 1.0) * output_steps / state.cycle_steps
    if state.is_bound:
        decodes = state.decodes
    attention_us = mean_decode_attention_us(arena, plan, speculation, decodes, isl, osl)
    attention_us = mixed_decode_attention_us(arena, plan, speculation, attention_us, decodes, isl, osl)
    prompt_us = mean_mixed_step_us(
        arena, plan, speculation, attention_us, decodes, prefill_tokens, isl, state.room
    )
    if speculation.draft_at > 0:
        prompt_us += draft_mixed_us(arena, speculation, decodes, prefill_tokens, isl, osl, state.room)
    alone = decodes
    if share < 1.0:
        alone = max(
            (state.admitted * output_steps / state.cycle_steps - share * decodes) / (1.0 - share), 0.0
        )
    full, full_us = 0.0, 0.0
    more = math.ceil(concurrency - 1e-9) - concurrency
    if more > 0.0 and state.admitted >= concurrency and not state.is_bound and osl > 1.0:
        full = state.decodes + more * output_steps / state.cycle_steps
        full_us = mean_decode_step_us(arena, plan, speculation, full, isl, osl)
        if speculation.draft_at > 0:
            full_us += draft_decode_us(arena, speculation, full, isl, osl)
    return OtherRanks(
        with_requests,
        share,
        prefill_tokens + decodes * speculation.tokens,
        alone * speculation.tokens,
        (options.rules.ranks - 1.0 - with_requests) * options.rules.idle_tokens,
        prompt_us,
        full * speculation.tokens,
        full_us,
    )


@jit
def mixed_scenario(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    isl: float,
    osl: float,
    loop: Clients,
    with_requests: float,
    budget: float,
    options: ServingOptions,
    out: Any,
) -> tuple[int, float]:
    """Estimate one scenario into its column of the answer. Returns a code, and what it needed."""
    concurrency = loop.inside
    state = _steady_state(isl, osl, concurrency, budget, options, speculation)
    gaps = osl - 1.0
    output_steps = decode_steps(osl, speculation.accepted)

    attention_us = mean_decode_attention_us(arena, plan, speculation, state.decodes, isl, osl)
    decode_us = 0.0
    if gaps > 0.0:
        decode_us = mean_decode_rows_us(arena, plan, speculation, state.decodes) + attention_us
        if speculation.draft_at > 0:
            decode_us += draft_decode_us(arena, speculation, state.decodes, isl, osl)
    mixed_us = 0.0
    if state.mixed_share > 0.0:
        mixed_us = mixed_decode_attention_us(arena, plan, speculation, attention_us, state.decodes, isl, osl)
        mixed_us = mean_mixed_step_us(
            arena, plan, speculation, mixed_us, state.decodes, state.prefill_tokens, isl, state.room
        )
        if speculation.draft_at > 0:
            mixed_us += draft_mixed_us(
                arena, speculation, state.decodes, state.prefill_tokens, isl, osl, state.room
            )
    rules = options.rules
    in_lockstep = waits_for_others(rules)
    verified = state.decodes * speculation.tokens
    # share of steps with a prompt of this rank, and of any rank
    mixed_share = state.mixed_share
    share = mixed_share
    found = 1.0
    alone_us = decode_us
    others_in = NO_OTHERS
    if in_lockstep:
        others_in = _other_ranks(
            arena, plan, speculation, isl, osl, concurrency, with_requests, state, options
        )
        share = 1.0 - (1.0 - share) * others_idle(others_in)
        without = OtherRanks(
            with_requests, 0.0, 0.0, others_in.decode_tokens, others_in.idle_tokens, 0.0,
            others_in.full_tokens, others_in.full_us,
        )  # fmt: skip
        if gaps > 0.0:
            alone_us = together_us(arena, plan, rules, without, decode_us, verified, True)
            decode_us = together_us(arena, plan, rules, others_in, decode_us, verified, True)
        if mixed_us > 0.0:
            tokens = verified + state.prefill_tokens
            mixed_us = together_us(arena, plan, rules, others_in, mixed_us, tokens, False)
        elif gaps <= 0.0 and others_in.active > 0.0:
            # outputs of one token and one client: all steps that it may meet are prompts of other ranks
            found = 1.0 - others_idle(others_in)
            mixed_us = together_us(arena, plan, rules, others_in, 0.0, 0.0, False) / found
            mixed_share, share = 1.0, 1.0
    step_us = decode_us + mixed_share * (mixed_us - decode_us)

    # a prompt waits for the running step and for earlier prompts, then is prefilled
    decoding = max(state.decodes - min(output_steps, 1.0), 0.0)
    wait_us = 0.0
    others = 0.0
    # alone, a request never finds a step running
    busy = min(state.admitted - 1.0 + with_requests, found)
    if busy > 0.0:
        if options.steps_met < 0.0:
            square = decode_us**2 + mixed_share * (mixed_us**2 - decode_us**2)
            ahead = steps_ahead(options.steps_met)
            wait_us = busy * (square / (2.0 * step_us) + ahead * step_us)
            others = state.arrivals * (square / step_us**2 + ahead)
            load = min(state.arrivals * isl / state.room, MAX_QUEUE)
            wait_us += 0.5 * min(load / (1.0 - load), 1.0) * mixed_share * mixed_us
        else:
            # each step is equally likely to be the one that ends, and other requests end with it
            wait_us = busy * options.steps_met * step_us
            others = state.arrivals
            wait_us += state.queue_steps * mixed_us
        if state.paused > 0.0:
            # of those that arrive in a pause or the step before it
            held_us = state.held_steps * decode_us
            if options.steps_met < 0.0:
                pause = options.pause_steps
                held_us = (mixed_us + 0.5 * (pause - 1.0) * decode_us) / ((pause + 1.0) * step_us)
                held_us *= state.paused * pause * decode_us
            wait_us += busy * held_us
            others += state.paused * state.arrivals * options.pause_steps
        elif state.held_prompts > 0.0:
            wait_us += busy * state.held_steps * step_us
            others += state.held_prompts
    decoding_us = mean_decode_attention_us(arena, plan, speculation, decoding, isl, osl)
    decoding_us = mixed_decode_attention_us(arena, plan, speculation, decoding_us, decoding, isl, osl)
    own = prompt_steps_us(arena, plan, speculation, isl, state.room, others, decoding, decoding_us)
    ttft_us = wait_us + own.us
    if in_lockstep:
        full_us = 0.0
        if own.full_steps > 0.0:
            full_us = (own.us - own.last_us) / own.full_steps
            tokens = state.room + decoding * speculation.tokens
            full_us = together_us(arena, plan, rules, others_in, full_us, tokens, False)
        last_us = together_us(arena, plan, rules, others_in, own.last_us, own.last_tokens, False)
        ttft_us = wait_us + own.full_steps * full_us + last_us
    if speculation.draft_at > 0:
        ttft_us += draft_prompt_us(arena, speculation, isl, osl, state.room, others, decoding)

    most = most_places(isl, osl, budget, options, speculation.tokens)
    places = places_of(loop.every, most)
    prefill_tokens = state.prefill_tokens
    place_us = ttft_us + output_steps * step_us
    if state.is_bound:
        place_us = max(place_us, state.admitted / state.arrivals * mixed_us)
    elif loop.every <= most:
        train = train_of(arena, plan, speculation, isl, osl, budget, loop, decode_us, options)
        if train.step_us > 0.0:
            ttft_us, mixed_us = train.ttft_us, train.step_us
            # the mean of decodes is above that of the train's steps by a part of one
            prefill_tokens = min(train.tokens, budget - state.decodes)
            share = min(train.others / gaps, 1.0)
            step_us = decode_us + share * (mixed_us - decode_us)
    # Little's law: clients in all over requests a second is the time from one request to the next
    steady_us = ttft_us
    if state.is_bound:
        ttft_us = max(steady_us, concurrency / state.arrivals * mixed_us - output_steps * step_us)
    elif concurrency > state.admitted:
        ttft_us += (concurrency / state.admitted - 1.0) * (ttft_us + output_steps * step_us)
    not_fitting_us = ttft_us - steady_us
    tokens = max(own.tokens, state.decodes * speculation.tokens + state.prefill_tokens)
    if in_lockstep:
        mixed_us = (step_us - (1.0 - share) * alone_us) / share if share > 0.0 else 0.0
    rounds = options.requests_per_client
    if rounds > 0.0:
        burst = burst_of(
            arena, plan, speculation, isl, osl, budget, min(loop.every, most), options.is_chunked
        )
        first_us = start_us(burst.ttft_us, place_us, loop.every, places, options.length_spread)
        not_fitting_us += (first_us - burst.ttft_us - not_fitting_us) / rounds
        ttft_us += (first_us - ttft_us) / rounds
        tokens = max(tokens, burst.tokens)
        if gaps > 0.0:
            # the first request of a client misses the prompts before its own, the last those after it
            of_burst = places / (loop.every * rounds)
            seen = of_burst * burst_share(burst, output_steps)
            share *= 1.0 - of_burst
            mixed_us = seen * burst.step_us + share * mixed_us
            share += seen
            mixed_us = mixed_us / share if share > 0.0 else 0.0
            step_us = alone_us + share * (mixed_us - alone_us)

    request_us = ttft_us + output_steps * step_us
    out[S.TTFT_US] = ttft_us
    out[S.TPOT_US] = step_us * (output_steps / gaps) if gaps > 0.0 else math.nan
    out[S.REQUEST_US] = request_us
    out[S.TOKENS_PER_US] = concurrency * osl / request_us
    if rounds > 0.0 and not state.is_bound and loop.every > places:
        # places are never empty, however few requests wait for them at the start
        out[S.TOKENS_PER_US] = min(out[S.TOKENS_PER_US], state.admitted * osl / place_us)
    out[S.WAIT_US] = not_fitting_us
    out[S.DECODE_STEP_US] = alone_us
    out[S.MIXED_STEP_US] = mixed_us
    out[S.EFFECTIVE_CONCURRENCY] = state.running
    out[S.MIXED_SHARE] = share
    if in_lockstep and prefill_tokens <= 0.0 and share > 0.0:
        # a rank with one client, which waits only for prompts of other ranks
        prefill_tokens = min(isl, state.room)
    out[S.DECODES] = state.decodes
    out[S.PREFILL_TOKENS] = prefill_tokens
    out[S.PROMPTS] = prefill_tokens / isl
    out[S.KV_LEN] = isl + 0.5 * osl
    # means may add up to more, but a step has no more sequences than there are requests
    seqs = min(max(own.seqs, state.decodes + state.prefill_tokens / isl), state.admitted)
    if seqs > plan.max_num_seqs:
        return S.CODE_SEQS, seqs
    # the sum of a full step may exceed its budget by rounding
    if tokens > plan.max_num_batched_tokens * (1.0 + 1e-12):
        return S.CODE_TOKENS, tokens
    return 0, 0.0


@jit
def add_prefix(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    isl: float,
    new: float,
    osl: float,
    concurrency: float,
    budget: float,
    options: ServingOptions,
    out: Any,
) -> None:
    """Add attention over cached tokens to an estimate of the prompts' ``new`` tokens alone."""
    cached = isl - new
    decodes = out[S.DECODES]
    longer_us = mean_decode_attention_us(arena, plan, speculation, decodes, isl, osl)
    shorter_us = mean_decode_attention_us(arena, plan, speculation, decodes, new, osl)
    more_us = longer_us - shorter_us
    mixed_more_us = mixed_decode_attention_us(arena, plan, speculation, longer_us, decodes, isl, osl)
    mixed_more_us -= mixed_decode_attention_us(arena, plan, speculation, shorter_us, decodes, new, osl)
    if speculation.draft_at > 0:
        draft_longer_us = draft_decode_us(arena, speculation, decodes, isl, osl)
        draft_shorter_us = draft_decode_us(arena, speculation, decodes, new, osl)
        more_us = (more_us + draft_longer_us) - draft_shorter_us
        mixed_more_us = (mixed_more_us + draft_longer_us) - draft_shorter_us
    chunks = 1.0
    if options.is_chunked:
        chunks = float(math.ceil(new / max(budget - decodes * speculation.tokens, 1.0)))
    crossed, read = prefix_in_window(float(plan.window), new, cached, chunks)
    pair_us, token_us = window_prices_us(arena, plan)
    readers = max(out[S.PROMPTS], 1.0)
    draft_step_us, draft_own_us = 0.0, 0.0
    if speculation.draft_at > 0:
        draft_step_us, draft_own_us = draft_prefix_us(arena, speculation, new, cached, chunks, out[S.PROMPTS])
    share = out[S.MIXED_SHARE]
    gaps = osl - 1.0
    output_steps = decode_steps(osl, speculation.accepted)
    before_us = out[S.DECODE_STEP_US] + share * (out[S.MIXED_STEP_US] - out[S.DECODE_STEP_US])
    if gaps > 0.0:
        out[S.DECODE_STEP_US] += more_us
    if share > 0.0:
        pairs = out[S.PREFILL_TOKENS] * cached
        out[S.MIXED_STEP_US] += mixed_more_us + plan.prefix_pair_us * pairs
        out[S.MIXED_STEP_US] += plan.prefix_token_us * cached * readers
        out[S.MIXED_STEP_US] += pair_us * (out[S.PREFILL_TOKENS] / new) * crossed
        out[S.MIXED_STEP_US] += token_us * read / chunks * readers
        out[S.MIXED_STEP_US] += draft_step_us
    step_us = out[S.DECODE_STEP_US] + share * (out[S.MIXED_STEP_US] - out[S.DECODE_STEP_US])
    own_us = plan.prefix_pair_us * new * cached + plan.prefix_token_us * cached * chunks
    own_us += pair_us * crossed + token_us * read
    own_us += draft_own_us
    if concurrency > 1.0:
        waited = options.steps_met
        if options.steps_met < 0.0:
            waited = 0.5 + steps_ahead(options.steps_met)
        own_us += mixed_more_us * chunks + waited * (step_us - before_us)
    steady_us = out[S.TTFT_US] - out[S.WAIT_US]
    # the longer a request takes, the longer others wait for its place
    grown = (steady_us + own_us + output_steps * step_us) / (steady_us + output_steps * before_us)
    out[S.WAIT_US] *= grown
    out[S.TTFT_US] = steady_us + own_us + out[S.WAIT_US]
    if gaps > 0.0:
        out[S.TPOT_US] = step_us * (output_steps / gaps)
    out[S.REQUEST_US] = out[S.TTFT_US] + output_steps * step_us
    out[S.TOKENS_PER_US] = concurrency * osl / out[S.REQUEST_US]
    out[S.KV_LEN] = isl + 0.5 * osl
