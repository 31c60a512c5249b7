"""Mean steps: numbers of tokens, sequences and chunks are real.

Dense rows are interpolated between integers, and decode attention is averaged over the lengths of a growing
context. At integers, and for one request, a mean step is the step itself. Decodes verify as many tokens as
their speculation drafts: one without speculation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fastroof.arrays import Floats
from fastroof.compiled.decode_lines import cell_at
from fastroof.compiled.grids import grid_value
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.llvm import table_load
from fastroof.compiled.request_sums import (
    WindowSums,
    mean_chunk_sums,
    mean_seen,
    prefix_in_window,
    windowed_pairs,
)
from fastroof.compiled.steps import (
    MIXED_WINDOW_KV_US,
    PlanParts,
    beside_decodes_us,
    equal_chunks,
    open_window,
    prefill_attention_us,
    window_prices_us,
    windowed_prefill_us,
    with_prefill_us,
)
from fastroof.compiled.verification import Drafter, Speculation, open_drafter, queries_factor

NO_SUMS = WindowSums(0.0, 0.0, 0.0, 0.0)
"""Placeholder for plans without a window, which do not read it."""

GAUSS = 0.5773502691896257
"""Position of the two Gauss-Legendre points, 1 / sqrt(3)."""


class Prompt(NamedTuple):
    """The steps that prefill one prompt: their time, and tokens and sequences of the largest."""

    us: float
    tokens: float
    seqs: float
    full_steps: float
    last_us: float
    last_tokens: float


class Decodes(NamedTuple):
    """Decodes of one step: their number and sums of their kv_len, whole and within a window."""

    number: float
    kv_sum: float
    seen_sum: float


class ChunkSums(NamedTuple):
    """Sums over the chunks of a mean step, as of :class:`fastroof.compiled.request_sums.StepSums`."""

    new_tokens: float
    causal_pairs: float
    prefix_pairs: float
    prefix_sum: float


@jit_inline
def _between(arena: Floats, at: int, x: float, last: int) -> float:
    """Interpolate a dense row at a real number, linear between integers and clamped to the row."""
    inside = min(max(x, 0.0), float(last))
    low = int(inside)
    value: float = table_load(arena, at + low)
    share = inside - low
    if share > 0.0:
        value += share * (table_load(arena, at + low + 1) - value)
    return value


@jit_inline
def _rows_us(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    tokens_at: int,
    tokens: float,
    seqs: float,
    head_rows: float,
) -> float:
    tokens_us = _between(arena, tokens_at, tokens, plan.max_num_batched_tokens)
    logits_us = _between(arena, speculation.head_at, head_rows, speculation.head_last)
    return (tokens_us + logits_us) + (plan.step_us + plan.sequence_us * seqs)


@jit_inline
def mean_decode_rows_us(arena: Floats, plan: PlanParts, speculation: Speculation, decodes: float) -> float:
    """:func:`fastroof.compiled.steps.decode_rows_us` of a mean number of decodes, us."""
    rows = decodes * speculation.tokens
    head_rows = decodes * speculation.head_tokens
    return _rows_us(arena, plan, speculation, plan.decode_tokens_at, rows, decodes, head_rows)


@jit_inline
def _at_mean_us(arena: Floats, plan: PlanParts, batch: float, kv_len: float, seen: float) -> float:
    """Time decode attention at a mean length, of which windowed layers see ``seen`` tokens, us."""
    total = grid_value(arena, plan.decode, batch, kv_len)
    if plan.window > 0:
        block = open_window(arena, plan.header_at).decode
        total += grid_value(arena, block, batch, seen)
        total -= grid_value(arena, block, batch, min(kv_len, float(plan.window)))
    return total


@jit
def _spread_attention_us(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    decodes: float,
    kv_len: float,
    spread: float,
    others: float,
) -> float:
    """Time decode attention of all layers, us: the mean over lengths within ``spread`` of ``kv_len``."""
    batch = max(decodes, 1.0)
    # fewer than one decode is one in a share of the steps
    share = min(decodes, 1.0)
    low = kv_len - 0.5 * spread
    high = kv_len + 0.5 * spread
    axis = plan.decode.x
    cell = cell_at(arena, axis, low)
    start = low
    total = 0.0
    while start < high:
        stop = high if cell >= axis.last_cell else min(high, arena[axis.nodes_at + cell + 1])
        half = 0.5 * (stop - start)
        middle = start + half
        for at in (middle - GAUSS * half, middle + GAUSS * half):
            factor = queries_factor(arena, speculation, batch, at)
            seen = mean_seen(at, others, float(plan.window)) if plan.window > 0 else 0.0
            total += half * (_at_mean_us(arena, plan, batch, at, seen) * factor)
        start = stop
        cell += 1
    return share * (total / spread)


@jit_inline
def _mean_kv_len(speculation: Speculation, isl: float, osl: float) -> float:
    """Return the mean kv_len of decodes anywhere in their output."""
    # a step starts after the last one's accepted tokens and counts all tokens that it verifies
    ahead = (speculation.tokens - 1.0) - 0.5 * (speculation.accepted - 1.0)
    return isl + 0.5 * osl + ahead


@jit_inline
def mean_decode_attention_us(
    arena: Floats, plan: PlanParts, speculation: Speculation, decodes: float, isl: float, osl: float
) -> float:
    """Time decode attention of requests anywhere in their output, us."""
    if decodes <= 0.0 or osl <= 1.0:
        return 0.0
    requests = max(decodes, 1.0)
    spread = (osl - 1.0) / math.sqrt(requests)
    others = (osl - 1.0) * math.sqrt(1.0 - 1.0 / requests) if plan.window > 0 else 0.0
    kv_len = _mean_kv_len(speculation, isl, osl)
    return _spread_attention_us(arena, plan, speculation, decodes, kv_len, spread, others)


@jit_inline
def _next_to_prompts_us(
    arena: Floats, plan: PlanParts, attention_us: float, kv_sum: float, seen_sum: float
) -> float:
    """Time decode attention next to prompts, us; the sums are of kv_len, whole and within a window."""
    least_us = plan.mixed_kv_us * kv_sum
    if plan.window > 0:
        least_us += arena[plan.header_at + MIXED_WINDOW_KV_US] * seen_sum
    return max(attention_us, least_us)


@jit
def mixed_decode_attention_us(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    attention_us: float,
    decodes: float,
    isl: float,
    osl: float,
) -> float:
    """Time decode attention in a step with prefill, us; ``attention_us`` is that of decodes alone."""
    if decodes <= 0.0 or osl <= 1.0:
        return attention_us
    kv_len = _mean_kv_len(speculation, isl, osl)
    seen = mean_seen(kv_len, osl - 1.0, float(plan.window)) if plan.window > 0 else 0.0
    return _next_to_prompts_us(arena, plan, attention_us, decodes * kv_len, decodes * seen)


@jit
def mean_decode_step_us(
    arena: Floats, plan: PlanParts, speculation: Speculation, decodes: float, isl: float, osl: float
) -> float:
    """Time the mean decode step, us."""
    return mean_decode_rows_us(arena, plan, speculation, decodes) + mean_decode_attention_us(
        arena, plan, speculation, decodes, isl, osl
    )


@jit
def _mixed_us(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    decode_attention_us: float,
    decodes: float,
    chunks: ChunkSums,
    in_window: WindowSums,
    seqs: float,
) -> float:
    """Time a step with prefill, us, from the same sums over its chunks as ragged steps."""
    batch, q_len = equal_chunks(chunks.new_tokens, chunks.causal_pairs)
    if plan.window > 0:
        prefixes = chunks.prefix_pairs, chunks.prefix_sum
        within = open_window(arena, plan.header_at)
        prefill_us = windowed_prefill_us(
            arena, plan, within, (batch, q_len), chunks.new_tokens, prefixes, in_window
        )
    else:
        prefill_us = prefill_attention_us(arena, plan, batch, q_len, chunks.prefix_pairs, chunks.prefix_sum)
    tokens = chunks.new_tokens + decodes * speculation.tokens
    head_rows = seqs + decodes * (speculation.head_tokens - 1.0)
    rows_us = _rows_us(arena, plan, speculation, plan.tokens_at, tokens, seqs, head_rows)
    prefill_us = beside_decodes_us(plan, prefill_us, decodes)
    return with_prefill_us(plan, rows_us + decode_attention_us, prefill_us)


@jit
def summed_mean_step_us(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    decodes: Decodes,
    chunks: ChunkSums,
    in_window: WindowSums,
    seqs: float,
) -> float:
    """Time one step from the sums over its decodes and chunks, us."""
    attention_us = 0.0
    if decodes.number > 0.0:
        kv_len = decodes.kv_sum / decodes.number
        attention_us = _at_mean_us(arena, plan, decodes.number, kv_len, decodes.seen_sum / decodes.number)
        attention_us *= queries_factor(arena, speculation, decodes.number, kv_len)
    if chunks.new_tokens == 0.0:
        return mean_decode_rows_us(arena, plan, speculation, decodes.number) + attention_us
    if decodes.number > 0.0:
        attention_us = _next_to_prompts_us(arena, plan, attention_us, decodes.kv_sum, decodes.seen_sum)
    return _mixed_us(arena, plan, speculation, attention_us, decodes.number, chunks, in_window, seqs)


@jit
def mean_mixed_step_us(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    decode_attention_us: float,
    decodes: float,
    new_tokens: float,
    isl: float,
    room: float,
) -> float:
    """Time a step in which ``new_tokens`` of prompts anywhere in their prefill share ``room`` tokens, us."""
    chunk = min(isl, room, new_tokens)
    context = 0.5 * (isl - chunk)
    chunks = ChunkSums(
        new_tokens,
        0.5 * new_tokens * (chunk + 1.0),
        new_tokens * context,
        new_tokens / chunk * context,
    )
    in_window = NO_SUMS
    if plan.window > 0:
        in_window = mean_chunk_sums(new_tokens / chunk, chunk, isl, float(plan.window))
    seqs = decodes + new_tokens / isl
    return _mixed_us(arena, plan, speculation, decode_attention_us, decodes, chunks, in_window, seqs)


@jit_inline
def _last_in_window(window: float, isl: float, context: float, chunk: float, shared: float) -> WindowSums:
    """Sums of the rest of a prompt after ``context`` tokens, and of ``shared`` tokens of others."""
    rest = isl - context
    own = windowed_pairs(rest, window)
    crossed = windowed_pairs(isl, window) - windowed_pairs(context, window) - own
    shared_sums = mean_chunk_sums(shared / chunk, chunk, isl, window)
    return WindowSums(
        0.0,
        own + shared_sums.causal_pairs,
        crossed + shared_sums.prefix_pairs,
        min(context, window - 1.0) + shared_sums.prefix_sum,
    )


@jit
def prompt_steps_us(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    isl: float,
    room: float,
    others: float,
    decodes: float,
    decode_attention_us: float,
) -> Prompt:
    """Time one prompt's steps: full ones, then its last, which it shares with ``others`` as long as it."""
    full = max(math.ceil(isl / room) - 1.0, 0.0)
    context = full * room
    rest = isl - context
    total = 0.0
    if full > 0.0:
        prefix = 0.5 * (context - room)
        chunks = ChunkSums(room, 0.5 * room * (room + 1.0), room * prefix, prefix)
        in_window = NO_SUMS
        if plan.window > 0:
            in_window = mean_chunk_sums(1.0, room, context, float(plan.window))
        total = full * _mixed_us(
            arena, plan, speculation, decode_attention_us, decodes, chunks, in_window, decodes
        )
    shared = max(min(others * isl, room - rest), 0.0)
    chunk = min(isl, room)
    before = 0.5 * (isl - chunk)
    seqs = decodes + 1.0 + shared / isl
    last = ChunkSums(
        rest + shared,
        0.5 * (rest * (rest + 1.0) + shared * (chunk + 1.0)),
        rest * context + shared * before,
        context + shared / chunk * before,
    )
    in_window = NO_SUMS
    if plan.window > 0:
        in_window = _last_in_window(float(plan.window), isl, context, chunk, shared)
    last_us = _mixed_us(arena, plan, speculation, decode_attention_us, decodes, last, in_window, seqs)
    tokens = max(rest + shared, room if full > 0.0 else 0.0)
    verified = decodes * speculation.tokens
    return Prompt(total + last_us, verified + tokens, seqs, full, last_us, verified + rest + shared)


