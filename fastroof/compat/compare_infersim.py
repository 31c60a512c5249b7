"""InferSim's column of a comparison, and the facts that explain its differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from fastroof.columns import ORIGIN_MEASURED
from fastroof.compat import infersim
from fastroof.compat.compare_steps import (
    COMPONENTS,
    Case,
    ComparedModel,
    MethodTime,
    Step,
    infersim_world,
    is_fp8,
    roles_us,
)
from fastroof.compat.infersim.estimate import ZERO_MFU
from fastroof.compat.infersim.model import (
    BANDWIDTH_SHARE,
    CAUSAL_DIVISOR,
    DECODE_OVERHEAD_MS,
    GFLOP,
    GFLOPS_PER_TFLOPS,
    PREFILL_OVERHEAD_MS,
)
from fastroof.compat.infersim.tree import grouped_gemm_rows
from fastroof.config import GpuSpec
from fastroof.errors import MissingTableError
from fastroof.models import ModelSpec
from fastroof.operators.attention_work import decode_attention_flops
from fastroof.operators.gemm import gemm_flops
from fastroof.operators.moe_work import moe_flops
from fastroof.units import GB, GIB, TFLOP, US_PER_MS, US_PER_S

BALANCED: Final = "balanced"
"""Routing of the rows given to InferSim, which has no routing model."""

ROUNDING: Final = 0.0005000001
"""Maximum rounding error of an MFU with 3 decimals."""

UP_SHARE: Final = 2.0 / 3.0
"""Gate and up are two of an expert's three projections, and use the MFU of up."""


def experts_facts(
    case: Case, step: Step, by_role: Mapping[str, float], row: Mapping[str, Any], its_share: float
) -> dict[str, Any]:
    """Return facts of the experts: each ``_us`` is one peculiarity's effect; they sum to the difference."""
    experts, layout = case.model.experts, case.layout
    assert experts is not None
    layers_us = case.model.num_layers * US_PER_S
    routed_us, load_us = row["routed_s"] * layers_us, row["moe_load_s"] * layers_us
    up, down, row_tokens = _its_row(case, step)
    at_peak_us = routed_us * its_share
    # 0 is a valid MFU, of a row whose MFU rounds to 0
    both = max(up, down) * (UP_SHARE / up + (1.0 - UP_SHARE) / down) if up and down else 1.0
    apart_us = at_peak_us * both
    own_us = by_role["experts"]
    routing = case.plan.execution.routing
    even_us = own_us if routing == BALANCED else _evenly_routed_us(case, step.new_tokens, own_us)
    least_us = _least_us(case, step.new_tokens)
    fell_back = "experts" in (row["fallbacks"] or "").split(", ")
    other_format = has_other_format(case)
    reads_row = case.own_trees["infersim"] and not fell_back and not other_format
    mfu, row_mfu = least_us / apart_us, 0.0
    if reads_row:
        row_mfu = _least_us(case, row_tokens) / _evenly_routed_us(case, row_tokens, own_us)
    at_row_us = least_us / row_mfu if reads_row else apart_us
    is_rounded = abs(mfu - row_mfu) <= ROUNDING
    has_shared = row.get("shared_up_s") is not None
    shared_us = (row["shared_up_s"] + row["shared_down_s"]) * layers_us if has_shared else 0.0
    own_shared_us = sum(us for role, us in by_role.items() if role in _SHARED_ROLES)
    return {
        "expert_floored": load_us > routed_us,
        "expert_floor_us": max(load_us - routed_us, 0.0),
        "expert_load_us": load_us,
        "expert_core_us": routed_us,
        "local_experts": experts.num_experts // layout.ep,
        "expert_peak_us": routed_us - at_peak_us,
        "expert_one_mfu_us": at_peak_us - apart_us,
        "up_mfu": up,
        "down_mfu": down,
        "expert_row_us": at_row_us - even_us,
        "expert_mfu_us": apart_us - at_row_us,
        "expert_tree_us": apart_us - even_us,
        "expert_mfu": mfu,
        "expert_row_mfu": row_mfu,
        "expert_effective_mfu": least_us / even_us,
        "expert_default": fell_back,
        "expert_row": reads_row,
        "expert_rounded": reads_row and is_rounded,
        "expert_drawn": reads_row and not is_rounded,
        "expert_other_format": other_format and not fell_back,
        "expert_given_tree": not reads_row and not fell_back and not other_format,
        "row_tokens": row_tokens,
        "uneven": routing != BALANCED,
        "routing": routing,
        "routing_us": even_us - own_us,
        "even_us": even_us,
        "no_router_us": -by_role["router"],
        "unread_shared": own_shared_us > 0.0 and not has_shared,
        "read_shared": has_shared,
        "shared_us": shared_us - own_shared_us,
        "its_shared_us": shared_us,
        "own_shared_us": own_shared_us,
    }


