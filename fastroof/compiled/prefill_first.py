"""Closed loops of an engine that runs prompts ahead of decodes, never in one step with them.

A decode step runs only when no prompt waits and holds every running request; a prefill step keeps all decodes
waiting. So every client has the same time from one request to the next: n decode steps and the prompts of
all. The unknown is how much of the prompts' time a request sees before its first token and how much after it.
That depends on how many requests end in the same decode step, since their clients' next prompts then come
together: all of them if outputs are equally long ("waves"), one in n if they end anywhere. Formulas:
:func:`fastroof.serving.estimate`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fastroof.arrays import Floats
from fastroof.compiled import serving_options as S
from fastroof.compiled.closed_runs import places_of, start_us
from fastroof.compiled.expert_rows import ONE_RANK, RankRules
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.lockstep import NO_OTHERS, OtherRanks, together_us, waits_for_others
from fastroof.compiled.mean_steps import (
    draft_decode_us,
    draft_mixed_us,
    draft_prefix_us,
    draft_prompt_us,
    mean_decode_attention_us,
    mean_decode_rows_us,
    mean_mixed_step_us,
    prompt_steps_us,
)
from fastroof.compiled.request_sums import prefix_in_window
from fastroof.compiled.serving_options import ServingOptions, held_tokens
from fastroof.compiled.steps import PlanParts, window_prices_us, with_floor
from fastroof.compiled.verification import Speculation, decode_steps

MOST_CYCLES = 32
"""Maximum number of a client's requests for which the spread of clients is computed; of more, a sample."""


class PromptSizes(NamedTuple):
    """One scenario; ``new`` of its ``isl`` tokens are not in the prefix cache."""

    isl: float
    new: float
    osl: float
    concurrency: float
    budget: float


class Lockstep(NamedTuple):
    """The other ranks' steps while one rank computes prompts, and while it decodes."""

    is_on: bool
    rules: RankRules
    prompting: OtherRanks
    decoding: OtherRanks


NO_LOCKSTEP = Lockstep(False, ONE_RANK, NO_OTHERS, NO_OTHERS)


class Prompts(NamedTuple):
    """Times of prompts, us: one alone, a full step, and one more step of a prompt that needs several."""

    one_us: float
    full_us: float
    room: float


class Decoding(NamedTuple):
    """Clients that decode; a share ``same`` of others ends with one, looked at every ``looks`` steps."""

    clients: float
    steps: float
    step_us: float
    same: float
    looks: float
    steps_met: float


class Shared(NamedTuple):
    """Time that a request sees of all prompts, us: before its first token, and after it."""

    ttft_us: float
    after_us: float
    decodes: float
    together: float


@jit
def same_step_share(steps: float, spread: float, requests_per_client: float) -> float:
    """Return the mean share of other requests that end in the same decode step as one."""
    if spread <= 0.0:
        return 1.0
    anywhere = 1.0 / (steps + 1.0)
    cycles = requests_per_client - 1.0
    if cycles <= 0.0:
        return anywhere
    deviation = spread / (1.0 - 0.5 * spread) / math.sqrt(12.0) * steps
    places = min(math.ceil(cycles), MOST_CYCLES)
    total = 0.0
    for i in range(places):
        cycle = 0.5 + cycles * (i + 0.5) / places
        total += max(math.erf(0.25 / (deviation * math.sqrt(cycle))), anywhere)
    return total / places


@jit
def _prompts_us(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    sizes: PromptSizes,
    tokens: float,
    room: float,
    lockstep: Lockstep,
) -> float:
    """Time a step of ``tokens`` of prompts anywhere in their prefill, us, including the draft."""
    new = sizes.new
    total = mean_mixed_step_us(arena, plan, speculation, 0.0, 0.0, tokens, new, room)
    if speculation.draft_at > 0:
        total += draft_mixed_us(arena, speculation, 0.0, tokens, new, sizes.osl, room)
    cached = sizes.isl - new
    if cached > 0.0:
        prompts = tokens / new
        chunks = float(math.ceil(new / room))
        readers = max(prompts, 1.0)
        crossed, read = prefix_in_window(float(plan.window), new, cached, chunks)
        pair_us, token_us = window_prices_us(arena, plan)
        total += plan.prefix_pair_us * tokens * cached + plan.prefix_token_us * cached * readers
        total += pair_us * prompts * crossed + token_us * read / chunks * readers
        if speculation.draft_at > 0:
            total += draft_prefix_us(arena, speculation, new, cached, chunks, prompts)[0]
    if lockstep.is_on:
        total = together_us(arena, plan, lockstep.rules, lockstep.prompting, total, tokens, False)
    return total


