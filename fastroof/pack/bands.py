"""Bands along m: kernels that pad m to a tile, found from the steps of their table.

fp8 GEMMs of vLLM and SGLang on Hopper run tiles of 256 rows: ``t(257) / t(256)`` is 1.6 for large n k, and a
partly filled tile costs more than a full one. So a line from a band's first row to its last is too slow in
between, and a line from a first row to the last row of another band is wrong everywhere. Nodes added here let
loops interpolate only. Evidence: fastroof/tables/README.md ("GEMMs in bands").
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Flags, Floats
from fastroof.columns import ORIGIN_INTERPOLATED, ORIGIN_MEASURED

LARGE: Final = 2**22
"""Least n k of the GEMMs that show bands: they take longer than a launch."""

SMALLEST_TILE: Final = 16
"""Fewest rows of a band."""

STEP: Final = 1.1
"""Least median ratio of a band's first row to the row before."""

LEVEL: Final = 0.03
"""Maximum deviation from 1 of the median ratio of two rows within a band."""

FEWEST_STEPS: Final = 3
"""Fewest ends of bands that show a width."""

ALIGNED: Final = 4
"""Kernels need not pad m that are multiples of this."""

RESIDUE: Final = 0.05
"""Least excess over 1 of the median ratio of two rows within a band if kernels pad m."""

LARGE_TILE: Final = 64
"""Rows of the smallest tile that large GEMMs run in: no band ends in between."""

KNEE: Final = 0.75
"""Share of a band after which the excess of its first row is gone.

Of t(129) - t(256) 0.65 to 0.77 is left at m = 160, 0.29 to 0.35 at 192 and 0.02 to 0.04 at 224 (vLLM 0.24.0
on H100 and H200), 0.56 to 0.65, 0.20 to 0.28 and 0.02 (SGLang 0.5.14).
"""

MOST_BANDS: Final = 16
"""Maximum number of bands between two measured m; a wider gap has only the first one and a line after it.

The gap from 4353 to 8192 has 15 bands. The next gap has 32, with steps of 4 % of the latency at its start and
2 % at its end (median for large n k).
"""


