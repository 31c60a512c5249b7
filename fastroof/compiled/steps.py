"""The loops that time steps: from a plan's arena and a batch to microseconds.

    step_us = rows_us + L decode_attention(bs, mean kv) + L prefill_attention(b, q, prefix)
    rows_us = tokens[m] + logits[s] + what the engine adds to a step and for each of its sequences

plus, for a step with prefill, what the engine adds to it, and at least the engine's floor: the time in which
the host launches its kernels. If layers attend within a window, requests of different lengths are
distinguished (fastroof.compiled.request_sums).

One thread times a step. Between two nodes a step of equal decodes is linear in kv_len, and every entry point
adds its two terms in the same order, so that a step is the same to the last bit at every entry point and with
any number of threads.

A plan's arena is one float64 array: the header named below, then the sections it points to. Attention blocks
hold the time of all layers. Tables of decode steps are in decode_lines.
"""

from __future__ import annotations

from typing import NamedTuple

from fastroof.arrays import Flags, Floats, Ints
from fastroof.compiled.grids import (
    GridBlock,
    axis_cell,
    grid_flag,
    grid_line,
    grid_place,
    grid_value,
    latency_at,
    line_at,
    open_block,
)
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.layout import FORM_LATENCY
from fastroof.compiled.llvm import output_store, table_load
from fastroof.compiled.request_sums import (
    MAX_KV_LEN,
    StepSums,
    WindowSums,
    window_chunks,
    window_prefix,
    windowed_pairs,
)

# header slots of a plan's arena
MAGIC, FORMAT, MAX_TOKENS, MAX_SEQS, NUM_LAYERS, STEP_US = 0, 1, 2, 3, 4, 5
PREFIX_PAIR_US, PREFIX_TOKEN_US = 6, 7
TOKENS_AT, LOGITS_AT, TOKENS_ORIGIN_AT, LOGITS_ORIGIN_AT = 8, 9, 10, 11
DECODE_AT, PREFILL_AT, ARENA_SIZE = 12, 13, 14
SEQUENCE_US, PREFILL_US, PREFILL_FLOOR_US = 15, 16, 17
# per-token calls in decode steps; the sections of all steps if no call differs
DECODE_TOKENS_AT, DECODE_TOKENS_ORIGIN_AT = 18, 19
# windowed layers: the window, 0 if there are none; prices of their prefixes; their own blocks, which are
# those of all layers if all or none are windowed
WINDOW, WINDOW_PAIR_US, WINDOW_TOKEN_US, WINDOW_DECODE_AT, WINDOW_PREFILL_AT = 20, 21, 22, 23, 24
# lower bound of decode attention in steps with prefill, us per KV token: unwindowed layers, and windowed
# layers per token within the window
MIXED_KV_US, MIXED_WINDOW_KV_US = 25, 26
# calls that depend on the tokens of all ranks of attention data parallelism, by tokens per rank: in all
# steps, in decode steps; number of ranks; 0 in plans without them
EXPERT_AT, DECODE_EXPERT_AT, RANKS = 27, 28, 29
# what decodes and chunks in one attention call save compared with a call each, us
SHARED_LAUNCH_US = 30
# where the data of fastroof.compiled.verification start; 0 in plans without them
SPECULATION_AT = 31
# whether the host launches a prefill step while the decode step before it runs
HIDES_HOST = 32
HEADER_SIZE = 40

ARENA_MAGIC = 1718776436.0
ARENA_FORMAT = 9.0
"""Version of the arena's layout."""

CODE_SIZES = 1
"""An invalid size, or one beyond the plan."""


class PlanParts(NamedTuple):
    """A plan's header and blocks, read once before a loop."""

    max_num_batched_tokens: int
    max_num_seqs: int
    step_us: float
    sequence_us: float
    prefill_us: float
    prefill_floor_us: float
    prefix_pair_us: float
    prefix_token_us: float
    tokens_at: int
    logits_at: int
    tokens_origin_at: int
    logits_origin_at: int
    decode_tokens_at: int
    decode_tokens_origin_at: int
    decode: GridBlock
    prefill: GridBlock
    window: int
    header_at: int
    mixed_kv_us: float
    shared_launch_us: float
    hides_host: bool


