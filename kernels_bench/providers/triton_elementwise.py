"""Small fused Triton kernels, for where torch has none and vLLM's libraries are not at hand.

Imported only where they run. Each is checked against its float64 reference before it is timed; in tests
they run in Triton's interpreter on the CPU.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kernels_bench.providers.device import FP8_MAX
from kernels_bench.providers.small_ops import RMS_EPSILON

BLOCK = 1024
_MAX = tl.constexpr(FP8_MAX)


def _empty_kernel() -> None:
    pass


def _rmsnorm_kernel(x: Any, residual: Any, weight: Any, width: Any, epsilon: Any, SIZE: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, SIZE)
    inside = column < width
    total = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual + row + column, total.to(residual.dtype.element_ty), mask=inside)
    mean_square = tl.sum(total * total, axis=0) / width
    scaled = total * (1.0 / tl.sqrt(mean_square + epsilon))
    scaled *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + row + column, scaled.to(x.dtype.element_ty), mask=inside)


def _rope_kernel(
    q: Any, k: Any, positions: Any, cos_sin: Any, q_stride: Any, k_stride: Any,
    NUM_Q_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS_SIZE: tl.constexpr, HALF: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_SIZE)[:, None]
    element = tl.arange(0, HALF)[None, :]
    angle = cos_sin + tl.load(positions + token) * 2 * HALF + element
    cos = tl.load(angle).to(tl.float32)
    sin = tl.load(angle + HALF).to(tl.float32)
    is_q = head < NUM_Q_HEADS
    is_k = (head >= NUM_Q_HEADS) & (head < NUM_HEADS)
    in_q = q + token * q_stride + head * 2 * HALF + element
    in_k = k + token * k_stride + (head - NUM_Q_HEADS) * 2 * HALF + element
    everywhere = element >= 0
    for_q = is_q & everywhere
    for_k = is_k & everywhere
    first = tl.load(in_q, mask=for_q, other=0.0) + tl.load(in_k, mask=for_k, other=0.0)
    second = tl.load(in_q + HALF, mask=for_q, other=0.0) + tl.load(in_k + HALF, mask=for_k, other=0.0)
    first, second = first.to(tl.float32), second.to(tl.float32)
    low = (first * cos - second * sin).to(q.dtype.element_ty)
    high = (second * cos + first * sin).to(q.dtype.element_ty)
    tl.store(in_q, low, mask=for_q)
    tl.store(in_q + HALF, high, mask=for_q)
    tl.store(in_k, low, mask=for_k)
    tl.store(in_k + HALF, high, mask=for_k)


def _silu_kernel(out: Any, x: Any, width: Any, SIZE: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def _kv_write_kernel(
    k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any, k_stride: Any, v_stride: Any,
    page_stride: Any, place_stride: Any, head_stride: Any, width: Any,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    column = tl.arange(0, SIZE)
    inside = column < width
    target = slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * place_stride
    target += column // HEAD_DIM * head_stride + column % HEAD_DIM
    tl.store(k_pages + target, tl.load(k + token * k_stride + column, mask=inside), mask=inside)
    tl.store(v_pages + target, tl.load(v + token * v_stride + column, mask=inside), mask=inside)


def _fp8_kernel(out: Any, x: Any, scale: Any, count: Any, SIZE: tl.constexpr) -> None:
    element = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = element < count
    value = tl.load(x + element, mask=inside, other=0.0).to(tl.float32) / tl.load(scale)
    value = tl.minimum(tl.maximum(value, -_MAX), _MAX)
    tl.store(out + element, value.to(out.dtype.element_ty), mask=inside)


_empty, _rmsnorm, _rope, _silu, _kv_write, _fp8 = (
    triton.jit(f)
    for f in (_empty_kernel, _rmsnorm_kernel, _rope_kernel, _silu_kernel, _kv_write_kernel, _fp8_kernel)
)


def launch_empty() -> None:
    """Launch a kernel that does nothing."""
    _empty[(1,)]()


class TritonSmallOps:
    """The small kernels in Triton."""

    def __init__(self) -> None:
        self.cos_sin_dtype = "fp32"
        self.kernels = {
            "rmsnorm_residual": "triton fused_add_rmsnorm",
            "rope": "triton rope",
            "silu_and_mul": "triton silu_and_mul",
            "kv_write": "triton kv_write",
            "fp8_quantise": "triton fp8_quantise",
        }

    def rmsnorm_residual(self, x: Any, residual: Any, weight: Any) -> None:
        """Add and normalise in place."""
        tokens, width = x.shape
        size = triton.next_power_of_2(width)
        warps = min(16, max(4, size // 512))
        _rmsnorm[(tokens,)](x, residual, weight, width, RMS_EPSILON, SIZE=size, num_warps=warps)

    def rope(self, positions: Any, q: Any, k: Any, head_dim: int, cos_sin: Any) -> None:
        """Rotate in place."""
        heads_q, heads = q.shape[1] // head_dim, (q.shape[1] + k.shape[1]) // head_dim
        _rope[(q.shape[0],)](
            q, k, positions, cos_sin, q.stride(0), k.stride(0),
            NUM_Q_HEADS=heads_q, NUM_HEADS=heads,
            HEADS_SIZE=triton.next_power_of_2(heads), HALF=head_dim // 2,
        )  # fmt: skip

    def kv_write(self, k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any) -> None:
        """Write at the slots."""
        tokens, heads, head_dim = k.shape
        _kv_write[(tokens,)](
            k, v, k_pages, v_pages, slots, k.stride(0), v.stride(0), *k_pages.stride()[:3], heads * head_dim,
            PAGE_SIZE=k_pages.shape[1], HEAD_DIM=head_dim, SIZE=triton.next_power_of_2(heads * head_dim),
        )  # fmt: skip

    def silu_and_mul(self, out: Any, x: Any) -> None:
        """Gate and multiply."""
        rows, width = out.shape
        _silu[(rows, triton.cdiv(width, BLOCK))](out, x, width, SIZE=BLOCK)

    def fp8_quantise(self, out: Any, x: Any, scale: Any) -> None:
        """Divide, clamp and round."""
        _fp8[(triton.cdiv(x.numel(), BLOCK),)](out, x, scale, x.numel(), SIZE=BLOCK)