@jit
def _one_prompt_us(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    sizes: PromptSizes,
    room: float,
    lockstep: Lockstep,
) -> float:
    """Time one prompt alone, in as many steps as it needs, us."""
    new = sizes.new
    if new <= room:
        return _prompts_us(arena, plan, speculation, sizes, new, room, lockstep)
    one = prompt_steps_us(arena, plan, speculation, new, room, 0.0, 0.0, 0.0)
    total = one.us
    if lockstep.is_on:
        rules, others = lockstep.rules, lockstep.prompting
        full_us = (one.us - one.last_us) / one.full_steps
        total = one.full_steps * together_us(arena, plan, rules, others, full_us, room, False)
        total += together_us(arena, plan, rules, others, one.last_us, one.last_tokens, False)
    if speculation.draft_at > 0:
        total += draft_prompt_us(arena, speculation, new, sizes.osl, room, 0.0, 0.0)
    cached = sizes.isl - new
    if cached > 0.0:
        chunks = float(math.ceil(new / room))
        crossed, read = prefix_in_window(float(plan.window), new, cached, chunks)
        pair_us, token_us = window_prices_us(arena, plan)
        total += plan.prefix_pair_us * new * cached + plan.prefix_token_us * cached * chunks
        total += pair_us * crossed + token_us * read
        if speculation.draft_at > 0:
            total += draft_prefix_us(arena, speculation, new, cached, chunks, 1.0)[1]
    return total


@jit_inline
def _row_us(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    sizes: PromptSizes,
    prompts: Prompts,
    together: float,
    lockstep: Lockstep,
) -> tuple[float, float]:
    """Time steps of prompts that come together, us: all of them, and the mean until a prompt is done."""
    new, room = sizes.new, prompts.room
    if together <= 1.0:
        return together * prompts.one_us, prompts.one_us
    if together * new <= room:
        step_us = _prompts_us(arena, plan, speculation, sizes, together * new, room, lockstep)
        return step_us, step_us
    if new > room:
        # several steps each: the j-th waits for j of them
        more_us = (together - 1.0) * (new / room) * prompts.full_us
        return prompts.one_us + more_us, prompts.one_us + 0.5 * more_us
    steps = together * new / room
    return steps * prompts.full_us, 0.5 * (steps + 1.0) * prompts.full_us


@jit_inline
def _group(clients: float, ending: float) -> float:
    """Return the prompts that come together per step if a share ``ending`` of the others ends with one."""
    if ending >= 1.0:
        return clients
    return float(max(clients * ending / (1.0 - (1.0 - ending) ** clients), 1.0))


@jit
def _lockstep(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    sizes: PromptSizes,
    with_requests: float,
    clients: float,
    room: float,
    options: ServingOptions,
) -> Lockstep:
    """Describe the other ranks' steps: only prompts in a share of them, else decodes of all."""
    rules = options.rules
    if not waits_for_others(rules):
        return NO_LOCKSTEP
    steps = decode_steps(sizes.osl, speculation.accepted)
    together, same = clients, 1.0
    if steps > 0.0:
        looks = max(options.wait_steps, 1.0)
        same = same_step_share(steps, options.length_spread, options.requests_per_client)
        together = _group(clients, min(same * looks, 1.0))
    tokens = together * sizes.new
    of_prompts = clients / together * max(tokens / room, 1.0)
    share = of_prompts / (of_prompts + steps)
    tokens = min(tokens, room)
    prompt_us = _prompts_us(arena, plan, speculation, sizes, tokens, room, NO_LOCKSTEP)
    idle_tokens = (rules.ranks - 1.0 - with_requests) * rules.idle_tokens
    decode_tokens = clients * speculation.tokens
    full, full_us = 0.0, 0.0
    if math.ceil(clients - 1e-9) > clients >= sizes.concurrency and steps > 0.0:
        full = float(math.ceil(clients))
        full_us = _decode_us(arena, plan, speculation, full, sizes.isl, sizes.osl, NO_LOCKSTEP)
    # clients of all ranks that go on together compute their prompts in the same steps
    prompting = OtherRanks(
        with_requests, share + (1.0 - share) * same, tokens, decode_tokens, idle_tokens, prompt_us,
        full * speculation.tokens, full_us,
    )  # fmt: skip
    decoding = OtherRanks(
        with_requests, share * (1.0 - same), tokens, decode_tokens, idle_tokens, prompt_us,
        full * speculation.tokens, full_us,
    )  # fmt: skip
    return Lockstep(True, rules, prompting, decoding)


