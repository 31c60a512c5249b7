"""InferSim's column of a comparison, and the facts by which its differences are told."""

from __future__ import annotations

from typing import Any, Final

from fastroof.columns import ORIGIN_MEASURED
from fastroof.compat import infersim
from fastroof.compat.compare_fastroof import roles_us
from fastroof.compat.compare_infersim_experts import experts_facts, has_other_format
from fastroof.compat.compare_models import ComparedModel, infersim_world, is_fp8
from fastroof.compat.compare_steps import COMPONENTS, Case, MethodTime, Step
from fastroof.compat.infersim.hardware import (
    BANDWIDTH_SHARE,
    CAUSAL_DIVISOR,
    DECODE_OVERHEAD_MS,
    GFLOP,
    GFLOPS_PER_TFLOPS,
    PREFILL_OVERHEAD_MS,
)
from fastroof.compat.infersim.phases import ZERO_MFU
from fastroof.config import GpuSpec
from fastroof.models import ModelSpec
from fastroof.operators.attention_work import decode_attention_flops
from fastroof.operators.gemm import gemm_flops
from fastroof.units import GB, GIB, TFLOP, US_PER_MS, US_PER_S

__all__ = ["constants_of", "hf_config", "infersim_facts", "infersim_time"]

LIKE: Final = "h800"
"""Whose default MFU and network a GPU gets that InferSim does not know: the nearest to an H100."""

COARSE_MFU: Final = 0.025
"""Below it, rounding to 3 decimals changes an MFU by more than 2 %."""


def constants_of(gpu: GpuSpec) -> infersim.InfersimGpu:
    """InferSim's constants of a GPU, in its own convention where it has no entry for it."""
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
    """Fields of a model's config.json that InferSim reads."""
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
    """InferSim's answer: one row, with the prefix of its phase taken off."""
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
            # the average context is the input's and half of the output's
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
    """Time of a step by component: InferSim's TPOT or TTFT, its layers' parts and its constant."""
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
    """Facts of a step: every ``_us`` is what one peculiarity adds, and they add up to the difference."""
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
