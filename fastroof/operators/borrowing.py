"""Kernels that were not measured, borrowed from the nearest measured ones.

All operators follow one law. What differs is data, a :class:`Distance` for each of them below:

1. Of the measured kernels, those that differ least in kind (library, layer, number of GPUs) are candidates.
2. They rank by the octaves between their sizes, and the nearest are the donors.
3. A donor's latency / B holds at equal work: tokens per expert, sequences x KV heads, bytes on the wire.
4. The squared errors of what differs are added to that of the donor's curve.

README.md ("Accuracy of borrowed kernels") has the alternatives and their errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import ORIGIN_BORROWED
from fastroof.operators.row_operator import PackedSizes
from fastroof.pack import pack_curve
from fastroof.uncertainty.leave_one_out import LEVEL, NORMAL_80

MOST_DONORS: Final = 2
"""Maximum number of donors of experts. MAPE on the H100's vLLM tables, up to 256 tokens and beyond: 6.5 and
7.7 % for another split, 10.9 and 13.8 for another layer; with one donor 9.1 and 11.9, 12.3 and 15.0; with
three 7.7 and 9.5, 10.5 and 13.6."""

NEAR_OCTAVES: Final = 0.25
"""Added to distances before weighting: nearer kernels differ by tuning, not by size."""

DISTANCE_EDGES: Final = (1.5, 3.0)
"""Octaves between classes of distance with separate errors: about 0.09, 0.16 and 0.25 for vLLM on H100."""


# -- distances -------------------------------------------------------------------------------------


class Distance(NamedTuple):
    """How far kernels are from a target: differences of kind, then octaves between sizes, then ties.

    ``kinds`` and ``ties`` are compared from left to right, the target given first.
    """

    sizes: Callable[[Any], tuple[float, ...]]
    kinds: Callable[[Any, Any], tuple[float, ...]] = lambda target, kernel: ()
    ties: Callable[[Any, Any], tuple[Any, ...]] = lambda target, kernel: (kernel,)
    most: int = 1

    def octaves(self, kernels: Sequence[Any]) -> Floats:
        """Sizes of kernels in octaves, shape (kernels, sizes)."""
        return np.log2(np.array([self.sizes(kernel) for kernel in kernels], np.float64))


class Donor(NamedTuple):
    """A measured kernel, its weight (all add up to 1), its distance in octaves, and what differs in kind."""

    kernel: Any
    weight: float = 1.0
    octaves: float = 0.0
    kinds: tuple[float, ...] = (0,)

    @property
    def is_near(self) -> bool:
        """Whether the first kind is the same, or the kernel is not in the farthest class of distance."""
        return not self.kinds[0] or self.octaves < DISTANCE_EDGES[-1]


def nearest(target: Any, measured: Sequence[Any], by: Distance) -> tuple[Donor, ...]:
    """Choose the donors of a kernel, nearest first; empty if nothing was measured."""
    kinds = [by.kinds(target, kernel) for kernel in measured]
    least = min(kinds, default=())
    alike = [kernel for kernel, kind in zip(measured, kinds, strict=True) if kind == least]
    if not alike:
        return ()
    # round away the last bits of sums, so that ties are resolved as the distance says
    apart = np.abs(by.octaves(alike) - by.octaves([target])).sum(axis=1).round(9)
    ranked = sorted(range(len(alike)), key=lambda i: (apart[i], *by.ties(target, alike[i])))[: by.most]
    weight = 1.0 / (apart[ranked] + NEAR_OCTAVES)
    weight /= weight.sum()
    return tuple(
        Donor(alike[i], float(w), float(apart[i]), least) for i, w in zip(ranked, weight, strict=True)
    )


EXPERTS: Final = Distance(
    # the width and the number of experts on one GPU, and the share of the tokens that an expert has
    lambda k: (k.hidden, k.intermediate / k.moe_tp, k.experts / k.moe_ep, k.topk / k.experts, k.moe_ep),
    # other splits of the layer come before other layers
    kinds=lambda target, k: (k.layer != target.layer,),
    most=MOST_DONORS,
)
WIDE_EXPERTS: Final = EXPERTS._replace(
    kinds=lambda target, k: (k.layer != target.layer, k.layer == target.layer and k.experts != target.experts)
)
HEADS: Final = Distance(
    lambda k: (k.num_kv_heads,), kinds=lambda target, k: (abs(k.group_size - target.group_size),)
)
SIZE: Final = Distance(lambda size: (size,))
"""A single size, such as a head_dim."""
GPUS: Final = SIZE._replace(ties=lambda target, size: (-size,))
"""Groups of GPUs: the larger of two that are equally near."""
DISPATCH: Final = Distance(
    lambda k: (k.hidden, k.topk, k.num_experts),
    kinds=lambda target, k: (
        k.library != target.library,
        # the same format, else the library's own
        (k.comm_dtype != target.comm_dtype) * (1 + (k.comm_dtype != "default")),
        abs(float(np.log(k.num_gpus / target.num_gpus))),
    ),
    # kernels without a choice of SMs have 0
    ties=lambda target, k: (abs(k.sms - target.sms) if k.sms else 0, k.num_nodes),
)


# -- curves at equal work --------------------------------------------------------------------------

Roofline = Callable[[Any, float], Callable[[Any], Floats]]
"""B against tokens, us, of a kernel with a given least latency, us."""


class BorrowedPoints(NamedTuple):
    """Latencies of a shape made from its donors, at their nodes."""

    tokens: Floats
    latency_us: Floats
    bound_us: Callable[[Any], Floats]

    def packed(self) -> PackedSizes:
        """Pack as a curve of origin borrowed."""
        made = pack_curve(self.tokens, self.latency_us, self.bound_us, is_linear=False)
        flag = np.full_like(made.flag, ORIGIN_BORROWED)
        return PackedSizes(made._replace(flag=flag), self.tokens, self.bound_us)

    def log_errors(self, tokens: Floats, latency_us: Floats) -> Floats:
        """Return ln of these over measured latencies."""
        at, nodes = self.bound_us(tokens), self.bound_us(self.tokens)
        held = np.clip(at, nodes[0], nodes[-1])
        return np.log(np.interp(held, nodes, self.latency_us) * (at / held) / latency_us)


def borrowed_points(
    target: Any,
    donors: Sequence[Donor],
    packed_of: Callable[[Any], PackedSizes],
    roofline_of: Roofline,
    donor_roofline_of: Roofline | None = None,
) -> BorrowedPoints:
    """Make latencies of experts: the weighted geometric mean of ``B (latency / B)`` over their donors.

    Work is equal at equal tokens per expert, ``tokens x topk / experts``.
    """
    from fastroof.compiled.guides import curve_latency_us

    curves = [packed_of(donor.kernel) for donor in donors]
    # an expert has equally many tokens at o / u times the donor's tokens
    over = [float(donor.kernel.topk * target.experts) for donor in donors]
    under = [float(donor.kernel.experts * target.topk) for donor in donors]
    nodes = [curve.sizes * o / u for curve, o, u in zip(curves, over, under, strict=True)]
    tokens = np.unique(np.concatenate(nodes))
    log_us, log_launch_us = np.zeros(len(tokens)), 0.0
    for donor, curve, o, u in zip(donors, curves, over, under, strict=True):
        launch_us = curve.launch_us
        theirs = tokens * u / o
        latency_us, flag = np.empty(len(tokens)), np.empty(len(tokens), np.uint8)
        curve_latency_us(curve.curve, curve.coordinate(theirs), latency_us, flag)
        own_us = roofline_of(target, launch_us)
        their_us = (donor_roofline_of or roofline_of)(donor.kernel, launch_us)
        log_us += donor.weight * np.log(latency_us * own_us(tokens) / their_us(theirs))
        log_launch_us += donor.weight * np.log(launch_us)
    bound_us = roofline_of(target, float(np.exp(log_launch_us)))
    return BorrowedPoints(tokens, np.exp(log_us), bound_us)


# -- distributions of tokens over experts ----------------------------------------------------------


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


# -- errors ----------------------------------------------------------------------------------------

ANOTHER_ROUTING: Final = 0.23
"""Relative standard error of another routing distribution: 80 % of |ln| of power_law_1.2 over balanced are
within 0.29 in the H100's vLLM tables, 0.47 in TensorRT-LLM's, 0.23 in SGLang's."""

