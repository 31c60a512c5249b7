"""Local errors of a table, point by point: dictionaries of sizes, no arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

Sizes = tuple[int, ...]
CLIP = 0.35
NORMAL_80 = 1.2816


def axes_of(points: Mapping[Sizes, float]) -> list[list[int]]:
    """Measured values of each size, sorted."""
    return [sorted(set(values)) for values in zip(*points, strict=True)]


def left_out(points: Mapping[Sizes, float], bound: Callable[..., float], axis: int) -> dict[Sizes, float]:
    """ln error of each point predicted from the nearest measured one on either side along an axis."""
    errors = {}
    for at, us in points.items():
        line = {p[axis]: p for p in points if p[:axis] + p[axis + 1 :] == at[:axis] + at[axis + 1 :]}
        below, above = [x for x in line if x < at[axis]], [x for x in line if x > at[axis]]
        if below and above:
            low, high = line[max(below)], line[min(above)]
            weight = (bound(*at) - bound(*low)) / (bound(*high) - bound(*low))
            guess = points[low] + (points[high] - points[low]) * weight
            errors[at] = max(-CLIP, min(CLIP, math.log(guess / us)))
    return errors


def _near(
    errors: Mapping[Sizes, float], axis: int, nodes: list[int], at: Sizes, places: range, left: int | None
) -> list[float]:
    """Errors at some places of the line through a point, without one of them."""
    wanted = [nodes[i] for i in places if 0 <= i < len(nodes) and i != left]
    found = [(*at[:axis], x, *at[axis + 1 :]) for x in wanted]
    return [errors[p] for p in found if p in errors]


def _blend(local: list[float], whole: float) -> float:
    """Half the mean square of the surroundings, half that of the table."""
    return 0.5 * (sum(e * e for e in local) / len(local) + whole) if local else whole


def mean_square(errors: Mapping[Sizes, float]) -> float:
    """Over a whole table; 0 if it has none."""
    return sum(e * e for e in errors.values()) / len(errors) if errors else 0.0


def ratios(points: Mapping[Sizes, float], bound: Callable[..., float]) -> list[float]:
    """Each error over the scale that its neighbours give it."""
    found = []
    for axis, nodes in enumerate(axes_of(points)):
        errors = left_out(points, bound, axis)
        for at, error in errors.items():
            here = nodes.index(at[axis])
            local = _near(errors, axis, nodes, at, range(here - 2, here + 3), here)
            found.append(abs(error) / math.sqrt(_blend(local, mean_square(errors))))
    return found


def bracket_error(
    points: Mapping[Sizes, float], bound: Callable[..., float], axis: int, at: Sizes, factor: float
) -> float:
    """Relative standard error in the bracket above a node, along one axis."""
    nodes = axes_of(points)[axis]
    errors = left_out(points, bound, axis)
    here = nodes.index(at[axis])
    local = _near(errors, axis, nodes, at, range(here - 1, here + 3), None)
    return math.sqrt(_blend(local, mean_square(errors))) * factor / NORMAL_80
