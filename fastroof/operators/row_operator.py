"""Operators whose latency depends only on a number of rows: tokens or sequences.

A plan holds calls (:mod:`fastroof.operators.calls`), an operator with its shape on one GPU. The operator
gives the latency of a call, from measured tables or a datasheet, and its error.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fastroof.arrays import Array, Flags, Floats
from fastroof.columns import ORIGIN, ORIGIN_EXTRAPOLATED, ORIGIN_MEASURED, ORIGIN_MODELLED
from fastroof.config.gpu import GpuSpec
from fastroof.operators.operator import (
    Answers,
    Columns,
    DatasheetClass,
    Key,
    Operator,
    RowSource,
    SourceTable,
    shared_errors,
    unit_us,
)
from fastroof.pack import SIZE_LIMIT, PackedCurve, pack_curve
from fastroof.uncertainty.leave_one_out import (
    LocalErrors,
    MeasuredGrid,
    measured_grid,
    relative_variance,
)
from fastroof.units import US_PER_S


class RowCost(NamedTuple):
    """FLOPs and bytes of one call, linear in its rows."""

    flops_per_row: float
    bytes_per_row: float
    fixed_bytes: float
    dtype: str


class RowNodes(NamedTuple):
    """Latency of a call against its rows, piecewise linear; ``flag`` is the origin of each node."""

    axis: Floats
    value: Floats
    flag: Flags
    launch_us: float


class CurveOptions(NamedTuple):
    """How plans read measured tables: lookup method, GEMM smoothing, fp8 scales (dynamic or static)."""

    method: str = "roofline"
    gemm_smoothing: str = "none"
    fp8_scales: str = "dynamic"


class PerRowOperator(Operator):
    """An operator whose calls in plans depend on a number of rows."""

    datasheet_error: ClassVar[float | None] = None

    @abstractmethod
    def row_cost(self, call: Any) -> RowCost:
        """FLOPs and compulsory bytes of one call: per row, and fixed."""

    def row_work(self, call: Any, rows: Floats) -> tuple[Floats, Floats]:
        """FLOPs and compulsory bytes of one call at some numbers of rows."""
        cost = self.row_cost(call)
        return cost.flops_per_row * rows, cost.fixed_bytes + cost.bytes_per_row * rows

    @abstractmethod
    def row_key(self, call: Any) -> Key:
        """Everything that a call's latency depends on: not its role, nor its count."""

    @abstractmethod
    def serving(self, call: Any, tables: RowSource) -> SourceTable | None:
        """Measured table that a call's latencies come from; None if the datasheet is used."""

    def modelled_from(self, tables: RowSource) -> str:
        """Source of calls that no table serves, if they are modelled from another operator's; else empty."""
        return ""

    def has_every_row(self, call: Any, tables: RowSource, options: CurveOptions) -> bool:
        """Whether :meth:`row_nodes` has a node at every row, because no few nodes are exact."""
        return options.method != "roofline"

    @abstractmethod
    def row_nodes(self, call: Any, tables: RowSource, options: CurveOptions, max_rows: int) -> RowNodes:
        """Latency of a call against its rows, from measured tables."""

    @abstractmethod
    def row_variance(self, call: Any, tables: RowSource, rows: Floats) -> Floats | None:
        """Squared relative standard error at rows; None if all calls share :meth:`shared_error`."""

    def table_points(self, call: Any, tables: RowSource, rows: Floats) -> tuple[Key, list[Floats]] | None:
        """Kernel that a call is looked up as, and its sizes at numbers of rows; None without a lookup."""
        return None

    def shared_error(self, tables: RowSource) -> float | None:
        """Relative standard error that all calls of the operator share; None if unknown."""
        return None

    def row_datasheet(self, call: Any) -> DatasheetClass:
        """Launch floor and efficiency that the datasheet model assumes for a call."""
        return self.datasheet

    def datasheet_nodes(self, call: Any, gpu: GpuSpec) -> RowNodes:
        """Latency against rows from the datasheet: launch floor plus the larger of two straight lines."""
        cost, assumed = self.row_cost(call), self.row_datasheet(call)
        bytes_per_s = gpu.nvlink_bytes_per_s if self.over_link else gpu.hbm_bytes_per_s
        flops_slope = cost.flops_per_row / gpu.peak(cost.dtype) * US_PER_S
        bytes_slope, fixed = (b / bytes_per_s * US_PER_S for b in (cost.bytes_per_row, cost.fixed_bytes))
        kink = [fixed / (flops_slope - bytes_slope)] if fixed and flops_slope > bytes_slope else []
        axis = np.array([0.0, *kink, SIZE_LIMIT])
        bound = np.maximum(flops_slope * axis, fixed + bytes_slope * axis)
        flag = np.full(len(axis), ORIGIN_MODELLED, np.uint8)
        return RowNodes(axis, assumed.launch_us + bound / assumed.efficiency, flag, assumed.launch_us)

    def every_row_nodes(
        self, tables: RowSource, method: str, key: Key, sizes: list[Floats], launch_us: float
    ) -> RowNodes:
        """Nodes at every number of rows, from the sizes of 1, 2, 3 ... rows."""
        max_rows = len(sizes[0])
        latency_us, origin = np.empty(max_rows), np.empty(max_rows, np.uint8)
        self.check_key(key)
        self.look_up(tables, method, key, sizes, (latency_us, np.empty(max_rows), origin))
        axis = np.r_[0.0, np.arange(1, max_rows + 1), SIZE_LIMIT]
        at = np.r_[0, :max_rows, max_rows - 1]
        return RowNodes(axis, latency_us[at], origin[at], launch_us)


