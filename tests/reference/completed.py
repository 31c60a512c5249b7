"""Ratios of your own rows to another campaign's, in plain loops."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Sizes = Sequence[float]


def cell(sizes: Sizes) -> tuple[float, ...]:
    """Half octaves in which sizes lie."""
    return tuple(round(2.0 * math.log2(size)) / 2.0 for size in sizes)


def naive_ratio(known: Iterable[tuple[Sizes, float]], at: Sizes) -> float:
    """Mean of the known ratios near some sizes, weighted by a normal density 0.7 octaves wide."""
    by_cell: dict[tuple[float, ...], list[float]] = {}
    for sizes, ratio in known:
        by_cell.setdefault(cell(sizes), []).append(math.log(ratio))
    weights, total = 0.0, 0.0
    for place, log_ratios in by_cell.items():
        square = sum((a - b) ** 2 for a, b in zip(place, cell(at), strict=True))
        weight = math.exp(-square / (2.0 * 0.7**2))
        weights += weight
        total += weight * sum(log_ratios) / len(log_ratios)
    return math.exp(total / weights)
