"""The loops over ragged steps: arbitrary requests, step after step, and the parts of their times.

A plan with a window has its own loop with more sums over requests (fastroof.compiled.request_sums).
"""

from __future__ import annotations

from fastroof.arrays import Flags, Floats, Ints
from fastroof.compiled.grids import grid_flag
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.layout import MODELLED
from fastroof.compiled.llvm import output_store, table_load
from fastroof.compiled.request_sums import decode_sums, request_sums, window_chunks, windowed_pairs
from fastroof.compiled.steps import (
    CODE_SIZES,
    WINDOW,
    beside_decodes_us,
    beside_prefill_us,
    decode_rows_us,
    decode_step_us,
    equal_chunks,
    open_plan,
    open_window,
    prefill_attention_us,
    rows_us_at,
    summed_step_us,
    windowed_decode_step_us,
    windowed_prefill_us,
    windowed_step_us,
    with_prefill_us,
)

CODE_OFFSETS = 2
"""Offsets decrease or are outside the requests."""

StepParts = tuple[Floats, Floats, Floats, Floats, Floats]
"""Parts of steps, us: tokens, logits, decode attention, prefill attention, runtime.

A call takes a tuple as fast as separate arrays; a NamedTuple of five costs 1.5 us more.
"""


@jit_inline
def _step_bounds(offsets: Ints, i: int, num_requests: int) -> tuple[int, int, bool]:
    """Return the first and last request of step i, and whether they are within the requests."""
    start = int(table_load(offsets, i))
    stop = int(table_load(offsets, i + 1))
    return start, stop, 0 <= start <= stop <= num_requests


@jit
def _windowed_steps_us(arena: Floats, new_tokens: Ints, context_len: Ints, offsets: Ints, out: Floats) -> int:
    """:func:`ragged_steps_us` for a plan with a window: one more sum over decodes, three over others."""
    plan = open_plan(arena)
    within = open_window(arena, 0)
    expect_decodes = True
    for i in range(len(out)):
        start, stop, fits = _step_bounds(offsets, i, len(new_tokens))
        if not fits:
            return CODE_OFFSETS
        seqs = stop - start
        if seqs > plan.max_num_seqs:
            return CODE_SIZES
        if seqs == 0:
            output_store(out, i, 0.0)
            continue
        if expect_decodes and seqs <= plan.max_num_batched_tokens:
            context_sum, kv_sum, expect_decodes = decode_sums(
                new_tokens, context_len, start, stop, plan.window
            )
            if expect_decodes:
                mean_kv = float(context_sum + seqs) / float(seqs)
                rows_us = decode_rows_us(arena, plan, seqs)
                total = windowed_decode_step_us(arena, plan, within, rows_us, seqs, mean_kv, kv_sum)
                output_store(out, i, total)
                continue
        sums, in_window, possible = request_sums(new_tokens, context_len, start, stop, plan.window)
        if not possible or sums.decodes + sums.new_sum > plan.max_num_batched_tokens:
            return CODE_SIZES
        expect_decodes = sums.new_sum == 0
        output_store(out, i, windowed_step_us(arena, plan, within, seqs, sums, in_window))
    return 0


@jit
def ragged_steps_us(arena: Floats, new_tokens: Ints, context_len: Ints, offsets: Ints, out: Floats) -> int:
    """Time ragged steps, CSR: step i holds requests ``offsets[i]:offsets[i + 1]``. Returns a code."""
    if arena[WINDOW] > 0.0:
        return _windowed_steps_us(arena, new_tokens, context_len, offsets, out)
    plan = open_plan(arena)
    expect_decodes = True
    for i in range(len(out)):
        # one function for this and its twin above, returning all nine values, made ragged steps 20 % slower
        start, stop, fits = _step_bounds(offsets, i, len(new_tokens))
        if not fits:
            return CODE_OFFSETS
        seqs = stop - start
        if seqs > plan.max_num_seqs:
            return CODE_SIZES
        if seqs == 0:
            output_store(out, i, 0.0)
            continue
        if expect_decodes and seqs <= plan.max_num_batched_tokens:
            context_sum, _, expect_decodes = decode_sums(new_tokens, context_len, start, stop, 0)
            if expect_decodes:
                mean_kv = float(context_sum + seqs) / float(seqs)
                rows_us = decode_rows_us(arena, plan, seqs)
                output_store(out, i, decode_step_us(arena, plan, rows_us, seqs, mean_kv))
                continue
        sums, _, possible = request_sums(new_tokens, context_len, start, stop, 0)
        if not possible or sums.decodes + sums.new_sum > plan.max_num_batched_tokens:
            return CODE_SIZES
        expect_decodes = sums.new_sum == 0
        output_store(out, i, summed_step_us(arena, plan, seqs, sums))
    return 0


