"""The largest rate at which something holds: brackets and bisection over whatever was tried before."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from typing import Final, NamedTuple, TypeVar

__all__ = ["LOWEST_SHARE", "Bracket", "bracket", "largest_rate"]

Seen = TypeVar("Seen")

LOWEST_SHARE: Final = 2.0**-12
"""The lowest rate that is tried, of the one that the search begins with: there requests hardly meet."""

CUTS: Final = 2
"""Cuts by a line in which a bracket has to become half as wide."""

STEEPEST: Final = 3.0
"""Excess, in ln, beyond which no line is drawn: waits grow without end where a queue does."""

HALVINGS: Final = 3
"""Halvings before the lowest rate is tried: what does not hold there holds nowhere."""


class Bracket(NamedTuple):
    """Where the largest rate lies."""

    kept: float
    broken: float


def bracket(tried: MutableMapping[float, Seen], holds: Callable[[Seen], bool]) -> Bracket:
    """Bracket the largest rate by what was tried: from below, up to the first that does not hold."""
    kept = 0.0
    for rate in sorted(tried):
        if not holds(tried[rate]):
            return Bracket(kept, rate)
        kept = rate
    return Bracket(kept, math.inf)


def largest_rate(
    seen_at: Callable[[float], Seen],
    holds: Callable[[Seen], bool],
    start: float,
    *,
    tolerance: float,
    tried: MutableMapping[float, Seen],
    highest: float = math.inf,
    excess: Callable[[Seen], float] | None = None,
) -> Bracket:
    """Find the largest rate at which something holds."""
    lowest = start * LOWEST_SHARE
    widths: list[float] = []
    while True:
        found = bracket(tried, holds)
        kept, broken = found
        if kept and broken < math.inf:
            if broken <= kept * (1.0 + tolerance):
                return found
            widths.append(math.log(broken / kept))
            is_slow = len(widths) > CUTS and widths[-1] > widths[-1 - CUTS] / 2.0
            rate = None
            if excess is not None and not is_slow:
                rate = _cut(found, excess(tried[kept]), excess(tried[broken]), tolerance)
            if rate is None:
                # where the lowest rate is kept, the answer is rarely in the middle, and low rates take long
                rate = max(math.sqrt(kept * broken), broken / 4.0)
            if not kept < rate < broken:
                return found
        else:
            outside = _outside(found, start, lowest, highest)
            if outside is None:
                return found
            rate = outside
        tried[rate] = seen_at(rate)


def _cut(found: Bracket, under: float, over: float, tolerance: float) -> float | None:
    """Where a line between both ends of a bracket is 0; None where there is none."""
    if not under < 0.0 < over:
        return None
    under, over = max(under, -STEEPEST), min(over, STEEPEST)
    width, aside = math.log(found.broken / found.kept), 0.45 * math.log1p(tolerance)
    at = width * under / (under - over)
    # beyond what the line says, seen from the end that is further away: then that end comes near
    at += -aside if at > width / 2.0 else aside
    return found.kept * math.exp(min(max(at, aside), width - aside))


def _outside(found: Bracket, start: float, lowest: float, highest: float) -> float | None:
    """What to try next without a bracket; None where there is nothing left."""
    kept, broken = found
    if kept:
        return min(max(2.0 * kept, start), highest) if kept < highest else None
    if broken == math.inf:
        return min(start, highest)
    if broken <= lowest:
        return None
    return broken / 2.0 if broken > start * 0.5**HALVINGS else lowest