class WindowParts(NamedTuple):
    """A plan's windowed layers."""

    tokens: int
    pair_us: float
    token_us: float
    decode: GridBlock
    prefill: GridBlock
    window_cell: int
    is_all: bool
    mixed_kv_us: float


@jit_inline
def open_plan(arena: Floats) -> PlanParts:
    """Read a plan's header."""
    return PlanParts(
        int(arena[MAX_TOKENS]),
        int(arena[MAX_SEQS]),
        arena[STEP_US],
        arena[SEQUENCE_US],
        arena[PREFILL_US],
        arena[PREFILL_FLOOR_US],
        arena[PREFIX_PAIR_US],
        arena[PREFIX_TOKEN_US],
        int(arena[TOKENS_AT]),
        int(arena[LOGITS_AT]),
        int(arena[TOKENS_ORIGIN_AT]),
        int(arena[LOGITS_ORIGIN_AT]),
        int(arena[DECODE_TOKENS_AT]),
        int(arena[DECODE_TOKENS_ORIGIN_AT]),
        open_block(arena, int(arena[DECODE_AT])),
        open_block(arena, int(arena[PREFILL_AT])),
        int(arena[WINDOW]),
        0,
        arena[MIXED_KV_US],
        arena[SHARED_LAUNCH_US],
        arena[HIDES_HOST] > 0.0,
    )


@jit_inline
def with_floor(plan: PlanParts, prefill_floor_us: float) -> PlanParts:
    """Return a plan with another minimum time of a step with prefill."""
    return PlanParts(
        plan.max_num_batched_tokens,
        plan.max_num_seqs,
        plan.step_us,
        plan.sequence_us,
        plan.prefill_us,
        prefill_floor_us,
        plan.prefix_pair_us,
        plan.prefix_token_us,
        plan.tokens_at,
        plan.logits_at,
        plan.tokens_origin_at,
        plan.logits_origin_at,
        plan.decode_tokens_at,
        plan.decode_tokens_origin_at,
        plan.decode,
        plan.prefill,
        plan.window,
        plan.header_at,
        plan.mixed_kv_us,
        plan.shared_launch_us,
        plan.hides_host,
    )


@jit_inline
def window_prices_us(arena: Floats, plan: PlanParts) -> tuple[float, float]:
    """Return prefix prices in windowed layers: us per (query, prefix token) pair, us per prefix token."""
    return arena[plan.header_at + WINDOW_PAIR_US], arena[plan.header_at + WINDOW_TOKEN_US]


@jit_inline
def open_window(arena: Floats, at: int) -> WindowParts:
    """Read the windowed layers of the plan at ``arena[at]``."""
    decode = open_block(arena, at + int(arena[at + WINDOW_DECODE_AT]))
    return WindowParts(
        int(arena[at + WINDOW]),
        arena[at + WINDOW_PAIR_US],
        arena[at + WINDOW_TOKEN_US],
        decode,
        open_block(arena, at + int(arena[at + WINDOW_PREFILL_AT])),
        axis_cell(arena, decode.x, arena[at + WINDOW]),
        arena[at + WINDOW_DECODE_AT] == arena[at + DECODE_AT],
        arena[at + MIXED_WINDOW_KV_US],
    )


@jit_inline
def decode_rows_us(arena: Floats, plan: PlanParts, num_decodes: int) -> float:
    """:func:`step_rows_us` of a decode step, us."""
    return rows_us_at(arena, plan, plan.decode_tokens_at, num_decodes, num_decodes)


@jit_inline
def step_rows_us(arena: Floats, plan: PlanParts, num_tokens: int, num_seqs: int) -> float:
    """Time per-token operators of a step with prefill, the LM head and the engine's part, us."""
    return rows_us_at(arena, plan, plan.tokens_at, num_tokens, num_seqs)


