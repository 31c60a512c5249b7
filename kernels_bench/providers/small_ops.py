"""The kernels between GEMMs and attention, one set of them a provider."""

from __future__ import annotations

from typing import Any, Final, Protocol

RMS_EPSILON: Final = 1e-5
ROPE_THETA: Final = 10000.0
"""Base of the rotary frequencies; their values change no time."""

KINDS: Final = ("rmsnorm_residual", "rope", "silu_and_mul", "kv_write", "fp8_quantise")


class SmallOps(Protocol):
    """What a transformer layer runs besides GEMMs and attention.

    A kernel that is given its output returns None. A compiled one returns a tuple of what it allocated.
    """

    # What each kind of :data:`KINDS` launches, for those that it has.
    kernels: dict[str, str]
    # dtype of the table of cosines and sines that ``rope`` reads.
    cos_sin_dtype: str

    def rmsnorm_residual(self, x: Any, residual: Any, weight: Any) -> Any:
        """Add ``x`` to ``residual`` and normalise the sum into ``x``, both in place."""

    def rope(self, positions: Any, q: Any, k: Any, head_dim: int, cos_sin: Any) -> Any:
        """Rotate queries and keys, shape (tokens, heads * head_dim), in place; rows may be strided.

        ``cos_sin`` holds cosines, then sines, of each position: shape (positions, head_dim).
        """

    def kv_write(self, k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any) -> None:
        """Write keys and values, shape (tokens, heads, head_dim), at their slots of the pages."""

    def silu_and_mul(self, out: Any, x: Any) -> Any:
        """Write ``silu(gate) * up`` of rows that hold gate, then up."""

    def fp8_quantise(self, out: Any, x: Any, scale: Any) -> Any:
        """Write ``x / scale`` in fp8; ``scale`` is of shape (1,)."""


class TorchSmallOps:
    """Plain torch: for machines without a GPU, and to show what the kernels do. Not fused, never timed."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.kernels: dict[str, str] = {}
        self.cos_sin_dtype = "fp32"

    def rmsnorm_residual(self, x: Any, residual: Any, weight: Any) -> None:
        """Add and normalise in place."""
        residual.add_(x)
        x.copy_(self._torch.nn.functional.rms_norm(residual, x.shape[-1:], weight, RMS_EPSILON))

    def rope(self, positions: Any, q: Any, k: Any, head_dim: int, cos_sin: Any) -> None:
        """Rotate in place."""
        cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
        for x in (q, k):
            heads = x.unflatten(-1, (-1, head_dim))
            first, second = heads.clone().chunk(2, dim=-1)
            heads.copy_(self._torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def kv_write(self, k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any) -> None:
        """Write at the slots."""
        page, place = slots // k_pages.shape[1], slots % k_pages.shape[1]
        k_pages[page, place] = k
        v_pages[page, place] = v

    def silu_and_mul(self, out: Any, x: Any) -> None:
        """Gate and multiply."""
        gate, up = x.chunk(2, dim=-1)
        out.copy_(self._torch.nn.functional.silu(gate) * up)

    def fp8_quantise(self, out: Any, x: Any, scale: Any) -> None:
        """Divide, clamp and round."""
        from kernels_bench.providers.device import FP8_MAX

        out.copy_((x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(out.dtype))


VLLM_KERNELS: Final = {
    "rmsnorm_residual": "vllm fused_add_rms_norm",
    "rope": "vllm rotary_embedding",
    "silu_and_mul": "vllm silu_and_mul",
    "kv_write": "vllm reshape_and_cache_flash",
    "fp8_quantise": "vllm static_scaled_fp8_quant",
}


class VllmSmallOps:
    """vLLM's CUDA ops: what its models run with ``enforce_eager``."""

    def __init__(self) -> None:
        import torch

        self._ops = torch.ops._C
        self._cache_ops = torch.ops._C_cache_ops
        self._one: Any = None
        self._torch = torch
        self.cos_sin_dtype = "bf16"
        self.kernels = VLLM_KERNELS

    def rmsnorm_residual(self, x: Any, residual: Any, weight: Any) -> None:
        """Add and normalise in place."""
        self._ops.fused_add_rms_norm(x, residual, weight, RMS_EPSILON)

    def rope(self, positions: Any, q: Any, k: Any, head_dim: int, cos_sin: Any) -> None:
        """Rotate in place."""
        self._ops.rotary_embedding(positions, q, k, head_dim, cos_sin, True)

    def kv_write(self, k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any) -> None:
        """Write at the slots."""
        if self._one is None or self._one.device != k.device:
            self._one = self._torch.ones((), dtype=self._torch.float32, device=k.device)
        # "auto": the cache's own dtype, so that the scales are not used.
        self._cache_ops.reshape_and_cache_flash(k, v, k_pages, v_pages, slots, "auto", self._one, self._one)

    def silu_and_mul(self, out: Any, x: Any) -> None:
        """Gate and multiply."""
        self._ops.silu_and_mul(out, x)

    def fp8_quantise(self, out: Any, x: Any, scale: Any) -> None:
        """Divide, clamp and round."""
        self._ops.static_scaled_fp8_quant(out, x, scale, None)
