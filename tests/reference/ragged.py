"""Naive lookups of ragged tables: one point at a time, rows within rows, over a dictionary of points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.reference.lookups import EXTRAPOLATED, INTERPOLATED, MEASURED, Answer, Point, Table, around
from tests.reference.lookups import below as carried_below

Work = Callable[..., float]
"""B less its launch floor, us."""


def ragged(points: Table, work: Work, at: Point, segment: Callable[..., Any] | None = None) -> Answer:
    """Latency at ``at``, and how it was made."""
    launch_us = min(points.values())

    def below(start: Point, rest: Point) -> Answer:
        """Latency at the coordinates ``rest`` below the node ``start`` of the first axes."""
        if not rest:
            return points[start], MEASURED
        depth = len(start)
        x, inner = rest[0], rest[1:]
        nodes = sorted({p[depth] for p in points if p[:depth] == start})
        near = around(nodes, x)
        if len(near) == 2 and segment is not None:
            here = segment(*start, x, *inner)
            alike = [n for n in near if segment(*start, n, *inner) == here]
            near = tuple(alike) if len(alike) == 1 else near
        ends = [below((*start, n), inner) for n in near]
        bounds = [work(*start, n, *inner) for n in near]
        bound = work(*start, x, *inner)
        if near == (x,):
            return ends[0]
        if len(near) == 1:
            held_us = ends[0][0] * ((launch_us + bound) / (launch_us + bounds[0]))
            if x < nodes[0]:
                line = [
                    (below((*start, n), inner)[0], launch_us + work(*start, n, *inner)) for n in nodes[:3]
                ]
                held_us = carried_below(held_us, launch_us + bound, nodes[0], line, launch_us)
            return held_us, EXTRAPOLATED
        rise = bounds[1] - bounds[0]
        weight = (bound - bounds[0]) / rise if rise > 0 else (x - near[0]) / (near[1] - near[0])
        us = ends[0][0] + (ends[1][0] - ends[0][0]) * weight
        return us, max(ends[0][1], ends[1][1], INTERPOLATED)

    return below((), at)
