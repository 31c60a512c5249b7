"""Where a plan's latencies come from: measured tables, or the datasheet."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol, cast

import numpy as np

from fastroof.arrays import Flags, Floats
from fastroof.caching import lazy_property
from fastroof.checks import one_of
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_INTERPOLATED, ORIGIN_MEASURED, ORIGIN_MODELLED
from fastroof.compiled.grids import cells_of, curve_rows
from fastroof.compiled.layout import is_plain
from fastroof.config import GpuSpec, is_shipped, load_gpu
from fastroof.errors import MissingTableError, PlanError
from fastroof.load.by_name import how_to_get, table_folders
from fastroof.load.scaled import scaled_error
from fastroof.operators.attention_work import PrefixUs
from fastroof.operators.calls import Elementwise, HyperConnection, RowOperator
from fastroof.operators.gemm import GEMM
from fastroof.operators.operator import METHODS
from fastroof.operators.registry import OPERATORS
from fastroof.operators.row_operator import CurveOptions, PerRowOperator, RowCost, RowNodes
from fastroof.plan.attention import StepAttention
from fastroof.plan.options import PlanOptions
from fastroof.plan.weight_only import Sibling, sibling_nodes, weight_only_sibling
from fastroof.tables import Tables
from fastroof.tables.kernel_order import KernelOrder

DATASHEET_SOURCE: Final = "datasheet"
"""Source of what was not measured."""


Component = Literal["linear", "experts", "communication", "elementwise", "lm_head"]
"""Parts of a step that comparisons and pictures sum its calls over rows to."""


@dataclass(frozen=True, eq=False)
class RowCurve:
    """Latency of one call by its rows, piecewise linear."""

    operator: RowOperator
    axis: Floats
    value: Floats
    flag: Flags
    launch_us: float
    source: str = DATASHEET_SOURCE
    share: float = 1.0

    def in_layers(self, count: int) -> RowCurve:
        """Return the curve of ``count`` layers' calls; ``replace`` would take three times as long."""
        call = self.operator
        if count > 1:
            call = replace(call, times=call.times * count)
        return RowCurve(call, self.axis, self.value, self.flag, self.launch_us, self.source, self.share)

    def once(self) -> RowCurve:
        """Return the curve of one call."""
        call = replace(self.operator, times=1)
        return RowCurve(call, self.axis, self.value, self.flag, self.launch_us, self.source, self.share)


class CurveSource(Protocol):
    """Latencies that a plan is compiled from."""

    @property
    def method(self) -> str:
        """How tables are interpolated."""

    @property
    def gpu(self) -> GpuSpec:
        """The GPU."""

    def quantises_apart(self, dtype: str) -> bool:
        """Return whether GEMMs of fp8 or fp8_block were measured without quantising their input."""

    def row_curve(self, call: RowOperator, max_rows: int) -> RowCurve:
        """Return a call's latency by rows, at least up to ``max_rows``."""

    def row_values(self, call: RowOperator, max_rows: int) -> tuple[Floats, Flags]:
        """Return a call's latency and origin at every number of rows up to ``max_rows``."""

    def attention_block(self, attention: StepAttention) -> Floats:
        """Return the grid block of one layer's attention, as ``grid_value`` reads it."""

    def attention_source(self, attention: StepAttention) -> str:
        """Return the source of an attention block."""

    def prefix_us(self, attention: StepAttention) -> PrefixUs:
        """Return the time per pair and token of a prefix, in one layer's prefill."""


def num_allreduces(curves: Iterable[RowCurve]) -> float:
    """Number of all-reduces of a step: the same with and without prefill."""
    calls = [curve.operator for curve in curves if curve.operator.steps != "with_prefill"]
    return sum(call.times for call in calls if call.operator == "allreduce")


def per_row(call: RowOperator) -> PerRowOperator:
    """Return the operator of a call."""
    return cast(PerRowOperator, OPERATORS[call.operator])


def component_of(call: RowOperator) -> Component:
    """Return the component of a call over rows; attention is separate."""
    if per_row(call).over_link:
        return "communication"
    if isinstance(call, Elementwise | HyperConnection):
        return "elementwise"
    if call.role == "lm_head":
        return "lm_head"
    return "experts" if call.role in ("router", "experts") or call.role.startswith("shared_") else "linear"


def row_values(curve: RowCurve, max_rows: int) -> tuple[Floats, Flags]:
    """Look up a curve at every number of rows up to ``max_rows``."""
    if is_plain():
        return plain_row_values(curve, max_rows)
    latency_us = np.empty(max_rows + 1)
    origin = np.empty(max_rows + 1, np.uint8)
    curve_rows(curve.axis, curve.value, curve.flag, latency_us, origin)
    return latency_us, origin


