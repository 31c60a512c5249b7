"""GEMMs of LoRA adapters next to linear layers: modelled from the GEMM table, since none were measured.

A step's rows are grouped by adapter, and one kernel runs all groups (Punica's SGMV, arXiv:2310.18547): first
to the rank (shrink), then from it to the layer's outputs (expand). README.md has the evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import ORIGIN_MODELLED, Column
from fastroof.config.gpu import GpuSpec
from fastroof.operators.calls import AdapterGemm
from fastroof.operators.elementwise import ELEMENTWISE
from fastroof.operators.gemm import GEMM
from fastroof.operators.operator import Columns, DatasheetClass, Key, RowSource, as_floats, is_measured
from fastroof.operators.row_operator import CurveOptions, PerRowOperator, RowCost, RowNodes
from fastroof.pack import SIZE_LIMIT
from fastroof.units import ACTIVATION_BYTES, US_PER_S

DTYPE: Final = "bf16"
"""Adapters are in 16 bits whatever the layer's format (lora_dtype of vLLM, the pool of SGLang)."""

BUFFER_BYTES: Final = 4
"""Bytes of an element between both GEMMs: float32."""

ERROR: Final = 1.0
"""Relative standard error, which all of a step's calls share: README.md compares public figures, none of
which chose anything here."""

_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 512)
_ROWS: Final = np.unique(np.r_[[1.0], 2.0 ** np.arange(1, 31), 3.0 * 2.0 ** np.arange(30)])
"""Rows at which a call is modelled; a straight line in between."""

GemmUs = Callable[[Floats, float, float], Floats]
"""Latency of GEMMs of m rows, n outputs and k inputs, us."""