class PackedSizes(NamedTuple):
    """Curve of one kernel, its measured sizes, and the map from sizes to the curve's coordinate."""

    curve: PackedCurve
    sizes: Floats
    coordinate: Callable[[Floats], Floats]

    @property
    def launch_us(self) -> float:
        """The smallest latency."""
        return float(self.curve.value[1:-1].min())


def _itself(sizes: Floats) -> Floats:
    return sizes


class SizedOperator(Operator):
    """An operator with one axis; ``is_linear`` if its roofline B is linear in the size."""

    is_linear: ClassVar[bool] = False

    def roofline(self, key: Key, gpu: GpuSpec, launch_us: float) -> Callable[[Any], Floats]:
        """B at sizes, us: bytes over the link, or FLOPs and bytes, after the least latency ``launch_us``."""
        link, peak = gpu.nvlink_bytes_per_s / US_PER_S, math.nan if self.over_link else gpu.peak(key[0])

        def bound_us(sizes: Any) -> Floats:
            columns = self._key_columns(key, sizes)
            moved = self.expected_bytes(columns)
            if self.over_link:
                us = launch_us + moved / link
            else:
                seconds = self.flops(columns) / peak + moved / gpu.hbm_bytes_per_s
                us = launch_us + seconds * US_PER_S
            return np.asarray(us).reshape(np.shape(sizes))

        return bound_us

    def expected_bytes(self, columns: Columns) -> Floats:
        """Bytes of the roofline, which interpolates between sizes."""
        return self.moved_bytes(columns)

    def flops_per_unit(self, key: Key) -> float:
        """FLOPs per unit of the size; NaN if the operator only moves bytes."""
        return math.nan if self.over_link else float(self.flops(self._key_columns(key, 1))[0])

    def _key_columns(self, key: Key, sizes: Any) -> dict[str, Array]:
        """Columns of calls of one kernel."""
        sizes = np.atleast_1d(np.asarray(sizes, np.float64))
        named = {column.name: value for column, value in zip(self.keys, key, strict=True)}
        kinds = {name: object if isinstance(value, str) else np.float64 for name, value in named.items()}
        arrays = {name: np.full(len(sizes), value, kinds[name]) for name, value in named.items()}
        return {**arrays, self.axes[0].name: sizes}

    def pack(self, key: Key, rows: Columns, gpu: GpuSpec, variant: str = "") -> PackedSizes:
        """Pack the curve of one kernel."""
        sizes = rows[self.axes[0].name].astype(np.float64)
        latency_us = rows["latency_us"]
        bound_us = self.roofline(key, gpu, float(latency_us.min()))
        curve = pack_curve(sizes, latency_us, bound_us, rows.get(ORIGIN), is_linear=self.is_linear)
        return PackedSizes(curve, np.unique(sizes), _itself if self.is_linear else bound_us)

    def packed(self, tables: RowSource, key: Key) -> PackedSizes:
        """Curve of one kernel."""
        return tables.packed(self, key)

    def look_up(
        self, tables: RowSource, method: str, key: Key, sizes: list[Floats], answers: Answers
    ) -> None:
        """Look up one kernel; methods other than roofline interpolate size / latency."""
        from fastroof.compiled import points
        from fastroof.compiled.guides import curve_latency_us

        (size,) = sizes
        out, mfu, origin = answers
        packed = self.packed(tables, key)
        curve_latency_us(packed.curve, packed.coordinate(size), out, origin)
        if method != "roofline":
            _keep_rate(packed, method, size, out, origin)
        work = self.flops_per_unit(key)
        if math.isnan(work):
            mfu.fill(math.nan)
        else:
            points.curve_mfu(size, unit_us(tables.gpu, key[0], work), out, mfu)

    def _measured_grid(self, tables: RowSource, key: Key) -> MeasuredGrid:
        rows = tables.rows(self, key)
        latency_us = rows["latency_us"]
        bound_us = self.roofline(key, tables.gpu, float(latency_us.min()))
        sizes = (rows[self.axes[0].name].astype(np.float64),)
        return measured_grid(sizes, latency_us, bound_us, is_spike=rows[ORIGIN] != ORIGIN_MEASURED)

    def local_errors(self, tables: RowSource, key: Key) -> LocalErrors:
        """Local errors of one kernel, calibrated over kernels with the same first and last key."""
        ends = key[0], key[-1]

        def kernels() -> list[Key]:
            return [one for one in tables.candidates(self.name)[0].groups() if (one[0], one[-1]) == ends]

        return shared_errors(tables, self.name, key, ends, kernels, partial(self._measured_grid, tables))

    def relative_error(self, tables: RowSource, key: Key, sizes: list[Floats], latency_us: Floats) -> Floats:
        """Relative standard error of lookups of one kernel."""
        return np.sqrt(relative_variance(self.local_errors(tables, key), sizes))


