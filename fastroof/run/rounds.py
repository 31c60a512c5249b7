"""Micro-batches that keep going round pipeline stages."""

from __future__ import annotations

from fastroof.arrays import Floats

__all__ = ["round_us"]


def round_us(times_us: Floats) -> float:
    """Time of a round: no less than any stage needs for all batches, nor than any batch for all stages."""
    if not times_us.size:
        return 0.0
    # added up in their order, as fastroof_step.h's function does
    return float(max(times_us.cumsum(axis=0)[-1].max(), times_us.cumsum(axis=1)[:, -1].max()))
