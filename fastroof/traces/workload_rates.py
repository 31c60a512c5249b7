"""Rates of drawn requests over time: arrivals at a mean rate, ramps, and rates by the hour."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.checks import is_number, shown
from fastroof.errors import TraceError

LEAST_RATE: Final = 1e-9
MOST_RATE: Final = 1e9
"""Range of given rates other than 0, 1/s: their sums and halves stay finite and above 0."""


def unit_arrivals(arrivals: str, burstiness: float, count: int, generator: np.random.Generator) -> Floats:
    """Return arrivals at a mean rate of 1, the first at 0."""
    if arrivals == "constant":
        return np.arange(count, dtype=np.float64)
    if burstiness == 1.0:
        gaps = generator.standard_exponential(count - 1)
    else:
        gaps = generator.standard_gamma(burstiness, count - 1) / burstiness
    return np.concatenate([[0.0], np.cumsum(gaps)])


def ramped(unit: Floats, rates_per_s: tuple[float, ...]) -> Floats:
    """Map arrivals at rate 1 to piecewise linear rates, by the inverse of the integrated rate."""
    means = np.array([(a + b) / 2 for a, b in pairwise(rates_per_s)])
    part_s = len(unit) / float(means.sum())
    knots = np.concatenate([[0.0], np.cumsum(means * part_s)])
    part = np.minimum(np.searchsorted(knots, unit, side="right") - 1, len(means) - 1)
    rates = np.array(rates_per_s)
    start, slope = rates[part], (rates[part + 1] - rates[part]) / part_s
    # a part may end a rounding error after its knot; its rate is then the last one
    above = np.minimum(unit - knots[part], means[part] * part_s)
    root = np.sqrt(np.maximum(start * start + 2 * slope * above, 0.0))
    with np.errstate(invalid="ignore", divide="ignore"):
        within_s = np.where(above > 0, 2 * above / (start + root), 0.0)
    after_s = np.maximum(unit - knots[-1], 0.0) / rates[-1]
    return np.maximum.accumulate(part * part_s + np.minimum(within_s, part_s) + after_s)


MOST_HOURS: Final = 366 * 24


def by_hours(unit: Floats, rates_per_s: tuple[float, ...]) -> Floats:
    """Map arrivals at rate 1 to rates that are constant over equal parts of the run, of mean 1."""
    part_s = len(unit) / sum(rates_per_s)
    knots = np.concatenate([[0.0], np.cumsum(rates_per_s) * part_s])
    after_s = np.maximum(unit - knots[-1], 0.0) / next(rate for rate in reversed(rates_per_s) if rate)
    arrivals_s: Floats = np.interp(unit, knots, np.arange(len(rates_per_s) + 1) * part_s) + after_s
    return arrivals_s


def _are_rates(values: tuple[Any, ...]) -> bool:
    return all(is_number(rate) and (rate == 0 or LEAST_RATE <= float(rate) <= MOST_RATE) for rate in values)


def checked_ramp(ramp: Any) -> tuple[float, ...]:
    """Return the rates of a ramp."""
    listed = tuple(ramp) if isinstance(ramp, tuple | list) else ()
    fits = len(listed) > 1 and _are_rates(listed)
    # with two neighbouring zeros no request comes, with 0 at the end none ever again
    if not fits or listed[-1] == 0 or any(a == b == 0 for a, b in pairwise(listed)):
        raise TraceError(
            "ramp must be two or more rates in requests/s, such as (2, 20), the last above 0 and no two "
            f"neighbours 0, each 0 or from {LEAST_RATE:g} to {MOST_RATE:g}, got {shown(ramp)}"
        )
    return tuple(float(rate) for rate in listed)


def mean_of_ramp(ramp: tuple[float, ...]) -> float:
    """Return the mean rate of a ramp."""
    return sum((a + b) / 2 for a, b in pairwise(ramp)) / (len(ramp) - 1)


def checked_hourly(rates: Any) -> tuple[float, ...]:
    """Return rates by the hour, of a list or of a file with one each line."""
    listed = _read_rates(rates.removeprefix("file:")) if isinstance(rates, str) else rates
    listed = tuple(listed) if isinstance(listed, tuple | list | np.ndarray) else ()
    if not (0 < len(listed) <= MOST_HOURS and _are_rates(listed) and any(listed)):
        raise TraceError(
            f"hourly must be 1 to {MOST_HOURS:,} rates in requests/s, one each hour, not all 0, each 0 or "
            f"from {LEAST_RATE:g} to {MOST_RATE:g}, or file:PATH with them, got {shown(rates)}"
        )
    return tuple(float(rate) for rate in listed)


def _read_rates(path: str) -> list[float]:
    """Read numbers with spaces, commas, semicolons or line ends between."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return [float(word) for word in re.split(r"[\s,;]+", text.strip())]
    except (OSError, ValueError) as error:
        raise TraceError(
            f"hourly file:{path} must be a text file of requests/s, one each hour: {error!s:.200}"
        ) from None
