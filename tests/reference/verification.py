"""Steps that verify draft tokens, naively: rows by hand, attention times the ratio of two rooflines."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastroof.compiled import steps
from fastroof.compiled.grids import grid_value
from fastroof.operators.attention_work import attention_bytes, attention_flops
from fastroof.plan.curves import row_values
from fastroof.units import DTYPE_BYTES, US_PER_S
from tests.reference.mixed_attention import launches_saved_us


def bound_us(plan: Any, batch: float, kv_len: float, queries: int) -> float:
    """Roofline of one kind's decode attention with several queries a sequence, all layers, us."""
    (part,) = plan.attention
    call = part.call
    launch_us = grid_value(plan.arena, steps.open_plan(plan.arena).decode, 0.0, 1.0)
    flops = attention_flops(call.num_q_heads, call.head_dim, queries, kv_len, batch)
    heads = (call.num_q_heads, call.num_kv_heads, call.head_dim)
    moved = attention_bytes(*heads, queries, kv_len, batch, DTYPE_BYTES[call.kv_dtype])
    gpu = plan.gpu
    roofline_us = (flops / gpu.peak("bf16") + moved / gpu.hbm_bytes_per_s) * US_PER_S
    return float(launch_us + call.times * roofline_us)


def factor(plan: Any, batch: float, kv_len: float, queries: int) -> float:
    """How much longer attention takes for several queries than for one."""
    return bound_us(plan, batch, kv_len, queries) / bound_us(plan, batch, kv_len, 1)


def head_us(plan: Any, rows: float) -> float:
    """The LM head on any number of rows, us."""
    (curve,) = [c for c in plan.row_curves if c.operator.rows == "sequences"]
    most = max(plan.max_num_batched_tokens, plan.max_num_seqs)
    return float(np.interp(rows, np.arange(most + 1), row_values(curve, most)[0]))


def attention_us(plan: Any, batch: float, kv_len: float, queries: int) -> float:
    """Attention of a verification of all layers, us."""
    block = steps.open_plan(plan.arena).decode
    return grid_value(plan.arena, block, batch, kv_len) * factor(plan, batch, kv_len, queries)


def verify_us(plan: Any, batch: int, kv_len: int, queries: int) -> float:
    """A whole step, us."""
    rows, costs = batch * queries, plan.profile.costs
    tokens_us = plan.arena[int(plan.arena[steps.DECODE_TOKENS_AT]) + rows]
    total = tokens_us + head_us(plan, rows) + costs.step_us + costs.of_sequence_us(plan.model.vocab) * batch
    return float(total + attention_us(plan, float(batch), float(kv_len), queries))


def mixed_step_us(plan: Any, decodes: list[tuple[int, int]], chunks: list[tuple[int, int]]) -> float:
    """A step of requests that verify and of chunks of prompts, each (new tokens, context), us."""
    parts, costs = steps.open_plan(plan.arena), plan.profile.costs
    rows, seqs = sum(q for q, _ in decodes + chunks), len(decodes) + len(chunks)
    at = steps.TOKENS_AT if chunks else steps.DECODE_TOKENS_AT
    total = float(plan.arena[int(plan.arena[at]) + rows]) + head_us(
        plan, seqs + sum(q - 1 for q, _ in decodes)
    )
    total += costs.step_us + costs.sequence_us * seqs
    if decodes:
        mean_kv = float(np.mean([q + context for q, context in decodes]))
        total += attention_us(plan, float(len(decodes)), mean_kv, decodes[0][0])
    if chunks:
        new = sum(q for q, _ in chunks)
        q_len = 2 * sum(q * (q + 1) / 2 for q, _ in chunks) / new - 1
        prompts_us = grid_value(plan.arena, parts.prefill, new / q_len, q_len)
        prompts_us += parts.prefix_pair_us * sum(q * context for q, context in chunks)
        prompts_us += parts.prefix_token_us * sum(context for _, context in chunks)
        total += max(prompts_us - (launches_saved_us(plan) if decodes else 0.0), 0.0) + costs.prefill_us
        total = max(total, costs.prefill_floor_layer_us * plan.model.num_layers)
    return total