@jit_inline
def _draft_isl(speculation: Speculation, queries: float, isl: float) -> float:
    """Return the prompt length at which decodes are as long as a pass's, half-way through the draft's."""
    ahead = 0.5 * (speculation.tokens - 1.0) - 0.5 * max(queries - 1.0, 0.0)
    return isl + ahead - 0.5 * (speculation.accepted - 1.0)


@jit
def draft_decode_us(arena: Floats, speculation: Speculation, decodes: float, isl: float, osl: float) -> float:
    """Time the draft's steps before ``decodes`` requests anywhere in their output are verified, us."""
    if decodes <= 0.0:
        return 0.0
    draft = open_drafter(arena, speculation.draft_at)
    at = _draft_isl(speculation, draft.later.tokens, isl)
    later_us = mean_decode_step_us(arena, draft.plan, draft.later, decodes, at, osl)
    if draft.first.tokens == draft.later.tokens:
        return speculation.draft_steps * later_us
    total = (speculation.draft_steps - 1.0) * later_us
    if draft.first.tokens > 0.0:
        at = _draft_isl(speculation, draft.first.tokens, isl)
        total += mean_decode_step_us(arena, draft.plan, draft.first, decodes, at, osl)
    return total


@jit_inline
def _alike(draft: PlanParts, decodes: float, kv_len: float) -> Decodes:
    """Return decodes of one length."""
    return Decodes(decodes, decodes * kv_len, decodes * min(kv_len, float(draft.window)))


