"""Roofline V2's column of a comparison, and the facts by which its differences are told."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.compat import roofline_v2
from fastroof.compat.compare_fastroof import linear_us
from fastroof.compat.compare_steps import COMPONENTS, Case, MethodTime, Step
from fastroof.compat.roofline_v2.configs import Hardware, ModelSizes
from fastroof.compat.roofline_v2.lookups import decode_at
from fastroof.operators.attention_work import decode_attention_flops
from fastroof.units import TB, US_PER_S

__all__ = ["roofline_v2_facts", "roofline_v2_time"]

CAUSAL_DIVISOR: Final = 1.8
FIRST_BUCKET: Final = 512
LAST_BUCKET: Final = 65536
SAME_GEMMS: Final = (2, 2, 2, 1)
"""q and o, k and v, gate and up, down: GEMMs of each of its sizes."""


class _Parts(NamedTuple):
    linear_us: float
    unfloored_us: float
    attention_us: float
    mfu: float


def _step(step: Step) -> tuple[list[tuple[int, int]], list[int]]:
    """Progress is what a request has before the step: a decode's kv_len less its new token."""
    if step.phase == "decode":
        return [], [step.tokens - 1] * step.batch_size
    return [(0, step.tokens)] * step.batch_size, []


def roofline_v2_time(case: Case, step: Step) -> MethodTime:
    """Time of a step by component; its total is :func:`fastroof.compat.roofline_v2.step_us`'s."""
    total, seconds = roofline_v2.step_us(
        _tree(case), case.model_config, case.hardware, case.plan.tp, [_step(step)], components=True
    )
    parts = _parts(case, step)
    compute_s, memory_s = (float(seconds[f"{step.phase}_{kind}_s"][0]) for kind in ("compute", "memory"))
    hardware = Hardware.from_config(case.hardware)
    layers = ModelSizes.from_config(case.model_config).num_layers
    components = dict.fromkeys(COMPONENTS, 0.0) | {
        "linear": parts.linear_us,
        "attention": compute_s * US_PER_S - parts.linear_us,
        "memory": max(memory_s - compute_s, 0.0) * US_PER_S,
        "overhead": hardware.layer_overhead_us * layers / case.plan.tp,
    }
    return MethodTime("roofline_v2", components, float(total[0]))


def _tree(case: Case) -> roofline_v2.RooflineV2Tables:
    assert case.roofline_v2 is not None
    return case.roofline_v2


def _bucket(tokens: int) -> int:
    bucket = FIRST_BUCKET
    while bucket < min(tokens, LAST_BUCKET):
        bucket *= 2
    return bucket


def _parts(case: Case, step: Step) -> _Parts:
    sizes, gpu = ModelSizes.from_config(case.model_config), Hardware.from_config(case.hardware)
    tables, tp = _tree(case), case.plan.tp
    m = step.new_tokens
    k, n = (np.array(column, np.float64) for column in zip(*sizes.gemms, strict=True))
    mfu = roofline_v2.gemm_mfu(tables, m, k.astype(int), n.astype(int))
    compute_us = 2.0 * m * k * n / (gpu.peak_flops_per_s * mfu) * US_PER_S
    weights_us = k * n * sizes.bytes_per_param / gpu.bandwidth_bytes_per_s * US_PER_S
    share = np.array(SAME_GEMMS) * sizes.num_layers / tp
    shape = roofline_v2.nearest_attention(tables, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)
    if step.phase == "decode":
        attention_mfu = roofline_v2.decode_mfu(tables, shape, step.batch_size, step.tokens - 1, tp)
        context, divisor = step.tokens - 1, 1.0
    else:
        attention_mfu = roofline_v2.prefill_mfu(tables, shape, _bucket(step.tokens))
        context, divisor = step.tokens, CAUSAL_DIVISOR
    new = step.batch_size if step.phase == "decode" else step.batch_size * step.tokens
    work = 4.0 * sizes.num_heads * sizes.head_dim * new * context * sizes.num_layers / divisor / tp
    return _Parts(
        float((np.maximum(compute_us, weights_us) * share).sum()),
        float((compute_us * share).sum()),
        work / (gpu.peak_flops_per_s * float(attention_mfu)) * US_PER_S,
        float(attention_mfu),
    )