class KernelOperator(SizedOperator, PerRowOperator):
    """Calls of one measured kernel, whose key is :meth:`row_key` and whose size is the number of rows."""

    def serving(self, call: Any, tables: RowSource) -> SourceTable:
        """Table of the kernel."""
        return tables.serving(self.name, self.row_key(call))

    def row_nodes(self, call: Any, tables: RowSource, options: CurveOptions, max_rows: int) -> RowNodes:
        """Curve of the kernel."""
        packed = self.call_curve(call, tables)
        if options.method == "roofline":
            return self.roofline_nodes(call, packed)
        rows = np.arange(1.0, max_rows + 1.0)
        return self.every_row_nodes(tables, options.method, self.row_key(call), [rows], packed.launch_us)

    def call_curve(self, call: Any, tables: RowSource) -> PackedSizes:
        """Curve of a call's kernel."""
        return self.packed(tables, self.row_key(call))

    def roofline_nodes(self, call: Any, packed: PackedSizes) -> RowNodes:
        """Nodes of a call by the roofline method: those of its kernel's curve."""
        return RowNodes(packed.curve.axis, packed.curve.value, packed.curve.flag, packed.launch_us)

    def table_points(self, call: Any, tables: RowSource, rows: Floats) -> tuple[Key, list[Floats]] | None:
        """Kernel and rows."""
        return self.row_key(call), [rows]

    def row_variance(self, call: Any, tables: RowSource, rows: Floats) -> Floats:
        """Variance of the kernel's curve."""
        return relative_variance(self.local_errors(tables, self.row_key(call)), [rows])


def _keep_rate(packed: PackedSizes, method: str, sizes: Floats, out: Floats, origin: Flags) -> None:
    """Replace unmeasured points by size / rate, with the rate of a measured size or between two."""
    nodes = packed.sizes
    rate = nodes / packed.curve.value[1:-1]
    if method == "linear_mfu":
        other = sizes / np.interp(sizes, nodes, rate)
    else:
        last = len(nodes) - 1
        node = np.clip(np.searchsorted(nodes, sizes, side="right") - 1, 0, last)
        if method == "nearest":
            above = np.minimum(node + 1, last)
            # further than the geometric mean of its neighbours; a tie goes to the smaller one
            beyond = sizes * sizes > nodes[node] * nodes[above]
            node = np.where(beyond & (sizes >= nodes[0]), above, node)
        other = sizes / rate[node]
        origin[origin != ORIGIN_MEASURED] = ORIGIN_EXTRAPOLATED
    np.copyto(out, other, where=origin != ORIGIN_MEASURED)