@jit_inline
def rows_us_at(arena: Floats, plan: PlanParts, tokens_at: int, num_tokens: int, num_seqs: int) -> float:
    """Time per-token operators from the section at ``tokens_at``, the LM head and the engine's part, us."""
    tokens_us: float = table_load(arena, tokens_at + num_tokens)
    logits_us: float = table_load(arena, plan.logits_at + num_seqs)
    return (tokens_us + logits_us) + (plan.step_us + plan.sequence_us * float(num_seqs))


@jit_inline
def decode_step_us(arena: Floats, plan: PlanParts, rows_us: float, num_decodes: int, mean_kv: float) -> float:
    """Add decode attention of all layers to ``rows_us``, us: paged attention costs its total KV."""
    if plan.decode.form == FORM_LATENCY:
        at_zero_us, slope_us = grid_line(arena, plan.decode, float(num_decodes), mean_kv)
        return (rows_us + at_zero_us) + slope_us * mean_kv
    return rows_us + grid_value(arena, plan.decode, float(num_decodes), mean_kv)


@jit_inline
def prefill_attention_us(
    arena: Floats, plan: PlanParts, batch: float, q_len: float, prefix_pairs: float, prefix_sum: float
) -> float:
    """Time prefill attention of all layers, us: one call over all chunks, its floor paid once."""
    own = grid_value(arena, plan.prefill, batch, q_len)
    prefix: float = plan.prefix_pair_us * float(prefix_pairs) + plan.prefix_token_us * float(prefix_sum)
    return own + prefix


@jit_inline
def windowed_decode_step_us(
    arena: Floats,
    plan: PlanParts,
    within: WindowParts,
    rows_us: float,
    num_decodes: int,
    mean_kv: float,
    kv_sum: int,
) -> float:
    """:func:`decode_step_us` for a plan with a window, us; decodes see ``kv_sum`` tokens within it."""
    batch = float(num_decodes)
    i = axis_cell(arena, plan.decode.y, batch)
    j = axis_cell(arena, plan.decode.x, mean_kv)
    v = batch - table_load(arena, plan.decode.y.nodes_at + i)
    at_zero_us, slope_us = line_at(arena, plan.decode, i, v, j)
    total = (rows_us + at_zero_us) + slope_us * mean_kv
    mean_seen = float(kv_sum) / batch
    seen_by_mean = min(mean_kv, float(within.tokens))
    if mean_seen == seen_by_mean:
        return total
    own_us, own_slope_us = line_at(arena, within.decode, i, v, axis_cell(arena, plan.decode.x, mean_seen))
    alike_us, alike_slope_us = line_at(arena, within.decode, i, v, min(j, within.window_cell))
    return total + ((own_us + own_slope_us * mean_seen) - (alike_us + alike_slope_us * seen_by_mean))


@jit_inline
def windowed_prefill_us(
    arena: Floats,
    plan: PlanParts,
    within: WindowParts,
    chunks: tuple[float, float],
    new_sum: float,
    prefixes: tuple[float, float],
    sums: WindowSums,
) -> float:
    """:func:`prefill_attention_us` of a plan with a window, us."""
    batch, q_len = chunks
    pairs, window = float(sums.causal_pairs), float(within.tokens)
    alike, tokens = window_chunks(new_sum, pairs, window)
    is_equal = batch * windowed_pairs(q_len, window) == pairs
    if within.is_all:
        # equal chunks of all layers, plus the difference that windows make
        own = grid_value(arena, plan.prefill, batch if is_equal else alike, q_len if is_equal else tokens)
    else:
        place = grid_place(arena, plan.prefill, batch, q_len)
        own = latency_at(arena, plan.prefill, place)
        # if no chunk is longer than the window, both are the same place
        if not (is_equal | (tokens == q_len)):
            others = latency_at(arena, within.prefill, place)
            own += latency_at(arena, within.prefill, grid_place(arena, plan.prefill, alike, tokens)) - others
    prefix_pairs, prefix_sum = prefixes
    prefix: float = plan.prefix_pair_us * float(prefix_pairs) + plan.prefix_token_us * float(prefix_sum)
    prefix_in: float = within.pair_us * float(sums.prefix_pairs) + within.token_us * float(sums.prefix_sum)
    return (own + prefix) + prefix_in