@jit
def drafting_us(
    arena: Floats,
    speculation: Speculation,
    decodes: float,
    kv_sum: float,
    chunks: ChunkSums,
    in_window: WindowSums,
    seqs: float,
) -> float:
    """Time the draft's steps around one step, us; ``kv_sum`` is that of decodes without draft tokens."""
    draft = open_drafter(arena, speculation.draft_at)
    # half-way through its steps
    ahead = 0.5 * (speculation.tokens - 1.0)
    first_us = 0.0
    if draft.first.tokens > 0.0:
        kv_len = kv_sum / max(decodes, 1.0) + ahead + 0.5 * (draft.first.tokens - 1.0)
        first = _alike(draft.plan, decodes, kv_len)
        first_us = summed_mean_step_us(arena, draft.plan, draft.first, first, chunks, in_window, seqs)
    if chunks.new_tokens == 0.0 and draft.first.tokens == draft.later.tokens:
        return speculation.draft_steps * first_us
    kv_len = (kv_sum + chunks.new_tokens + chunks.prefix_sum) / seqs + ahead
    later = _alike(draft.plan, seqs, kv_len + 0.5 * (draft.later.tokens - 1.0))
    no_chunks = ChunkSums(0.0, 0.0, 0.0, 0.0)
    later_us = summed_mean_step_us(arena, draft.plan, draft.later, later, no_chunks, in_window, seqs)
    return first_us + (speculation.draft_steps - 1.0) * later_us


