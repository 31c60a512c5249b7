"""A plan's latencies from measured tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastroof.columns import ORIGIN_BORROWED, ORIGIN_INTERPOLATED
from fastroof.compiled.gemms import gemm_latency_us
from fastroof.compiled.grids import FORM_DECODE_RATE, FORM_PREFILL_RATE, cells_of
from fastroof.compiled.search import bracket
from fastroof.errors import PlanError
from fastroof.once import made_once
from fastroof.operators.calls import AllReduce, Elementwise, Gemm, RowOperator
from fastroof.pack import SIZE_LIMIT, PackedGrid
from fastroof.plan.curves import RowCurve, row_values
from fastroof.plan.datasheet import elementwise_curve
from fastroof.roofline import HeadShape
from fastroof.tables import Tables
from fastroof.tables.lookup import METHODS, node_latency_us

__all__ = ["TableCurves"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TableCurves:
    """Curves from measured tables; each distinct one is made once, and kept with the tables."""

    tables: Tables
    method: str = "roofline"
    gemm_smoothing: str = "none"
    fp8_scales: str = "dynamic"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise PlanError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")

    @made_once
    def _made(self) -> dict[Any, Any]:
        return self.tables.kept(("curves", self.method, self.gemm_smoothing, self.fp8_scales))

    @property
    def quantise_inputs(self) -> bool:
        """Whether the source's fp8 GEMMs leave out quantising their input, as kernels alone do."""
        about = self.tables.table("gemm").provenance.get("operators", {}).get("gemm", {})
        return not about.get("fp8_includes_input_quantisation", False)

    def row_curve(self, operator: RowOperator, max_rows: int) -> RowCurve:
        """Latency of an operator against its rows."""
        key = self._key(operator, max_rows)
        if key not in self._made:
            self._made[key] = self._curve(operator, max_rows)
        return RowCurve(operator, *self._made[key])

    def row_values(self, operator: RowOperator, max_rows: int) -> tuple[Floats, npt.NDArray[np.uint8]]:
        """Latency of an operator at every number of rows, and its origin."""
        key = ("rows", self._key(operator, max_rows), max_rows)
        if key not in self._made:
            self._made[key] = row_values(self.row_curve(operator, max_rows), max_rows)
        return self._made[key]  # type: ignore[no-any-return]

    def _key(self, operator: RowOperator, max_rows: int) -> tuple[Any, ...]:
        """What a curve depends on: not the operator's name, nor how often it runs."""
        if isinstance(operator, Gemm):
            key: tuple[Any, ...] = (operator.dtype, operator.n, operator.k)
        elif isinstance(operator, AllReduce):
            key = (operator.num_gpus, operator.row_bytes)
        else:
            key = (operator.row_bytes,)
        return key if self.method == "roofline" else (*key, max_rows)

    def _curve(self, operator: RowOperator, max_rows: int) -> tuple[Any, ...]:
        if isinstance(operator, Elementwise):
            return self._streaming_curve(operator)
        if isinstance(operator, Gemm):
            gemm = self.tables.gemm(operator.dtype, self.gemm_smoothing)
            launch_us = float(gemm.value[gemm.flag == 0].min())
            if self.method == "roofline":
                return (*self._gemm_nodes(operator), launch_us)
        else:
            curve = self.tables.allreduce("bf16", operator.num_gpus)
            launch_us = float(curve.value[1:-1].min())
            if self.method == "roofline":
                return curve.axis / operator.row_bytes, curve.value, curve.flag, launch_us
        # MFU methods are not piecewise linear in the rows: every row becomes a node
        rows = np.arange(1, max_rows + 1)
        if isinstance(operator, Gemm):
            sizes: dict[str, Any] = {"m": rows, "n": operator.n, "k": operator.k, "dtype": operator.dtype}
            found = self.tables.lookup("gemm", method=self.method, **sizes)
        else:
            message = rows * int(operator.row_bytes)
            found = self.tables.lookup(
                "allreduce", method=self.method, num_gpus=operator.num_gpus, message_bytes=message
            )
        axis = np.r_[0.0, rows, SIZE_LIMIT]
        value = found.latency_us[np.r_[0, :max_rows, max_rows - 1]]
        return axis, value, found.origin[np.r_[0, :max_rows, max_rows - 1]], launch_us

    def _streaming_curve(self, operator: Elementwise) -> tuple[Any, ...]:
        """Launch floor plus bytes at copy bandwidth: the line through this GPU's two measured constants.

        Where no streaming kernel was measured the datasheet's constants serve, and the origin says so.
        """
        measured = self.tables.streaming
        if measured is None:
            estimate = elementwise_curve(operator, self.tables.gpu)
            return estimate.axis, estimate.value, estimate.flag, estimate.launch_us
        launch_us, bytes_per_us = measured.rates
        axis = np.array([0.0, SIZE_LIMIT])
        flag = np.full(2, ORIGIN_INTERPOLATED, np.uint8)
        return axis, launch_us + axis * operator.row_bytes / bytes_per_us, flag, launch_us

    def _gemm_nodes(self, operator: Gemm) -> tuple[Floats, Floats, npt.NDArray[np.uint8]]:
        """Latency at every m that one of the measured neighbours of (n, k) has."""
        packed = self.tables.gemm(operator.dtype, self.gemm_smoothing)
        n, k = float(operator.n), float(operator.k)
        row = bracket(packed.k_axis, 0, len(packed.k_axis), k)
        parts = []
        for i in (row, row + 1):
            first = bracket(packed.n_axis, packed.row_start[i], packed.row_start[i + 1], n)
            parts.append(packed.m_axis[packed.curve_start[first] : packed.curve_start[first + 2]])
        m = np.unique(np.concatenate(parts))
        value = np.empty(len(m))
        flag = np.empty(len(m), np.uint8)
        gemm_latency_us(packed, m, np.full(len(m), n), np.full(len(m), k), value, flag)
        if operator.dtype == "fp8" and self.fp8_scales == "static" and not self.quantise_inputs:
            value = np.maximum(value - self.tables.fp8_scale_us(m, operator.k), 0.0)
        return m, value, flag

    def attention_block(self, operator: str, heads: HeadShape) -> Floats:
        """Grid block of an attention operator; borrowed nodes say so."""
        key = (operator, heads)
        if key not in self._made:
            self._made[key] = self._block(operator, heads)
        return self._made[key]  # type: ignore[no-any-return]

    def _block(self, operator: str, heads: HeadShape) -> Floats:
        found = self.tables.attention(operator, heads)
        if self.method == "roofline":
            block = found.grid.arena
        else:
            block = _rate_block(found.grid, self.method, is_decode=operator == "attention_decode")
        if found.borrowed:
            block = block.copy()
            flags = block[cells_of(block).stop :]
            np.maximum(flags, ORIGIN_BORROWED, out=flags)
        return block

    def prefix_us(self, heads: HeadShape) -> tuple[float, float]:
        """Price of a prefix, see :meth:`Tables.prefix_us`."""
        key = ("prefix", heads)
        if key not in self._made:
            self._made[key] = self.tables.prefix_us(heads)
        return self._made[key]  # type: ignore[no-any-return]


