"""The torch provider: cuBLASLt, SDPA, grouped GEMM, copies, and small Triton kernels where torch has none."""

from __future__ import annotations

import importlib.util
from typing import Any, Final

from kernels_bench.points import Point
from kernels_bench.protocol import Availability, Prepared
from kernels_bench.providers.attention import Heads
from kernels_bench.providers.device import (
    CPU_DEVICE,
    Device,
    cuda_availability,
    cuda_device,
    oom_as_memory_error,
)
from kernels_bench.providers.elementwise import (
    prepare_copy,
    prepare_launch,
    prepare_small_op,
    refuses_small_op,
)
from kernels_bench.providers.small_ops import SmallOps, TorchSmallOps
from kernels_bench.providers.torch_attention import prepare_sdpa, refuses_sdpa
from kernels_bench.providers.torch_gemm import prepare_gemm, refuses_gemm, torch_gemm
from kernels_bench.providers.torch_moe import prepare_moe, refuses_moe

__all__ = ["TorchProvider", "refuses_heads"]

_ATTENTION: Final = ("attention_prefill", "attention_decode", "attention_decode_unequal")


def refuses_heads(point: Point) -> str | None:
    """Say why an attention point's heads or window are not measured by any provider; None where they are."""
    heads = Heads.of(point)
    if heads.num_q_heads % heads.num_kv_heads:
        return f"{heads.num_q_heads} query heads do not divide by {heads.num_kv_heads} KV heads"
    if int(point.values.get("window", 0)):
        return f"a sliding window of {point.values['window']} tokens is not measured"
    if int(point.values.get("q_len", 1)) > int(point.values["kv_len"]):
        return f"{point.values['q_len']} new tokens are more than the {point.values['kv_len']} attended to"
    return None


class TorchProvider:
    """Launches torch's own kernels.

    Parameters
    ----------
    device : Device, optional
        Where to run; the current CUDA device by default, found when it is first needed.
    """

    name = "torch"

    def __init__(self, device: Device | None = None) -> None:
        self._device = device

    @property
    def device(self) -> Device:
        """Where inputs live."""
        if self._device is None:
            self._device = cuda_device()
        return self._device

    def availability(self) -> Availability:
        """Say whether torch sees a GPU."""
        if self._device == CPU_DEVICE:
            return Availability(True)
        found = cuda_availability()
        if found.works and (triton := _triton_version()):
            return Availability(True, versions={**(found.versions or {}), "triton": triton})
        return found

    def refuses(self, point: Point) -> str | None:
        """Say why a point is not for torch."""
        if point.operator == "gemm":
            return refuses_gemm(point, self.device)
        if point.operator in _ATTENTION:
            return refuses_heads(point) or refuses_sdpa(point)
        if point.operator == "moe":
            return refuses_moe(point) or self._lacks_triton()
        if point.operator == "elementwise":
            if point.values["kind"] == "copy":
                return None
            return refuses_small_op(point) or self._lacks_triton()
        return f"torch has no kernel for {point.operator}"

    def prepare(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        """Make random inputs for a point."""
        device = self.device
        with oom_as_memory_error():
            if point.operator == "gemm":
                kernel, gemm = torch_gemm(point.values["dtype"])
                return prepare_gemm(point, device, seed, max_bytes, kernel, gemm)
            if point.operator in _ATTENTION:
                return prepare_sdpa(point, device, seed, max_bytes)
            if point.operator == "moe":
                ops = self._small_ops()
                activation = ops.kernels.get("silu_and_mul", "silu_and_mul")
                return prepare_moe(point, ops, activation, device, seed, max_bytes)
            if point.values["kind"] == "copy":
                return prepare_copy(point, device, seed, max_bytes)
            if point.values["kind"] == "launch":
                return prepare_launch(self._launch_empty(), device)
            return prepare_small_op(point, self._small_ops(), device, seed, max_bytes)

    def _lacks_triton(self) -> str | None:
        if self.device.name == "cpu" or _triton_version():
            return None
        return "needs triton, which cannot be imported"

    def _small_ops(self) -> SmallOps:
        if self.device.name == "cpu":
            return TorchSmallOps()
        from kernels_bench.providers.triton_elementwise import TritonSmallOps

        return TritonSmallOps()

    def _launch_empty(self) -> Any:
        if self.device.name == "cpu":
            return lambda: None
        from kernels_bench.providers.triton_elementwise import launch_empty

        return launch_empty


def _triton_version() -> str:
    """Return triton's version, empty where there is none."""
    if importlib.util.find_spec("triton") is None:
        return ""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return "unknown"
