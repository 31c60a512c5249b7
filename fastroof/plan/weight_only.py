"""Weight-only kernels that nobody measured, modelled from a measured sibling of the same shape.

A weight-only kernel (Marlin) computes in bf16 like its siblings and reads its weights in another width. It
takes the sibling's time less the time of the bytes it saves at the datasheet's bandwidth, and at least its
own roofline. README.md has the evidence.
"""

from __future__ import annotations

import functools
import math
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import MODELLED_FROM, ORIGIN_MODELLED
from fastroof.config import GpuSpec
from fastroof.engines import engine_names, load_engine
from fastroof.errors import MissingTableError
from fastroof.operators.calls import Experts, Gemm, RowOperator
from fastroof.operators.gemm import GEMM
from fastroof.operators.moe import MOE, MOE_NONGATED
from fastroof.operators.operator import SourceTable
from fastroof.operators.row_operator import PerRowOperator, RowNodes
from fastroof.tables import Tables
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES, INPUT_BYTES, PEAK_DTYPE, US_PER_S

SIBLING: Final = "bf16"

WEIGHT_ONLY: Final = tuple(
    dtype
    for dtype, peak in PEAK_DTYPE.items()
    if peak == SIBLING and DTYPE_BYTES[dtype] < INPUT_BYTES[dtype] == ACTIVATION_BYTES
)
"""Formats whose kernels read narrow weights and compute in bf16."""

MXFP4: Final = "w4a16_mxfp4"
"""Format of several programs: Marlin where nothing else was measured, or Triton (``marlin`` of a profile)."""

ERROR_PER_OCTAVE: Final = 0.2
"""Relative standard error per octave of a weight's bytes, at least one; all calls of a step share it."""

MXFP4_ERROR_PER_OCTAVE: Final = 0.35
"""The same for mxfp4 of other programs than Marlin."""


class Sibling(NamedTuple):
    """A measured call of the same shape in another format, its table, and the error of modelling from it."""

    call: Gemm | Experts
    table: SourceTable
    error: float

    @property
    def source(self) -> str:
        """The table and format, and the error."""
        return f"{self.call.dtype} of {self.table.source} ({MODELLED_FROM}, ±{self.error:.0%})"


@functools.cache
def _marlin_engines() -> dict[str, str]:
    """Engines that run the same weight-only program, Marlin, and for which formats.

    Int4 experts of vLLM and SGLang are 5 to 7 % apart (median of |ln|: H100, H200, L40S, RTX PRO 6000),
    nearer than either is to its own bf16 experts.
    """
    profiles = [load_engine(name) for name in engine_names()]
    return {one.engine: one.kernels.marlin for one in profiles if one.kernels.marlin != "none"}


def weight_only_sibling(call: RowOperator, operator: PerRowOperator, tables: Tables) -> Sibling | None:
    """Return the measured sibling of a weight-only call; None if it was measured itself, or without one.

    Weight-only formats of the engine itself, or of the same program, come first, the nearest bytes before
    others; then bf16.
    """
    if not isinstance(call, Gemm | Experts) or call.dtype not in WEIGHT_ONLY:
        return None
    if operator.name not in (GEMM.name, MOE.name, MOE_NONGATED.name):
        return None
    engine = next(iter(tables.order.engines), "")
    is_marlin = call.dtype != MXFP4 or _marlin_engines().get(engine) == "all"

    def found() -> tuple[str, SourceTable] | None:
        with suppress(MissingTableError):
            operator.serving(call, tables)
            return None
        formats = set(WEIGHT_ONLY) - {call.dtype, MXFP4} if is_marlin else ()
        nearest = sorted(formats, key=lambda dtype: (_octaves(call.dtype, dtype), dtype))
        for dtype in (*nearest, SIBLING):
            with suppress(MissingTableError):
                other = replace(call, dtype=dtype)
                table = operator.serving(other, tables)
                if table is None or not _is_sound(other, operator, table, tables):
                    continue
                if (
                    dtype == SIBLING
                    or {table.engine, engine} <= _marlin_engines().keys()
                    or not tables.is_foreign(table)
                ):
                    return dtype, table
        return None

    sibling = tables.cached(("weight-only sibling", operator.name, operator.row_key(call)), found)
    if sibling is None:
        return None
    dtype, table = sibling
    per_octave = ERROR_PER_OCTAVE if is_marlin else MXFP4_ERROR_PER_OCTAVE
    return Sibling(replace(call, dtype=dtype), table, per_octave * max(1.0, _octaves(call.dtype, dtype)))


def _is_sound(call: RowOperator, operator: PerRowOperator, table: SourceTable, tables: Tables) -> bool:
    """Whether no check found the rows wrong that serve a call."""
    key = (call.dtype,) if isinstance(call, Gemm) else operator.source_key(tables, operator.row_key(call))
    return tables.is_sound(table, key)


def _octaves(dtype: str, other: str) -> float:
    return abs(math.log2(DTYPE_BYTES[dtype] / DTYPE_BYTES[other]))


def sibling_nodes(
    call: RowOperator, sibling: Sibling, operator: PerRowOperator, gpu: GpuSpec, measured: RowNodes
) -> RowNodes:
    """Model a call's latency against rows from the nodes of its measured sibling."""

    def work_us(one: RowOperator, dtype: str) -> tuple[Floats, Floats]:
        flops, moved = operator.row_work(one, measured.axis)
        return flops / gpu.peak(dtype) * US_PER_S, moved / gpu.hbm_bytes_per_s * US_PER_S

    flops_us, bytes_us = work_us(call, SIBLING)
    saved_us = work_us(sibling.call, SIBLING)[1] - bytes_us
    value = np.maximum(measured.value - saved_us, flops_us + bytes_us)
    return measured._replace(value=value, flag=np.full(len(value), ORIGIN_MODELLED, np.uint8))