FEWEST_KERNELS: Final = 8
"""Fewest kernels of a class with a separate error."""

MOST_LEFT_OUT: Final = 100
"""Maximum number of kernels of a table that are left out in turn."""

FEWEST_LAYERS: Final = 4
FEW_LAYERS: Final = 0.29
"""Least relative standard error of borrowing from another layer if a table has fewer than FEWEST_LAYERS: that
of kernels at least 3.5 octaves away (vLLM on H100)."""


class BorrowingErrors(NamedTuple):
    """Relative standard errors of borrowing within a table: other splits, and other layers by distance."""

    of_split: float
    of_layer: tuple[float, ...]

    def of(self, distribution: str, donor: Donor) -> float:
        """Error of a shape with a routing distribution that is borrowed from a nearest donor."""
        place = int(np.searchsorted(DISTANCE_EDGES, donor.octaves, "right"))
        local = self.of_layer[place] if donor.kinds[0] else self.of_split
        return float(np.hypot(local, ANOTHER_ROUTING * (donor.kernel.distribution != distribution)))


def borrowing_errors(
    measured: Sequence[Any], log_errors: Callable[[Any, Sequence[Donor]], Floats]
) -> BorrowingErrors:
    """Measure the error of borrowing by leaving out every kernel, and every layer, of a table."""
    at = EXPERTS.octaves(measured)
    number = {layer: i for i, layer in enumerate(dict.fromkeys(shape.layer for shape in measured))}
    layer_of = np.array([number[shape.layer] for shape in measured])
    split: list[Floats] = []
    layer: list[Floats] = []
    octaves: list[float] = []
    for i in range(0, len(measured), -(-len(measured) // MOST_LEFT_OUT)):
        apart = np.abs(at - at[i]).sum(axis=1).round(9)
        for pool, errors in ((layer_of == layer_of[i], split), (layer_of != layer_of[i], layer)):
            others = np.flatnonzero(pool & (np.arange(len(measured)) != i))
            if not len(others):
                continue
            # farther kernels cannot be donors: MOST_DONORS are nearer
            farthest = np.sort(apart[others])[:MOST_DONORS][-1]
            donors = nearest(measured[i], [measured[j] for j in others[apart[others] <= farthest]], EXPERTS)
            errors.append(log_errors(measured[i], donors))
            if errors is layer:
                octaves.append(donors[0].octaves)
    whole = _scale(layer, FEW_LAYERS)
    if len(number) < FEWEST_LAYERS:
        whole = max(whole, FEW_LAYERS)
    place = np.searchsorted(DISTANCE_EDGES, octaves, "right")
    classes = []
    for number_of in range(len(DISTANCE_EDGES) + 1):
        of_class = [errors for errors, at_class in zip(layer, place, strict=True) if at_class == number_of]
        few = len(of_class) < FEWEST_KERNELS or whole == FEW_LAYERS
        own = whole if few else _scale(of_class, whole)
        classes.append(float(np.sqrt((own**2 + whole**2) / 2.0)))
    return BorrowingErrors(_scale(split, whole), tuple(classes))


def _scale(log_errors: list[Floats], unknown: float) -> float:
    if not log_errors:
        return unknown
    return float(np.quantile(np.abs(np.concatenate(log_errors)), LEVEL)) / NORMAL_80