def has_other_format(case: Case) -> bool:
    """Return whether InferSim's tree has MFUs of fp8 kernels for a case in bf16, or vice versa."""
    return bool(case.infersim_dtype) and is_fp8(case.infersim_dtype) != is_fp8(case.dtype)


_SHARED_ROLES: Final = ("shared_gate_up", "shared_down", "shared_gate")


def _its_row(case: Case, step: Step) -> tuple[float, float, int]:
    """Return the MFUs of up and down that InferSim reads, and the tokens per GPU of their row, or 0."""
    experts, tables = case.model.experts, case.infersim
    assert experts is not None
    world, tp, gpu = infersim_world(case.model, case.layout), case.layout.tp, case.plan.gpu.name
    up, down = infersim.grouped_gemm_mfu(
        tables,
        gpu,
        step.phase,
        num_experts=experts.num_experts,
        topk=experts.topk,
        hidden=case.model.hidden,
        intermediate=experts.intermediate,
        tokens_per_gpu=step.new_tokens,
        num_gpus=world,
        tp_size=tp,
    )
    kind = f"grouped_gemm/{step.phase}"
    layer = (
        experts.num_experts, world, experts.num_experts // (world // tp), experts.topk, case.model.hidden,
        experts.intermediate // tp,
    )  # fmt: skip
    sizes = [np.array([size]) for size in (tables.devices.index(gpu), *layer, step.new_tokens)]
    at = int(grouped_gemm_rows(tables, kind, sizes[0], tuple(sizes[1:-1]), sizes[-1])[0])
    tokens = int(tables.blocks[kind].axes[0][at]) if at >= 0 else 0
    return float(up), float(down), tokens


def _least_us(case: Case, tokens: int) -> float:
    """Return the time of the routed experts of some tokens per GPU at the peak of their format."""
    experts, layout = case.model.experts, case.layout
    assert experts is not None
    shape = (case.model.hidden, experts.intermediate, experts.topk, layout.moe_tp, layout.ep)
    work = float(moe_flops(tokens * layout.dp, *shape)) * case.model.num_layers
    return work / case.plan.gpu.peak(case.dtype) * US_PER_S


def _evenly_routed_us(case: Case, tokens: int, own_us: float) -> float:
    """Return the experts' time from fastroof's tables with even routing; ``own_us`` without such rows."""
    experts, layout = case.model.experts, case.layout
    assert experts is not None
    try:
        even = case.tables.lookup(
            "moe",
            dtype=case.dtype,
            hidden=case.model.hidden,
            intermediate=experts.intermediate,
            topk=experts.topk,
            num_experts=experts.num_experts,
            moe_tp=layout.moe_tp,
            moe_ep=layout.ep,
            distribution=BALANCED,
            num_tokens=tokens * layout.dp,
        )
    except MissingTableError:
        return own_us
    return float(even.latency_us) * case.model.num_layers


LIKE: Final = "h800"
"""GPU that provides the default MFU and network of GPUs unknown to InferSim: closest to an H100."""

COARSE_MFU: Final = 0.025
"""Below it, rounding to 3 decimals changes an MFU by more than 2 %."""