class Bands(NamedTuple):
    """Bands end at every multiple of ``width``, and at ``ends`` up to it."""

    width: int
    ends: tuple[int, ...]

    def end(self, m: float) -> int:
        """Return the end of the band that m lies in."""
        if m > self.width:
            return self.width * -int(-m // self.width)
        return self.ends[bisect.bisect_left(self.ends, m)]

    def ends_at(self, m: float) -> bool:
        """Whether m is a band's last row."""
        return self.end(m) == m

    def starts_at(self, m: float) -> bool:
        """Whether m is a band's first row."""
        return m > self.ends[0] and self.ends_at(m - 1)


def _row_steps(m: Floats, n: Floats, k: Floats, latency_us: Floats) -> dict[int, float]:
    """Median of t(m + 1) / t(m) of large GEMMs by m, if both were measured."""
    follows = (m[1:] == m[:-1] + 1) & (n[1:] == n[:-1]) & (k[1:] == k[:-1])
    pairs = np.flatnonzero(follows & (n[1:] * k[1:] >= LARGE) & (m[:-1] >= SMALLEST_TILE))
    ratio = latency_us[pairs + 1] / latency_us[pairs]
    last_rows = np.unique(m[pairs])
    return {int(row): float(np.median(ratio[m[pairs] == row])) for row in last_rows}


def bands_of(m: Floats, n: Floats, k: Floats, latency_us: Floats) -> Bands | None:
    """Find the bands of a table, with the largest width that its steps show; None if there are none."""
    steps = _row_steps(m, n, k, latency_us)
    for width in reversed(steps):
        ends = [step for row, step in steps.items() if row % width == 0]
        smaller = [row for row, step in steps.items() if row < width and step >= STEP]
        within = [
            step for row, step in steps.items() if row % width and row > width / 2 and row not in smaller
        ]
        is_level = bool(within) and max(abs(step - 1.0) for step in within) <= LEVEL
        is_seen = len(ends) >= max(FEWEST_STEPS, max(steps) / width / 2)
        if is_seen and is_level and float(np.median(ends)) >= STEP:
            return Bands(width, (*smaller, width))
    return None


def banded_points(
    bands: Bands, m: Floats, n: Floats, k: Floats, latency_us: Floats
) -> tuple[Floats, Floats, Floats, Floats, Flags]:
    """Add the nodes of bands to a table's points, sorted by k, n and m; return origins too."""
    starts = np.flatnonzero(np.r_[True, (n[1:] != n[:-1]) | (k[1:] != k[:-1])])
    curves = np.split(np.arange(len(m)), starts[1:])
    alike: dict[bytes, list[int]] = {}
    for number, rows in enumerate(curves):
        alike.setdefault(m[rows].tobytes(), []).append(number)
    made: dict[int, tuple[Floats, Floats, Flags]] = {}
    for numbers in alike.values():
        us = np.stack([latency_us[curves[number]] for number in numbers], 1)
        axis, values, is_measured = with_band_nodes(bands, m[curves[numbers[0]]], us)
        flag = np.where(is_measured, ORIGIN_MEASURED, ORIGIN_INTERPOLATED).astype(np.uint8)
        made |= {number: (axis, values[:, i], flag) for i, number in enumerate(numbers)}
    parts = [made[number] for number in range(len(curves))]
    lengths = [len(axis) for axis, _, _ in parts]
    all_m, all_us, flags = (np.concatenate(part) for part in zip(*parts, strict=True))
    return all_m, np.repeat(n[starts], lengths), np.repeat(k[starts], lengths), all_us, flags


def with_band_nodes(bands: Bands, m: Floats, us: Floats) -> tuple[Floats, Floats, Bools]:
    """Add the nodes of bands to curves over the same m."""
    axis, values, measured = [float(m[0])], [us[0]], [True]
    for i in range(len(m) - 1):
        for at, at_us in _gap_nodes(bands, m, us, i):
            axis.append(at)
            values.append(at_us)
            measured.append(False)
        axis.append(float(m[i + 1]))
        values.append(us[i + 1])
        measured.append(True)
    return np.array(axis), np.stack(values), np.array(measured)


def left_out_us(bands: Bands, m: Floats, us: Floats, i: int) -> Floats:
    """Latency at an inner node predicted from the others; shapes as in :func:`with_band_nodes`."""
    others_m, others_us = np.delete(m, i), np.delete(us, i, 0)
    low = (others_m[i - 1], others_us[i - 1])
    for at, at_us in (*_gap_nodes(bands, others_m, others_us, i - 1), (others_m[i], others_us[i])):
        if at >= m[i]:
            return np.asarray(low[1] + (at_us - low[1]) * ((m[i] - low[0]) / (at - low[0])))
        low = (at, at_us)
    raise AssertionError("a left-out node lies between its neighbours")


def residue_start(m: Floats, n: Floats, k: Floats, latency_us: Floats) -> float | None:
    """Find the m above which multiples of 4 have a separate curve; None if one curve fits all m."""
    steps = _row_steps(m, n, k, latency_us)
    inner = [row for row in steps if row % LARGE_TILE]
    if len(inner) < FEWEST_STEPS:
        return None
    within = float(np.median([steps[row] for row in inner]))
    if within < 1.0 + RESIDUE:
        return None
    ends = [row for row in steps if row > inner[-1]][:FEWEST_STEPS]
    has_bands = bool(ends) and float(np.median([steps[row] for row in ends])) > (1.0 + LEVEL) * within
    return float(ends[0]) if has_bands else 0.0


class _Crossing(NamedTuple):
    """Extrapolation of bands whose ends and first rows were not measured."""

    low: float
    low_us: Floats
    high: float
    high_us: Floats
    step_us: Floats

    def end_us(self, at: float) -> Floats:
        """Latency of a band's last row, on the line through the nearest measured ones."""
        return self.low_us + (self.high_us - self.low_us) * ((at - self.low) / (self.high - self.low))

    @classmethod
    def of(cls, bands: Bands, m: Floats, us: Floats, i: int) -> _Crossing | None:
        """Between m[i] and m[i + 1]; None without last rows on both sides and a first row before."""
        ends = np.flatnonzero([bands.ends_at(at) for at in m.tolist()])
        starts = ends[np.isin(m[ends] + 1, m)] + 1
        below, above, steps = ends[ends <= i], ends[ends > i], starts[starts <= i]
        if not len(below) or not len(above) or not len(steps):
            return None
        low, high, start = below[-1], above[0], steps[-1]
        return cls(m[low], us[low], m[high], us[high], np.maximum(us[start] - us[start - 1], 0.0))


def _knee(bands: Bands, start: float, start_us: Floats, end_us: Floats) -> tuple[float, Floats]:
    """Return the m where a first row's excess is gone, and the latency there."""
    end = bands.end(start)
    knee = end - (1.0 - KNEE) * (end - start + 1)
    on_line = start_us + (end_us - start_us) * ((knee - start) / (end - start))
    return knee, np.where(start_us > end_us, end_us, on_line)


def _gap_nodes(bands: Bands, m: Floats, us: Floats, i: int) -> Iterator[tuple[float, Floats]]:
    """Yield the nodes of bands between m[i] and m[i + 1]."""
    at, last = float(m[i]), float(m[i + 1])
    if last == at + 1:
        return
    if not bands.ends_at(at) and bands.end(at) >= last:
        if bands.starts_at(at) and bands.end(at) == last:
            yield _knee(bands, at, us[i], us[i + 1])
        return
    crossing = _Crossing.of(bands, m, us, i)
    if crossing is None:
        return
    at_us, is_wide = us[i], last - at > MOST_BANDS * bands.width
    while True:
        if bands.ends_at(at):
            if is_wide and bands.starts_at(last):
                yield last - 1, crossing.end_us(last - 1)
            if is_wide or at + 1 == last:
                return
            at_us = crossing.end_us(at) + crossing.step_us
            at += 1
            yield at, at_us
        end = bands.end(at)
        end_us = us[i + 1] if end == last else crossing.end_us(end)
        if bands.starts_at(at) and end > at:
            knee, knee_us = _knee(bands, at, at_us, end_us)
            if at < knee < last:
                yield knee, knee_us
        if end >= last:
            return
        if end > at:
            yield end, end_us
        at = end
