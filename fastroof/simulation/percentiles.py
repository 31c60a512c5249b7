"""Means and percentiles of requests, exact, and of all gaps between tokens, from a histogram."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from fastroof.arrays import Floats, Longs

__all__ = ["GAP_ERROR", "PERCENTILES", "gap_spread", "gap_values_us", "percentile", "spread"]

PERCENTILES: Final = (50, 90, 95, 99)
"""Percentiles that every answer has, beside the mean."""

MANTISSA_BITS: Final = 7
GAP_ERROR: Final = 2.0 ** -(MANTISSA_BITS + 1)
"""Largest relative error of a percentile of gaps: half the width of a bin, over its lower end."""


def percentile(values: Floats, percent: float) -> float:
    """Return one percentile of some values."""
    if not len(values):
        return math.nan
    place = (len(values) - 1) * (percent / 100.0)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    low, high = np.partition(values, (below, above))[[below, above]].tolist()
    share = place - below
    # the same sum as numpy's, to the last bit; inf less inf would be nan
    if share == 0.0 or low == high:
        return float(low)
    return float(high - (high - low) * (1.0 - share) if share >= 0.5 else low + (high - low) * share)


def spread(values: Floats) -> dict[str, float]:
    """Return the mean and the percentiles of some values, as answers name them."""
    if not len(values):
        return dict.fromkeys(_NAMES, math.nan)
    found: Any = np.percentile(values, PERCENTILES).tolist()
    return dict(zip(_NAMES, (float(values.mean()), *found), strict=True))


_NAMES: Final = ("mean", *(f"p{percent}" for percent in PERCENTILES))


def gap_values_us(num_bins: int, first_exponent: int) -> Floats:
    """Return the middle of each bin of a histogram of gaps, us."""
    per_power = 1 << MANTISSA_BITS
    power, step = np.divmod(np.arange(num_bins), per_power)
    return np.asarray(np.ldexp(1.0 + (step + 0.5) / per_power, power + first_exponent))


def gap_spread(counts: Longs, values: Floats) -> dict[str, float]:
    """Return the mean and the percentiles of what a histogram counts."""
    upto = np.cumsum(counts)
    total = int(upto[-1]) if len(upto) else 0
    if not total:
        return dict.fromkeys(_NAMES, math.nan)
    answers = {"mean": float(counts @ values) / total}
    for percent in PERCENTILES:
        place = (total - 1) * (percent / 100.0)
        below = math.floor(place)
        # the value of rank r is that of the first bin with more than r up to it
        low, high = values[np.searchsorted(upto, (below, min(below + 1, total - 1)), side="right")].tolist()
        answers[f"p{percent}"] = low + (high - low) * (place - below)
    return answers