@jit
def _shared(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    sizes: PromptSizes,
    prompts: Prompts,
    decoding: Decoding,
    lockstep: Lockstep,
) -> Shared:
    """Return the prompts' time that clients see if a share ``same`` of the others ends with a request."""
    clients, step_us, same = decoding.clients, decoding.step_us, decoding.same
    looks, steps_met = decoding.looks, decoding.steps_met
    # as a request sees them, and as steps do: those in which requests end
    ending = min(same * looks, 1.0)
    seen = 1.0 + (clients - 1.0) * ending
    ended = clients * same
    group = _group(clients, ending)
    group_us, _ = _row_us(arena, plan, speculation, sizes, prompts, group, lockstep)
    _, own_us = _row_us(arena, plan, speculation, sizes, prompts, seen, lockstep)
    if steps_met < 0.0 and same > 0.0 and clients > 1.0:
        # if no request is left to decode, the first that comes starts alone, the others after it
        others = max(seen - 1.0, 1.0)
        behind_us = _row_us(arena, plan, speculation, sizes, prompts, others, lockstep)[1]
        alone_us = (prompts.one_us + others * (prompts.one_us + behind_us)) / (1.0 + others)
        alone_us = prompts.one_us + min(seen - 1.0, 1.0) * (alone_us - prompts.one_us)
        own_us += same * (alone_us - own_us)
    others_decode = (1.0 - same) * min(clients - 1.0, 1.0)
    if steps_met < 0.0:
        # of those that end while prompts of the step before are computed, which come next without a step
        # between
        found = (1.0 - math.exp(-ended)) * min(group_us / step_us, 1.0) * others_decode
        joining = found / (looks + found)
        covered_us = min(group_us, step_us)
        missed = (1.0 - joining) * 0.5 * (looks + 1.0)
        before_us = joining * (group_us - covered_us)
        wait_us = (1.0 - joining) * 0.5 * looks * step_us + joining * (group_us - 0.5 * covered_us)
    else:
        # a step that is made ahead holds the prompts of those who ended a step before, or is one of decodes
        prompts_met = steps_met * (1.0 - math.exp(-ended)) / looks
        missed = 0.5 * (looks - 1.0) + (steps_met - prompts_met)
        before_us = prompts_met * group_us
        wait_us = missed * step_us + before_us
    # all prompts once, less what is seen before the first token
    after_us = clients / group * group_us - own_us - others_decode * before_us
    decodes = clients * decoding.steps / (decoding.steps + others_decode * missed)
    return Shared(others_decode * wait_us + own_us, max(after_us, 0.0), decodes, group)


@jit_inline
def _decode_us(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    decodes: float,
    isl: float,
    osl: float,
    lockstep: Lockstep,
) -> float:
    """Return the mean decode step, us, and the draft's time in it."""
    total = mean_decode_rows_us(arena, plan, speculation, decodes)
    total += mean_decode_attention_us(arena, plan, speculation, decodes, isl, osl)
    if speculation.draft_at > 0:
        total += draft_decode_us(arena, speculation, decodes, isl, osl)
    if lockstep.is_on:
        tokens = decodes * speculation.tokens
        total = together_us(arena, plan, lockstep.rules, lockstep.decoding, total, tokens, True)
    return total


@jit
def _behind_decodes(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    sizes: PromptSizes,
    clients: float,
    steps: float,
    options: ServingOptions,
) -> PlanParts:
    """Return a plan whose steps with prefill wait for the host only as long as no decode step runs."""
    if not plan.hides_host or plan.prefill_floor_us <= 0.0 or steps <= 0.0 or options.steps_met == 0.0:
        return plan
    same = same_step_share(steps, options.length_spread, options.requests_per_client)
    decode_us = _decode_us(arena, plan, speculation, clients, sizes.isl, sizes.osl, NO_LOCKSTEP)
    # prompts of two decode steps in a row run in a row: the second ones follow no decode step
    follow = 1.0 - math.exp(-clients * same)
    hidden_us = (1.0 - same) * min(clients - 1.0, 1.0) * decode_us / (1.0 + follow)
    return with_floor(plan, max(plan.prefill_floor_us - max(hidden_us, 0.0), 0.0))


