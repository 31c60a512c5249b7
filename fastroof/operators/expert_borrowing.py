"""Experts of an unmeasured shape, borrowed from the nearest measured shapes at equal work.

On one GPU a kernel of routed experts sees an expert's width over moe_tp, the experts over moe_ep, and the
share of tokens per expert, topk / experts. The distance of two kernels is the sum of octaves between these,
the hidden width and moe_ep. Other splits of the same layer come before other layers; the two nearest are
weighted by distance.

Work is equal at equal tokens per expert, ``tokens x topk / experts``; the donor's latency / B applies there.
README.md ("Unmeasured expert shapes") has the alternatives and their errors.
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

MOST_DONORS: Final = 2
"""Maximum number of donors. MAPE on the H100's vLLM tables, up to 256 tokens and beyond: 6.5 and 7.7 % for
another split, 10.9 and 13.8 for another layer; with one donor 9.1 and 11.9, 12.3 and 15.0; with three 7.7 and
9.5, 10.5 and 13.6."""

NEAR_OCTAVES: Final = 0.25
"""Added to distances before weighting: nearer kernels differ by tuning, not by size."""

ANOTHER_ROUTING: Final = 0.23
"""Relative standard error of another routing distribution: 80 % of |ln| of power_law_1.2 over balanced are
within
0.29 in the H100's vLLM tables, 0.47 in TensorRT-LLM's, 0.23 in SGLang's."""

DISTANCE_EDGES: Final = (1.5, 3.0)
"""Octaves between classes of distance with separate errors: about 0.09, 0.16 and 0.25 for vLLM on H100."""

FEWEST_KERNELS: Final = 8
"""Fewest kernels of a class with a separate error."""

MOST_LEFT_OUT: Final = 100
"""Maximum number of kernels of a table that are left out in turn."""

FEWEST_LAYERS: Final = 4
FEW_LAYERS: Final = 0.29
"""Least relative standard error of borrowing from another layer if a table has fewer than FEWEST_LAYERS: that
of
kernels at least 3.5 octaves away (vLLM on H100)."""


Roofline = Callable[["ExpertShape", float], Callable[[Any], Floats]]
"""B against tokens, us, of a shape with a given least latency, us."""


class ExpertShape(NamedTuple):
    """Key of a kernel of routed experts."""

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
        """Sizes of the layer, independent of its split."""
        return self[1:5]


class ExpertDonor(NamedTuple):
    """A measured kernel, its weight (all add up to 1) and its distance in octaves."""

    shape: ExpertShape
    weight: float
    octaves: float

    def is_near(self, target: ExpertShape) -> bool:
        """Whether it is the same layer, or not in the farthest class of distance."""
        return self.shape.layer == target.layer or self.octaves < DISTANCE_EDGES[-1]


def borrowing_grids(operator: str) -> tuple[HoldoutGrid, ...]:
    """Hold-outs of whole kernels: other splits of the layer remain, or only other layers."""
    layer, routing = ("hidden", "intermediate", "topk", "num_experts"), {"distribution": "power_law_1.2"}
    return (
        HoldoutGrid(operator, "another split", {}, routing, (*layer, "moe_tp", "moe_ep")),
        HoldoutGrid(operator, "another layer", {}, routing, layer),
    )


def features(shapes: Sequence[ExpertShape]) -> Floats:
    """Coordinates of kernels in octaves, shape (kernels, 5)."""
    c = np.array([shape[1:7] for shape in shapes], np.float64).reshape(-1, 6).T
    hidden, intermediate, topk, num_experts, moe_tp, moe_ep = c
    own = (hidden, intermediate / moe_tp, num_experts / moe_ep, topk / num_experts, moe_ep)
    return np.log2(np.stack(own, axis=1))


def layers(shapes: Sequence[ExpertShape]) -> Longs:
    """Number of each shape's layer, equal for all its splits."""
    number: dict[tuple[int, ...], int] = {}
    return np.array([number.setdefault(shape.layer, len(number)) for shape in shapes], np.int64)


def is_routing(distribution: str) -> bool:
    """Whether a distribution is a token routing (``balanced``, ``uniform``, ``power_law_*``)."""
    return distribution.startswith(("balanced", "uniform", "power_law"))


def nearest_routing(target: str, measured: Iterable[str]) -> str:
    """The distribution itself, or the measured one with the nearest skew; empty without any."""

    def skew(distribution: str) -> float:
        last = distribution.rsplit("_", 1)[-1]
        return float(last) if last.replace(".", "", 1).isdecimal() else 0.0

    def off(distribution: str) -> tuple[bool, float, str]:
        return distribution != target, abs(skew(distribution) - skew(target)), distribution

    return min(measured, key=off, default="")


