"""Bands along m in words: where a table's steps show them, and what a curve takes between measured rows."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping

Gemm = tuple[float, float, float]
MOST_BANDS = 16


class Bands:
    """Ends of bands: some by name up to ``width``, then its multiples."""

    def __init__(self, smaller: list[int], width: int) -> None:
        self.smaller = smaller
        self.width = width

    def is_end(self, m: float) -> bool:
        return m in self.smaller or (m >= self.width and m % self.width == 0)

    def end(self, m: float) -> float:
        """The last row of the band of m."""
        while not self.is_end(m):
            m += 1
        return m

    def is_start(self, m: float) -> bool:
        return self.is_end(m - 1)

    def start(self, m: float) -> float:
        """The first row of the band of m."""
        while m > 1 and not self.is_start(m):
            m -= 1
        return m

    def up_to(self, m: float) -> list[float]:
        """All ends up to m."""
        return [*self.smaller, *range(self.width, int(m) + 1, self.width)]


def row_steps(points: Mapping[Gemm, float]) -> dict[int, float]:
    """Median of t(m + 1) / t(m) of large GEMMs."""
    steps: dict[int, list[float]] = {}
    for (m, n, k), us in points.items():
        if m >= 16 and n * k >= 2**22 and (m + 1, n, k) in points:
            steps.setdefault(int(m), []).append(points[m + 1, n, k] / us)
    return {m: statistics.median(ratios) for m, ratios in sorted(steps.items())}


def curve_of(points: Mapping[Gemm, float], m: float) -> Mapping[Gemm, float]:
    """The points that give the latency at m: its own residue's, where multiples of 4 are faster."""
    step = row_steps(points)
    inner = [row for row in step if row % 64]
    if len(inner) < 3 or statistics.median(step[row] for row in inner) < 1.05:
        return points
    beyond = [row for row in step if row > max(inner)][:3]
    above = 0
    if statistics.median(step[row] for row in beyond) > 1.03 * statistics.median(step[row] for row in inner):
        above = beyond[0]
    return {at: us for at, us in points.items() if at[0] <= above or (at[0] % 4 == 0) == (m % 4 == 0)}


def bands_of(points: Mapping[Gemm, float]) -> Bands | None:
    """The bands that a table of (m, n, k) shows."""
    step = row_steps(points)
    for width in sorted(step, reverse=True):
        smaller = sorted(m for m in step if m < width and step[m] >= 1.1)
        ends = [step[m] for m in step if m % width == 0]
        within = [step[m] for m in step if m > width / 2 and m % width and m not in smaller]
        if len(ends) < 3 or len(ends) < max(step) / width / 2 or statistics.median(ends) < 1.1:
            continue
        if within and all(0.97 <= ratio <= 1.03 for ratio in within):
            return Bands(smaller, width)
    return None


def latency_us(curve: Mapping[float, float], bands: Bands, m: float) -> float:
    """Latency at m, between measured rows of one (n, k)."""
    if m in curve:
        return curve[m]
    below, above = max(x for x in curve if x < m), min(x for x in curve if x > m)

    def line(x0: float, y0: float, x1: float, y1: float) -> float:
        return y0 + (y1 - y0) * (m - x0) / (x1 - x0)

    plain = line(below, curve[below], above, curve[above])
    lowest = min([*bands.smaller, bands.width])
    if above <= lowest:
        return plain
    measured_ends = [x for x in curve if bands.is_end(x)]
    steps = [x for x in measured_ends if x + 1 in curve and x + 1 <= below]
    is_one_band = not bands.is_end(below) and bands.end(below) >= above
    if is_one_band:
        if not (bands.is_start(below) and bands.end(below) == above):
            return plain
        first, end, first_us, end_us = below, above, curve[below], curve[above]
        return falling(first, first_us, end, end_us, m)
    if not steps or not any(x <= below for x in measured_ends) or not any(x >= above for x in measured_ends):
        return plain
    low, high = max(x for x in measured_ends if x <= below), min(x for x in measured_ends if x >= above)
    step_us = max(curve[max(steps) + 1] - curve[max(steps)], 0.0)

    def end_us_at(end: float) -> float:
        if end in curve:
            return curve[end]
        return curve[low] + (curve[high] - curve[low]) * (end - low) / (high - low)

    end = bands.end(m)
    if above - below > MOST_BANDS * bands.width:
        first_end = bands.end(below)
        if m > first_end:
            # on the line of last rows, up to what was measured next or the last row before it
            if bands.is_start(above):
                return end_us_at(m)
            return line(first_end, end_us_at(first_end), above, curve[above])
    start = bands.start(math.ceil(m))
    if below > start:
        # the rest of a band of which an inner row was measured last
        return line(below, curve[below], end, end_us_at(end))
    start_us = curve[start] if start in curve else end_us_at(start - 1) + step_us
    if m == start:
        return start_us
    if above < end:
        knee = end - (end - start + 1) / 4
        if knee >= above:
            return line(start, start_us, above, curve[above])
        knee_us = falling(start, start_us, end, end_us_at(end), knee)
        return line(start, start_us, knee, knee_us) if m < knee else line(knee, knee_us, above, curve[above])
    return falling(start, start_us, end, end_us_at(end), m)


def falling(first: float, first_us: float, end: float, end_us: float, m: float) -> float:
    """Within a band: the excess of its first row is gone at three quarters of it."""
    if first_us <= end_us:
        return first_us + (end_us - first_us) * (m - first) / (end - first)
    knee = end - (end - first + 1) / 4
    return end_us + (first_us - end_us) * max(0.0, 1 - (m - first) / (knee - first))


def bends(curve: Mapping[float, float], bands: Bands) -> dict[float, float]:
    """Latency wherever a curve bends between measured rows: three quarters, ends and first rows of bands."""
    rows = sorted(curve)
    ends = bands.up_to(bands.end(rows[-1]))
    knees = [end - (end - before) / 4 for before, end in itertools.pairwise(ends) if end > before + 1]
    found = {}
    for below, above in itertools.pairwise(rows):
        at = [x for x in (*ends, *(end + 1 for end in ends), *knees) if below < x < above]
        if above - below > MOST_BANDS * bands.width:
            at = [x for x in at if x <= bands.end(below) or x == above - 1 == bands.end(x)]
        found |= {x: latency_us(curve, bands, x) for x in at}
    return found
