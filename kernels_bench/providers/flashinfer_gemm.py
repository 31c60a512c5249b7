"""flashinfer's block-scaled fp8 GEMM, which it has for Blackwell."""

from __future__ import annotations

from typing import Any, Final

from kernels_bench.points import Point
from kernels_bench.protocol import Prepared
from kernels_bench.providers.block_scales import SCALE_BLOCK
from kernels_bench.providers.device import Device
from kernels_bench.providers.flashinfer_calls import FlashinferModules
from kernels_bench.providers.torch_gemm import prepare_gemm, refuses_gemm

MODULES: Final = {10: "gemm_sm100", 12: "gemm_sm120"}
"""By major compute capability."""
ROWS_ALIGNMENT: Final = 4
KERNEL: Final = (
    "flashinfer gemm_fp8_nt_groupwise cutlass, blocks of 128, quantisation of activations not inside"
)


def refuses_block_gemm(point: Point, device: Device, modules: FlashinferModules) -> str | None:
    """Say why a GEMM is not for flashinfer; None where it is."""
    if point.values["dtype"] != "fp8_block":
        return f"flashinfer's {point.values['dtype']} GEMM is not asked for"
    if reason := refuses_gemm(point, device):
        return reason
    name = MODULES.get(device.capability[0])
    if name is None:
        has = ".".join(map(str, device.capability))
        return f"flashinfer's block-scaled GEMM is for compute capability 10 and 12, this GPU has {has}"
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

    return prepare_gemm(point, device, seed, max_bytes, KERNEL, gemm)
