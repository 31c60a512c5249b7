"""Naive lookups: plain Python over dictionaries of measured points.

A table is a dict from a point's sizes to its latency in us. Inside the measured range latency is
interpolated between the surrounding points, linearly in B = t_launch + flops/peak + bytes/bandwidth.
Outside, a measured point is *carried* to where it is needed: by holding latency / B, or, for decode
attention, by its lines. Every function answers (latency_us, origin).
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.reference import bands

Point = tuple[float, ...]
Table = dict[Point, float]
Answer = tuple[float, int]
US = 1e6
WIDTH = {"bf16": 2, "fp8": 1, "fp8_block": 1}
MEASURED, INTERPOLATED, EXTRAPOLATED, BORROWED, MODELLED = range(5)


def median_points(sizes: Iterable[Sequence[float]], latency_us: Iterable[float]) -> Table:
    """Collect rows into a table; of equal points the median."""
    found: dict[Point, list[float]] = {}
    for point, us in zip(sizes, latency_us, strict=True):
        found.setdefault(tuple(float(s) for s in point), []).append(float(us))
    return {point: statistics.median(times) for point, times in found.items()}


def points_of(tables: Any, operator: str, key: tuple[Any, ...]) -> Table:
    """Points of one key of measured tables as they are served, their axes in the schema's order."""
    measured, rows = tables.table(operator), tables.groups(operator)[key]
    axes = [measured.columns[a.name][rows].tolist() for a in measured.schema.axes]
    latency_us = tables.spike_free_rows(measured).latency_us[rows]
    return median_points(zip(*axes, strict=True), latency_us.tolist())


def around(nodes: Sequence[float], x: float) -> tuple[float, ...]:
    """Return the node at x, the two nodes around it, or the outermost one."""
    if x in nodes:
        return (x,)
    above = bisect_right(nodes, x)
    return tuple(nodes[max(0, above - 1) : above + 1])


def between(low: Answer, high: Answer, weight: float) -> Answer:
    """Linear interpolation of two answers."""
    return low[0] + (high[0] - low[0]) * weight, max(low[1], high[1], INTERPOLATED)


# B of the operators, us


def gemm_bound(gpu: Any, dtype: str, t_launch_us: float) -> Callable[[float, float, float], float]:
    """B of a GEMM: both inputs in its dtype, the output in bf16."""

    def bound(m: float, n: float, k: float) -> float:
        moved = WIDTH[dtype] * (m * k + n * k) + 2 * m * n
        return t_launch_us + US * (2 * m * n * k / gpu.peak(dtype) + moved / gpu.hbm_bytes_per_s)

    return bound


def decode_work(gpu: Any, heads: Any) -> Callable[[float, float], tuple[float, float]]:
    """FLOPs and bytes of decode attention, as us at the peak and at the bandwidth."""
    kv_dtype, nh, nkv, dh = heads

    def work(batch: float, kv_len: float) -> tuple[float, float]:
        moved = 2 * 2 * nh * dh * batch + 2 * WIDTH[kv_dtype] * nkv * dh * kv_len * batch
        return (
            US * 4 * nh * dh * kv_len * batch / gpu.peak("bf16"),
            US * moved / gpu.hbm_bytes_per_s,
        )

    return work


def prefill_work(gpu: Any, heads: Any) -> Callable[[float, float], tuple[float, float]]:
    """FLOPs and bytes of causal attention without a prefix, as us at the peak and at the bandwidth."""
    kv_dtype, nh, nkv, dh = heads

    def work(batch: float, q_len: float) -> tuple[float, float]:
        moved = (2 * 2 * nh + 2 * WIDTH[kv_dtype] * nkv) * dh * q_len * batch
        return (
            US * 4 * nh * dh * (q_len * (q_len + 1) / 2) * batch / gpu.peak("bf16"),
            US * moved / gpu.hbm_bytes_per_s,
        )

    return work


# Curves: one axis


def below(held_us: float, to_us: float, size: float, nodes: Sequence[Point], launch_us: float) -> float:
    """Latency below the first node, where B is ``to_us``, from (latency, B) of the nodes there and above."""
    if size <= 2:
        return held_us
    (us, bound), *others = nodes[:3]
    slopes = [us / bound] + [
        max(0.0, (other - us) / (high - bound)) for other, high in others if high > bound
    ]
    slope = [slopes[0], slopes[-1], statistics.median(slopes)][len(slopes) - 1]
    work_us = max(bound - launch_us, 0.0)
    if work_us > 0.0:
        slope = min(slope, max(us - 1.5, 0.0) / work_us)
    return us + slope * (to_us - bound)


