"""An operator's latency against its rows, and what a plan asks of whoever knows latencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fastroof import flops
from fastroof.compiled.rows import curve_rows
from fastroof.operators.calls import AllReduce, Gemm, RowOperator
from fastroof.roofline import HeadShape
from fastroof.units import DTYPE_BYTES

__all__ = ["CurveSource", "RowCost", "RowCurve", "row_cost", "row_values"]

Floats = npt.NDArray[np.float64]


class RowCost(NamedTuple):
    """FLOPs and bytes of one call of an operator: linear in its rows."""

    flops_per_row: float
    bytes_per_row: float
    fixed_bytes: float
    dtype: str


@dataclass(frozen=True, eq=False)
class RowCurve:
    """One operator's latency against its rows, piecewise linear.

    Attributes
    ----------
    operator : RowOperator
        What it is and how often it runs in a step.
    axis, value : ndarray of float64, shape (nodes,)
        Rows and the latency of one call, us; padded at both ends.
    flag : ndarray of uint8, shape (nodes,)
        Origin of each node.
    launch_us : float
        Latency of the smallest call, us.
    """

    operator: RowOperator
    axis: Floats
    value: Floats
    flag: npt.NDArray[np.uint8]
    launch_us: float


class CurveSource(Protocol):
    """What a plan is compiled from."""

    @property
    def method(self) -> str:
        """How latencies are looked up."""

    @property
    def quantise_inputs(self) -> bool:
        """Whether an fp8 GEMM's latency leaves out quantising its input."""

    def row_curve(self, operator: RowOperator, max_rows: int) -> RowCurve:
        """Latency of an operator against its rows, at least up to ``max_rows``."""

    def row_values(self, operator: RowOperator, max_rows: int) -> tuple[Floats, npt.NDArray[np.uint8]]:
        """Latency of an operator at every number of rows up to ``max_rows``, and its origin."""

    def attention_block(self, operator: str, heads: HeadShape) -> Floats:
        """Grid block of an attention operator, as ``grid_value`` reads it."""

    def prefix_us(self, heads: HeadShape) -> tuple[float, float]:
        """Price of a prefix: us a (query, prefix token) pair, us a prefix token."""


def row_values(curve: RowCurve, max_rows: int) -> tuple[Floats, npt.NDArray[np.uint8]]:
    """Look a curve up at every number of rows up to ``max_rows``."""
    latency_us = np.empty(max_rows + 1)
    origin = np.empty(max_rows + 1, np.uint8)
    curve_rows(curve.axis, curve.value, curve.flag, latency_us, origin)
    return latency_us, origin


def row_cost(operator: RowOperator) -> RowCost:
    """FLOPs and compulsory bytes of one call of an operator, a row and fixed."""
    if isinstance(operator, Gemm):
        n, k, width = operator.n, operator.k, DTYPE_BYTES[operator.dtype]
        fixed = float(flops.gemm_bytes(0, n, k, width))
        a_row = float(flops.gemm_bytes(1, n, k, width)) - fixed
        return RowCost(float(flops.gemm_flops(1, n, k)), a_row, fixed, operator.dtype)
    if isinstance(operator, AllReduce):
        return RowCost(
            0.0, float(flops.allreduce_wire_bytes(operator.row_bytes, operator.num_gpus)), 0.0, "bf16"
        )
    return RowCost(0.0, operator.row_bytes, 0.0, "bf16")
