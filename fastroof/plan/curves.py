"""A call's latency against its rows, and what a plan asks of whoever knows latencies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Protocol, cast

import numpy as np

from fastroof.arrays import Flags, Floats
from fastroof.compiled.rows import curve_rows
from fastroof.config import GpuSpec
from fastroof.operators.calls import RowOperator
from fastroof.operators.prefix_price import PrefixUs
from fastroof.operators.registry import OPERATORS
from fastroof.operators.rows import PerRowOperator, RowCost
from fastroof.plan.step_attention import StepAttention

__all__ = [
    "DATASHEET_SOURCE",
    "CurveSource",
    "RowCurve",
    "num_allreduces",
    "per_row",
    "row_cost",
    "row_values",
]

DATASHEET_SOURCE: Final = "datasheet"
"""What stands for a source where no kernel was measured."""


@dataclass(frozen=True, eq=False)
class RowCurve:
    """One call's latency against its rows, piecewise linear."""

    operator: RowOperator
    axis: Floats
    value: Floats
    flag: Flags
    launch_us: float
    source: str = DATASHEET_SOURCE
    share: float = 1.0

    def in_layers(self, count: int) -> RowCurve:
        """Return the curve of all calls of so many layers; ``replace`` would take three times as long."""
        call = self.operator
        if count > 1:
            call = replace(call, times=call.times * count)
        return RowCurve(call, self.axis, self.value, self.flag, self.launch_us, self.source, self.share)

    def once(self) -> RowCurve:
        """Return the curve of one call."""
        call = replace(self.operator, times=1)
        return RowCurve(call, self.axis, self.value, self.flag, self.launch_us, self.source, self.share)


class CurveSource(Protocol):
    """What a plan is compiled from."""

    @property
    def method(self) -> str:
        """How latencies are looked up."""

    @property
    def gpu(self) -> GpuSpec:
        """The GPU."""

    @property
    def quantise_inputs(self) -> bool:
        """Whether an fp8 GEMM's latency leaves out quantising its input."""

    def row_curve(self, call: RowOperator, max_rows: int) -> RowCurve:
        """Latency of a call against its rows, at least up to ``max_rows``."""

    def row_values(self, call: RowOperator, max_rows: int) -> tuple[Floats, Flags]:
        """Latency of a call at every number of rows up to ``max_rows``, and its origin."""

    def attention_block(self, attention: StepAttention) -> Floats:
        """Grid block of one layer's attention, as ``grid_value`` reads it."""

    def attention_source(self, attention: StepAttention) -> str:
        """Which measured tables a block of attention comes from."""

    def prefix_us(self, attention: StepAttention) -> PrefixUs:
        """Price of a prefix in one layer's prompts."""


def num_allreduces(curves: Iterable[RowCurve]) -> float:
    """All-reduces of a step, which steps of decodes and steps with prompts have as many of."""
    calls = [curve.operator for curve in curves if curve.operator.steps != "with_prefill"]
    return sum(call.times for call in calls if call.operator == "allreduce")


def per_row(call: RowOperator) -> PerRowOperator:
    """Return the operator of a call."""
    return cast(PerRowOperator, OPERATORS[call.operator])


def row_values(curve: RowCurve, max_rows: int) -> tuple[Floats, Flags]:
    """Look a curve up at every number of rows up to ``max_rows``."""
    latency_us = np.empty(max_rows + 1)
    origin = np.empty(max_rows + 1, np.uint8)
    curve_rows(curve.axis, curve.value, curve.flag, latency_us, origin)
    return latency_us, origin


def row_cost(call: RowOperator) -> RowCost:
    """FLOPs and compulsory bytes of one call, a row and fixed."""
    return per_row(call).row_cost(call)
