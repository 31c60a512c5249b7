"""A plan's latencies from measured tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastroof.arrays import Flags, Floats
from fastroof.errors import PlanError
from fastroof.lazy_property import lazy_property
from fastroof.operators.attention import ATTENTION, ATTENTION_PREFILL
from fastroof.operators.attention_work import HeadShape
from fastroof.operators.calls import RowOperator
from fastroof.operators.gemm import GEMM
from fastroof.operators.operator import METHODS
from fastroof.operators.rows import CurveOptions
from fastroof.plan.curves import RowCurve, per_row, row_values
from fastroof.tables import Tables

__all__ = ["TableCurves"]


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

    @property
    def options(self) -> CurveOptions:
        """How the tables are read."""
        return CurveOptions(self.method, self.gemm_smoothing, self.fp8_scales)

    @lazy_property
    def _made(self) -> dict[Any, Any]:
        return self.tables.kept(("curves", *self.options))

    @property
    def quantise_inputs(self) -> bool:
        """Whether the source's fp8 GEMMs leave out quantising their input, as kernels alone do."""
        return GEMM.quantises_inputs_apart(self.tables)

    def row_curve(self, call: RowOperator, max_rows: int) -> RowCurve:
        """Latency of a call against its rows."""
        key = self._key(call, max_rows)
        if key not in self._made:
            self._made[key] = per_row(call).row_nodes(call, self.tables, self.options, max_rows)
        return RowCurve(call, *self._made[key])

    def row_values(self, call: RowOperator, max_rows: int) -> tuple[Floats, Flags]:
        """Latency of a call at every number of rows, and its origin."""
        key = ("rows", self._key(call, max_rows), max_rows)
        if key not in self._made:
            self._made[key] = row_values(self.row_curve(call, max_rows), max_rows)
        return self._made[key]  # type: ignore[no-any-return]

    def _key(self, call: RowOperator, max_rows: int) -> tuple[Any, ...]:
        """What a curve depends on: not the call's role, nor how often it runs."""
        key = (call.operator, *per_row(call).row_key(call))
        return key if self.method == "roofline" else (*key, max_rows)

    def attention_block(self, operator: str, heads: HeadShape) -> Floats:
        """Grid block of an attention operator; borrowed nodes say so."""
        key = (operator, heads)
        if key not in self._made:
            self._made[key] = ATTENTION[operator].block(self.tables, self.method, heads)
        return self._made[key]  # type: ignore[no-any-return]

    def prefix_us(self, heads: HeadShape) -> tuple[float, float]:
        """Price of a prefix, see :meth:`AttentionPrefill.prefix_us`."""
        key = ("prefix", heads)
        if key not in self._made:
            self._made[key] = ATTENTION_PREFILL.prefix_us(self.tables, heads)
        return self._made[key]  # type: ignore[no-any-return]
