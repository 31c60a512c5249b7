"""Experts of a shape that was not measured, from the measured ones nearest to it at equal work.

A kernel of routed experts sees on one GPU an expert's width over moe_tp, the experts over moe_ep, and the
share of its tokens that each takes, topk / experts. Two kernels are as far apart as the octaves between
these, the hidden width and moe_ep add up to. The layer itself, split otherwise, lends before any other
layer does; of either the two nearest, weighted by how near they are.

Work is equal where an expert has equally many tokens: at ``tokens x topk / experts``. There the lender's
latency / B is taken over. What was chosen, and on which tables it was judged, is in ``README.md`` beside
this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.columns import ORIGIN_BORROWED
from fastroof.operators.operator import HoldoutGrid
from fastroof.operators.row_operator import PackedSizes
from fastroof.pack import pack_curve
from fastroof.uncertainty.leave_one_out import LEVEL, NORMAL_80

LENDERS: Final = 2
"""Kernels that lend: with one the H100's vLLM tables come out at 9.1 and 11.9 % instead of 6.5 and 7.7 (up to
256 tokens, and beyond) for another split, at 12.3 and 15.0 instead of 10.9 and 13.8 for another layer; with
three at 7.7 and 9.5, and at 10.5 and 13.6."""

NEAR_OCTAVES: Final = 0.25
"""Added to a distance before weighing by it: kernels nearer than this differ by tuning, not by size."""

ANOTHER_ROUTING: Final = 0.23
"""Relative standard error of routing by another distribution: 80 % of |ln| of power_law_1.2 over balanced are
within 0.29 in the H100's vLLM tables, 0.47 in TensorRT-LLM's, 0.23 in SGLang's."""

DISTANCE_EDGES: Final = (1.5, 3.0)
"""Octaves between classes of distance, whose errors are told apart: about 0.09, 0.16 and 0.25 on the H100
with vLLM's kernels."""

FEWEST_KERNELS: Final = 8
"""A class of fewer is not told apart."""

MOST_LEFT_OUT: Final = 100
"""Kernels of a table that are left out; of more every so many."""

FEWEST_LAYERS: Final = 4
FEW_LAYERS: Final = 0.29
"""Least relative standard error of lending from another layer where a table has fewer layers: that of kernels
3.5 octaves away and farther on the H100 with vLLM's kernels."""


Roofline = Callable[["ExpertShape", float], Callable[[Any], Floats]]
"""B at numbers of tokens, us, of a shape and for a least latency in us."""


class ExpertShape(NamedTuple):
    """Keys of a kernel of routed experts, in the order of its table."""

    dtype: str
    hidden: int
    intermediate: int
    topk: int
    num_experts: int
    moe_tp: int
    moe_ep: int
    distribution: str

    @property
    def layer(self) -> tuple[int, int, int, int]:
        """What a model says, however it is split."""
        return self[1:5]


class Lender(NamedTuple):
    """A measured kernel that lends, and how much it counts; weights of all lenders add up to 1."""

    shape: ExpertShape
    weight: float
    octaves: float

    def is_near(self, wanted: ExpertShape) -> bool:
        """Whether it is the layer itself, or not in the farthest class of distance."""
        return self.shape.layer == wanted.layer or self.octaves < DISTANCE_EDGES[-1]


def borrowing_grids(operator: str) -> tuple[HoldoutGrid, ...]:
    """Hold-outs of whole kernels: other splits of the layer are left, or other layers alone."""
    layer, routing = ("hidden", "intermediate", "topk", "num_experts"), {"distribution": "power_law_1.2"}
    return (
        HoldoutGrid(operator, "another split", {}, routing, (*layer, "moe_tp", "moe_ep")),
        HoldoutGrid(operator, "another layer", {}, routing, layer),
    )


def features(shapes: Sequence[ExpertShape]) -> Floats:
    """What kernels lie apart by, in octaves, shape (kernels, 5)."""
    c = np.array([shape[1:7] for shape in shapes], np.float64).reshape(-1, 6).T
    hidden, intermediate, topk, num_experts, moe_tp, moe_ep = c
    own = (hidden, intermediate / moe_tp, num_experts / moe_ep, topk / num_experts, moe_ep)
    return np.log2(np.stack(own, axis=1))


def layers(shapes: Sequence[ExpertShape]) -> Longs:
    """A number a layer: equal for its splits."""
    number: dict[tuple[int, ...], int] = {}
    return np.array([number.setdefault(shape.layer, len(number)) for shape in shapes], np.int64)


def is_routing(distribution: str) -> bool:
    """Whether a name says how tokens spread, as tables of experts call it."""
    return distribution.startswith(("balanced", "uniform", "power_law"))


def nearest_routing(wanted: str, measured: Iterable[str]) -> str:
    """The distribution itself, or the measured one whose skew is nearest; empty without any."""

    def skew(distribution: str) -> float:
        last = distribution.rsplit("_", 1)[-1]
        return float(last) if last.replace(".", "", 1).isdecimal() else 0.0

    def off(distribution: str) -> tuple[bool, float, str]:
        return distribution != wanted, abs(skew(distribution) - skew(wanted)), distribution

    return min(measured, key=off, default="")


def nearest(wanted: ExpertShape, measured: Sequence[ExpertShape]) -> tuple[Lender, ...]:
    """Choose who lends to a shape, the nearest first."""
    # equal distances are equal, whatever the last bits of their sums: ties go by the shapes themselves
    apart = np.abs(features(measured) - features([wanted])).sum(axis=1).round(9)
    own = np.array([shape.layer == wanted.layer for shape in measured])
    pool = np.flatnonzero(own) if own.any() else np.arange(len(measured))
    ranked = sorted(pool.tolist(), key=lambda i: (apart[i], measured[i]))[:LENDERS]
    weight = 1.0 / (apart[ranked] + NEAR_OCTAVES)
    weight /= weight.sum()
    return tuple(Lender(measured[i], float(w), float(apart[i])) for i, w in zip(ranked, weight, strict=True))