@jit
def draft_mixed_us(
    arena: Floats,
    speculation: Speculation,
    decodes: float,
    new_tokens: float,
    isl: float,
    osl: float,
    room: float,
) -> float:
    """Time the draft's steps after a step of ``decodes`` requests and ``new_tokens`` of prompts, us."""
    draft = open_drafter(arena, speculation.draft_at)
    first_us = 0.0
    if draft.first.tokens > 0.0:
        at = _draft_isl(speculation, draft.first.tokens, isl)
        attention_us = _first_attention_us(arena, draft, decodes, at, osl)
        first_us = mean_mixed_step_us(
            arena, draft.plan, draft.first, attention_us, decodes, new_tokens, isl, room
        )
    at = _draft_isl(speculation, draft.later.tokens, isl)
    seqs = decodes + new_tokens / isl
    return first_us + (speculation.draft_steps - 1.0) * mean_decode_step_us(
        arena, draft.plan, draft.later, seqs, at, osl
    )


@jit_inline
def _first_attention_us(arena: Floats, draft: Drafter, decodes: float, isl: float, osl: float) -> float:
    """Time decode attention of a draft's first pass next to prompts, us."""
    attention_us = mean_decode_attention_us(arena, draft.plan, draft.first, decodes, isl, osl)
    return mixed_decode_attention_us(arena, draft.plan, draft.first, attention_us, decodes, isl, osl)


@jit
def draft_prompt_us(
    arena: Floats,
    speculation: Speculation,
    isl: float,
    osl: float,
    room: float,
    others: float,
    decodes: float,
) -> float:
    """Time the draft's part of the steps that prefill one prompt, us; see ``prompt_steps_us``."""
    draft = open_drafter(arena, speculation.draft_at)
    own_us = 0.0
    if draft.first.tokens > 0.0:
        at = _draft_isl(speculation, draft.first.tokens, isl)
        attention_us = _first_attention_us(arena, draft, decodes, at, osl)
        own = prompt_steps_us(arena, draft.plan, draft.first, isl, room, others, decodes, attention_us)
        own_us = own.us
    at = _draft_isl(speculation, draft.later.tokens, isl)
    more_us = mean_decode_step_us(arena, draft.plan, draft.later, decodes + 1.0, at, osl)
    return own_us + math.ceil(isl / room) * (speculation.draft_steps - 1.0) * more_us


@jit
def draft_prefix_us(
    arena: Floats, speculation: Speculation, new: float, cached: float, chunks: float, prompts: float
) -> tuple[float, float]:
    """Return the draft's attention time over ``cached`` tokens, us: per prompt batch and per sequence."""
    drafter = open_drafter(arena, speculation.draft_at)
    if drafter.first.tokens == 0.0:
        return 0.0, 0.0
    draft = drafter.plan
    crossed, read = prefix_in_window(float(draft.window), new, cached, chunks)
    pair_us, token_us = window_prices_us(arena, draft)
    pairs_us = draft.prefix_pair_us * new * cached + pair_us * crossed
    reads_us = draft.prefix_token_us * cached + token_us * read / chunks
    return prompts * pairs_us + max(prompts, 1.0) * reads_us, pairs_us + chunks * reads_us
