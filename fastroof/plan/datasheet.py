"""The datasheet model: what a plan is compiled from where nothing was measured.

Latency is ``launch + max(flops / peak, bytes / bandwidth) / efficiency``, with one efficiency and one
launch floor an operator class: each operator's file has its own, from the vLLM 0.24.0 tables of the H100
(the smallest latency, and the median of roofline / latency of large calls; attention: calls of over 200 us
with head_dim 128 and bf16 KV). Everything it gives has origin "modelled".
"""

from __future__ import annotations

import warnings
from typing import Final

from fastroof.arrays import Flags, Floats
from fastroof.config import GpuSpec
from fastroof.load.by_name import how_to_get, table_folders
from fastroof.operators.calls import RowOperator
from fastroof.operators.prefix_price import PrefixUs
from fastroof.operators.registry import OPERATORS
from fastroof.plan.curves import DATASHEET_SOURCE, RowCurve, per_row, row_values
from fastroof.plan.step_attention import StepAttention

__all__ = ["CLASSES", "DatasheetCurves"]

CLASSES: Final = {name: kind for o in OPERATORS.values() for name, kind in o.datasheets.items()}
"""Launch floor and efficiency by class of operator."""


class DatasheetCurves:
    """Curves from a GPU's datasheet alone."""

    method = "datasheet"
    quantise_inputs = False

    def __init__(self, gpu: GpuSpec) -> None:
        self.gpu = gpu
        hint = "" if table_folders(gpu.name) else how_to_get(gpu.name)
        warnings.warn(
            f"no measured tables of {gpu.name}: its steps come from the datasheet model, not from kernels"
            + (f"; {hint}" if hint else ""),
            UserWarning,
            stacklevel=3,
        )

    def row_curve(self, call: RowOperator, max_rows: int) -> RowCurve:
        """Latency of a call against its rows; ``max_rows`` does not matter."""
        return RowCurve(call, *per_row(call).datasheet_nodes(call, self.gpu))

    def row_values(self, call: RowOperator, max_rows: int) -> tuple[Floats, Flags]:
        """Latency of a call at every number of rows, and its origin."""
        return row_values(self.row_curve(call, max_rows), max_rows)

    def attention_block(self, attention: StepAttention) -> Floats:
        """Grid block of one layer's attention."""
        return attention.datasheet_block(self.gpu)

    def attention_source(self, attention: StepAttention) -> str:
        """No kernel was measured."""
        return DATASHEET_SOURCE

    def prefix_us(self, attention: StepAttention) -> PrefixUs:
        """Price of a prefix: its roofline at the efficiency of prompts."""
        return attention.datasheet_prefix_us(self.gpu)
