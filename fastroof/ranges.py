"""Numbers given in a file as one, a list or a range, expanded to a sorted tuple."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fastroof.checks import is_number, is_whole_number, shown

MAX_NUMBERS: Final = 2**20
"""Maximum number of values of one key."""

_PACES: Final = ("step", "factor", "num")
_SCALES: Final = ("linear", "log2")
RANGE_FORMS: Final = (
    "{start, stop, step}, {start, stop, factor} or {start, stop, num, scale = 'linear' or 'log2'}"
)
_SHOWN: Final = 3


class _Allowed(NamedTuple):
    """Valid ranges of numbers, and how messages describe them."""

    need: str
    each: str
    end: str
    fits: Callable[[Any], bool]
    are_whole: bool
    most: int


def expand_sizes(value: Any, largest: int, least: int = 1, most: int = MAX_NUMBERS) -> tuple[int, ...]:
    """Expand a size, a list of sizes or a range to a sorted tuple."""
    allowed = _Allowed(
        need="a whole number, a list of them,",
        each=f"whole numbers from {least} to {largest:,}",
        end=f"a whole number from {least} to {largest:,}",
        fits=lambda number: is_whole_number(number, least, largest),
        are_whole=True,
        most=most,
    )
    if not isinstance(value, Mapping):
        return tuple(sorted({int(size) for size in _listed(value, allowed)}))
    stop, numbers = _spaced(value, allowed)
    rounded = np.rint(numbers)
    return tuple(np.unique(rounded[rounded <= stop].astype(np.int64)).tolist())


def expand_reals(value: Any, least: float, largest: float, *, above: bool = False) -> tuple[float, ...]:
    """Expand a real number, a list of them or a range to a sorted tuple."""
    text = f"numbers {'above' if above else 'from'} {least:g} {'up ' if above else ''}to {largest:,g}"
    allowed = _Allowed(
        need=f"{text}: one, a list of them,",
        each=text,
        end=f"one of {text}",
        fits=lambda number: (
            is_number(number) and least <= number <= largest and not (above and number == least)
        ),
        are_whole=False,
        most=MAX_NUMBERS,
    )
    if not isinstance(value, Mapping):
        return tuple(sorted({float(number) for number in _listed(value, allowed)}))
    stop, numbers = _spaced(value, allowed)
    return tuple(np.unique(np.minimum(numbers, stop)).tolist())


def _listed(value: Any, allowed: _Allowed) -> Sequence[Any]:
    """Return one number or a list of them as a list; raise if any is not allowed."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    numbers = [value] if isinstance(value, int | float) else value
    if not isinstance(numbers, Sequence) or isinstance(numbers, str):
        raise ValueError(f"got {shown(value)}, need {allowed.need} or {RANGE_FORMS}")
    if not numbers:
        raise ValueError(f"the list is empty, need at least one of {allowed.each}")
    if len(numbers) > allowed.most:
        raise ValueError(_too_many(len(numbers), allowed))
    wrong = [(i, number) for i, number in enumerate(numbers) if not allowed.fits(number)]
    if wrong:
        some = ", ".join(f"{shown(number, 30)} at position {i}" for i, number in wrong[:_SHOWN])
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(f"got {some}{more}, need {allowed.each}")
    return numbers


def _spaced(given: Mapping[str, Any], allowed: _Allowed) -> tuple[Any, npt.NDArray[np.float64]]:
    """Return a range's stop and its numbers; the last may exceed the stop by rounding."""
    way = _pace_key(given)
    start, stop = given["start"], given["stop"]
    pace, scale = given[way], given.get("scale", "linear")
    problems = [
        f"{key} must be {allowed.end}, got {shown(given[key], 30)}"
        for key in ("start", "stop")
        if not allowed.fits(given[key])
    ]
    if not problems and start > stop:
        problems.append(f"the range is empty: start {start} is above stop {stop}")
    if way == "num" or (way == "step" and allowed.are_whole):
        fewest = 2 if way == "num" else 1
        if not is_whole_number(pace, fewest):
            problems.append(f"{way} must be a whole number of at least {fewest}, got {shown(pace, 30)}")
    else:
        slowest = 1 if way == "factor" else 0
        if not is_number(pace) or pace <= slowest:
            problems.append(f"{way} must be a number above {slowest}, got {shown(pace, 30)}")
    if scale not in _SCALES:
        problems.append(f"scale must be {' or '.join(_SCALES)}, got {shown(scale, 30)}")
    if not problems and start == 0 and (way == "factor" or scale == "log2"):
        problems.append(f"{way} cannot start at 0: start above 0, or use a linear scale")
    if problems:
        raise ValueError("; ".join(problems))
    if way == "num":
        count = int(pace)
    elif way == "factor":
        # one more for sizes: rounding may bring it down to the stop
        count = math.floor(math.log(stop / start) / math.log(pace) * (1 + 1e-12)) + 1 + allowed.are_whole
    elif allowed.are_whole:
        count = (stop - start) // pace + 1
    else:
        count = math.floor((stop - start) / pace * (1 + 1e-12)) + 1
    # checked before an array of that length is allocated
    if count > allowed.most:
        raise ValueError(_too_many(count, allowed))
    if way == "step":
        return stop, start + pace * np.arange(count, dtype=np.float64)
    if way == "factor":
        return stop, start * float(pace) ** np.arange(count)
    if scale == "log2":
        return stop, np.exp2(np.linspace(math.log2(start), math.log2(stop), count))
    return stop, np.linspace(start, stop, count)


def _pace_key(given: Mapping[str, Any]) -> str:
    """Return which of ``step``, ``factor`` and ``num`` spaces a range."""
    known = ("start", "stop", *_PACES, "scale")
    problems = [f"unknown key {key!r}" for key in given if key not in known]
    problems += [f"{key} is missing" for key in ("start", "stop") if key not in given]
    ways = [key for key in _PACES if key in given]
    if len(ways) != 1:
        problems.append(f"need one of {', '.join(_PACES)}, got {' and '.join(ways) or 'none'}")
    if "scale" in given and "num" not in given:
        problems.append("scale needs num")
    if problems:
        raise ValueError(f"{'; '.join(problems)}: a range is {RANGE_FORMS}")
    return ways[0]


def _too_many(count: int, allowed: _Allowed) -> str:
    return f"{count:,} values are too many, at most {allowed.most:,}: use a larger step or a smaller num"