def plain_row_values(curve: RowCurve, max_rows: int) -> tuple[Floats, Flags]:
    """Return the bits of :func:`curve_rows` by NumPy, in a tenth of the time of that loop as Python."""
    rows = np.arange(1.0, max_rows + 1.0)
    at = np.clip(np.searchsorted(curve.axis, rows, "right") - 1, 0, len(curve.axis) - 2)
    past, step_us = rows - curve.axis[at], np.diff(curve.value)[at]
    between_us = curve.value[at] + step_us * (past / np.diff(curve.axis)[at])
    flag = np.maximum(np.maximum(curve.flag[at], curve.flag[at + 1]), np.uint8(ORIGIN_INTERPOLATED))
    is_node = past == 0.0
    latency_us, origin = np.zeros(max_rows + 1), np.zeros(max_rows + 1, np.uint8)
    latency_us[1:] = np.where(is_node, curve.value[at], between_us)
    origin[1:] = np.where(is_node, curve.flag[at], flag)
    return latency_us, origin


def faster_of(first_choice: RowCurve, other: RowCurve) -> RowCurve:
    """Return the smaller latency of two curves at every number of rows.

    The other curve starts at the own one's least latency if that is longer: of one kernel, it is how two
    programs measured its launch.
    """
    later_us = max(first_choice.launch_us - other.launch_us, 0.0)
    other = replace(other, value=other.value + later_us)
    axis = np.union1d(first_choice.axis, other.axis)
    values = np.array([np.interp(axis, one.axis, one.value) for one in (first_choice, other)])
    apart = values[0] - values[1]
    # a node where the curves cross
    cross = np.flatnonzero(apart[:-1] * apart[1:] < 0.0)
    share = apart[cross] / (apart[cross] - apart[cross + 1])
    axis = np.union1d(axis, axis[cross] + share * (axis[cross + 1] - axis[cross]))
    values = np.array([np.interp(axis, one.axis, one.value) for one in (first_choice, other)])
    places = (np.clip(np.searchsorted(one.axis, axis), 0, len(one.axis) - 1) for one in (first_choice, other))
    flags = np.array([one.flag[at] for one, at in zip((first_choice, other), places, strict=True)])
    first = values.argmin(axis=0)
    fastest = values[first, np.arange(len(axis))], flags[first, np.arange(len(axis))]
    source = f"{first_choice.source} or {other.source}"
    return RowCurve(first_choice.operator, axis, *fastest, first_choice.launch_us, source, first_choice.share)


def row_cost(call: RowOperator) -> RowCost:
    """FLOPs and compulsory bytes of one call, per row and fixed."""
    return per_row(call).row_cost(call)


def modelled_block(block: Floats) -> Floats:
    """Return an attention block all of whose nodes are modelled."""
    padded = block.copy()
    padded[cells_of(block).stop :] = ORIGIN_MODELLED
    return padded


CLASSES: Final = {name: kind for o in OPERATORS.values() for name, kind in o.datasheets.items()}
"""Launch floor and efficiency by operator class."""


class DatasheetCurves:
    """Curves from a GPU's datasheet only."""

    method = "datasheet"

    def __init__(self, gpu: GpuSpec, *, warns: bool = True) -> None:
        self.gpu = gpu
        if not warns:
            return
        hint = "" if table_folders(gpu.kernel_name) else how_to_get(gpu.kernel_name)
        warnings.warn(
            f"no measured tables of {gpu.name}: its steps come from the datasheet model, not from kernels "
            f"(standard error {gpu.datasheet_error:.0%})" + (f"; {hint}" if hint else ""),
            UserWarning,
            stacklevel=3,
        )

    def quantises_apart(self, dtype: str) -> bool:
        """Return False: efficiencies include it."""
        return False

    def row_curve(self, call: RowOperator, max_rows: int) -> RowCurve:
        """Return a call's latency by rows; ``max_rows`` is ignored."""
        return RowCurve(call, *per_row(call).datasheet_nodes(call, self.gpu))

    def row_values(self, call: RowOperator, max_rows: int) -> tuple[Floats, Flags]:
        """Return a call's latency and origin at every number of rows."""
        return row_values(self.row_curve(call, max_rows), max_rows)

    def attention_block(self, attention: StepAttention) -> Floats:
        """Return the grid block of one layer's attention."""
        return attention.datasheet_block(self.gpu)

    def attention_source(self, attention: StepAttention) -> str:
        """Return "datasheet"."""
        return DATASHEET_SOURCE

    def prefix_us(self, attention: StepAttention) -> PrefixUs:
        """Return the roofline of a prefix at the efficiency of prefill."""
        return attention.datasheet_prefix_us(self.gpu)


