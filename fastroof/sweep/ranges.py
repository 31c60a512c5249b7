"""The sizes a spec asks for: one, a list, or a range, expanded to sorted integers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

__all__ = ["MAX_SIZES", "RANGE_FORMS", "expand_sizes", "range_way"]

MAX_SIZES: Final = 2**20
"""Most values that one key may have."""

_STEPS: Final = ("step", "factor", "num")
_SCALES: Final = ("linear", "log2")
RANGE_FORMS: Final = (
    "{start, stop, step}, {start, stop, factor} or {start, stop, num, scale = 'linear' or 'log2'}"
)
_SHOWN: Final = 3


def expand_sizes(value: Any, largest: int) -> tuple[int, ...]:
    """Expand what a spec gives for a size.

    Parameters
    ----------
    value : int, sequence or array of int, or mapping
        One size, a list of sizes, or a range: ``start`` and ``stop``, both included, and one of
        ``step``, ``factor`` (each value times the one before, rounded) and ``num`` (so many values,
        on the scale ``linear`` or ``log2``, rounded).
    largest : int
        Largest size allowed; the smallest is 1.

    Returns
    -------
    tuple of int
        Sorted, each once.

    Raises
    ------
    ValueError
        If a value is no whole number from 1 to ``largest``, there are none, or there are too many.

    Examples
    --------
    >>> expand_sizes({"start": 1, "stop": 20, "factor": 2}, 512)
    (1, 2, 4, 8, 16)
    >>> expand_sizes({"start": 128, "stop": 1024, "num": 4, "scale": "log2"}, 2048)
    (128, 256, 512, 1024)
    """
    if isinstance(value, Mapping):
        return _expand_range(value, largest)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    listed = [value] if isinstance(value, int) else value
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise ValueError(f"got {value!r:.60}, need a whole number, a list of them, or {RANGE_FORMS}")
    if not listed:
        raise ValueError(f"the list is empty, need at least one whole number from 1 to {largest:,}")
    if len(listed) > MAX_SIZES:
        raise ValueError(_too_many(len(listed)))
    wrong = [(i, size) for i, size in enumerate(listed) if not _is_size(size, largest)]
    if wrong:
        some = ", ".join(f"{size!r:.30} at position {i}" for i, size in wrong[:_SHOWN])
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(f"got {some}{more}, need whole numbers from 1 to {largest:,}")
    return tuple(sorted(set(listed)))


def _is_size(value: Any, largest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= largest


def _too_many(count: int) -> str:
    return f"{count:,} values are too many, at most {MAX_SIZES:,}: take a larger step, or a smaller num"


def range_way(given: Mapping[str, Any]) -> str:
    """Return which of ``step``, ``factor`` and ``num`` a range is given by.

    Raises
    ------
    ValueError
        If its keys are not those of a range.
    """
    known = ("start", "stop", *_STEPS, "scale")
    problems = [f"no key {key!r} in a range" for key in given if key not in known]
    problems += [f"{key} is missing" for key in ("start", "stop") if key not in given]
    ways = [key for key in _STEPS if key in given]
    if len(ways) != 1:
        problems.append(f"need one of {', '.join(_STEPS)}, got {' and '.join(ways) or 'none'}")
    if "scale" in given and "num" not in given:
        problems.append("scale goes with num")
    if problems:
        raise ValueError(f"{'; '.join(problems)}: a range is {RANGE_FORMS}")
    return ways[0]


def _expand_range(given: Mapping[str, Any], largest: int) -> tuple[int, ...]:
    way = range_way(given)
    start, stop = given["start"], given["stop"]
    pace = given[way]
    scale = given.get("scale", "linear")
    problems = [
        f"{key} must be a whole number from 1 to {largest:,}, got {given[key]!r:.30}"
        for key in ("start", "stop")
        if not _is_size(given[key], largest)
    ]
    if not problems and start > stop:
        problems.append(f"the range is empty: start {start} is above stop {stop}")
    if way == "factor":
        real = isinstance(pace, int | float) and not isinstance(pace, bool)
        if not real or not 1 < pace <= largest:
            problems.append(f"factor must be a number above 1, and at most {largest:,}, got {pace!r:.30}")
    else:
        least = 2 if way == "num" else 1
        if isinstance(pace, bool) or not isinstance(pace, int) or pace < least:
            problems.append(f"{way} must be a whole number of at least {least}, got {pace!r:.30}")
    if scale not in _SCALES:
        problems.append(f"scale must be {' or '.join(_SCALES)}, got {scale!r:.30}")
    if problems:
        raise ValueError("; ".join(problems))
    return _range_sizes(start, stop, way, pace, scale)


def _range_sizes(start: int, stop: int, way: str, pace: Any, scale: str) -> tuple[int, ...]:
    if way == "step":
        count = (stop - start) // pace + 1
    elif way == "factor":
        count = int(math.log(stop / start) / math.log(pace)) + 2
    else:
        count = pace
    # before anything of that length is made
    if count > MAX_SIZES:
        raise ValueError(_too_many(count))
    if way == "step":
        return tuple(range(start, stop + 1, pace))
    if way == "factor":
        sizes = start * float(pace) ** np.arange(count)
    elif scale == "log2":
        sizes = np.exp2(np.linspace(math.log2(start), math.log2(stop), count))
    else:
        sizes = np.linspace(start, stop, count)
    rounded = np.rint(sizes)
    kept = np.unique(rounded[rounded <= stop].astype(np.int64))
    return tuple(int(size) for size in kept)