class BorrowedPoints(NamedTuple):
    """What lenders make of a shape."""

    tokens: Floats
    latency_us: Floats
    bound_us: Callable[[Any], Floats]

    def packed(self) -> PackedSizes:
        """As a curve of origin borrowed; beyond its ends latency / B is held."""
        made = pack_curve(self.bound_us(self.tokens), self.latency_us, lambda coordinate: coordinate)
        flag = np.full_like(made.flag, ORIGIN_BORROWED)
        return PackedSizes(made._replace(flag=flag), self.tokens, self.bound_us)

    def log_errors(self, tokens: Floats, latency_us: Floats) -> Floats:
        """Ln of what it says over measured latencies."""
        at, nodes = self.bound_us(tokens), self.bound_us(self.tokens)
        held = np.clip(at, nodes[0], nodes[-1])
        return np.log(np.interp(held, nodes, self.latency_us) * (at / held) / latency_us)


def borrowed_points(
    wanted: ExpertShape,
    lenders: Sequence[Lender],
    packed_of: Callable[[ExpertShape], PackedSizes],
    roofline_of: Roofline,
    lender_roofline_of: Roofline | None = None,
) -> BorrowedPoints:
    """Make the latencies of a shape from those of its lenders."""
    from fastroof.compiled.guides import curve_latency_us

    curves = [packed_of(lender.shape) for lender in lenders]
    # an expert has as many tokens at so many times the lender's
    over = [float(lender.shape.topk * wanted.num_experts) for lender in lenders]
    under = [float(lender.shape.num_experts * wanted.topk) for lender in lenders]
    nodes = [curve.sizes * o / u for curve, o, u in zip(curves, over, under, strict=True)]
    tokens = np.unique(np.concatenate(nodes))
    log_us, log_launch_us = np.zeros(len(tokens)), 0.0
    for lender, curve, o, u in zip(lenders, curves, over, under, strict=True):
        launch_us = float(curve.curve.value[1:-1].min())
        theirs = tokens * u / o
        latency_us, flag = np.empty(len(tokens)), np.empty(len(tokens), np.uint8)
        curve_latency_us(curve.curve, curve.coordinate(theirs), latency_us, flag)
        own_us = roofline_of(wanted, launch_us)
        their_us = (lender_roofline_of or roofline_of)(lender.shape, launch_us)
        log_us += lender.weight * np.log(latency_us * own_us(tokens) / their_us(theirs))
        log_launch_us += lender.weight * np.log(launch_us)
    bound_us = roofline_of(wanted, float(np.exp(log_launch_us)))
    return BorrowedPoints(tokens, np.exp(log_us), bound_us)


class BorrowingErrors(NamedTuple):
    """Relative standard errors of borrowing from a table, as the table says of itself."""

    of_split: float
    of_layer: tuple[float, ...]

    def of(self, wanted: ExpertShape, lenders: Sequence[Lender]) -> float:
        """Error of one shape's answers."""
        if lenders[0].shape.layer == wanted.layer:
            local = self.of_split
        else:
            local = self.of_layer[int(np.searchsorted(DISTANCE_EDGES, lenders[0].octaves, "right"))]
        routed = 0.0 if lenders[0].shape.distribution == wanted.distribution else ANOTHER_ROUTING
        return float(np.hypot(local, routed))


def borrowing_errors(
    measured: Sequence[ExpertShape], log_errors: Callable[[ExpertShape, Sequence[Lender]], Floats]
) -> BorrowingErrors:
    """Leave every kernel of a table out, and every layer, and see how far off borrowing is."""
    apart = features(measured)
    number = layers(measured)
    split: list[Floats] = []
    layer: list[Floats] = []
    octaves: list[float] = []
    for i in range(0, len(measured), -(-len(measured) // MOST_LEFT_OUT)):
        shape = measured[i]
        distance = np.abs(apart - apart[i]).sum(axis=1).round(9)
        for pool, errors in ((number == number[i], split), (number != number[i], layer)):
            others = np.flatnonzero(pool & (np.arange(len(measured)) != i))
            if not len(others):
                continue
            # the others cannot lend: more than LENDERS are nearer
            farthest = np.sort(distance[others])[:LENDERS][-1]
            lenders = nearest(shape, [measured[j] for j in others[distance[others] <= farthest]])
            errors.append(log_errors(shape, lenders))
            if errors is layer:
                octaves.append(lenders[0].octaves)
    whole = _scale(layer, FEW_LAYERS)
    if number.max() + 1 < FEWEST_LAYERS:
        whole = max(whole, FEW_LAYERS)
    place = np.searchsorted(DISTANCE_EDGES, octaves, "right")
    classes = []
    for number_of in range(len(DISTANCE_EDGES) + 1):
        of_class = [errors for errors, at in zip(layer, place, strict=True) if at == number_of]
        few = len(of_class) < FEWEST_KERNELS or whole == FEW_LAYERS
        own = whole if few else _scale(of_class, whole)
        classes.append(float(np.sqrt((own**2 + whole**2) / 2.0)))
    return BorrowingErrors(_scale(split, whole), tuple(classes))


def _scale(log_errors: list[Floats], unknown: float) -> float:
    if not log_errors:
        return unknown
    return float(np.quantile(np.abs(np.concatenate(log_errors)), LEVEL)) / NORMAL_80
