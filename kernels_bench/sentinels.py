"""Sentinels: points that are measured again and again through a run, to show whether the device drifts."""

from __future__ import annotations

from typing import Any, Final

from kernels_bench.operators.elementwise import elementwise_bytes
from kernels_bench.points import Point

SENTINEL_EVERY: Final = 200
"""Points between two rounds of sentinels: about 4 s on a GPU."""

_HEADS: Final[dict[str, Any]] = {
    "kv_dtype": "bf16",
    "num_q_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "window": 0,
}


def sentinel_points(tiny: bool = False) -> tuple[Point, ...]:
    """Return the sentinels of a grid that names none: a GEMM, a copy and a decode.

    >>> [p.operator for p in sentinel_points()]
    ['gemm', 'elementwise', 'attention_decode']
    """
    size, width, batch, kv_len = (64, 8192, 2, 32) if tiny else (4096, 2**26, 64, 4096)
    heads = _HEADS | ({"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16} if tiny else {})
    copied = {"kind": "copy", "m": 1, "width": width, "io_bytes": elementwise_bytes("copy", 1, width)}
    return (
        Point("gemm", {"dtype": "bf16", "m": size, "n": size, "k": size}, group="sentinel"),
        Point("elementwise", copied, group="sentinel"),
        Point("attention_decode", {**heads, "batch_size": batch, "kv_len": kv_len}, group="sentinel"),
    )
