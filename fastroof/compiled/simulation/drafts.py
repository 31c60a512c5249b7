"""Draft tokens: which of them a step keeps, what decodes that verify them hold, and how long a step takes.

A decode verifies ``pool.verified`` tokens and keeps at least one of them. What it keeps follows from its
request and from how many tokens of the output remain, so the order of events changes no draw. It is known
when the step is scheduled, also with asynchronous scheduling.

Decodes then advance by different numbers of tokens, so one walk over the running requests follows each step
of decodes: a request that keeps ``kept`` tokens has ``kept - 1`` more tokens before its next decode step,
and as many steps fewer to go. The first of a lane's ``due`` counts the blocks that its next step needs.
"""

from __future__ import annotations

from fastroof.arrays import Floats
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.mean_steps import ChunkSums, Decodes, drafting_us, summed_mean_step_us
from fastroof.compiled.request_sums import StepSums, WindowSums
from fastroof.compiled.simulation.records import NONE, Parts, Row
from fastroof.compiled.simulation.units import blocks_of
from fastroof.compiled.steps import PlanParts
from fastroof.compiled.verification import Speculation, open_speculation

_LOW_BITS = 0xFFFFFFFF
_MIX = 0x45D9F3B


@jit_stateful_inline
def _mixed(bits: int) -> int:
    """Return 32 bits that depend on all of 32 others; a product fits into 64 bits."""
    bits = ((bits >> 16) ^ bits) * _MIX & _LOW_BITS
    bits = ((bits >> 16) ^ bits) * _MIX & _LOW_BITS
    return (bits >> 16) ^ bits


@jit_stateful_inline
def kept_tokens(on: Parts, pool: Row, request: int, remaining: int) -> int:
    """Return how many tokens a request keeps of a step, ``remaining`` tokens before its end."""
    row = on.drafted[request]
    if row.kept_end > 0:
        return int(min(on.kept[row.kept_end - remaining], remaining))
    drawn = _mixed(_mixed(remaining) ^ int(row.key))
    kept = 1
    while kept < pool.verified and drawn < on.rates[pool.rates_at + kept - 1]:
        kept += 1
    return int(min(kept, remaining))


@jit_stateful_inline
def decode_need(pool: Row, own: Row, computed: int) -> int:
    """Count the blocks that a request lacks to decode after so many computed tokens."""
    return int(blocks_of(computed + 1 + pool.beyond, pool) - own.held)


@jit_stateful
def fitting_need(on: Parts, lane: Row, pool: Row, need: int, free: int) -> int:
    """Count the blocks of the first admitted decodes that get all they lack, of ``need`` that they lack."""
    slot = int(lane.last)
    while need > free:
        own = on.slots[slot]
        if own.finish >= lane.step:
            need -= decode_need(pool, own, own.offset + lane.step)
        slot = int(own.order_previous)
    return int(need)


@jit_stateful_inline
def tokens_seen(pool: Row, computed: int) -> int:
    """Return how many tokens a windowed layer sees of a decode after so many computed ones."""
    return int(min(computed + pool.verified, pool.window))


@jit_stateful
def keep_drafts(on: Parts, lane: Row, pool: Row) -> int:
    """Draw what every decode of the step that is scheduled now keeps.

    Those with their last token come into the step's bucket, the latest admitted first. Returns the draft
    tokens that are kept.
    """
    step = lane.step
    need, more, newest = 0, 0, NONE
    slot = int(lane.last)
    while slot != NONE:
        own = on.slots[slot]
        if own.finish >= step:
            computed = own.offset + step
            remaining = own.finish - step + 1
            kept = kept_tokens(on, pool, own.request, remaining)
            if pool.reserves_output == 0:
                own.held = blocks_of(computed + 1 + pool.beyond, pool)
            own.kept = kept
            more += kept - 1
            own.offset += kept - 1
            own.finish -= kept - 1
            ahead = kept - 1 if own.finish == step else kept
            if pool.window > 0:
                lane.window_sum += tokens_seen(pool, computed + ahead) - tokens_seen(pool, computed)
            if own.finish == step:
                own.bucket_next, own.bucket_previous = NONE, newest
                if newest == NONE:
                    on.calendar[lane.calendar_at + (step & lane.mask)] = slot
                else:
                    on.slots[newest].bucket_next = slot
                newest = slot
            else:
                need += decode_need(pool, own, computed + kept)
        slot = int(own.order_previous)
    lane.kv_sum += more
    lane.kept_drafts += more
    on.due[lane.due_at] = need
    return int(more)


@jit_stateful
def drafted_step_us(
    arena: Floats,
    plan: PlanParts,
    pool: Row,
    verifying: int,
    kv_sum: int,
    chunks: int,
    sums: StepSums,
    in_window: WindowSums,
    in_draft: WindowSums,
) -> tuple[float, float]:
    """Time a step in which so many decodes verify, next to ``chunks`` of prompts, and the draft's part, us.

    ``kv_sum`` is that of the decodes without draft tokens; the sums are of the prompts, those over windows of
    the decodes too.
    """
    of_plan = open_speculation(arena, plan)
    decodes = verifying + sums.decodes
    tokens = 1.0
    if verifying > 0:
        tokens = float(verifying * pool.verified + sums.decodes) / float(decodes)
    speculation = Speculation(
        tokens,
        of_plan.accepted,
        of_plan.draft_steps,
        of_plan.head_at,
        of_plan.head_last,
        of_plan.bounds_at,
        of_plan.bounds,
        of_plan.draft_at,
        tokens,
    )
    new = ChunkSums(
        float(sums.new_sum), float(sums.causal_pairs), float(sums.prefix_pairs), float(sums.prefix_sum)
    )
    all_sum = kv_sum + verifying * (pool.verified - 1) + sums.kv_sum
    of_decodes = Decodes(float(decodes), float(all_sum), float(in_window.kv_sum))
    windowed = WindowSums(
        0.0, float(in_window.causal_pairs), float(in_window.prefix_pairs), float(in_window.prefix_sum)
    )
    seqs = float(verifying + chunks)
    step_us = summed_mean_step_us(arena, plan, speculation, of_decodes, new, windowed, seqs)
    if of_plan.draft_at == 0:
        return step_us, 0.0
    windowed = WindowSums(
        0.0, float(in_draft.causal_pairs), float(in_draft.prefix_pairs), float(in_draft.prefix_sum)
    )
    draft_us = drafting_us(arena, of_plan, float(decodes), float(kv_sum + sums.kv_sum), new, windowed, seqs)
    return step_us, draft_us