def roofline_v2_facts(case: Case, step: Step, own: MethodTime, other: MethodTime) -> dict[str, Any]:
    """Facts of a step: every ``_us`` is what one peculiarity adds, and they add up to the difference."""
    hardware = Hardware.from_config(case.hardware)
    model, sizes = case.model, ModelSizes.from_config(case.model_config)
    facts: dict[str, Any] = {
        "tp": case.plan.tp,
        "split": case.plan.tp > 1,
        "layers": sizes.num_layers,
        "always": True,
        "own_tree": case.own_trees["roofline_v2"],
        "given_tree": not case.own_trees["roofline_v2"],
        "tb_per_s": hardware.bandwidth_bytes_per_s / TB,
        "layer_overhead_us": hardware.layer_overhead_us,
        "overhead_us": other.components_us["overhead"],
        "memory_us": other.components_us["memory"],
        "other_head_dim": sizes.head_dim != model.head_dim,
        "own_dim": model.head_dim,
        "its_dim": sizes.head_dim,
    }
    for name in ("lm_head", "communication", "elementwise"):
        facts[f"no_{name}_us"] = -own.components_us[name]
    return facts | _linear_facts(case, step, own) | _attention_facts(case, step, own)


def _linear_facts(case: Case, step: Step, own: MethodTime) -> dict[str, Any]:
    model, sizes, tp = case.model, ModelSizes.from_config(case.model_config), case.plan.tp
    m, hidden, ff = step.new_tokens, model.hidden, model.intermediate
    q, kv = model.num_q_heads * model.head_dim, model.num_kv_heads * model.head_dim
    its = [(count, k, n) for count, (k, n) in zip(SAME_GEMMS, sizes.gemms, strict=True)]
    apart = [(1, hidden, q), (1, q, hidden), (2, hidden, kv), (2, hidden, ff), (1, ff, hidden)]
    fused = [(1, hidden, q + 2 * kv), (1, q, hidden), (1, hidden, 2 * ff), (1, ff, hidden)]
    its_us, apart_us, fused_us = (
        linear_us(case.tables, m, gemms) * model.num_layers / tp for gemms in (its, apart, fused)
    )
    parts = _parts(case, step)
    tables, peak = _tree(case), Hardware.from_config(case.hardware).peak_flops_per_s
    least_us = sum(2.0 * m * k * n * count for count, k, n in its) / peak * model.num_layers / tp * US_PER_S
    pairs = set(zip(tables.gemm_k.tolist(), tables.gemm_n.tolist(), strict=True))
    measured = _axis(tables.arena, int(tables.gemm_at[0]))
    inexact = [f"{k}x{n}" for _, k, n in its if (k, n) not in pairs]
    return {
        "linear_floor_us": parts.linear_us - parts.unfloored_us,
        "linear_mfu_us": parts.unfloored_us - its_us,
        "linear_head_dim_us": its_us - apart_us,
        "apart_us": apart_us - fused_us,
        "linear_mfu": least_us / parts.unfloored_us,
        "linear_effective_mfu": least_us / its_us,
        "linear_tp_us": fused_us - own.components_us["linear"],
        "unmeasured_pairs": bool(inexact) and case.own_trees["roofline_v2"],
        "unmeasured_m": not inexact and m not in measured and case.own_trees["roofline_v2"],
        "pairs": ", ".join(inexact),
        "m": m,
    }


