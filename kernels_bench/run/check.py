"""Checks a kernel's result against a float64 reference, once a shape family, before it is timed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fastroof.errors import MeasureError
from kernels_bench.operators.registry import MEASURED
from kernels_bench.protocol import Point, Prepared

BOUNDS: Final[dict[str, float]] = {
    "exact": 0.0,
    "bf16": 1e-2,
    "fp16": 1e-2,
    "fp8": 6e-2,
    "fp8_block": 6e-2,
    "fp8_experts": 8e-2,
}
"""Largest relative Frobenius error by dtype.

bf16: storing a result rounds it by at most 2**-9, 1.7e-3 as a root mean square over a binade; attention
rounds its probabilities too, and a fused norm its input, each adding as much. 1e-2 leaves room for three
such roundings and none for a wrong scale, mask or index, whose errors begin near 1e-1. fp8 (e4m3) has 3
bits of mantissa: at most 2**-4, 2.6e-2 as a root mean square, an operand; two operands that are
quantised make 3.7e-2, and 6e-2 is that with room for the accumulation of Hopper's fp8 units, which keep
about 14 bits. A provider whose reference starts at the quantised values stays far below. Experts in fp8
quantise their input and what comes between their GEMMs, where it is the product of gate and up, which are
both off by the first: 3.7e-2 and 2.6e-2 make 4.5e-2, and 8e-2 leaves that room. A copy is exact.
"""

REFERENCE_WORK: Final = 2**31
"""Multiply-adds that a float64 reference may take: seconds on a host, not minutes."""


@dataclass(frozen=True)
class Check:
    """Outcome of a check."""

    # Relative Frobenius error; NaN where the result holds NaN.
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound; NaN never is."""
        return self.error <= self.bound


def relative_error(result: npt.ArrayLike, reference: npt.ArrayLike) -> float:
    """Frobenius norm of the difference over that of the reference.

    >>> relative_error([3.0, 4.5], [3.0, 4.0])
    0.1
    """
    got, want = np.asarray(result, np.float64), np.asarray(reference, np.float64)
    if got.shape != want.shape:
        raise MeasureError(f"the result has shape {got.shape}, its reference {want.shape}")
    if want.size == 0 or not np.isfinite(want).all():
        raise MeasureError(f"the reference of shape {want.shape} is empty or not finite: nothing to check by")
    with np.errstate(invalid="ignore", over="ignore"):
        apart = float(np.linalg.norm((got - want).ravel()))
    if apart == 0.0:
        return 0.0
    size = float(np.linalg.norm(want.ravel()))
    return apart / size if size else math.inf


def error_bound(point: Point) -> float:
    """Return the largest error that a point's result may have.

    >>> error_bound(Point("gemm", {"dtype": "fp8", "m": 1, "n": 1, "k": 1}))
    0.06
    """
    dtype = MEASURED[point.operator].checked_dtype(point.values)
    if dtype not in BOUNDS:
        raise MeasureError(
            f"{point.key}: no error bound for dtype {dtype!r}; there are {', '.join(BOUNDS)}: "
            "add one, with its reason, to kernels_bench/run/check.py"
        )
    return BOUNDS[dtype]


def check_result(point: Point, prepared: Prepared) -> Check:
    """Run a prepared point once and compare it with its reference."""
    bound = error_bound(point)
    worst = 0.0
    for index in sorted({0, prepared.num_sets - 1}):
        prepared.run(index)
        error = relative_error(prepared.result(index), prepared.reference(index))
        if not error <= worst:
            worst = error
        if not worst <= bound:
            break
    return Check(worst, bound)


def check_points(points: Iterable[Point]) -> tuple[Point, ...]:
    """Pick the points of a family that its check runs on."""
    with_result = (p for p in points if MEASURED[p.operator].has_result(p.values))
    by_work = sorted(with_result, key=lambda p: (_work(p), p.key))
    if not by_work:
        return ()
    quick = [p for p in by_work if _work(p) <= REFERENCE_WORK] or by_work[:1]
    return tuple({p.key: p for p in (quick[-1], by_work[0])}.values())


def _work(point: Point) -> float:
    return MEASURED[point.operator].reference_work(point.values)
