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
    """Where the largest rate lies.

    Attributes
    ----------
    kept : float
        The largest rate that was tried and holds, as do all that were tried below it; 0 where none does.
    broken : float
        The next larger one that was tried, which does not hold; inf where none was.
    """

    kept: float
    broken: float


def bracket(tried: MutableMapping[float, Seen], holds: Callable[[Seen], bool]) -> Bracket:
    """Bracket the largest rate by what was tried: from below, up to the first that does not hold.

    Examples
    --------
    >>> bracket({1.0: True, 4.0: True, 2.0: False}, bool)
    Bracket(kept=1.0, broken=2.0)
    """
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
    """Find the largest rate at which something holds.

    Parameters
    ----------
    seen_at : callable
        What there is to see at a rate.
    holds : callable
        Whether that will do.
    start : float
        The rate to begin with, above 0; nothing below :data:`LOWEST_SHARE` of it is tried.
    tolerance : float
        How far apart the ends may be in the end, relative.
    tried : mutable mapping of float to what is seen
        What was seen at rates before; what is tried is added. What is there is not tried again.
    highest : float, optional
        No higher rate is tried.
    excess : callable, optional
        By how much something misses, below 0 where it holds: where that is known at both ends of a bracket,
        the next rate is where a line between them says that it is 0. It changes which rates are tried, and
        not what is said of them.

    Returns
    -------
    Bracket
        ``broken <= kept * (1 + tolerance)``, or one of both ends is that of all rates.

    Notes
    -----
    A percentile need not rise with the rate: other requests meet. So the answer is not the largest rate of
    all that hold, but the largest tried below which no tried one fails; a rate is halved or doubled until
    there is a bracket, which is cut where the excess is about 0, a little to either side so that both ends
    come near, or else at its geometric mean: always, where two cuts have not made it half as wide. The lower
    end is a rate that does hold.

    Examples
    --------
    >>> found = largest_rate(lambda rate: 1.0 / (10.0 - rate), lambda wait: 0 < wait < 0.5, 6.0,
    ...                      tolerance=0.01, tried={})
    >>> 7.9 < found.kept <= 8.0 < found.broken < 8.1
    True
    """
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
