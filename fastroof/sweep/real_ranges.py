"""Real numbers that a spec asks for: one, a list, or a range, expanded to a sorted tuple."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastroof.sweep.ranges import MAX_SIZES, RANGE_FORMS, range_way

__all__ = ["expand_reals"]


def expand_reals(value: Any, least: float, largest: float, *, above: bool = False) -> tuple[float, ...]:
    """Expand what a spec gives for a real number, as :func:`~fastroof.sweep.ranges.expand_sizes` for a size.

    Parameters
    ----------
    value : number, sequence or mapping
        One, a list, or a range: ``start`` and ``stop``, and one of ``step``, ``factor`` and ``num``.
    least, largest : float
        What is allowed.
    above : bool
        Whether it has to be more than ``least``.

    Returns
    -------
    tuple of float
        Sorted, each once.

    Raises
    ------
    ValueError
        If a value is not allowed, there are none, or there are too many.

    Examples
    --------
    >>> expand_reals({"start": 0, "stop": 1, "num": 5}, 0, 1)
    (0.0, 0.25, 0.5, 0.75, 1.0)
    """
    allowed = f"numbers {'above' if above else 'from'} {least:g} {'up ' if above else ''}to {largest:,g}"

    def fits(number: Any) -> bool:
        real = isinstance(number, int | float) and not isinstance(number, bool)
        return real and least <= number <= largest and not (above and number == least)

    if isinstance(value, Mapping):
        return _expand_range(value, fits, allowed)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    numbers = [value] if isinstance(value, int | float) else value
    if not isinstance(numbers, Sequence) or isinstance(numbers, str):
        raise ValueError(f"got {value!r:.60}, need {allowed}: one, a list of them, or {RANGE_FORMS}")
    if not numbers:
        raise ValueError(f"the list is empty, need at least one of {allowed}")
    if len(numbers) > MAX_SIZES:
        raise ValueError(f"{len(numbers):,} values are too many, at most {MAX_SIZES:,}")
    wrong = [f"{number!r:.30} at position {i}" for i, number in enumerate(numbers) if not fits(number)]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"got {', '.join(wrong[:3])}{more}, need {allowed}")
    return tuple(sorted({float(number) for number in numbers}))


def _expand_range(given: Mapping[str, Any], fits: Any, allowed: str) -> tuple[float, ...]:
    way = range_way(given)
    start, stop = given["start"], given["stop"]
    pace, scale = given[way], given.get("scale", "linear")
    problems = [
        f"{key} must be one of {allowed}, got {given[key]!r:.30}"
        for key in ("start", "stop")
        if not fits(given[key])
    ]
    if not problems and start > stop:
        problems.append(f"the range is empty: start {start} is above stop {stop}")
    is_number = isinstance(pace, int | float) and not isinstance(pace, bool) and math.isfinite(pace)
    slowest = {"step": 0, "factor": 1, "num": 1}[way]
    if not is_number or pace <= slowest or (way == "num" and not isinstance(pace, int)):
        kind = "a whole number" if way == "num" else "a number"
        problems.append(f"{way} must be {kind} above {slowest}, got {pace!r:.30}")
    if scale not in ("linear", "log2"):
        problems.append(f"scale must be linear or log2, got {scale!r:.30}")
    if not problems and start == 0 and (way == "factor" or scale == "log2"):
        problems.append(f"{way} cannot start at 0: start above it, or take a linear scale")
    if problems:
        raise ValueError("; ".join(problems))
    if way == "step":
        count = math.floor((stop - start) / pace * (1 + 1e-12)) + 1
    elif way == "factor":
        count = math.floor(math.log(stop / start) / math.log(pace) * (1 + 1e-12)) + 1
    else:
        count = pace
    if count > MAX_SIZES:
        raise ValueError(f"{count:,} values are too many, at most {MAX_SIZES:,}: take a larger step")
    if way == "step":
        numbers = start + pace * np.arange(count)
    elif way == "factor":
        numbers = start * float(pace) ** np.arange(count)
    elif scale == "log2":
        numbers = np.exp2(np.linspace(math.log2(start), math.log2(stop), count))
    else:
        numbers = np.linspace(start, stop, count)
    return tuple(float(number) for number in np.unique(np.minimum(numbers, stop)))