def _attention_facts(case: Case, step: Step, own: MethodTime) -> dict[str, Any]:
    model, sizes = case.model, ModelSizes.from_config(case.model_config)
    tables, tp = _tree(case), case.plan.tp
    parts = _parts(case, step)
    own_us = own.components_us["attention"]
    shape = roofline_v2.nearest_attention(tables, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)
    wanted = f"{sizes.num_heads}-{sizes.num_kv_heads}-{sizes.head_dim}"
    right_dim = model.head_dim / sizes.head_dim
    peak = Hardware.from_config(case.hardware).peak_flops_per_s
    facts: dict[str, Any] = {"shape": shape, "wanted": wanted, "attention_mfu": parts.mfu}
    own_tree = case.own_trees["roofline_v2"]
    if step.phase == "decode":
        left_us = parts.attention_us * right_dim
        work = decode_attention_flops(model.num_q_heads, model.head_dim, step.tokens, step.batch_size)
        in_us, tp_us = left_us - own_us, 0.0
        causal_us = bucket_us = 0.0
        served = [measured for name, measured in tables.decode_at if name == shape]
        facts["its_tp"] = min(served, key=lambda have: (abs(have - tp), have))
        hole, on_grid = _decode_cells(case, step, shape)
        rules = {
            "other_shape": shape != wanted,
            "other_tp": facts["its_tp"] != tp,
            "hole": hole,
            "between": not on_grid,
        }
    else:
        corrected_us = parts.attention_us * CAUSAL_DIVISOR / 2.0
        bucket = _bucket(step.tokens)
        at_length_us = corrected_us * parts.mfu / float(roofline_v2.prefill_mfu(tables, shape, step.tokens))
        whole_us = float(
            case.tables.lookup(
                "attention_prefill",
                num_q_heads=model.num_q_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                q_len=step.tokens,
                kv_len=step.tokens,
            ).latency_us
        )
        whole_us *= step.batch_size * model.num_layers / tp
        causal_us, bucket_us = parts.attention_us - corrected_us, corrected_us - at_length_us
        left_us = at_length_us * right_dim
        in_us, tp_us = left_us - whole_us, whole_us - own_us
        work = decode_attention_flops(model.num_q_heads, model.head_dim, step.tokens, step.new_tokens) / 2.0
        facts |= {"bucket": bucket, "tokens": step.tokens, "bucketed": bucket != step.tokens}
        lengths = _prefill_lengths(case, shape)
        rules = {"other_shape": shape != wanted, "between": step.tokens not in lengths}
    told = False
    for name, holds in rules.items():
        facts[name] = holds and own_tree and not told
        told = told or holds
    return facts | {
        "causal": step.phase == "prefill",
        "causal_us": causal_us,
        "bucket_us": bucket_us,
        "attention_mfu_us": in_us,
        "attention_tp_us": tp_us,
        "attention_head_dim_us": left_us / right_dim - left_us,
        "effective_mfu": float(work) * model.num_layers / tp / (peak * own_us) * US_PER_S,
    }


def _decode_cells(case: Case, step: Step, shape: str) -> tuple[bool, bool]:
    """Whether an unmeasured cell takes part in a decode lookup, and whether the point is a measured one."""
    tables = _tree(case)
    arena, at = tables.arena, decode_at(tables, shape, case.plan.tp)
    rows, columns = int(arena[at]), int(arena[at + 1])
    first = at + 3
    axes = (arena[first : first + rows - 1], arena[first + rows : first + rows + columns - 1])
    cells = arena[first + rows + columns :][: rows * columns].reshape(rows, columns)
    corners = []
    exact = True
    for axis, value in zip(axes, (step.batch_size, step.tokens - 1), strict=True):
        held = float(np.clip(value, axis[0], axis[-1]))
        upper = int(np.searchsorted(axis, held))
        lower = upper if axis[upper] == held else upper - 1
        # one token less than the measured kv_len is as good as measured
        exact = exact and bool(np.abs(axis - value).min() <= 1)
        corners.append(sorted({lower, upper}))
    return bool((cells[np.ix_(*corners)] == 0.0).any()), exact


def _prefill_lengths(case: Case, shape: str) -> set[int]:
    tables = _tree(case)
    return _axis(tables.arena, int(tables.prefill_at[tables.attn_configs.index(shape)]))


def _axis(arena: Floats, at: int) -> set[int]:
    """Measured sizes of a curve's block, whose last node only closes it."""
    return {int(x) for x in arena[at + 2 : at + 2 + int(arena[at]) - 1]}
