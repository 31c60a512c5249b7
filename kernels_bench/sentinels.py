"""Sentinels: points that are measured again and again, to show whether the device drifts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kernels_bench.operators.elementwise import elementwise_bytes
from kernels_bench.protocol import Point

SENTINEL_EVERY: Final = 200
"""Points between two rounds of sentinels: about 4 s on a GPU."""

SOAK: Final = "sentinel soak"
"""Group of a compute-bound sentinel that is timed at the power limit, after it has run for :data:`SOAK_US`.

Prefill runs there, and 3 ms of warm-up do not get to it.
"""
SOAK_US: Final = 500_000.0

_HEADS: Final[dict[str, Any]] = {
    "kv_dtype": "bf16",
    "num_q_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "window": 0,
}


def sentinel_points(tiny: bool = False) -> tuple[Point, ...]:
    """Return the sentinels of a grid that names none: a GEMM, a copy, a decode, and on a GPU a soak.

    >>> [p.operator for p in sentinel_points()]
    ['gemm', 'elementwise', 'attention_decode', 'gemm']
    """
    soak = Point("gemm", {"dtype": "bf16", "m": 8192, "n": 8192, "k": 8192}, group=SOAK)
    size, width, batch, kv_len = (64, 8192, 2, 32) if tiny else (4096, 2**26, 64, 4096)
    heads = _HEADS | ({"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16} if tiny else {})
    copied = {"kind": "copy", "m": 1, "width": width, "io_bytes": elementwise_bytes("copy", 1, width)}
    return (
        Point("gemm", {"dtype": "bf16", "m": size, "n": size, "k": size}, group="sentinel"),
        Point("elementwise", copied, group="sentinel"),
        Point("attention_decode", {**heads, "batch_size": batch, "kv_len": kv_len}, group="sentinel"),
        *(() if tiny else (soak,)),
    )


@dataclass(frozen=True)
class SentinelRepeat:
    """One sentinel of one run, over its rounds."""

    run: str
    key: str
    rounds: int
    # Over the rounds, of each round's median, us.
    median_us: float
    min_us: float
    max_us: float
    # 90th minus 10th percentile over the median: one disturbed round in ten does not count.
    spread: float
    # Median of the last third of the rounds over that of the first, less 1; above 0 is slower.
    drift: float


def repeatability(run: str, sentinels: Sequence[Mapping[str, Any]]) -> list[SentinelRepeat]:
    """Summarise the sentinel lines of one run, by point.

    >>> lines = [{"key": "copy", "round": i, "latency_us": 10.0 + i} for i in range(6)]
    >>> repeat, = repeatability("a", lines)
    >>> repeat.rounds, repeat.median_us, round(repeat.drift, 3)
    (6, 12.5, 0.381)
    """
    by_key: dict[str, list[Mapping[str, Any]]] = {}
    for line in sentinels:
        if line["latency_us"] is not None and math.isfinite(line["latency_us"]):
            by_key.setdefault(str(line["key"]), []).append(line)
    return [_repeat(run, key, lines) for key, lines in by_key.items()]


def _repeat(run: str, key: str, lines: Sequence[Mapping[str, Any]]) -> SentinelRepeat:
    in_order = sorted(lines, key=lambda line: int(line.get("round", 0)))
    latency_us = np.array([line["latency_us"] for line in in_order], np.float64)
    low, median, high = np.quantile(latency_us, (0.1, 0.5, 0.9))
    third = max(1, len(latency_us) // 3)
    first, last = np.median(latency_us[:third]), np.median(latency_us[-third:])
    return SentinelRepeat(
        run=run,
        key=key,
        rounds=len(latency_us),
        median_us=float(median),
        min_us=float(latency_us.min()),
        max_us=float(latency_us.max()),
        spread=float((high - low) / median),
        drift=float(last / first - 1.0),
    )
