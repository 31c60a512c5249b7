"""Steps that verify draft tokens: each decode has several queries, and each query a row of the LM head.

    step_us = decode_tokens[bs q] + head[bs q] + what the engine adds to a step and for each of its sequences
            + L decode_attention(bs, kv) B(q) / B(1)

B is the roofline of decode attention with q queries per sequence: FLOPs grow with the queries, the KV cache
is read once. Tables have no rows with several queries after a long context, so latency / B is held constant
and the attention is modelled. At q = 1 a step is that of :mod:`fastroof.compiled.steps` to the last bit.

The data of verification follow the plan in its arena, at the header's slot SPECULATION_AT: the tokens
verified and accepted, the LM head at more rows than sequences, the rooflines, and the draft's own arena.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastroof.arrays import Floats, Ints
from fastroof.compiled.grids import grid_value, open_block
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.llvm import output_store, table_load
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.compiled.steps import (
    CODE_SIZES,
    DECODE_AT,
    PREFILL_AT,
    SPECULATION_AT,
    PlanParts,
    decode_rows_us,
    decode_step_us,
    open_plan,
)

# slots from SPECULATION_AT on, offsets from the start of the arena; a draft at 0 means no draft
TOKENS, ACCEPTED, DRAFT_STEPS, HEAD_AT, HEAD_LAST, BOUNDS_AT, BOUNDS, DRAFT_AT = range(8)
SPECULATION_HEADER = 8

# a draft: its passes, then its plan; tokens of a request and those with logits, in the first pass over the
# step's tokens (0 without one) and in later passes
FIRST, FIRST_HEAD, LATER, LATER_HEAD = range(4)
PASSES = 4

# a roofline: all layers of a kind
LAUNCH_US, PAIR_US, QUERY_US, KV_US, WINDOW = range(5)
BOUND_SIZE = 5


class Speculation(NamedTuple):
    """How decodes verify: ``tokens`` queries each, of which on average ``accepted`` are kept.

    ``head_tokens`` of them get logits.
    """

    tokens: float
    accepted: float
    draft_steps: float
    head_at: int
    head_last: int
    bounds_at: int
    bounds: int
    draft_at: int
    head_tokens: float


class Drafter(NamedTuple):
    """A draft's plan, and the tokens of each request in its first pass and in later ones."""

    plan: PlanParts
    first: Speculation
    later: Speculation


@jit_inline
def one_token(plan: PlanParts) -> Speculation:
    """No speculation: one token per decode."""
    return Speculation(1.0, 1.0, 0.0, plan.logits_at, plan.max_num_seqs, 0, 0, 0, 1.0)


@jit_inline
def open_speculation(arena: Floats, plan: PlanParts) -> Speculation:
    """Read the plan's speculation; one token per decode without it."""
    at = int(arena[SPECULATION_AT])
    return one_token(plan) if at == 0 else speculation_at(arena, at)


@jit_inline
def speculation_at(arena: Floats, at: int) -> Speculation:
    """Read a speculation from ``arena[at]`` on."""
    return Speculation(
        arena[at + TOKENS],
        arena[at + ACCEPTED],
        arena[at + DRAFT_STEPS],
        int(arena[at + HEAD_AT]),
        int(arena[at + HEAD_LAST]),
        int(arena[at + BOUNDS_AT]),
        int(arena[at + BOUNDS]),
        int(arena[at + DRAFT_AT]),
        arena[at + TOKENS],
    )


@jit_inline
def open_drafter(arena: Floats, at: int) -> Drafter:
    """Read a draft from ``arena[at]`` on."""
    plan = _open_draft(arena, at + PASSES)
    return Drafter(
        plan,
        _pass(arena, plan, arena[at + FIRST], arena[at + FIRST_HEAD]),
        _pass(arena, plan, arena[at + LATER], arena[at + LATER_HEAD]),
    )


@jit_inline
def _pass(arena: Floats, draft: PlanParts, tokens: float, head_tokens: float) -> Speculation:
    """Read how a draft's requests take part in a pass."""
    start = draft.header_at
    at = start + int(arena[start + SPECULATION_AT])
    if at == start:
        return one_token(draft)
    return Speculation(
        tokens,
        1.0,
        0.0,
        start + int(arena[at + HEAD_AT]),
        int(arena[at + HEAD_LAST]),
        start + int(arena[at + BOUNDS_AT]),
        int(arena[at + BOUNDS]),
        0,
        head_tokens,
    )