@jit_inline
def beside_prefill_us(rows_us: float, total_us: float, least_us: float) -> float:
    """Return ``total_us`` with decode attention of at least ``least_us``, as in steps with prefill, us."""
    return max(total_us, rows_us + least_us)


@jit_inline
def beside_decodes_us(plan: PlanParts, attention_us: float, decodes: float) -> float:
    """Prefill attention in a step of ``decodes`` too, us: one call of both launches once."""
    # fewer than one decode is one in a share of the steps
    return max(attention_us - plan.shared_launch_us * min(decodes, 1.0), 0.0)


@jit_inline
def with_prefill_us(plan: PlanParts, total_us: float, attention_us: float) -> float:
    """Add prefill attention and what the engine adds to steps with prefill, us."""
    return max((total_us + attention_us) + plan.prefill_us, plan.prefill_floor_us)


@jit_inline
def equal_chunks(new_sum: float, causal_pairs: float) -> tuple[float, float]:
    """Return batch and q_len of equal chunks with these sums; exact if the chunks are equal."""
    q_len = 2.0 * float(causal_pairs) / float(new_sum) - 1.0
    return float(new_sum) / q_len, q_len


@jit
def general_decode_steps_us(arena: Floats, batch_size: Ints, kv_len: Ints, out: Floats) -> int:
    """Time steps of equal decodes in any plan: ``batch_size`` requests at ``kv_len`` each. Returns a code."""
    plan = open_plan(arena)
    max_batch = min(plan.max_num_batched_tokens, plan.max_num_seqs)
    for i in range(len(out)):
        batch = int(table_load(batch_size, i))
        kv = int(table_load(kv_len, i))
        if batch < 1 or batch > max_batch or kv < 1 or kv > MAX_KV_LEN:
            return CODE_SIZES
        rows_us = decode_rows_us(arena, plan, batch)
        output_store(out, i, decode_step_us(arena, plan, rows_us, batch, float(kv)))
    return 0


@jit
def decode_origins(arena: Floats, batch_size: Ints, kv_len: Ints, origin: Flags) -> None:
    """Find the origins of steps of equal decodes: the largest of their parts'."""
    plan = open_plan(arena)
    for i in range(len(origin)):
        batch = int(batch_size[i])
        tokens = arena[plan.decode_tokens_origin_at + batch]
        logits = arena[plan.logits_origin_at + batch]
        attention = grid_flag(arena, plan.decode, float(batch), float(kv_len[i]))
        origin[i] = max(int(tokens), int(logits), attention)


@jit_inline
def has_chunks(plan: PlanParts, new_tokens: int, context_len: int, batch_size: int) -> bool:
    """Whether a plan times a step of ``batch_size`` equal chunks."""
    return (
        1 <= batch_size <= plan.max_num_seqs
        and 1 <= new_tokens <= plan.max_num_batched_tokens
        and batch_size * new_tokens <= plan.max_num_batched_tokens
        and 0 <= context_len <= MAX_KV_LEN - new_tokens
    )


@jit_inline
def chunks_step_us(
    arena: Floats, plan: PlanParts, new_tokens: int, context_len: int, batch_size: int, windowed_us: float
) -> float:
    """Time a step of equal chunks, us; one new token after a context is a decode."""
    tokens = batch_size * new_tokens
    if new_tokens == 1 and context_len > 0:
        rows_us = decode_rows_us(arena, plan, batch_size)
        return decode_step_us(arena, plan, rows_us, batch_size, float(context_len + 1))
    rows_us = step_rows_us(arena, plan, tokens, batch_size)
    # equal chunks: their sums give (batch, new) back exactly
    attention_us = prefill_attention_us(
        arena, plan, float(batch_size), float(new_tokens), tokens * context_len, batch_size * context_len
    )
    return with_prefill_us(plan, rows_us, attention_us + windowed_us)


@jit_inline
def windowed_chunks_step_us(
    arena: Floats, plan: PlanParts, new_tokens: int, context_len: int, batch_size: int
) -> float:
    """:func:`chunks_step_us` of a plan with a window."""
    pairs, tokens = window_prefix(new_tokens, context_len, plan.window)
    pair_us, token_us = window_prices_us(arena, plan)
    windowed_us = pair_us * float(batch_size * pairs) + token_us * float(batch_size * tokens)
    return chunks_step_us(arena, plan, new_tokens, context_len, batch_size, windowed_us)