def nearest(target: ExpertShape, measured: Sequence[ExpertShape]) -> tuple[ExpertDonor, ...]:
    """Choose the donors of a shape, nearest first."""
    # round away the last bits of sums, so that ties are resolved by the shapes themselves
    apart = np.abs(features(measured) - features([target])).sum(axis=1).round(9)
    own = np.array([shape.layer == target.layer for shape in measured])
    pool = np.flatnonzero(own) if own.any() else np.arange(len(measured))
    ranked = sorted(pool.tolist(), key=lambda i: (apart[i], measured[i]))[:MOST_DONORS]
    weight = 1.0 / (apart[ranked] + NEAR_OCTAVES)
    weight /= weight.sum()
    return tuple(
        ExpertDonor(measured[i], float(w), float(apart[i])) for i, w in zip(ranked, weight, strict=True)
    )


class BorrowedPoints(NamedTuple):
    """Latencies of a shape made from its donors, at their nodes."""

    tokens: Floats
    latency_us: Floats
    bound_us: Callable[[Any], Floats]

    def packed(self) -> PackedSizes:
        """Pack as a curve of origin borrowed; latency / B is constant beyond its ends."""
        made = pack_curve(self.bound_us(self.tokens), self.latency_us, lambda coordinate: coordinate)
        flag = np.full_like(made.flag, ORIGIN_BORROWED)
        return PackedSizes(made._replace(flag=flag), self.tokens, self.bound_us)

    def log_errors(self, tokens: Floats, latency_us: Floats) -> Floats:
        """Return ln of these over measured latencies."""
        at, nodes = self.bound_us(tokens), self.bound_us(self.tokens)
        held = np.clip(at, nodes[0], nodes[-1])
        return np.log(np.interp(held, nodes, self.latency_us) * (at / held) / latency_us)


def borrowed_points(
    target: ExpertShape,
    donors: Sequence[ExpertDonor],
    packed_of: Callable[[ExpertShape], PackedSizes],
    roofline_of: Roofline,
    donor_roofline_of: Roofline | None = None,
) -> BorrowedPoints:
    """Make latencies of a shape: the weighted geometric mean of ``B (latency / B)`` over its donors."""
    from fastroof.compiled.guides import curve_latency_us

    curves = [packed_of(donor.shape) for donor in donors]
    # an expert has equally many tokens at o / u times the donor's tokens
    over = [float(donor.shape.topk * target.num_experts) for donor in donors]
    under = [float(donor.shape.num_experts * target.topk) for donor in donors]
    nodes = [curve.sizes * o / u for curve, o, u in zip(curves, over, under, strict=True)]
    tokens = np.unique(np.concatenate(nodes))
    log_us, log_launch_us = np.zeros(len(tokens)), 0.0
    for donor, curve, o, u in zip(donors, curves, over, under, strict=True):
        launch_us = float(curve.curve.value[1:-1].min())
        theirs = tokens * u / o
        latency_us, flag = np.empty(len(tokens)), np.empty(len(tokens), np.uint8)
        curve_latency_us(curve.curve, curve.coordinate(theirs), latency_us, flag)
        own_us = roofline_of(target, launch_us)
        their_us = (donor_roofline_of or roofline_of)(donor.shape, launch_us)
        log_us += donor.weight * np.log(latency_us * own_us(tokens) / their_us(theirs))
        log_launch_us += donor.weight * np.log(launch_us)
    bound_us = roofline_of(target, float(np.exp(log_launch_us)))
    return BorrowedPoints(tokens, np.exp(log_us), bound_us)


class BorrowingErrors(NamedTuple):
    """Relative standard errors of borrowing within a table: other splits, and other layers by distance."""

    of_split: float
    of_layer: tuple[float, ...]

    def of(self, target: ExpertShape, donors: Sequence[ExpertDonor]) -> float:
        """Error of one borrowed shape."""
        if donors[0].shape.layer == target.layer:
            local = self.of_split
        else:
            local = self.of_layer[int(np.searchsorted(DISTANCE_EDGES, donors[0].octaves, "right"))]
        routed = 0.0 if donors[0].shape.distribution == target.distribution else ANOTHER_ROUTING
        return float(np.hypot(local, routed))


def borrowing_errors(
    measured: Sequence[ExpertShape], log_errors: Callable[[ExpertShape, Sequence[ExpertDonor]], Floats]
) -> BorrowingErrors:
    """Measure the error of borrowing by leaving out every kernel, and every layer, of a table."""
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
            # farther kernels cannot be donors: MOST_DONORS are nearer
            farthest = np.sort(distance[others])[:MOST_DONORS][-1]
            donors = nearest(shape, [measured[j] for j in others[distance[others] <= farthest]])
            errors.append(log_errors(shape, donors))
            if errors is layer:
                octaves.append(donors[0].octaves)
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