def curve(points: Table, x: float, bound: Callable[[float], float]) -> Answer:
    """All-reduce against message bytes, MoE against tokens: latency / B is held above."""
    nodes = sorted(p[0] for p in points)
    near = around(nodes, x)
    if near == (x,):
        return points[near], MEASURED
    if len(near) == 1:
        held_us = points[near] * bound(x) / bound(near[0])
        if x < near[0]:
            line = [(points[node,], bound(node)) for node in nodes]
            held_us = below(held_us, bound(x), near[0], line, min(points.values()))
        return held_us, EXTRAPOLATED
    low, high = near
    weight = (bound(x) - bound(low)) / (bound(high) - bound(low))
    return between((points[low,], MEASURED), (points[high,], MEASURED), weight)


# GEMM: n, then k, at each measured m, then m. Pairs (n, k) may be scattered.


def gemm_with_bands(points: Table) -> tuple[Table, frozenset[Point]]:
    """Points (m, n, k) with those that bands along m add, and which these are."""
    found = bands.bands_of(points)
    if found is None:
        return points, frozenset()
    curves: dict[Point, dict[float, float]] = {}
    for (m, n, k), us in points.items():
        curves.setdefault((n, k), {})[m] = us
    added = {(m, n, k): us for (n, k), curve in curves.items() for m, us in bands.bends(curve, found).items()}
    return points | added, frozenset(added)


FAR = 2.0**40
"""Beyond every valid size."""

CURVES: dict[int, tuple[Table, dict[Point, list[float]]]] = {}
"""Tables and the measured m of each of their (n, k): sorting a table takes longer than a lookup in it."""


def curves_of(points: Table) -> dict[Point, list[float]]:
    if id(points) not in CURVES:
        curves: dict[Point, list[float]] = {}
        for pm, pn, pk in sorted(points):
            curves.setdefault((pn, pk), []).append(pm)
        CURVES[id(points)] = points, curves
    return CURVES[id(points)][1]


def gemm(
    points: Table,
    bound: Callable[..., float],
    m: float,
    n: float,
    k: float,
    added: frozenset[Point] = frozenset(),
) -> Answer:
    """Latency of an m x n x k GEMM out of points (m, n, k), of which some were added and not measured.

    Every axis has a node at 0, carried from the first ones, and one at FAR, where latency / B is held.
    """
    curves = curves_of(points)

    @functools.cache
    def measured(start: Point) -> list[float]:
        """Sizes of the next axis below a node: k, n of a k, or m of both."""
        if not start:
            return sorted({pk for _, pk in curves})
        pk = edge_of(measured(()), start[0])
        widths = sorted(pn for pn, other in curves if other == pk)
        return curves[edge_of(widths, start[1]), pk] if len(start) == 2 else widths

    def edge_of(nodes: Sequence[float], x: float) -> float:
        return nodes[0] if x == 0.0 else nodes[-1] if x == FAR else x

    def value(start: Point, rest: Point) -> Answer:
        if rest:
            low, *high = around((0.0, *measured(start), FAR), rest[0])
            first = value((*start, low), rest[1:])
            if not high:
                return first
            return between(first, value((*start, high[0]), rest[1:]), (rest[0] - low) / (high[0] - low))
        outer = [depth for depth, x in enumerate(start) if x in (0.0, FAR)]
        if not outer:
            point = start[::-1]
            return points[point], INTERPOLATED if point in added else MEASURED
        before, to, after = start[: outer[0]], start[outer[0]], start[outer[0] + 1 :]
        nodes = measured(before)
        line = [
            (value((*before, x), after)[0], bound(*(*before, x, *after)[::-1]))
            for x in (nodes[:3] if to == 0.0 else nodes[-1:])
        ]
        us, edge_bound = line[0 if to == 0.0 else -1]
        held_us, to_us = us * bound(*start[::-1]) / edge_bound, bound(*start[::-1])
        return below(held_us, to_us, nodes[0], line, bound(0, 0, 0)) if to == 0.0 else held_us, EXTRAPOLATED

    return value((), (k, n, m))


# Attention: batch x kv_len, or batch x q_len