@dataclass(frozen=True, eq=False)
class TableCurves:
    """Curves from measured tables; each distinct one is cached with the tables."""

    tables: Tables
    method: str = "roofline"
    gemm_smoothing: str = "none"
    fp8_scales: str = "dynamic"
    allow_modelled: bool = False
    is_cold: bool = False
    faster: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        one_of("method", self.method, METHODS, PlanError)

    @lazy_property
    def options(self) -> CurveOptions:
        """How tables are read."""
        return CurveOptions(self.method, self.gemm_smoothing, self.fp8_scales)

    @property
    def gpu(self) -> GpuSpec:
        """The GPU that was measured."""
        return self.tables.gpu

    def quantises_apart(self, dtype: str) -> bool:
        """Return whether the source's GEMMs were measured without quantising their input."""
        return GEMM.quantises_inputs_apart(self.tables, dtype)

    def row_curve(self, call: RowOperator, max_rows: int) -> RowCurve:
        """Return a call's latency by rows: the engine's own, or of the faster of two kernels that it has."""
        engine_curve = self._own_curve(call, max_rows)
        engine = dict(self.faster).get(call.operator)
        if engine is None:
            return engine_curve
        operators = (*self.tables.order.operators, (call.operator, engine))
        curves = replace(
            self, tables=self.tables.in_order(self.tables.order._replace(operators=operators)), faster=()
        )
        other = curves._own_curve(call, max_rows)
        return engine_curve if other.source == engine_curve.source else faster_of(engine_curve, other)

    def _own_curve(self, call: RowOperator, max_rows: int) -> RowCurve:
        """Return a call's latency by rows from the first of the tables."""

        def nodes() -> RowNodes:
            nodes = operator.row_nodes(call, self.tables, self.options, max_rows)
            if table is None:
                return nodes
            least = ORIGIN_BORROWED if self.tables.is_foreign(table) else ORIGIN_MEASURED
            if table.source in self.tables.scaled_sources:
                least = ORIGIN_MODELLED
            return nodes._replace(flag=np.maximum(nodes.flag, np.uint8(least)))

        operator = per_row(call)
        try:
            table = operator.serving(call, self.tables)
        except MissingTableError as error:
            sibling = weight_only_sibling(call, operator, self.tables)
            if sibling is not None:
                return self._from_sibling(call, sibling, max_rows)
            self._check_modelled(error)
            return RowCurve(call, *operator.datasheet_nodes(call, self.tables.gpu))
        key = ("row nodes", *self._key(call, max_rows))
        if self.method == "roofline":
            made = self.tables.cached(key, nodes)
        else:  # a node at every row
            made = self.tables.cached_bounded(key, nodes, lambda made: 3 * made.axis.nbytes)
        source = operator.modelled_from(self.tables) if table is None else table.source
        return RowCurve(call, *made, source or DATASHEET_SOURCE)

    def _from_sibling(self, call: RowOperator, sibling: Sibling, max_rows: int) -> RowCurve:
        """Return a call's latency by rows, modelled from a measured call."""
        measured = self.row_curve(sibling.call, max_rows)
        nodes = RowNodes(measured.axis, measured.value, measured.flag, measured.launch_us)
        nodes_of_sibling = sibling_nodes(call, sibling, per_row(call), self.gpu, nodes)
        return RowCurve(call, *nodes_of_sibling, sibling.source)

    def row_values(self, call: RowOperator, max_rows: int) -> tuple[Floats, Flags]:
        """Return a call's latency and origin at every number of rows."""

        def values() -> tuple[Floats, Flags]:
            return row_values(self.row_curve(call, max_rows), max_rows)

        latency_us, origin = self.tables.cached_bounded(
            ("row values", *self._key(call, max_rows)),
            values,
            lambda made: made[0].nbytes + made[1].nbytes,
            lambda made: len(made[0]) > max_rows,
        )
        # cached values may go further
        return latency_us[: max_rows + 1], origin[: max_rows + 1]

    def _key(self, call: RowOperator, max_rows: int) -> tuple[Any, ...]:
        """Cache key: all that a curve depends on, which excludes the call's role and count."""
        operator = per_row(call)
        key = (self.options, self.allow_modelled, self.faster, call.operator, *operator.row_key(call))
        return (*key, max_rows) if operator.has_every_row(call, self.tables, self.options) else key

    def attention_block(self, attention: StepAttention) -> Floats:
        """Return the grid block of one layer's attention; borrowed nodes are flagged."""

        def block() -> Floats:
            if self._is_modelled(attention):
                return attention.datasheet_block(self.gpu)
            is_cold = self.is_cold and self.method == "roofline"
            made = (
                attention.block_from_memory(self.tables)
                if is_cold
                else attention.block(self.tables, self.method)
            )
            is_scaled = not self.tables.scaled_sources.isdisjoint(attention.sources(self.tables))
            return modelled_block(made) if is_scaled else made

        how = (self.method, self.allow_modelled, self.is_cold)
        return self.tables.cached(("attention blocks", *how, attention), block)

    def attention_source(self, attention: StepAttention) -> str:
        """Return the sources of its kernels, or of those that replace them."""
        if self._is_modelled(attention):
            return DATASHEET_SOURCE
        sources = dict.fromkeys(attention.sources(self.tables))
        return " ".join((*sources, *attention.modelled_from(self.tables)))

    def prefix_us(self, attention: StepAttention) -> PrefixUs:
        """Return the time per pair and token of a prefix, in one layer's prefill."""
        if self._is_modelled(attention):
            return attention.datasheet_prefix_us(self.gpu)
        return self.tables.cached(("prefix", attention), lambda: attention.prefix_us(self.tables))

    def _is_modelled(self, attention: StepAttention) -> bool:
        """Whether it was not measured and comes from the datasheet model."""

        def is_modelled() -> bool:
            try:
                attention.donors(self.tables)
            except MissingTableError as error:
                if not attention.is_modelled_unasked:
                    self._check_modelled(error)
                return True
            return False

        return self.tables.cached(("is modelled", self.allow_modelled, attention), is_modelled)

    def _check_modelled(self, error: MissingTableError) -> None:
        """Raise the error with a hint, unless the datasheet model is allowed or some kernels are scaled."""
        if not self.allow_modelled and not self.tables.scaled_sources:
            raise MissingTableError(
                f"{error}; allow_modelled=True (--allow-modelled) models it from the datasheet"
            ) from None