@jit
def prefill_first_scenario(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    sizes: PromptSizes,
    every: float,
    with_requests: float,
    options: ServingOptions,
    out: Any,
) -> tuple[int, float]:
    """Estimate one scenario into its column of the answer. Returns a code and the size it concerns."""
    isl, new, osl = sizes.isl, sizes.new, sizes.osl
    held = held_tokens(
        new + options.osl_reserved * osl, options.window, options.window_share, options.state_tokens
    )
    most = min(options.max_kv_tokens / held, options.max_num_seqs)
    clients = min(sizes.concurrency, most)
    room = sizes.budget
    if not options.is_chunked:
        room = max(math.floor(room / new), 1.0) * new
    gaps = osl - 1.0
    steps = decode_steps(osl, speculation.accepted)
    plan = _behind_decodes(arena, plan, speculation, sizes, clients, steps, options)
    lockstep = _lockstep(arena, plan, speculation, sizes, with_requests, clients, room, options)
    prompts = Prompts(
        _one_prompt_us(arena, plan, speculation, sizes, room, lockstep),
        _prompts_us(arena, plan, speculation, sizes, room, room, lockstep),
        room,
    )
    decodes, decode_us, mixed_us, share = 0.0, 0.0, 0.0, 0.0
    largest = min(clients * new, room)
    if gaps > 0.0:
        same = same_step_share(steps, options.length_spread, options.requests_per_client)
        decode_us = _decode_us(arena, plan, speculation, clients, isl, osl, lockstep)
        looks = max(options.wait_steps, 1.0)
        decoding = Decoding(clients, steps, decode_us, same, looks, options.steps_met)
        mean = _shared(arena, plan, speculation, sizes, prompts, decoding, lockstep)
        decodes = mean.decodes
        decode_us = _decode_us(arena, plan, speculation, decodes, isl, osl, lockstep)
        together = mean.together
        if options.requests_per_client <= 0.0 and same < 1.0:
            largest = min(together * new, room)
        ttft_us, after_us = mean.ttft_us, mean.after_us
    else:
        # no request decodes: all wait for all
        together = clients
        after_us = 0.0
        ttft_us = _row_us(arena, plan, speculation, sizes, prompts, clients, lockstep)[0]
    step_us = decode_us + after_us / steps if gaps > 0.0 else 0.0

    steady_us = ttft_us
    place_us = ttft_us + steps * step_us
    if sizes.concurrency > clients:
        ttft_us += (sizes.concurrency / clients - 1.0) * place_us
    not_fitting_us = ttft_us - steady_us
    places = places_of(every, most)
    if options.requests_per_client > 0.0:
        first_us, first_after_us = ttft_us, after_us
        if gaps > 0.0:
            decoding = Decoding(min(every, most), steps, decode_us, 1.0, 1.0, options.steps_met)
            first = _shared(arena, plan, speculation, sizes, prompts, decoding, lockstep)
            first_us, first_after_us = first.ttft_us, first.after_us
        else:
            first_us = _row_us(arena, plan, speculation, sizes, prompts, min(every, most), lockstep)[1]
        fitting_us = first_us
        first_us = start_us(fitting_us, place_us, every, places, options.length_spread)
        not_fitting_us += (first_us - fitting_us - not_fitting_us) / options.requests_per_client
        ttft_us += (first_us - ttft_us) / options.requests_per_client
        after_us += (first_after_us - after_us) / options.requests_per_client
        step_us = decode_us + after_us / steps if gaps > 0.0 else 0.0

    prefill_tokens = min(together * new, room)
    if after_us > 0.0:
        mixed_us = _prompts_us(
            arena, plan, speculation, sizes, max(prefill_tokens, min(new, room)), room, lockstep
        )
        share = after_us / (after_us + steps * mixed_us)
    elif clients > 1.0 and gaps <= 0.0:
        mixed_us, share = _prompts_us(arena, plan, speculation, sizes, prefill_tokens, room, lockstep), 1.0
    if share <= 0.0:
        prefill_tokens = 0.0
    request_us = ttft_us + steps * step_us
    out[S.TTFT_US] = ttft_us
    out[S.TPOT_US] = step_us * (steps / gaps) if gaps > 0.0 else math.nan
    out[S.REQUEST_US] = request_us
    out[S.TOKENS_PER_US] = sizes.concurrency * osl / request_us
    if options.requests_per_client > 0.0 and every > places:
        # places are never empty, however few requests wait for them at the start
        out[S.TOKENS_PER_US] = min(out[S.TOKENS_PER_US], clients * osl / place_us)
    out[S.WAIT_US] = not_fitting_us
    out[S.DECODE_STEP_US] = decode_us
    out[S.MIXED_STEP_US] = mixed_us
    out[S.EFFECTIVE_CONCURRENCY] = clients
    out[S.MIXED_SHARE] = share
    out[S.DECODES] = decodes
    out[S.PREFILL_TOKENS] = prefill_tokens
    out[S.PROMPTS] = prefill_tokens / new
    out[S.KV_LEN] = isl + 0.5 * osl
    seqs = max(decodes, largest / new, 1.0)
    if seqs > plan.max_num_seqs:
        return S.CODE_SEQS, seqs
    tokens = max(decodes * speculation.tokens, largest)
    if tokens > plan.max_num_batched_tokens * (1.0 + 1e-12):
        return S.CODE_TOKENS, tokens
    return 0, 0.0
