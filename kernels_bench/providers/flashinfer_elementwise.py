"""flashinfer's norm, rope and activation, where their libraries are built."""

from __future__ import annotations

from typing import Any, Final

from fastroof.errors import MeasureError
from kernels_bench.providers.flashinfer_calls import FlashinferModules
from kernels_bench.providers.small_ops import RMS_EPSILON

_MODULES: Final = {"rmsnorm_residual": "norm", "rope": "rope", "silu_and_mul": "silu_and_mul"}
_KERNELS: Final = {
    "rmsnorm_residual": "flashinfer fused_add_rmsnorm",
    "rope": "flashinfer apply_rope_with_cos_sin_cache_inplace",
    "silu_and_mul": "flashinfer silu_and_mul",
}


class FlashinferSmallOps:
    """flashinfer's small kernels; it writes KV and quantises in other ways than a bf16 step needs."""

    def __init__(self, flashinfer: Any, modules: FlashinferModules) -> None:
        self._flashinfer = flashinfer
        self.cos_sin_dtype = "fp32"
        self.kernels = {kind: _KERNELS[kind] for kind, name in _MODULES.items() if modules.is_built(name)}

    def rmsnorm(self, out: Any, x: Any, weight: Any) -> None:
        """Normalise each row."""
        self._flashinfer.rmsnorm(x, weight, eps=RMS_EPSILON, out=out)

    def rmsnorm_residual(self, x: Any, residual: Any, weight: Any) -> None:
        """Add and normalise in place."""
        self._flashinfer.fused_add_rmsnorm(x, residual, weight, eps=RMS_EPSILON)

    def rope(self, positions: Any, q: Any, k: Any, head_dim: int, cos_sin: Any) -> None:
        """Rotate in place."""
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(
            positions, q, k, head_dim, cos_sin, is_neox=True
        )

    def kv_write(self, k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any) -> None:
        """Refuse: ``kernels`` does not name it."""
        raise MeasureError("flashinfer has no kernel that writes KV by slot: vllm and Triton have one")

    def silu_and_mul(self, out: Any, x: Any) -> None:
        """Gate and multiply."""
        self._flashinfer.silu_and_mul(x, out=out)

    def fp8_quantise(self, out: Any, x: Any, scale: Any) -> None:
        """Refuse: ``kernels`` does not name it."""
        raise MeasureError("flashinfer's per-tensor fp8 kernel is not built here: vllm and Triton have one")