def kernel_order(gpu: GpuSpec, options: PlanOptions) -> KernelOrder:
    """Return the order in which a plan prefers sources of kernels; ``options`` are checked."""
    engine = options.engine
    by_operator = []
    for operator in dict.fromkeys(kernel.operator for kernel in engine.kernels.operators):
        kernel = options.kernel(operator, gpu, options.dtype)
        if kernel is not None and (kernel.source or kernel.engine):
            by_operator.append((operator, kernel.source or kernel.engine))
    own = (engine.engine,) if engine.engine else ()
    engines = tuple(dict.fromkeys((*own, *engine.kernels.engines)))
    return KernelOrder(engines, tuple(by_operator), options.release)


def faster_kernels(gpu: GpuSpec, options: PlanOptions) -> tuple[tuple[str, str], ...]:
    """Operators that a plan's engine runs by the faster of its own and another engine's kernels."""
    operators = dict.fromkeys(kernel.operator for kernel in options.engine.kernels.operators)
    known = ((operator, options.kernel(operator, gpu, options.dtype)) for operator in operators)
    return tuple(
        (operator, kernel.faster) for operator, kernel in known if kernel is not None and kernel.faster
    )


def curves_of(tables: Tables | None, gpu: GpuSpec, options: PlanOptions) -> CurveSource:
    """Return where a plan's latencies come from; ``options`` are checked."""
    if gpu.half_dtype != "bf16":
        warnings.warn(
            f"{gpu.name} has no bf16 units: what is bf16 runs in {gpu.half_dtype} (vLLM: --dtype half)",
            UserWarning,
            stacklevel=3,
        )
    if tables is None:
        return DatasheetCurves(gpu)
    kernels = options.engine.kernels
    tables = tables.in_order(kernel_order(gpu, options))
    is_own = not is_shipped(gpu)
    if is_own and not tables.scaled_sources:
        warnings.warn(
            f"what was not measured on {gpu.name} comes from the datasheet model (standard error "
            f"{gpu.datasheet_error:.0%})",
            UserWarning,
            stacklevel=3,
        )
    if tables.scaled_sources:
        warnings.warn(
            f"what was not measured on {gpu.name} comes from kernels of {gpu.kernels_of}, scaled to its "
            f"peaks and bandwidth (standard error {scaled_error(load_gpu(gpu.kernels_of), gpu):.0%})",
            UserWarning,
            stacklevel=3,
        )
    return TableCurves(
        tables,
        options.method,
        kernels.gemm_smoothing,
        kernels.fp8_scales,
        options.allow_modelled or is_own,
        gpu.kernel_name in kernels.cold_decode,
        faster_kernels(gpu, options),
    )
