"""One step for callers that are compiled themselves: from a plan's arena and a step's sizes to microseconds.

Sizes that a plan cannot time give NaN: nothing is raised. Other types do not compile.
"""

from __future__ import annotations

import numpy as np

from fastroof.arrays import Floats, Ints
from fastroof.compiled.caller_types import only_a_plan, only_integers, only_requests
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.request_sums import MAX_KV_LEN, StepSums, equal_window_sums, request_sums
from fastroof.compiled.steps import (
    chunks_step_us,
    decode_rows_us,
    decode_step_us,
    has_chunks,
    open_plan,
    open_window,
    summed_step_us,
    windowed_chunks_step_us,
    windowed_step_us,
)


@jit_inline
def equal_decodes_us(arena: Floats, batch_size: int, kv_len: int) -> float:
    """Time one step of ``batch_size`` decodes at ``kv_len`` each, us."""
    only_a_plan(arena)
    only_integers(batch_size, kv_len)
    plan = open_plan(arena)
    if batch_size < 1 or batch_size > min(plan.max_num_batched_tokens, plan.max_num_seqs):
        return np.nan
    if kv_len < 1 or kv_len > MAX_KV_LEN:
        return np.nan
    rows_us = decode_rows_us(arena, plan, batch_size)
    return decode_step_us(arena, plan, rows_us, batch_size, float(kv_len))


@jit
def equal_chunks_us(arena: Floats, new_tokens: int, context_len: int, batch_size: int) -> float:
    """Time one step of ``batch_size`` equal chunks of ``new_tokens`` after ``context_len`` tokens, us."""
    plan = open_plan(arena)
    if not has_chunks(plan, new_tokens, context_len, batch_size):
        return np.nan
    if plan.window > 0:
        return windowed_chunks_step_us(arena, plan, new_tokens, context_len, batch_size)
    return chunks_step_us(arena, plan, new_tokens, context_len, batch_size, 0.0)


@jit
def requests_step_us(arena: Floats, new_tokens: Ints, context_len: Ints) -> float:
    """Time one step of arbitrary requests, us."""
    only_a_plan(arena)
    only_requests(new_tokens, context_len)
    plan = open_plan(arena)
    seqs = len(new_tokens)
    if seqs > plan.max_num_seqs or len(context_len) != seqs:
        return np.nan
    if seqs == 0:
        return 0.0
    sums, in_window, possible = request_sums(new_tokens, context_len, 0, seqs, plan.window)
    if not possible or sums.decodes + sums.new_sum > plan.max_num_batched_tokens:
        return np.nan
    if plan.window > 0:
        return windowed_step_us(arena, plan, open_window(arena, 0), seqs, sums, in_window)
    return summed_step_us(arena, plan, seqs, sums)


@jit
def sums_step_us(
    arena: Floats,
    seqs: int,
    decodes: int,
    kv_sum: int,
    new_sum: int,
    causal_pairs: int,
    prefix_pairs: int,
    prefix_sum: int,
) -> float:
    """Time a step of ``seqs`` requests from its sums, us; NaN if impossible or beyond the plan."""
    plan = open_plan(arena)
    if seqs < 1 or seqs > plan.max_num_seqs or decodes < 0 or decodes > seqs:
        return np.nan
    if new_sum < 0 or decodes + new_sum < seqs or decodes + new_sum > plan.max_num_batched_tokens:
        return np.nan
    if min(kv_sum, prefix_pairs, prefix_sum) < 0 or causal_pairs < new_sum:
        return np.nan
    sums = StepSums(decodes, kv_sum, new_sum, causal_pairs, prefix_pairs, prefix_sum)
    if plan.window > 0:
        in_window = equal_window_sums(decodes, kv_sum, new_sum, seqs - decodes, prefix_sum, plan.window)
        return windowed_step_us(arena, plan, open_window(arena, 0), seqs, sums, in_window)
    return summed_step_us(arena, plan, seqs, sums)
