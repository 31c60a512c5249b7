"""Isolated spikes, point by point: dictionaries of points, no arrays."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

Point = tuple[Any, ...]


def neighbours(points: Mapping[Point, float], at: Point, column: int) -> tuple[Point | None, Point | None]:
    """Points at the next smaller and larger value of one column, all others equal."""
    line = sorted(p for p in points if p[:column] + p[column + 1 :] == at[:column] + at[column + 1 :])
    here = line.index(at)
    return (line[here - 1] if here else None), (line[here + 1] if here + 1 < len(line) else None)


def kernel_neighbours(points: Mapping[Point, float], at: Point, column: int, keys: int) -> list[Point | None]:
    """The same sizes in the kernels at the next smaller and larger value of one key."""
    kernels = {p[:keys]: 0.0 for p in points}
    near = neighbours(kernels, at[:keys], column)
    found = [None if kernel is None else (*kernel, *at[keys:]) for kernel in near]
    return [p if p in points else None for p in found]


def ratio(points: Mapping[Point, float], at: Point, axis: int) -> float | None:
    """Latency over that of the slower neighbour; None without a neighbour that has more work."""
    before, after = neighbours(points, at, axis)
    if after is None:
        return None
    return points[at] / max(points[p] for p in (before, after) if p is not None)


def spikes(points: Mapping[Point, float], keys: int) -> dict[Point, tuple[int, Hashable, Hashable]]:
    """Spikes among points (*keys, *sizes): the axis of the largest ratio, and the neighbours along it."""
    found = {}
    for at in points:
        best = 0.0
        for axis in range(keys, len(at)):
            own = ratio(points, at, axis)
            if own is None or own < 3.0 or own <= best:
                continue
            near: list[Point | None] = []
            for column in range(len(at)):
                if column < keys:
                    near += kernel_neighbours(points, at, column, keys)
                elif column != axis:
                    near += neighbours(points, at, column)
            known = [r for p in near if p is not None and (r := ratio(points, p, axis)) is not None]
            if len(known) >= 3 and max(known) < 1.5:
                best = own
                found[at] = (axis - keys, *neighbours(points, at, axis))
    return found
