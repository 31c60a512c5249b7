"""What a deployment's mean step is mostly bound by: its operators' times, summed by what bounds each."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fastroof.arrays import Flags, Floats, Longs
from fastroof.compiled import closed_loops, steps
from fastroof.compiled.grids import grid_value, open_block
from fastroof.operators.attention_work import (
    attention_bytes,
    attention_flops,
    decode_attention_bytes,
    decode_attention_flops,
)
from fastroof.operators.calls import AllReduce
from fastroof.plan import StepPlan
from fastroof.plan.curves import RowCurve, row_cost, row_values
from fastroof.units import DTYPE_BYTES, US_PER_MS, US_PER_S

__all__ = ["BOUNDS", "mean_bounds"]


BOUNDS: Final = ("compute", "memory", "launch", "communication", "host")
"""What a step can be bound by, in the order of the codes."""
_COMMUNICATION, _HOST = 3, 4


def mean_bounds(plan: StepPlan, answers: Floats, new_tokens: Floats, budget: Floats) -> Flags:
    """Find what bounds most of the time of mean steps, decodes alone and mixed ones in their shares.

    Parameters
    ----------
    plan : StepPlan
        Whose steps they are.
    answers : ndarray of float64, shape (ANSWERS, rows)
        As :mod:`fastroof.compiled.deployments` fills them.
    new_tokens : ndarray of float64, shape (rows,)
        Tokens of a prompt that are not found in the prefix cache.
    budget : ndarray of float64, shape (rows,)
        Tokens that a step holds at most.

    Returns
    -------
    ndarray of uint8, shape (rows,)
        Places in :data:`BOUNDS`.

    Notes
    -----
    An operator is bound by the largest term of its roofline, as ``plan.explain`` says; what the runtime
    adds, and a step that is not faster than the host, are bound by the host.
    """
    arena = plan.arena
    tokens, logits = _by_bound(plan, "tokens", plan.max_tokens), _by_bound(plan, "sequences", plan.max_seqs)
    decodes, prefill = answers[closed_loops.DECODES], answers[closed_loops.PREFILL_TOKENS]
    decode_us = answers[closed_loops.DECODE_STEP_MS] * US_PER_MS
    mixed_us = answers[closed_loops.MIXED_STEP_MS] * US_PER_MS
    # a single client that wants a single token: the steps are those of its prompt
    alone = (decode_us == 0.0) & (mixed_us == 0.0)
    own_us = answers[closed_loops.TTFT_MS] * US_PER_MS / np.ceil(new_tokens / budget)
    mixed_us = np.where(alone, own_us, mixed_us)
    prefill = np.where(alone, np.minimum(new_tokens, budget), prefill)
    share = np.where(alone, 1.0, answers[closed_loops.MIXED_SHARE])

    def rows_us(m: Floats, seqs: Floats) -> Floats:
        found = tokens[:, np.rint(m).astype(np.int64)] + logits[:, np.rint(seqs).astype(np.int64)]
        found[_HOST] += arena[steps.STEP_US] + arena[steps.SEQUENCE_US] * seqs
        return found

    def attention(bound: Longs, left_us: Floats) -> Floats:
        return np.where(np.arange(len(BOUNDS))[:, None] == bound, np.maximum(left_us, 0.0), 0.0)

    total = np.where(decode_us > 0.0, rows_us(decodes, decodes), 0.0)
    attention_us = decode_us - total.sum(axis=0)
    bound = _decode_bound(plan, np.maximum(decodes, 1.0), answers[closed_loops.KV_LEN])
    of_decodes = attention(bound, np.where(decode_us > 0.0, attention_us, 0.0))
    total += of_decodes
    mixed = rows_us(np.minimum(decodes + prefill, plan.max_tokens), decodes + answers[closed_loops.PROMPTS])
    mixed += of_decodes
    mixed[_HOST] += arena[steps.PREFILL_US]
    chunk = np.clip(np.minimum(new_tokens, prefill), 1.0, None)
    mixed += attention(_prefill_bound(plan, prefill / chunk, chunk), mixed_us - mixed.sum(axis=0))
    floor_us = arena[steps.PREFILL_FLOOR_US]
    on_host = np.where(np.arange(len(BOUNDS))[:, None] == _HOST, mixed_us, 0.0)
    mixed = np.where(mixed_us <= floor_us, on_host, mixed)
    most: Flags = np.argmax((1.0 - share) * total + share * mixed, axis=0).astype(np.uint8)
    return most


def _largest_term(plan: StepPlan, compute_s: Any, moved_bytes: Any, launch_us: float) -> Any:
    memory_us = np.asarray(moved_bytes / plan.gpu.hbm_bytes_per_s * US_PER_S)
    terms = np.broadcast_arrays(np.asarray(compute_s * US_PER_S), memory_us, launch_us)
    return np.argmax(np.stack(terms), axis=0)


def _by_bound(plan: StepPlan, rows: str, limit: int) -> Floats:
    """Times of the operators over tokens or sequences by what bounds them, at every number of rows, us."""
    found = np.zeros((len(BOUNDS), limit + 1))
    at = np.arange(limit + 1)
    for curve in plan.row_curves:
        if curve.operator.rows == rows:
            found[_curve_bound(plan, curve, limit), at] += curve.operator.times * row_values(curve, limit)[0]
    found[:, 0] = 0.0
    return found


def _curve_bound(plan: StepPlan, curve: RowCurve, limit: int) -> Any:
    if isinstance(curve.operator, AllReduce):
        return np.full(limit + 1, _COMMUNICATION)
    cost = row_cost(curve.operator)
    rows = np.arange(limit + 1.0)
    compute_s = cost.flops_per_row * rows / plan.gpu.peak(cost.dtype)
    return _largest_term(plan, compute_s, cost.fixed_bytes + cost.bytes_per_row * rows, curve.launch_us)


def _launch_us(plan: StepPlan, slot: int) -> float:
    block = open_block(plan.arena, int(plan.arena[slot]))
    return float(grid_value(plan.arena, block, 0.0, 1.0)) / plan.model.num_layers


def _decode_bound(plan: StepPlan, batch: Floats, kv_len: Floats) -> Any:
    _, nh, nkv, dim = plan.heads
    work = decode_attention_flops(nh, dim, kv_len, batch)
    moved = decode_attention_bytes(nh, nkv, dim, kv_len, batch, DTYPE_BYTES[plan.kv_dtype])
    compute_s = np.asarray(work / plan.gpu.peak("bf16"))
    return _largest_term(plan, compute_s, moved, _launch_us(plan, steps.DECODE_AT))


def _prefill_bound(plan: StepPlan, batch: Floats, q_len: Floats) -> Any:
    _, nh, nkv, dim = plan.heads
    work = batch * attention_flops(nh, dim, q_len, q_len)
    moved = attention_bytes(nh, nkv, dim, q_len, q_len, batch, DTYPE_BYTES[plan.kv_dtype])
    compute_s = np.asarray(work / plan.gpu.peak("bf16"))
    return _largest_term(plan, compute_s, moved, _launch_us(plan, steps.PREFILL_AT))