@jit
def _windowed_prefill_steps_us(
    arena: Floats, new_tokens: Ints, context_len: Ints, batch_size: Ints, out: Floats
) -> int:
    """:func:`prefill_steps_us` for a plan with a window: in one loop, plans without took 5 times as long."""
    plan = open_plan(arena)
    for i in range(len(out)):
        batch = int(table_load(batch_size, i))
        new = int(table_load(new_tokens, i))
        context = int(table_load(context_len, i))
        if not has_chunks(plan, new, context, batch):
            return CODE_SIZES
        output_store(out, i, windowed_chunks_step_us(arena, plan, new, context, batch))
    return 0


@jit
def prefill_steps_us(
    arena: Floats, new_tokens: Ints, context_len: Ints, batch_size: Ints, out: Floats
) -> int:
    """Time steps of equal chunks: ``batch_size`` requests of new tokens after a context. Returns a code."""
    if arena[WINDOW] > 0.0:
        return _windowed_prefill_steps_us(arena, new_tokens, context_len, batch_size, out)
    plan = open_plan(arena)
    for i in range(len(out)):
        batch = int(table_load(batch_size, i))
        new = int(table_load(new_tokens, i))
        context = int(table_load(context_len, i))
        if not has_chunks(plan, new, context, batch):
            return CODE_SIZES
        output_store(out, i, chunks_step_us(arena, plan, new, context, batch, 0.0))
    return 0


@jit_inline
def summed_step_us(arena: Floats, plan: PlanParts, seqs: int, sums: StepSums) -> float:
    """Time a step of at least one request from the sums over its requests, us; of a plan without a window."""
    tokens_at = plan.tokens_at if sums.new_sum > 0 else plan.decode_tokens_at
    rows_us = rows_us_at(arena, plan, tokens_at, sums.decodes + sums.new_sum, seqs)
    total = rows_us
    if sums.decodes > 0:
        mean_kv = float(sums.kv_sum) / float(sums.decodes)
        total = decode_step_us(arena, plan, rows_us, sums.decodes, mean_kv)
        if sums.new_sum > 0:
            total = beside_prefill_us(rows_us, total, plan.mixed_kv_us * float(sums.kv_sum))
    if sums.new_sum > 0:
        batch, q_len = equal_chunks(sums.new_sum, sums.causal_pairs)
        attention_us = prefill_attention_us(arena, plan, batch, q_len, sums.prefix_pairs, sums.prefix_sum)
        total = with_prefill_us(plan, total, beside_decodes_us(plan, attention_us, float(sums.decodes)))
    return total


@jit_inline
def windowed_step_us(
    arena: Floats, plan: PlanParts, within: WindowParts, seqs: int, sums: StepSums, in_window: WindowSums
) -> float:
    """:func:`summed_step_us` of a plan with a window, us."""
    tokens_at = plan.tokens_at if sums.new_sum > 0 else plan.decode_tokens_at
    rows_us = rows_us_at(arena, plan, tokens_at, sums.decodes + sums.new_sum, seqs)
    total = rows_us
    if sums.decodes > 0:
        mean_kv = float(sums.kv_sum) / float(sums.decodes)
        total = windowed_decode_step_us(arena, plan, within, rows_us, sums.decodes, mean_kv, in_window.kv_sum)
        if sums.new_sum > 0:
            least_us = plan.mixed_kv_us * float(sums.kv_sum) + within.mixed_kv_us * float(in_window.kv_sum)
            total = beside_prefill_us(rows_us, total, least_us)
    if sums.new_sum > 0:
        chunks = equal_chunks(sums.new_sum, sums.causal_pairs)
        prefixes = float(sums.prefix_pairs), float(sums.prefix_sum)
        attention_us = windowed_prefill_us(
            arena, plan, within, chunks, float(sums.new_sum), prefixes, in_window
        )
        total = with_prefill_us(plan, total, beside_decodes_us(plan, attention_us, float(sums.decodes)))
    return total
