"""Streaming kernels: norms, rotary embedding, activations, KV writes, copies, quantising."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import MEASURED_US, ORIGIN_INTERPOLATED, Column
from fastroof.config.gpu import GpuSpec
from fastroof.errors import MissingTableError
from fastroof.operators.calls import Elementwise
from fastroof.operators.external_rows import (
    MEASURED,
    ExternalRows,
    PackageFile,
    Raw,
    constant_text,
    others,
    package_rows,
    size_columns,
    text_columns,
)
from fastroof.operators.operator import Columns, DatasheetClass, Key, RowSource, SourceTable
from fastroof.operators.row_operator import CurveOptions, PerRowOperator, RowCost, RowNodes
from fastroof.pack import SIZE_LIMIT
from fastroof.uncertainty.leave_one_out import LEVEL, NORMAL_80
from fastroof.units import GB, US_PER_MS, US_PER_S

NOT_STREAMING: Final = ("launch", "fp8_scale")
"""Measured kinds that are not streaming kernels."""

STREAM_FRACTION: Final = 0.5
"""Share of the memory bandwidth below which a kernel is bound by something else."""

L2_MULTIPLE: Final = 8
"""Multiple of L2 beyond which a kernel streams from memory."""


class Streaming(NamedTuple):
    """Launch floor (smallest latency) and copy bandwidth of measured streaming kernels."""

    launch_us: float
    bytes_per_s: float

    @property
    def rates(self) -> tuple[float, float]:
        """Launch floor, us, and bytes per us."""
        return self.launch_us, self.bytes_per_s / US_PER_S


def _quantising(raw: Raw, kind: str, io_bytes: Array, what: str) -> ExternalRows:
    kinds, out = constant_text(kind, len(raw["m"])), others(what, raw["quant_dtype"], ("fp8",))
    return package_rows(raw, "m", kind=kinds, width="k", io_bytes=io_bytes).without(out)


def _scale_matrix(raw: Raw) -> ExternalRows:
    # bf16 in, fp8 out.
    return _quantising(raw, "fp8_quantise", 3 * raw["m"] * raw["k"], "quantises to")


def _compute_scale(raw: Raw) -> ExternalRows:
    # time of finding the scales, in addition to quantising with known ones: a float32 per row
    rows = _quantising(raw, "fp8_scale", 4 * raw["m"], "scales of")
    # no difference: both kernels were equally fast
    return rows.without({"no difference": raw["latency"] < MEASURED_US[0] / US_PER_MS})


_DIFFERENCE: Final = Column("latency", "float", "ms", "difference of two measured latencies", 0)


class ElementwiseOperator(PerRowOperator):
    """Streaming kernels; plans use their launch floor and copy bandwidth instead of lookups."""

    name = "elementwise"
    rank = 70
    keys = (
        Column("kind", "text", "", "rmsnorm, rope, silu_and_mul, kv_write, copy, fp8_quantise, fp8_scale"),
    )
    axes = (
        Column("m", "int", "tokens", "rows"),
        Column("width", "int", "", "elements per row"),
        Column("io_bytes", "int", "B", "compulsory bytes read and written"),
    )
    # Over vLLM 0.24.0's H100 streaming kernels beyond the L2.
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"elementwise": DatasheetClass(1.9, 0.88)}
    package_files = (
        PackageFile(
            "quantize",
            "scale_matrix_perf",
            (*text_columns("quant_dtype"), *size_columns("m", "k"), *MEASURED),
            _scale_matrix,
        ),
        PackageFile(
            "quantize",
            "computescale_perf",
            (*text_columns("quant_dtype", "kernel_source"), *size_columns("m", "k"), _DIFFERENCE),
            _compute_scale,
        ),
    )

    def moved_bytes(self, columns: Columns) -> Floats:
        """Bytes read and written."""
        return np.asarray(columns["io_bytes"], np.float64)

    def independent_axes(self, columns: Columns) -> dict[str, Array]:
        """Sizes without the bytes, which follow from them."""
        return {axis.name: columns[axis.name] for axis in self.axes if axis.name != "io_bytes"}

    def package_notes(self, columns: Mapping[str, Columns], gpu: GpuSpec) -> dict[str, Any]:
        """Launch floor and copy bandwidth, if the quantising kernel streams."""
        own = columns[self.name]
        quantises = own["kind"] == "fp8_quantise"
        io_bytes, latency_us = own["io_bytes"][quantises], own["latency_us"][quantises]
        stream_bytes, bandwidth = L2_MULTIPLE * gpu.l2_bytes or GB, gpu.hbm_bytes_per_s
        large = io_bytes > stream_bytes
        is_difference = any("_minus_" in word for word in own["kernel"])
        how = "a difference of two kernels: what finding the scales adds"
        note = f"fp8_scale is computescale_perf, {how if is_difference else 'finding the scales'}"
        if not large.any():
            return {"note": note}
        copy = float(np.median(io_bytes[large] / (latency_us[large] / US_PER_S)))
        if copy < STREAM_FRACTION * bandwidth:
            return {
                "note": f"{note}; no launch_us and copy_bytes_per_s: at {copy:.3g} B/s of {bandwidth:.3g} "
                f"this kernel is not bound by memory"
            }
        return {
            "launch_us": float(latency_us.min()),
            "copy_bytes_per_s": copy,
            "derived": "launch_us is the smallest latency; copy_bytes_per_s the median of io_bytes / latency "
            f"over the {int(large.sum())} rows of more than {stream_bytes:.3g} B, far beyond the L2 cache",
            "note": note,
        }

    def streaming(self, tables: RowSource) -> Streaming | None:
        """Launch floor and copy bandwidth of the first source bound by memory; None if there is none."""
        return self._streaming(tables)[1]

    def _streaming(self, tables: RowSource) -> tuple[SourceTable | None, Streaming | None]:
        def found() -> tuple[SourceTable | None, Streaming | None]:
            for table in tables.candidates(self.name) if tables.has(self.name) else ():
                rates = _streaming_rates(table.columns, tables.gpu)
                if rates is not None:
                    return table, rates
            return None, None

        return tables.cached(("streaming",), found)

    def shared_error(self, tables: RowSource) -> float | None:
        """Relative standard error of the streaming line; None if none was measured."""
        table, measured = self._streaming(tables)
        if table is None or measured is None:
            return None
        columns = table.columns
        streams = ~np.isin(columns["kind"], NOT_STREAMING)
        launch_us, bytes_per_us = measured.rates
        line_us = launch_us + columns["io_bytes"][streams] / bytes_per_us
        off = np.abs(np.log(line_us / columns["latency_us"][streams]))
        return float(np.quantile(off, LEVEL)) / NORMAL_80

    def fp8_scale_us(self, tables: RowSource, m: Any, k: int, source: str = "") -> Floats:
        """Time of finding the input scale of a dynamically quantised fp8 GEMM of m x k inputs, us."""
        every = tables.candidates(self.name) if tables.has(self.name) else ()
        having = [table for table in every if (table.columns["kind"] == "fp8_scale").any()]
        if not having:
            raise MissingTableError(
                f"{tables.gpu.name} has no fp8_scale rows, which fp8 GEMMs with static scales need: "
                "use an engine profile with dynamic fp8_scales"
            )
        table = next((table for table in having if table.source == source), having[0])
        rows = tables.rows(self, ("fp8_scale",), source=table.source)
        m_axis, at_m = np.unique(rows["m"], return_inverse=True)
        k_axis, at_k = np.unique(rows["width"], return_inverse=True)
        grid_us = np.full((len(m_axis), len(k_axis)), np.nan)
        grid_us[at_m, at_k] = rows["latency_us"]
        known = ~np.isnan(grid_us)
        along_k = [np.interp(k, k_axis[has], row[has]) for row, has in zip(grid_us, known, strict=True)]
        return np.asarray(np.interp(m, m_axis, along_k))

    # -- in plans ----------------------------------------------------------------------------------

    def row_cost(self, call: Elementwise) -> RowCost:
        """Bytes per row."""
        return RowCost(0.0, call.row_bytes, 0.0, "bf16")

    def row_key(self, call: Elementwise) -> Key:
        """Bytes per row."""
        return (call.row_bytes,)

    def serving(self, call: Elementwise, tables: RowSource) -> SourceTable | None:
        """Table of the first source whose streaming kernels are bound by memory."""
        return self._streaming(tables)[0]

    def row_nodes(
        self, call: Elementwise, tables: RowSource, options: CurveOptions, max_rows: int
    ) -> RowNodes:
        """Launch floor plus bytes at copy bandwidth, from measured constants or the datasheet."""
        measured = self.streaming(tables)
        if measured is None:
            return self.datasheet_nodes(call, tables.gpu)
        launch_us, bytes_per_us = measured.rates
        axis = np.array([0.0, SIZE_LIMIT])
        flag = np.full(2, ORIGIN_INTERPOLATED, np.uint8)
        return RowNodes(axis, launch_us + axis * call.row_bytes / bytes_per_us, flag, launch_us)

    def row_variance(self, call: Elementwise, tables: RowSource, rows: Floats) -> None:
        """None: all streaming kernels share one line and its error."""


def _streaming_rates(columns: Columns, gpu: GpuSpec) -> Streaming | None:
    """Rates of one source's kernels; None if they are not bound by memory or too small."""
    kind, io_bytes, latency_us = columns["kind"], columns["io_bytes"], columns["latency_us"]
    streams = ~np.isin(kind, NOT_STREAMING)
    large = streams & (io_bytes > (L2_MULTIPLE * gpu.l2_bytes or GB))
    copies = large & (kind == "copy")
    large = copies if copies.any() else large
    if not large.any():
        return None
    rate = float(np.median(io_bytes[large] / latency_us[large])) * US_PER_S
    if rate < STREAM_FRACTION * gpu.hbm_bytes_per_s:
        return None
    return Streaming(float(latency_us[streams].min()), rate)


ELEMENTWISE: Final = ElementwiseOperator()
OPERATORS: Final = (ELEMENTWISE,)