@jit
def ragged_step_parts(
    arena: Floats,
    new_tokens: Ints,
    context_len: Ints,
    offsets: Ints,
    parts: StepParts,
    out: Floats,
    origin: Flags,
) -> int:
    """Time ragged steps part by part, with the origin of each step. Returns a code."""
    plan = open_plan(arena)
    within = open_window(arena, 0)
    tokens_us, logits_us, decode_us, prefill_us, runtime_us = parts
    for i in range(len(out)):
        start, stop, fits = _step_bounds(offsets, i, len(new_tokens))
        if not fits:
            return CODE_OFFSETS
        sums, in_window, possible = request_sums(new_tokens, context_len, start, stop, plan.window)
        seqs = stop - start
        tokens = sums.decodes + sums.new_sum
        if not possible or tokens > plan.max_num_batched_tokens or seqs > plan.max_num_seqs:
            return CODE_SIZES
        tokens_us[i] = 0.0
        logits_us[i] = 0.0
        decode_us[i] = 0.0
        prefill_us[i] = 0.0
        runtime_us[i] = 0.0
        out[i] = 0.0
        origin[i] = 0
        if seqs == 0:
            continue
        tokens_at = plan.tokens_at if sums.new_sum > 0 else plan.decode_tokens_at
        origin_at = plan.tokens_origin_at if sums.new_sum > 0 else plan.decode_tokens_origin_at
        tokens_us[i] = arena[tokens_at + tokens]
        logits_us[i] = arena[plan.logits_at + seqs]
        runtime_us[i] = plan.step_us + plan.sequence_us * float(seqs)
        made = int(max(arena[origin_at + tokens], arena[plan.logits_origin_at + seqs]))
        rows_us = rows_us_at(arena, plan, tokens_at, tokens, seqs)
        total = rows_us
        if sums.decodes > 0:
            mean_kv = float(sums.kv_sum) / float(sums.decodes)
            made = max(made, grid_flag(arena, plan.decode, float(sums.decodes), mean_kv))
            if plan.window == 0:
                decode_us[i] = decode_step_us(arena, plan, 0.0, sums.decodes, mean_kv)
                total = decode_step_us(arena, plan, total, sums.decodes, mean_kv)
            else:
                kv_sum = in_window.kv_sum
                decode_us[i] = windowed_decode_step_us(
                    arena, plan, within, 0.0, sums.decodes, mean_kv, kv_sum
                )
                total = windowed_decode_step_us(arena, plan, within, total, sums.decodes, mean_kv, kv_sum)
                mean_seen = float(in_window.kv_sum) / float(sums.decodes)
                if mean_seen != min(mean_kv, float(plan.window)):
                    made = max(made, grid_flag(arena, within.decode, float(sums.decodes), mean_seen))
        if sums.new_sum > 0:
            least_us = plan.mixed_kv_us * float(sums.kv_sum) + within.mixed_kv_us * float(in_window.kv_sum)
            total = beside_prefill_us(rows_us, total, least_us)
            if least_us > decode_us[i]:
                # fitted on whole runs of an engine, not on single kernels
                decode_us[i] = least_us
                made = MODELLED
            batch, q_len = equal_chunks(sums.new_sum, sums.causal_pairs)
            made = max(made, grid_flag(arena, plan.prefill, batch, q_len))
            if plan.window == 0:
                prefill_us[i] = prefill_attention_us(
                    arena, plan, batch, q_len, sums.prefix_pairs, sums.prefix_sum
                )
            else:
                prefixes = float(sums.prefix_pairs), float(sums.prefix_sum)
                prefill_us[i] = windowed_prefill_us(
                    arena, plan, within, (batch, q_len), float(sums.new_sum), prefixes, in_window
                )
                pairs, window = float(in_window.causal_pairs), float(plan.window)
                if batch * windowed_pairs(q_len, window) != pairs:
                    alike, tokens_each = window_chunks(float(sums.new_sum), pairs, window)
                    made = max(made, grid_flag(arena, within.prefill, alike, tokens_each))
            prefill_us[i] = beside_decodes_us(plan, prefill_us[i], float(sums.decodes))
            if sums.prefix_sum > 0:
                made = MODELLED
            before = total
            total = with_prefill_us(plan, before, prefill_us[i])
            runtime_us[i] += total - (before + prefill_us[i])
        out[i] = total
        origin[i] = made
    return 0
