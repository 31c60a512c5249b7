"""The deepgemm provider: DeepSeek's block-scaled fp8 GEMM, which vLLM runs on Hopper where it can.

It compiles a kernel a shape at its first use, which takes a GPU host's time, so it is used only if named.
The call is that of vLLM 0.26.0's source (``utils/deep_gemm.py``, ``kernels/linear/scaled_mm/deep_gemm.py``);
DeepGEMM's own binding loads on a GPU host alone.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

from kernels_bench.protocol import Availability, Point, Prepared
from kernels_bench.providers.cuda_provider import CudaProvider, Launch
from kernels_bench.providers.device import Device, cuda_availability
from kernels_bench.providers.torch_gemm import prepare_gemm, refuses_gemm

DEEPGEMM: Final = "deepgemm"
PACKAGES: Final = ("deep_gemm", "vllm.third_party.deep_gemm")
"""In the order in which vLLM looks for it."""
ALIGNED_SCALES: Final = 4
"""Scales of a column begin at multiples of 16 B."""
KERNEL: Final = "deep_gemm fp8_gemm_nt, blocks of 128, quantisation of activations not inside"


class DeepgemmProvider(CudaProvider):
    """Launches DeepGEMM's GEMM."""

    name = DEEPGEMM

    def __init__(self, device: Device | None = None, deep_gemm: Any = None) -> None:
        super().__init__(device)
        self._deep_gemm = deep_gemm

    @cached_property
    def launches(self) -> Mapping[str, Launch]:
        """What it launches, by operator."""
        return {"gemm": Launch(self._refuses_gemm, self._prepare_gemm)}

    def availability(self) -> Availability:
        """Return whether DeepGEMM can be imported on a Hopper GPU here."""
        cuda = cuda_availability()
        if not cuda.works:
            return cuda
        if not self.device.is_hopper:
            return Availability(
                False, f"DeepGEMM is called as on Hopper, 9.0; this GPU has {self.device.version}"
            )
        try:
            package = self._package()
        except Exception as error:  # whatever a package raises when it is imported, this host lacks it
            return Availability(False, f"deep_gemm cannot be imported: {type(error).__name__}: {error}")
        version = str(getattr(package, "__version__", "unknown"))
        return Availability(True, versions={**(cuda.versions or {}), package.__name__: version})

    def _package(self) -> Any:
        if self._deep_gemm is None:
            found = next((p for p in PACKAGES if importlib.util.find_spec(p.split(".")[0])), PACKAGES[0])
            self._deep_gemm = importlib.import_module(found)
        return self._deep_gemm

    def _refuses_gemm(self, point: Point) -> str | None:
        if point.values["dtype"] != "fp8_block":
            return f"deepgemm does not measure {point.values['dtype']} GEMMs"
        return refuses_gemm(point, self.device)

    def _prepare_gemm(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        multiply = self._package().fp8_gemm_nt

        def gemm(out: Any, x: Any, weight: Any, x_scale: Any, weight_scale: Any) -> None:
            # Scales stay float32: packing them into exponents is for Blackwell.
            multiply((x, x_scale), (weight, weight_scale), out, disable_ue8m0_cast=True)

        return prepare_gemm(point, self.device, seed, max_bytes, KERNEL, gemm, _arranged)


def _arranged(x_scale: Any, weight_scale: Any) -> tuple[Any, Any]:
    return tma_aligned(x_scale), weight_scale


def tma_aligned(scale: Any) -> Any:
    """Lay scales out by columns, each from a multiple of 16 B; otherwise every call begins with that."""
    rows, columns = scale.shape
    room = -(-rows // ALIGNED_SCALES) * ALIGNED_SCALES
    return scale.new_zeros((columns, room))[:, :rows].copy_(scale.t()).t()