class AdapterGemmOperator(PerRowOperator):
    """Both GEMMs of adapters, and the lookup of an embedding's."""

    name = "lora"
    rank = 12
    keys = (Column("part", "text", "", "shrink, expand or lookup"),)
    axes = (
        Column("m", "int", "tokens", "rows of all adapters together"),
        Column("n", "int", "", "outputs of an adapter"),
        Column("k", "int", "", "inputs of an adapter"),
        Column("adapters", "int", "", "adapters of the rows"),
    )
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"lora": GEMM.datasheets["gemm"]}

    def flops(self, columns: Columns) -> Floats:
        """Those of one GEMM over all rows."""
        return GEMM.flops(columns)

    def moved_bytes(self, columns: Columns) -> Floats:
        """Matrices of all adapters, inputs and outputs, in 16 bits."""
        m, n, k, adapters = (as_floats(columns[name]) for name in ("m", "n", "k", "adapters"))
        return ACTIVATION_BYTES * (adapters * n * k + m * (n + k))

    def peaks(self, columns: Columns, gpu: GpuSpec) -> tuple[Floats, Floats]:
        """Peak of 16 bits."""
        peak = np.full(len(columns["latency_us"]), gpu.peak(DTYPE))
        return peak, peak

    # -- in plans ----------------------------------------------------------------------------------

    def row_cost(self, call: AdapterGemm) -> RowCost:
        """FLOPs and bytes per row, without the matrices, whose number depends on the rows."""
        flops = 0.0 if call.part == "lookup" else 2.0 * call.inputs * call.outputs * call.picks
        return RowCost(flops, self._row_bytes(call) * call.picks, 0.0, DTYPE)

    def _row_bytes(self, call: AdapterGemm) -> float:
        """Bytes of one row: inputs and outputs; an expand adds to its outputs."""
        if call.part == "lookup":
            return 2.0 * call.outputs * ACTIVATION_BYTES
        if call.part == "shrink":
            return float(call.inputs * ACTIVATION_BYTES + call.outputs * BUFFER_BYTES)
        return float(call.slices * call.inputs * BUFFER_BYTES + 2 * call.outputs * ACTIVATION_BYTES)

    def _matrices(self, call: AdapterGemm, rows: Floats) -> Floats:
        """Number of matrices that some rows use, at most one adapter per row."""
        if call.part == "lookup":
            return np.zeros(len(rows))
        adapters = np.minimum(rows, float(call.adapters))
        if call.experts == 1:
            return adapters
        # of all pairs of an adapter and an expert, those that any of the picks meets
        pairs = np.maximum(adapters * call.experts, 1.0)
        return np.asarray(pairs * (1.0 - (1.0 - 1.0 / pairs) ** (rows * call.picks)))

    def row_work(self, call: AdapterGemm, rows: Floats) -> tuple[Floats, Floats]:
        """FLOPs and bytes, with the matrices of all adapters that have rows."""
        cost = self.row_cost(call)
        matrix_bytes = call.inputs * call.outputs * ACTIVATION_BYTES
        moved = cost.bytes_per_row * rows + self._matrices(call, rows) * matrix_bytes
        return cost.flops_per_row * rows, moved

    def row_key(self, call: AdapterGemm) -> Key:
        """All sizes."""
        sizes = (call.inputs, call.outputs, call.slices, call.adapters, call.experts, call.picks)
        return (call.part, *sizes)

    def serving(self, call: AdapterGemm, tables: RowSource) -> None:
        """None: nothing was measured."""

    def modelled_from(self, tables: RowSource) -> str:
        """The GEMM table, and the error."""
        if not is_measured(tables, GEMM.name, (DTYPE,)):
            return ""
        return f"gemm of {tables.serving(GEMM.name, (DTYPE,)).source} (modelled, ±{ERROR:.0%})"

    def row_nodes(
        self, call: AdapterGemm, tables: RowSource, options: CurveOptions, max_rows: int
    ) -> RowNodes:
        """Latency from the measured GEMM of one adapter's shape, where the table has the format."""
        if not is_measured(tables, GEMM.name, (DTYPE,)):
            return self.datasheet_nodes(call, tables.gpu)

        def measured_us(m: Floats, n: float, k: float) -> Floats:
            us = np.empty(len(m))
            sizes = [m, np.full(len(m), n), np.full(len(m), k)]
            GEMM.look_up(
                tables, "roofline", (DTYPE,), sizes, (us, np.empty(len(m)), np.empty(len(m), np.uint8))
            )
            return us

        return self._nodes(call, tables.gpu, measured_us)

    def datasheet_nodes(self, call: AdapterGemm, gpu: GpuSpec) -> RowNodes:
        """Latency from the roofline of the same GEMM."""
        assumed = self.row_datasheet(call)
        bound_us = GEMM.roofline(DTYPE, gpu, 0.0)

        def modelled_us(m: Floats, n: float, k: float) -> Floats:
            return np.asarray(assumed.launch_us + bound_us(m, n, k) / assumed.efficiency)

        return self._nodes(call, gpu, modelled_us)

    def _nodes(self, call: AdapterGemm, gpu: GpuSpec, gemm_us: GemmUs) -> RowNodes:
        """Time of one dense GEMM, plus that of the bytes that grouped ones move beyond it."""
        # without experts, no more matrices are in use beyond as many rows
        rows = np.union1d(_ROWS, [float(call.adapters)]) if call.experts == 1 else _ROWS
        bytes_per_us = gpu.hbm_bytes_per_s / US_PER_S
        picks = np.maximum(rows * call.picks, 1.0)
        matrix_bytes = call.inputs * call.outputs * ACTIVATION_BYTES
        usual_us = np.zeros(len(_ROWS))
        if call.part != "lookup":
            # a larger rank is never faster, whatever the table's noise
            for n, k in _shapes(call):
                usual_us = np.maximum(usual_us, gemm_us(np.maximum(_ROWS * call.picks, 1.0), n, k))
        # more adapters are never faster either: the added node lies on the line between its neighbours
        dense_us = np.interp(rows, _ROWS, np.maximum.accumulate(usual_us))
        others = np.maximum(self._matrices(call, rows) - 1.0, 0.0) * matrix_bytes
        row_bytes = 0.0 if call.part == "lookup" else float((call.inputs + call.outputs) * ACTIVATION_BYTES)
        added = picks * (self._row_bytes(call) - row_bytes)
        launch_us = ELEMENTWISE.datasheet.launch_us if call.part == "lookup" else 0.0
        us = launch_us + dense_us + (others + np.maximum(added, 0.0)) / bytes_per_us
        axis = np.r_[0.0, rows, SIZE_LIMIT]
        slope = (us[-1] - us[-2]) / (rows[-1] - rows[-2])
        value = np.r_[us[0], us, us[-1] + slope * max(SIZE_LIMIT - rows[-1], 0.0)]
        return RowNodes(axis, value, np.full(len(axis), ORIGIN_MODELLED, np.uint8), float(us[0]))

    def row_variance(self, call: AdapterGemm, tables: RowSource, rows: Floats) -> None:
        """None: all calls share one error."""

    def shared_error(self, tables: RowSource) -> float:
        """Error of every call."""
        return ERROR


def _shapes(call: AdapterGemm) -> list[tuple[float, float]]:
    """Outputs and inputs of the call's dense GEMM, at its rank and all usual smaller ones."""
    rank = call.outputs // call.slices if call.part == "shrink" else call.inputs
    ranks = [*(one for one in _RANKS if one < rank), rank]
    if call.part == "shrink":
        return [(float(one * call.slices), float(call.inputs)) for one in ranks]
    return [(float(call.outputs), float(one)) for one in ranks]


LORA: Final = AdapterGemmOperator()
OPERATORS: Final = (LORA,)
