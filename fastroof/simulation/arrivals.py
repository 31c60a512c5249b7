"""When requests of a workload arrive, at a mean rate of one a unit of time."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np

from fastroof.arrays import Floats

__all__ = ["ARRIVALS", "ramped", "unit_arrivals"]

ARRIVALS: Final = ("poisson", "gamma", "constant", "ramp", "closed")
"""What arrivals may be."""


def unit_arrivals(arrivals: str, burstiness: float, count: int, generator: np.random.Generator) -> Floats:
    """Return arrivals at a mean rate of one, the first at 0."""
    if arrivals == "constant":
        return np.arange(count, dtype=np.float64)
    if burstiness == 1.0:
        gaps = generator.standard_exponential(count - 1)
    else:
        gaps = generator.standard_gamma(burstiness, count - 1) / burstiness
    return np.concatenate([[0.0], np.cumsum(gaps)])


def ramped(unit: Floats, rates_per_s: tuple[float, ...]) -> Floats:
    """Bend arrivals at a rate of one to rates that go in straight lines from one to the next."""
    means = np.array([(a + b) / 2 for a, b in pairwise(rates_per_s)])
    part_s = len(unit) / float(means.sum())
    knots = np.concatenate([[0.0], np.cumsum(means * part_s)])
    part = np.minimum(np.searchsorted(knots, unit, side="right") - 1, len(means) - 1)
    rates = np.array(rates_per_s)
    start, slope = rates[part], (rates[part + 1] - rates[part]) / part_s
    # a part may end a rounding error after its knot; the rate then is its last
    above = np.minimum(unit - knots[part], means[part] * part_s)
    root = np.sqrt(np.maximum(start * start + 2 * slope * above, 0.0))
    with np.errstate(invalid="ignore", divide="ignore"):
        within_s = np.where(above > 0, 2 * above / (start + root), 0.0)
    after_s = np.maximum(unit - knots[-1], 0.0) / rates[-1]
    return np.maximum.accumulate(part * part_s + np.minimum(within_s, part_s) + after_s)
