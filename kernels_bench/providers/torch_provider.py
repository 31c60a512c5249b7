"""The torch provider: cuBLASLt or hipBLASLt, SDPA, grouped GEMM, copies, and small kernels by Inductor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec

from kernels_bench.operators.attention import ATTENTION
from kernels_bench.protocol import Availability, Point, Prepared
from kernels_bench.providers.attention import refuses_heads
from kernels_bench.providers.cuda_provider import CudaProvider, Launch
from kernels_bench.providers.device import CPU_DEVICE, cuda_availability
from kernels_bench.providers.elementwise import (
    COPY_KERNEL,
    EMPTY_KERNEL,
    prepare_copy,
    prepare_launch,
    prepare_small_op,
    refuses_small_op,
)
from kernels_bench.providers.small_ops import Compiler, InductorSmallOps, SmallOps
from kernels_bench.providers.torch_attention import prepare_sdpa, refuses_sdpa, sdpa_words
from kernels_bench.providers.torch_gemm import Gemm, prepare_gemm, refuses_gemm, torch_gemm
from kernels_bench.providers.torch_moe import MOE_KERNEL, prepare_moe, refuses_moe


class TorchProvider(CudaProvider):
    """Launches torch's own kernels."""

    name = "torch"
    lacks = "has no kernel for"

    @cached_property
    def launches(self) -> Mapping[str, Launch]:
        """What it launches, by operator."""
        attention = Launch(
            lambda point: refuses_heads(point) or refuses_sdpa(point, self.device),
            lambda point, seed, max_bytes: prepare_sdpa(point, self.device, seed, max_bytes),
            lambda point: sdpa_words(point, self.device),
        )
        return {
            "gemm": Launch(self._refuses_gemm, self._prepare_gemm, lambda point: self._gemm(point)[0]),
            **dict.fromkeys(ATTENTION, attention),
            "moe": Launch(
                lambda point: refuses_moe(point) or self._lacks_triton(), self._prepare_moe, self._moe_kernel
            ),
            "elementwise": Launch(
                self._refuses_elementwise, self._prepare_elementwise, self._elementwise_kernel
            ),
        }

    def availability(self) -> Availability:
        """Return whether torch sees a GPU."""
        if self._device == CPU_DEVICE:
            return Availability(True)
        return cuda_availability(self._device, has_amd=True)

    def _refuses_gemm(self, point: Point) -> str | None:
        if point.values["dtype"] == "fp8_block":
            return "torch's block-scaled GEMM is not measured; fp8_block needs vllm, flashinfer or aiter"
        return refuses_gemm(point, self.device)

    def _gemm(self, point: Point) -> tuple[str, Gemm]:
        return torch_gemm(point.values["dtype"], bool(self.device.gfx))

    def _prepare_gemm(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        kernel, gemm = self._gemm(point)
        return prepare_gemm(point, self.device, seed, max_bytes, kernel, gemm)

    def _prepare_moe(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        return prepare_moe(point, self._small_ops, self._moe_kernel(point), self.device, seed, max_bytes)

    def _moe_kernel(self, point: Point) -> str:
        return MOE_KERNEL.format(activation=self._small_ops.kernels.get("silu_and_mul", "silu_and_mul"))

    def _elementwise_kernel(self, point: Point) -> str:
        kind = str(point.values["kind"])
        return {"copy": COPY_KERNEL, "launch": EMPTY_KERNEL}.get(kind) or self._small_ops.kernels[kind]

    def _refuses_elementwise(self, point: Point) -> str | None:
        if point.values["kind"] == "copy":
            return None
        if point.values["kind"] == "fp8_quantise" and self.device.gfx:
            return "fp8_quantise writes NVIDIA's e4m3"
        if point.values["kind"] == "kv_write" and self.device.name != "cpu":
            return "no engine writes KV with torch's kernels"
        return refuses_small_op(point) or self._lacks_triton()

    def _prepare_elementwise(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        if point.values["kind"] == "copy":
            return prepare_copy(point, self.device, seed, max_bytes)
        if point.values["kind"] == "launch":
            return prepare_launch(self.device)
        return prepare_small_op(point, self._small_ops, self.device, seed, max_bytes)

    def _lacks_triton(self) -> str | None:
        is_there = self.device.name == "cpu" or find_spec("triton") is not None
        return None if is_there else "needs triton, which is not installed"

    @cached_property
    def _small_ops(self) -> SmallOps:
        return SmallOps() if self.device.name == "cpu" else InductorSmallOps(Compiler())