class Attention:
    """An attention table of one head shape, its holes filled when they are met.

    ``is_decode`` chooses how it goes on past its nodes: decode by its lines, prefill holds latency / B.
    """

    def __init__(self, points: Table, work: Callable[..., tuple[float, float]], is_decode: bool) -> None:
        self.points = points
        self.work = work
        self.is_decode = is_decode
        self.t_launch_us = min(points.values())
        self.batches = sorted({b for b, _ in points})
        self.lengths = sorted({x for _, x in points})

    def bound(self, batch: float, x: float) -> float:
        """B, us."""
        return self.t_launch_us + sum(self.work(batch, x))

    def carried(self, us: float, origin: Point, to: Point) -> float:
        """Latency at ``to`` from that at ``origin``, which is larger where decode is carried."""
        if origin == to:
            return us
        if self.is_decode:
            return max(us + self.bound(*to) - self.bound(*origin), self.t_launch_us)
        return us * self.bound(*to) / self.bound(*origin)

    def continued(self, line: list[tuple[Point, float]], to: Point) -> float:
        """Decode latency beyond the last point of a line: so many times what B adds from there on."""
        (first, first_us), (last, last_us) = line[0], line[-1]
        slope = 1.0
        if len(line) > 1:
            slope = (last_us - first_us) / (self.bound(*last) - self.bound(*first))
            if first[0] == last[0]:
                slope = min((1 + slope) / 2, last_us / self.bound(*last))
        return last_us + max(1.0, slope) * (self.bound(*to) - self.bound(*last))

    def node(self, batch: float, x: float) -> Answer:
        """Latency at a node: measured, a filled hole, or one of the outer nodes of size 0 and FAR."""
        if batch in (0.0, FAR):
            line = [((b, x), self.node(b, x)[0]) for b in self.batches]
        elif x in (0.0, FAR):
            line = [((batch, length), self.node(batch, length)[0]) for length in self.lengths]
        elif (batch, x) in self.points:
            return self.points[batch, x], MEASURED
        else:
            return self.filled(batch, x), EXTRAPOLATED
        if batch == FAR or (batch != 0.0 and x == FAR):
            if self.is_decode:
                return self.continued(line, (batch, x)), EXTRAPOLATED
            return self.carried(line[-1][1], line[-1][0], (batch, x)), EXTRAPOLATED
        return self.below(line, (batch, x)), EXTRAPOLATED

    def below(self, line: list[tuple[Point, float]], to: Point) -> float:
        """Latency below the first node of a line along one axis."""
        (first, us), nodes = line[0], [(us, self.bound(*point)) for point, us in line]
        size = next(a for a, b in zip(first, to, strict=True) if a != b)
        return below(self.carried(us, first, to), self.bound(*to), size, nodes, self.t_launch_us)

    def filled(self, batch: float, x: float) -> float:
        """Latency in a hole: between measured neighbours on one line, else carried from the nearest."""
        here = (batch, x)
        lines = {
            "batch": sorted(p for p in self.points if p[1] == x),
            "length": sorted(p for p in self.points if p[0] == batch),
        }
        below = {name: [p for p in line if p < here] for name, line in lines.items()}
        above = {name: [p for p in line if p > here] for name, line in lines.items()}
        for name in ("length", "batch"):
            if below[name] and above[name]:
                low, high = below[name][-1], above[name][0]
                weight = (self.bound(*here) - self.bound(*low)) / (self.bound(*high) - self.bound(*low))
                return self.points[low] + (self.points[high] - self.points[low]) * weight
        candidates = []
        for name in lines:
            if below[name] and self.is_decode:
                candidates.append(self.continued([(p, self.points[p]) for p in below[name]], here))
            elif below[name]:
                candidates.append(self.carried(self.points[below[name][-1]], below[name][-1], here))
            elif above[name]:
                candidates.append(self.below([(p, self.points[p]) for p in above[name]], here))
        if not self.is_decode:
            return candidates[0]
        smaller = [self.points[below[name][-1]] for name in lines if below[name]]
        return max([sum(candidates) / len(candidates), *smaller])

    def latency(self, batch: float, x: float) -> Answer:
        """Latency at (batch, x): the nodes around it, each carried to it where it lies beyond them."""
        rows = self._sides(self.batches, batch)
        columns = self._sides(self.lengths, x)

        def corner(row: tuple[float, float], column: tuple[float, float]) -> Answer:
            (b, to_b), (c, to_c) = row, column
            us, origin = self.node(b, c)
            return self.carried(us, (b, c), (to_b, to_c)), origin if (b, c) == (to_b, to_c) else EXTRAPOLATED

        along = []
        for row in rows:
            ends = [corner(row, column) for column in columns]
            if len(ends) == 1:
                along.append(ends[0])
                continue
            (x0, _), (x1, _) = columns
            along.append(between(*ends, self._weight(x0, x1, x)))
        if len(along) == 1:
            return along[0]
        (b0, _), (b1, _) = rows
        return between(*along, (batch - b0) / (b1 - b0))

    def _sides(self, nodes: list[float], x: float) -> list[tuple[float, float]]:
        near = around(nodes, x)
        if len(near) == 2 or near == (x,):
            return [(node, node) for node in near]
        if x < near[0]:
            return [(0.0, 0.0), (near[0], near[0])]
        return [(near[0], near[0]), (FAR, FAR)] if self.is_decode else [(near[0], x)]

    def _weight(self, x0: float, x1: float, x: float) -> float:
        """(B(x) - B(x0)) / (B(x1) - B(x0)): the same for every batch. B has no digits to lose here."""
        square, slope = self._polynomial()
        return ((x - x0) * (square * (x + x0) + slope)) / ((x1 - x0) * (square * (x1 + x0) + slope))

    def _polynomial(self) -> tuple[float, float]:
        zero, one, two = (sum(self.work(1.0, x)) for x in (0.0, 1.0, 2.0))
        square = 0.0 if self.is_decode else ((two - one) - (one - zero)) / 2
        return square, (one - zero) - square

    def longest_ratio(self) -> float:
        """Latency / B of the longest measured sequence at the smallest batch that has it, at least 1."""
        longest = (min(b for b, x in self.points if x == self.lengths[-1]), self.lengths[-1])
        return max(1.0, self.points[longest] / self.bound(*longest))