def constants_of(gpu: GpuSpec) -> infersim.InfersimGpu:
    """Return InferSim's constants of a GPU, in its convention if it has no entry for it."""
    known = infersim.GPUS.get(gpu.name)
    if known is not None:
        return known
    like = infersim.GPUS[LIKE]
    fp8 = gpu.peak("fp8") if "fp8" in gpu.peak_flops_per_s else gpu.peak("bf16")
    return infersim.InfersimGpu(
        fp16_tflops=gpu.peak("bf16") / TFLOP,
        fp8_tflops=fp8 / TFLOP,
        default_mfu=like.default_mfu,
        memory_gib=gpu.hbm_bytes / GIB,
        memory_gb_per_s=gpu.hbm_bytes_per_s / GB * BANDWIDTH_SHARE,
        nvlink_gb_per_s=gpu.nvlink_bytes_per_s / GB * BANDWIDTH_SHARE,
        rdma_gb_per_s=like.rdma_gb_per_s,
    )


def hf_config(model: ModelSpec) -> dict[str, Any]:
    """Return the fields of a model's config.json that InferSim reads."""
    sizes = ComparedModel.of(model)
    config = {
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_q_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
    }
    experts = sizes.experts
    if experts is None:
        return config | {"intermediate_size": sizes.intermediate}
    config |= {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.topk,
        "moe_intermediate_size": experts.intermediate,
    }
    shared = experts.shared_intermediate
    if shared and not experts.shared_gate and shared % experts.intermediate == 0:
        return config | {"num_shared_experts": shared // experts.intermediate}
    return config | ({"shared_expert_intermediate_size": shared} if shared else {})


def _row(case: Case, step: Step) -> dict[str, Any]:
    """Return InferSim's answer: one row, without the prefix of its phase."""
    answer: dict[str, Any] = infersim.evaluate(
        case.infersim,
        case.hf_config,
        {
            "device": case.plan.gpu.name,
            "world_size": infersim_world(case.model, case.layout),
            "tp_size": case.layout.tp,
            "num_nodes": 1,
            "max_prefill_tokens": step.new_tokens if step.phase == "prefill" else 1,
            "decode_bs": step.batch_size,
            "target_tgs": 1.0,
            "target_tpot": 1.0,
            # the average context is the input plus half of the output
            "isl": step.tokens,
            "osl": 0,
            "fp8_gemm": int(is_fp8(case.dtype)),
            "fp8_kv": 0,
            "deepep": 0,
            "tbo": 0,
        },
    ).to_pylist()[0]
    prefix = "d_" if step.phase == "decode" else "p_"
    return answer | {name.removeprefix(prefix): v for name, v in answer.items() if name.startswith(prefix)}


def infersim_time(case: Case, step: Step) -> MethodTime:
    """Return the time of a step by component: InferSim's TPOT or TTFT, its layers' parts and constant."""
    row = _row(case, step)
    if row["error"] is not None:
        why = ": an MFU in its tables is 0 to 3 decimals" if row["error"] == ZERO_MFU else ""
        return MethodTime("infersim", {}, float("nan"), f"InferSim raises {row['error']}{why}")
    layers_us = case.plan.model.num_layers * US_PER_S
    decode = step.phase == "decode"
    has_experts = case.model.experts is not None
    components = dict.fromkeys(COMPONENTS, 0.0) | {
        "linear": (row["attn_others_s"] + (0.0 if has_experts else row["moe_s"])) * layers_us,
        "experts": row["moe_s"] * layers_us if has_experts else 0.0,
        "attention": row["attn_core_max_s"] * layers_us,
        "communication": (row["comm1_s"] + row["comm2_s"] + row["tp_comm_s"]) * layers_us,
        "overhead": (DECODE_OVERHEAD_MS if decode else PREFILL_OVERHEAD_MS) * US_PER_MS,
    }
    return MethodTime("infersim", components, row["tpot_ms" if decode else "ttft_ms"] * US_PER_MS)


def infersim_facts(case: Case, step: Step, own: MethodTime, other: MethodTime) -> dict[str, Any]:
    """Return facts of a step: each ``_us`` is one peculiarity's effect; they sum to the difference."""
    row = _row(case, step)
    constants = case.infersim.gpus[case.plan.gpu.name]
    gemm_tflops = constants.fp8_tflops if is_fp8(case.dtype) else constants.fp16_tflops
    its_gemm_peak, its_peak = (
        tflops * GFLOPS_PER_TFLOPS * GFLOP for tflops in (gemm_tflops, constants.fp16_tflops)
    )
    gemm_peak, peak = case.plan.gpu.peak(case.dtype), case.plan.gpu.peak("bf16")
    layers_us = case.plan.model.num_layers * US_PER_S
    by_role = roles_us(case.plan, step)
    allreduce_us = sum(us for role, us in by_role.items() if role.endswith("allreduce"))
    own_exchange_us = own.components_us["communication"] - allreduce_us
    facts: dict[str, Any] = {
        "always": True,
        "own_tree": case.own_trees["infersim"],
        "split": case.layout.tp > 1,
        "gathers": case.layout.tp > 1 and not own_exchange_us,
        "exchanges": own_exchange_us > 0.0,
        "dtype": case.dtype,
        "its_dtype": case.infersim_dtype,
        "tp": case.layout.tp,
        "world": infersim_world(case.model, case.layout),
        "overhead_us": other.components_us["overhead"],
        "memory_gb_per_s": constants.memory_gb_per_s,
        "nvlink_gb_per_s": constants.nvlink_gb_per_s,
        "its_peak_tflops": its_peak / TFLOP,
        "peak_tflops": peak / TFLOP,
        "its_gemm_peak_tflops": its_gemm_peak / TFLOP,
        "gemm_peak_tflops": gemm_peak / TFLOP,
        "exchange_us": (row["comm1_s"] + row["comm2_s"]) * layers_us - own_exchange_us,
        "own_exchange_us": own_exchange_us,
        "its_exchange_us": (row["comm1_s"] + row["comm2_s"]) * layers_us,
        "allreduce_us": row["tp_comm_s"] * layers_us - allreduce_us,
    }
    for name in ("lm_head", "elementwise"):
        facts[f"no_{name}_us"] = -own.components_us[name]
    its_gemm_share = its_gemm_peak / gemm_peak
    facts |= _linear_facts(case, step, own, row, its_gemm_share)
    facts |= _attention_facts(case, step, own, row, its_peak / peak)
    if case.model.experts is not None:
        facts |= experts_facts(case, step, by_role, row, its_gemm_share)
    return facts


def _linear_facts(
    case: Case, step: Step, own: MethodTime, row: dict[str, Any], its_share: float
) -> dict[str, Any]:
    plan, m = case.plan, step.new_tokens
    model, layers_us = case.model, plan.model.num_layers * US_PER_S
    peak = plan.gpu.peak(case.dtype)
    heads, kv_heads = model.num_q_heads // plan.tp, model.num_kv_heads // plan.tp
    inter = model.intermediate // plan.tp
    shapes = {
        "qkv": (model.hidden, (heads + 2 * kv_heads) * model.head_dim),
        "o": (heads * model.head_dim, model.hidden),
    }
    if model.experts is None:
        shapes |= {"gate_up": (model.hidden, 2 * inter), "down": (inter, model.hidden)}
    mfu = {name: infersim.gemm_mfu(case.infersim, plan.gpu.name, m, k, n) for name, (k, n) in shapes.items()}
    floor_us, unfloored_us, one_mfu_us = 0.0, row["attn_others_s"] * layers_us, 0.0
    if model.experts is None:
        floor_us = (row["moe_s"] - row["routed_s"]) * layers_us
        unfloored_us = (row["attn_others_s"] + row["routed_s"]) * layers_us
        down = float(gemm_flops(m, model.hidden, inter)) / peak * layers_us
        one_mfu_us = down / float(mfu["gate_up"]) - down / float(mfu["down"])
    at_peak_us = unfloored_us * its_share
    left_us = at_peak_us - one_mfu_us
    own_us = own.components_us["linear"]
    work = sum(float(gemm_flops(m, n, k)) for k, n in shapes.values())
    least_us = work / peak * layers_us
    blocks = case.infersim.blocks["gemm"]
    device = case.infersim.devices.index(plan.gpu.name)
    pairs = {(k, n) for d, k, n in blocks.keys.tolist() if d == device}
    inexact = [f"{k}x{n}" for k, n in shapes.values() if (k, n) not in pairs]
    fell_back = [name for name in ("projections", "MLP") if name in (row["fallbacks"] or "").split(", ")]
    own_tree = case.own_trees["infersim"]
    coarse = min(float(x) for x in mfu.values()) < COARSE_MFU
    other_format = has_other_format(case)
    looked_up = own_tree and not fell_back and not other_format
    return {
        "linear_floor_us": floor_us,
        "linear_peak_us": unfloored_us - at_peak_us,
        "one_mfu_us": one_mfu_us,
        "linear_mfu_us": left_us - own_us,
        "linear_mfu": least_us / left_us,
        "linear_effective_mfu": least_us / own_us,
        "linear_default": bool(fell_back),
        "linear_other_format": other_format and not fell_back,
        "linear_given_tree": not own_tree and not fell_back and not other_format,
        "default_parts": " and ".join(fell_back),
        "default_mfu": case.infersim.gpus[plan.gpu.name].default_mfu,
        "unmeasured_pairs": looked_up and bool(inexact),
        "linear_rounded": looked_up and not inexact and (coarse or m not in blocks.axes[0]),
        "pairs": ", ".join(inexact),
        "m": m,
    }


def _attention_facts(
    case: Case, step: Step, own: MethodTime, row: dict[str, Any], its_share: float
) -> dict[str, Any]:
    plan = case.plan
    model, layers_us = case.model, plan.model.num_layers * US_PER_S
    own_us = own.components_us["attention"]
    core_us, max_us = row["attn_core_s"] * layers_us, row["attn_core_max_s"] * layers_us
    corrected_us = core_us * CAUSAL_DIVISOR / 2.0 if step.phase == "prefill" else core_us
    at_peak_us = corrected_us * its_share
    heads = plan.heads
    if step.phase == "decode":
        work = decode_attention_flops(heads.num_q_heads, heads.head_dim, step.tokens, step.batch_size)
    else:
        work = decode_attention_flops(heads.num_q_heads, heads.head_dim, step.tokens, step.tokens) / 2
    least_us = float(work) / plan.gpu.peak("bf16") * layers_us
    fell_back = "attention" in (row["fallbacks"] or "").split(", ")
    floored = row["kv_load_s"] > row["attn_core_s"]
    coarse = row["attn_mfu"] < COARSE_MFU
    lookup: dict[str, Any] = {"batch_size": step.batch_size}
    if step.phase == "prefill":
        lookup["q_len"] = step.tokens
    measured = (
        case.tables.lookup(
            f"attention_{step.phase}",
            num_q_heads=heads.num_q_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            kv_len=step.tokens,
            **lookup,
        ).origin
        == ORIGIN_MEASURED
    )
    name = f"{model.num_q_heads // plan.tp}-{model.num_kv_heads // plan.tp}-{model.head_dim}"
    return {
        "floored": floored,
        "kv_floor_us": max_us - core_us,
        "kv_load_us": row["kv_load_s"] * layers_us,
        "core_us": core_us,
        "causal": step.phase == "prefill",
        "causal_us": core_us - corrected_us,
        "attention_peak_us": corrected_us - at_peak_us,
        "attention_mfu_us": at_peak_us - own_us,
        "attention_mfu": row["attn_mfu"],
        "effective_mfu": least_us / own_us,
        "attention_default": fell_back,
        "attention_given_tree": not fell_back and not case.own_trees["infersim"],
        "attention_rounded": not fell_back and case.own_trees["infersim"] and (coarse or not measured),
        "heads": name,
    }
