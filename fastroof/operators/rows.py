"""Operators whose time depends on a number of rows alone, as plans use them: tokens, or sequences.

A plan holds calls (:mod:`fastroof.operators.calls`): an operator with its shape on one GPU. What a call
costs, from measured tables or from a datasheet, and how good that is, its operator says.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from fastroof.arrays import Flags, Floats
from fastroof.columns import ORIGIN_MODELLED
from fastroof.config.gpu import GpuSpec
from fastroof.operators.operator import DatasheetClass, Key, Operator
from fastroof.pack import SIZE_LIMIT
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.load import MeasuredTable
    from fastroof.tables import Tables

__all__ = ["CurveOptions", "PerRowOperator", "RowCost", "RowNodes"]


class RowCost(NamedTuple):
    """FLOPs and bytes of one call of an operator: linear in its rows."""

    flops_per_row: float
    bytes_per_row: float
    fixed_bytes: float
    dtype: str


class RowNodes(NamedTuple):
    """A call's latency against its rows, piecewise linear."""

    axis: Floats
    value: Floats
    flag: Flags
    launch_us: float


class CurveOptions(NamedTuple):
    """How measured tables are read for a plan."""

    method: str = "roofline"
    gemm_smoothing: str = "none"
    fp8_scales: str = "dynamic"


class PerRowOperator(Operator):
    """An operator that plans call over rows."""

    datasheet_error: ClassVar[float | None] = None

    @abstractmethod
    def row_cost(self, call: Any) -> RowCost:
        """FLOPs and compulsory bytes of one call, a row and fixed."""

    def row_work(self, call: Any, rows: Floats) -> tuple[Floats, Floats]:
        """FLOPs and compulsory bytes of one call at numbers of rows."""
        cost = self.row_cost(call)
        return cost.flops_per_row * rows, cost.fixed_bytes + cost.bytes_per_row * rows

    @abstractmethod
    def row_key(self, call: Any) -> Key:
        """What a call's latency depends on: not its role, nor how often it runs."""

    @abstractmethod
    def serving(self, call: Any, tables: Tables) -> MeasuredTable | None:
        """The measured table that a call's latencies come from; None where a datasheet serves."""

    def has_every_row(self, call: Any, tables: Tables, options: CurveOptions) -> bool:
        """Whether :meth:`row_nodes` are all rows up to the last: no few of them are piecewise linear."""
        return options.method != "roofline"

    @abstractmethod
    def row_nodes(self, call: Any, tables: Tables, options: CurveOptions, max_rows: int) -> RowNodes:
        """Latency of a call against its rows, from measured tables."""

    @abstractmethod
    def row_variance(self, call: Any, tables: Tables, rows: Floats) -> Floats | None:
        """Squared relative standard error of a call at numbers of rows."""

    def table_points(self, call: Any, tables: Tables, rows: Floats) -> tuple[Key, list[Floats]] | None:
        """The kernel that a call is looked up as, and its sizes at numbers of rows; None without a lookup."""
        return None

    def shared_error(self, tables: Tables) -> float | None:
        """Relative standard error that all calls of the operator share; None where nothing tells it."""
        return None

    @abstractmethod
    def row_datasheet(self, call: Any) -> DatasheetClass:
        """What the datasheet model assumes of a call."""

    def datasheet_nodes(self, call: Any, gpu: GpuSpec) -> RowNodes:
        """Latency of a call against its rows, from a datasheet."""
        cost, assumed = self.row_cost(call), self.row_datasheet(call)
        bytes_per_s = gpu.nvlink_bytes_per_s if self.over_link else gpu.hbm_bytes_per_s
        flops_slope = cost.flops_per_row / gpu.peak(cost.dtype) * US_PER_S
        bytes_slope, fixed = (b / bytes_per_s * US_PER_S for b in (cost.bytes_per_row, cost.fixed_bytes))
        kink = [fixed / (flops_slope - bytes_slope)] if fixed and flops_slope > bytes_slope else []
        axis = np.array([0.0, *kink, SIZE_LIMIT])
        bound = np.maximum(flops_slope * axis, fixed + bytes_slope * axis)
        flag = np.full(len(axis), ORIGIN_MODELLED, np.uint8)
        return RowNodes(axis, assumed.launch_us + bound / assumed.efficiency, flag, assumed.launch_us)

    def looked_up_nodes(
        self, tables: Tables, method: str, max_rows: int, sizes: dict[str, Any], launch_us: float
    ) -> RowNodes:
        """Nodes at every number of rows, where few would not be piecewise linear in the rows."""
        lookup = tables.lookup(self.name, method=method, **sizes)
        axis = np.r_[0.0, np.arange(1, max_rows + 1), SIZE_LIMIT]
        at = np.r_[0, :max_rows, max_rows - 1]
        return RowNodes(axis, lookup.latency_us[at], lookup.origin[at], launch_us)
