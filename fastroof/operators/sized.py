"""Operators whose kernels have one size: a curve each, against the roofline of that size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from fastroof.arrays import Flags, Floats
from fastroof.columns import ORIGIN, ORIGIN_EXTRAPOLATED, ORIGIN_MEASURED
from fastroof.config.gpu import GpuSpec
from fastroof.operators.operator import Answers, Columns, Key, Operator, unit_us
from fastroof.pack import PackedCurve, pack_curve
from fastroof.uncertainty.leave_one_out import LocalErrors, MeasuredGrid, measured_grid
from fastroof.uncertainty.variance import calibrated_errors, calibration_factor, relative_variance

if TYPE_CHECKING:
    from fastroof.tables import Tables

__all__ = ["PackedSizes", "SizedOperator"]


class PackedSizes(NamedTuple):
    """One kernel's curve."""

    curve: PackedCurve
    sizes: Floats
    coordinate: Callable[[Floats], Floats]


def _itself(sizes: Floats) -> Floats:
    return sizes


class SizedOperator(Operator):
    """An operator with one axis."""

    is_linear: ClassVar[bool] = False

    def roofline(self, key: Key, gpu: GpuSpec, launch_us: float) -> Callable[[Any], Floats]:
        """B at sizes, us; ``launch_us`` is the smallest latency of the kernel."""
        raise self._no_lookups()

    def flops_per_unit(self, key: Key) -> float:
        """FLOPs of one unit of the size; NaN where it computes nothing."""
        return math.nan

    def pack(self, key: Key, rows: Columns, gpu: GpuSpec, variant: str = "") -> PackedSizes:
        """One kernel's curve; beyond its ends latency / B is held."""
        sizes = rows[self.axes[0].name].astype(np.float64)
        latency_us = rows["latency_us"]
        bound_us = self.roofline(key, gpu, float(latency_us.min()))
        if self.is_linear:
            curve = pack_curve(sizes, latency_us, bound_us, rows.get(ORIGIN))
            return PackedSizes(curve, curve.axis[1:-1], _itself)
        curve = pack_curve(bound_us(sizes), latency_us, _itself, rows.get(ORIGIN))
        return PackedSizes(curve, np.unique(sizes), bound_us)

    def packed(self, tables: Tables, key: Key) -> PackedSizes:
        """One kernel's curve."""
        return tables.packed(self, key)

    def look_up(self, tables: Tables, method: str, key: Key, sizes: list[Floats], answers: Answers) -> None:
        """Look one kernel up; methods other than roofline keep size / latency, as MFU is for a curve."""
        from fastroof.compiled import points
        from fastroof.compiled.search import curve_latency_us

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

    def _measured_grid(self, tables: Tables, key: Key) -> MeasuredGrid:
        rows = tables.rows(self, key)
        latency_us = rows["latency_us"]
        bound_us = self.roofline(key, tables.gpu, float(latency_us.min()))
        sizes = (rows[self.axes[0].name].astype(np.float64),)
        return measured_grid(sizes, latency_us, bound_us, is_spike=rows[ORIGIN] != ORIGIN_MEASURED)

    def local_errors(self, tables: Tables, key: Key) -> LocalErrors:
        """Local errors of one kernel, calibrated over those with the first and the last key in common."""

        def factor() -> float:
            alike = [k for k in tables.groups(self.name) if k[0] == key[0] and k[-1] == key[-1]]
            return calibration_factor(self._measured_grid(tables, k) for k in alike)

        def errors() -> LocalErrors:
            shared = tables.kept(("calibration", self.name, key[0], key[-1]), factor)
            return calibrated_errors(self._measured_grid(tables, key), shared)

        return tables.kept(("local errors", self.name, key), errors)

    def relative_error(self, tables: Tables, key: Key, sizes: list[Floats], latency_us: Floats) -> Floats:
        """One standard error over the latency."""
        return np.sqrt(relative_variance(self.local_errors(tables, key), sizes))


def _keep_rate(packed: PackedSizes, method: str, sizes: Floats, out: Floats, origin: Flags) -> None:
    """Replace what was not measured by size / rate, the rate of a measured size or between two."""
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