@jit_inline
def _open_draft(arena: Floats, at: int) -> PlanParts:
    """Read the draft's plan at ``arena[at]``: its kernels, without what its engine adds."""
    draft = open_plan(arena[at:])
    return PlanParts(
        draft.max_num_batched_tokens,
        draft.max_num_seqs,
        0.0,
        0.0,
        0.0,
        0.0,
        draft.prefix_pair_us,
        draft.prefix_token_us,
        at + draft.tokens_at,
        at + draft.logits_at,
        at + draft.tokens_origin_at,
        at + draft.logits_origin_at,
        at + draft.decode_tokens_at,
        at + draft.decode_tokens_origin_at,
        open_block(arena, at + int(arena[at + DECODE_AT])),
        open_block(arena, at + int(arena[at + PREFILL_AT])),
        draft.window,
        at,
        draft.mixed_kv_us,
        draft.shared_launch_us,
        False,
    )


@jit_inline
def decode_steps(osl: float, accepted: float) -> float:
    """Return the number of steps for an output's tokens after the first; at least one if there are any."""
    gaps = osl - 1.0
    return max(gaps / accepted, min(gaps, 1.0))


@jit_inline
def _bound_us(arena: Floats, speculation: Speculation, batch: float, kv_len: float, queries: float) -> float:
    """Return decode attention's roofline, us, all layers: ``queries`` each, the last sees ``kv_len``."""
    total = 0.0
    at = speculation.bounds_at
    first = kv_len - queries + 1.0
    for _ in range(speculation.bounds):
        window = table_load(arena, at + WINDOW)
        # queries whose past is within the window, and those that see a full window
        within = min(max(window - first, 0.0), queries)
        pairs = within * first + 0.5 * within * (within - 1.0) + (queries - within) * window
        read = min(kv_len, window + queries - 1.0)
        total += table_load(arena, at + LAUNCH_US) + batch * (
            pairs * table_load(arena, at + PAIR_US)
            + queries * table_load(arena, at + QUERY_US)
            + read * table_load(arena, at + KV_US)
        )
        at += BOUND_SIZE
    return total


@jit_inline
def queries_factor(arena: Floats, speculation: Speculation, batch: float, kv_len: float) -> float:
    """Return the ratio of decode attention for the verified tokens to that for one: B(q) / B(1)."""
    if speculation.tokens == 1.0:
        return 1.0
    # a mean length may be shorter than the verified tokens
    kv = max(kv_len, speculation.tokens)
    return _bound_us(arena, speculation, batch, kv, speculation.tokens) / _bound_us(
        arena, speculation, batch, kv, 1.0
    )


@jit_inline
def verified_us(
    arena: Floats, plan: PlanParts, any_tokens: Speculation, batch: int, kv: int, queries: int
) -> float:
    """Time one verification step, us; NaN if the plan cannot time it."""
    if batch < 1 or batch > plan.max_num_seqs or queries < 1 or queries > plan.max_num_batched_tokens:
        return np.nan
    rows = batch * queries
    if rows > plan.max_num_batched_tokens or kv < queries or kv > MAX_KV_LEN:
        return np.nan
    if queries == 1:
        return decode_step_us(arena, plan, decode_rows_us(arena, plan, batch), batch, float(kv))
    speculation = Speculation(
        float(queries),
        1.0,
        0.0,
        any_tokens.head_at,
        any_tokens.head_last,
        any_tokens.bounds_at,
        any_tokens.bounds,
        0,
        float(queries),
    )
    tokens_us: float = table_load(arena, plan.decode_tokens_at + rows)
    head_us: float = table_load(arena, speculation.head_at + rows)
    attention_us = grid_value(arena, plan.decode, float(batch), float(kv))
    attention_us *= queries_factor(arena, speculation, float(batch), float(kv))
    runtime_us = plan.step_us + plan.sequence_us * float(batch)
    return ((tokens_us + head_us) + runtime_us) + attention_us


@jit
def verify_steps_us(arena: Floats, batch_size: Ints, kv_len: Ints, tokens: Ints, out: Floats) -> int:
    """Time steps of ``batch_size`` requests that verify ``tokens`` each, the last at ``kv_len``."""
    plan = open_plan(arena)
    any_tokens = open_speculation(arena, plan)
    for i in range(len(out)):
        batch = int(table_load(batch_size, i))
        kv = int(table_load(kv_len, i))
        queries = int(table_load(tokens, i))
        time_us = verified_us(arena, plan, any_tokens, batch, kv, queries)
        if time_us != time_us:
            return CODE_SIZES
        output_store(out, i, time_us)
    return 0