def prefix_us(gpu: Any, heads: Any, ratio: float, pairs: float, tokens: float) -> float:
    """Price of a prefix: ratio x its roofline, for sums of q x ctx and of ctx over the sequences."""
    kv_dtype, nh, nkv, dh = heads
    compute = 4 * nh * dh * pairs / gpu.peak("bf16")
    return ratio * US * (compute + 2 * WIDTH[kv_dtype] * nkv * dh * tokens / gpu.hbm_bytes_per_s)


# The other methods: they keep MFU, that is work / latency


def linear_mfu(
    points: Table, nodes: Callable[[Point], float], work: Callable[..., float], at: Point
) -> float:
    """Interpolate work / latency linearly along every axis of a full grid, held outside it."""
    if at in points:
        return points[at]
    axes = [sorted({p[i] for p in points}) for i in range(len(at))]
    inside = [min(max(x, axis[0]), axis[-1]) for x, axis in zip(at, axes, strict=True)]
    near = [around(axis, x) for x, axis in zip(inside, axes, strict=True)]
    rate = 0.0
    for corner in itertools.product(*near):
        weight = 1.0
        for x, c, ends in zip(inside, corner, near, strict=True):
            if len(ends) == 2:
                share = (x - ends[0]) / (ends[1] - ends[0])
                weight *= share if c == ends[1] else 1.0 - share
        rate += weight * work(*corner) / nodes(corner)
    return work(*at) / rate


def nearest(points: Table, work: Callable[..., float], at: Point) -> set[float]:
    """Latency from the MFU of the measured point nearest in log2 of the axes; ties give several."""

    def distance(point: Point) -> float:
        return sum((math.log2(a) - math.log2(b)) ** 2 for a, b in zip(point, at, strict=True))

    least = min(map(distance, points))
    tied = [p for p in points if distance(p) <= least + 1e-12]
    return {points[p] if p == at else points[p] * work(*at) / work(*p) for p in tied}


def floor(points: Table, work: Callable[..., float], at: Point, order: Sequence[int]) -> float:
    """Latency from the MFU of the last measured point at or below, axis by axis; else of the first."""
    left = sorted(points)
    for i in order:
        nodes = sorted({p[i] for p in left})
        node = nodes[max(0, bisect_right(nodes, at[i]) - 1)]
        left = [p for p in left if p[i] == node]
    (found,) = left
    return points[found] if found == at else points[found] * work(*at) / work(*found)
