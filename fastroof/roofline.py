"""The roofline B of an operator in microseconds: the coordinate that fastroof interpolates in."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastroof import flops
from fastroof.config.gpu import GpuSpec
from fastroof.units import DTYPE_BYTES, US_PER_S

__all__ = ["HeadShape", "Roofline", "decode_roofline", "prefill_roofline", "prefix_roofline_us"]


class HeadShape(NamedTuple):
    """What one GPU's attention kernel is keyed by, after tensor parallelism."""

    kv_dtype: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group_size(self) -> float:
        """Query heads that share one KV head."""
        return self.num_q_heads / self.num_kv_heads

    def __str__(self) -> str:
        return f"{self.num_q_heads}-{self.num_kv_heads}-{self.head_dim} ({self.kv_dtype} KV)"


class Roofline(NamedTuple):
    """B of one attention table: ``t_launch + batch (square x^2 + slope x + fixed)``, all in us.

    x is kv_len for decode (square is 0) and q_len for prefill. t_launch is the smallest latency of
    the table.
    """

    t_launch_us: float
    square_us: float
    slope_us: float
    fixed_us: float

    def __call__(self, batch: Any, x: Any) -> npt.NDArray[np.float64]:
        """B at (batch, x), us."""
        b = np.asarray(batch, dtype=np.float64)
        x = np.asarray(x, dtype=np.float64)
        return np.asarray(self.t_launch_us + b * ((self.square_us * x + self.slope_us) * x + self.fixed_us))


def decode_roofline(shape: HeadShape, gpu: GpuSpec, t_launch_us: float) -> Roofline:
    """B of decode attention against (batch, kv_len); attention computes in bf16 whatever the KV is."""
    nh, nkv, dh = shape.num_q_heads, shape.num_kv_heads, shape.head_dim
    flops_us = US_PER_S / gpu.peak("bf16")
    bytes_us = US_PER_S / gpu.hbm_bytes_per_s
    kv_bytes = DTYPE_BYTES[shape.kv_dtype]
    fixed = float(flops.decode_attention_bytes(nh, nkv, dh, 0, 1, kv_bytes))
    a_token = float(flops.decode_attention_bytes(nh, nkv, dh, 1, 1, kv_bytes)) - fixed
    slope = float(flops.decode_attention_flops(nh, dh, 1, 1)) * flops_us + a_token * bytes_us
    return Roofline(t_launch_us, 0.0, slope, fixed * bytes_us)


def prefill_roofline(shape: HeadShape, gpu: GpuSpec, t_launch_us: float) -> Roofline:
    """B of causal prefill attention without a prefix against (batch, q_len)."""
    nh, nkv, dh = shape.num_q_heads, shape.num_kv_heads, shape.head_dim
    flops_us = US_PER_S / gpu.peak("bf16")
    one, two = (float(flops.attention_flops(nh, dh, q, q)) for q in (1, 2))
    square = (two - 2.0 * one) / 2.0
    kv_bytes = DTYPE_BYTES[shape.kv_dtype]
    a_token = float(flops.attention_bytes(nh, nkv, dh, 1, 1, 1, kv_bytes))
    slope = (one - square) * flops_us + a_token * US_PER_S / gpu.hbm_bytes_per_s
    return Roofline(t_launch_us, square * flops_us, slope, 0.0)


def prefix_roofline_us(shape: HeadShape, gpu: GpuSpec) -> tuple[float, float]:
    """Roofline of a prefix in prefill attention: us a (query, prefix token) pair, us a prefix token."""
    nh, nkv, dh = shape.num_q_heads, shape.num_kv_heads, shape.head_dim
    kv_bytes = DTYPE_BYTES[shape.kv_dtype]
    no_prefix, one = (float(flops.attention_bytes(nh, nkv, dh, 1, kv, 1, kv_bytes)) for kv in (1, 2))
    pair_us = float(flops.attention_flops(nh, dh, 1, 1)) / gpu.peak("bf16") * US_PER_S
    return pair_us, (one - no_prefix) / gpu.hbm_bytes_per_s * US_PER_S