def _rate_block(grid: PackedGrid, method: str, *, is_decode: bool) -> Floats:
    """Grid block whose cells hold work / latency, for the methods that keep MFU instead of latency.

    linear_mfu is bilinear between the measured nodes; floor is constant above a node; nearest is
    constant around a node, between the geometric means of its neighbours. A hole takes the MFU of the
    node that the method picks at the hole itself.
    """
    y_axis, x_axis = grid.y_axis[1:-1], grid.x_axis[1:-1]
    yy, xx = np.meshgrid(y_axis, x_axis, indexing="ij")
    latency_us = node_latency_us(grid, method, yy.ravel(), xx.ravel(), is_decode=is_decode)
    work = yy * (xx if is_decode else xx * (xx + 1.0) * 0.5)
    rate = work / latency_us.reshape(work.shape)
    flags = np.pad(grid.flags[1:-1, 1:-1], 1, constant_values=grid.flags[0, 0])
    axes = [y_axis, x_axis]
    if method == "nearest":
        # one step above the mean, so that a tie goes to the smaller node
        axes = [np.r_[a[:1], np.nextafter(np.sqrt(a[:-1] * a[1:]), np.inf)] for a in axes]
    y_padded, x_padded = (np.r_[0.0, a, SIZE_LIMIT] for a in axes)
    cells = np.zeros((*flags.shape, 6))
    cells[..., 0] = np.pad(rate, 1, mode="edge")
    if method == "linear_mfu":
        cells[:, :-1, 1] = np.diff(cells[..., 0], axis=1) / np.diff(x_padded)
        cells[:-1, :, 3:] = np.diff(cells[..., :3], axis=0) / np.diff(y_padded)[:, None, None]
    form = FORM_DECODE_RATE if is_decode else FORM_PREFILL_RATE
    return PackedGrid(y_padded, x_padded, cells, flags, grid.roofline, form).arena
