"""flashinfer's experts (CUTLASS, as in TensorRT-LLM), and its block-scaled fp8 GEMM (Blackwell)."""

from __future__ import annotations

from typing import Any, Final

from kernels_bench.protocol import Point, Prepared
from kernels_bench.providers.device import Device
from kernels_bench.providers.experts import ExpertSets, refuses_experts
from kernels_bench.providers.flashinfer_calls import FlashinferModules
from kernels_bench.providers.random_inputs import SCALE_BLOCK
from kernels_bench.providers.rotating import RotatingCalls
from kernels_bench.providers.torch_gemm import prepare_gemm, refuses_gemm

EXPERT_MODULES: Final = {
    (9, 0): "fused_moe_90",
    (10, 0): "fused_moe_100",
    (10, 3): "fused_moe_103",
    (12, 0): "fused_moe_120",
    (12, 1): "fused_moe_120",
}
"""By compute capability."""


def refuses_flashinfer_experts(point: Point, device: Device, modules: FlashinferModules) -> str | None:
    """Return why experts are not for flashinfer's kernels on a device; None where they are."""
    # Its blocks are for Hopper; per-tensor fp8 wants inputs that were quantised by another kernel.
    dtypes = ("bf16", "fp8_block") if device.is_hopper else ("bf16",)
    if reason := refuses_experts(point, dtypes):
        return reason
    name = EXPERT_MODULES.get(device.capability)
    if name is None:
        wanted = "compute capability 9.0, 10 and 12"
        return f"flashinfer's fused experts are for {wanted}, this GPU has {device.version}"
    return None if modules.is_built(name) else f"flashinfer's library {name} is not built"


def prepare_flashinfer_experts(
    point: Point, flashinfer: Any, device: Device, seed: int, max_bytes: int
) -> RotatingCalls:
    """Make tokens and experts for flashinfer's fused experts."""
    import torch

    sets = ExpertSets.make(point, device, seed, max_bytes, is_gate_first=False)
    outputs = [torch.full_like(sets.x[index], float("nan")) for index in range(sets.num_sets)]
    in_blocks = sets.layer.dtype == "fp8_block"

    def compute(index: int) -> Any:
        weights = sets.weights_of(index)
        flashinfer.fused_moe.cutlass_fused_moe(
            sets.x[index],
            sets.experts[index],
            sets.expert_weights[index],
            weights.gate_up,
            weights.down,
            sets.x.dtype,
            [weights.gate_up_scale, weights.down_scale] if in_blocks else [],
            tp_size=int(point.values["moe_tp"]),
            tp_rank=0,
            ep_size=sets.layer.moe_ep,
            ep_rank=0,
            output=outputs[index],
            use_deepseek_fp8_block_scale=in_blocks,
        )
        return outputs[index]

    return sets.calls(experts_kernel(point), compute, seed)


def experts_kernel(point: Point) -> str:
    """Name what computes the experts of a point."""
    scaling = "fp8 in blocks of 128" if point.values["dtype"] == "fp8_block" else "bf16"
    return f"flashinfer cutlass_fused_moe, {scaling}, untuned; router not inside"


GEMM_MODULES: Final = {10: "gemm_sm100", 12: "gemm_sm120"}
"""By major compute capability."""
ROWS_ALIGNMENT: Final = 4
GEMM_KERNEL: Final = (
    "flashinfer gemm_fp8_nt_groupwise cutlass, blocks of 128, quantisation of activations not inside"
)


def refuses_block_gemm(point: Point, device: Device, modules: FlashinferModules) -> str | None:
    """Return why a GEMM is not for flashinfer, or None."""
    if point.values["dtype"] != "fp8_block":
        return f"flashinfer's {point.values['dtype']} GEMM is not measured"
    if reason := refuses_gemm(point, device):
        return reason
    name = GEMM_MODULES.get(device.capability[0])
    if name is None:
        wanted = "compute capability 10 and 12"
        return f"flashinfer's block-scaled GEMM is for {wanted}, this GPU has {device.version}"
    if point.values["m"] % ROWS_ALIGNMENT:
        return f"flashinfer's block-scaled GEMM needs m in multiples of {ROWS_ALIGNMENT}"
    return None if modules.is_built(name) else f"flashinfer's library {name} is not built"


def prepare_block_gemm(point: Point, flashinfer: Any, device: Device, seed: int, max_bytes: int) -> Prepared:
    """Make inputs of a block-scaled GEMM; both scales lie as they are quantised, along k."""
    granularity = (1, SCALE_BLOCK, SCALE_BLOCK)

    def gemm(out: Any, x: Any, weight: Any, x_scale: Any, weight_scale: Any) -> None:
        flashinfer.gemm.gemm_fp8_nt_groupwise(
            x,
            weight,
            x_scale,
            weight_scale,
            scale_major_mode="K",
            scale_granularity_mnk=granularity,
            out=out,
            backend="cutlass",
        )

    return prepare_gemm(point, device, seed, max_bytes, GEMM_KERNEL, gemm)
