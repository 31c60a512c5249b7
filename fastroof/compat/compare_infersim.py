"""InferSim's column of a comparison."""

from __future__ import annotations

from typing import Any, Final

from fastroof.compat import infersim
from fastroof.compat.compare_steps import (
    COMPONENTS,
    Case,
    ComparedModel,
    MethodTime,
    Step,
    is_fp8,
)
from fastroof.compat.infersim.estimate import ZERO_MFU
from fastroof.compat.infersim.model import BANDWIDTH_SHARE, DECODE_OVERHEAD_MS, PREFILL_OVERHEAD_MS
from fastroof.config import GpuSpec
from fastroof.models import ModelSpec
from fastroof.units import GB, GIB, TFLOP, US_PER_MS, US_PER_S

LIKE: Final = "h800"
"""GPU that provides the default MFU and network of GPUs unknown to InferSim: closest to an H100."""


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
            # ranks of a dense model share nothing
            "world_size": case.layout.tp * (case.layout.dp if case.model.experts else 1),
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
