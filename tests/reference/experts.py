"""Naive borrowing of routed experts: who are the donors, and what, in plain Python over measured rows."""

from __future__ import annotations

import math
from typing import Any

from tests.reference.lookups import curve, points_of

Key = tuple[Any, ...]
WIDTH = {"bf16": 2, "fp8": 1, "fp8_block": 1, "int4_wo": 0.5, "w4a16_mxfp4": 17 / 32, "nvfp4": 9 / 16}


def bound(gpu: Any, key: Key, launch_us: float) -> Any:
    """Lower bound of the latency of gated experts at numbers of tokens, us."""
    dtype, hidden, wide, topk, experts, tp, ep, _ = key

    def bound_us(tokens: float) -> float:
        touched = experts / ep * (1 - (1 - topk / experts) ** tokens)
        moved = touched * 3 * hidden * wide / tp * WIDTH[dtype] + 2 * 2 * tokens * hidden
        work = 2 * 3 * tokens * topk * hidden * wide / (tp * ep)
        return launch_us + 1e6 * (work / gpu.peak(dtype) + moved / gpu.hbm_bytes_per_s)

    return bound_us


def donors(wanted: Key, measured: list[Key]) -> list[tuple[Key, float]]:
    """Two measured keys of the dtype and distribution, and their weights."""

    def sizes(key: Key) -> tuple[float, ...]:
        _, hidden, wide, topk, experts, tp, ep, _ = key
        return (hidden, wide / tp, experts / ep, topk / experts, ep)

    def octaves(key: Key) -> float:
        return sum(abs(math.log2(a) - math.log2(b)) for a, b in zip(sizes(key), sizes(wanted), strict=True))

    alike = [key for key in measured if (key[0], key[-1]) == (wanted[0], wanted[-1]) and key != wanted]
    own = [key for key in alike if key[1:5] == wanted[1:5]]
    chosen = sorted(own or alike, key=lambda key: (round(octaves(key), 9), key))[:2]
    shares = [1 / (octaves(key) + 0.25) for key in chosen]
    return [(key, share / sum(shares)) for key, share in zip(chosen, shares, strict=True)]


def borrowed_us(tables: Any, wanted: Key, tokens: float) -> float:
    """Latency of a shape at a node of one of its donors, us."""
    log_us = 0.0
    for key, share in donors(wanted, list(tables.groups("moe"))):
        points = points_of(tables, "moe", key)
        launch_us = min(points.values())
        theirs = tokens * (wanted[3] / wanted[4]) / (key[3] / key[4])
        near = min((node for (node,) in points), key=lambda node: abs(node - theirs))
        theirs = near if math.isclose(near, theirs, rel_tol=1e-12) else theirs
        own_us, their_us = (bound(tables.gpu, one, launch_us) for one in (wanted, key))
        us, _ = curve(points, theirs, their_us)
        log_us += share * math.log(us * own_us(tokens) / their_us(theirs))
    return math.exp(log_us)
