"""Checks of measured kernels: every row of the dense operators' tables, and its neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fastroof.config import GpuSpec
from fastroof.load.measured import MeasuredTable, MeasuredTables
from fastroof.operators.registry import OPERATORS
from fastroof.units import US_PER_S

from .ledger import Found

__all__ = [
    "AXES",
    "Bandwidth",
    "falls",
    "fp8_over_bf16",
    "highest_bandwidth",
    "of_kernels",
    "outliers",
    "under_work",
]

Array = npt.NDArray[Any]

AXES: Final = {
    "gemm": ("m", "n", "k"),
    "attention_prefill": ("batch_size", "q_len"),
    "attention_decode": ("batch_size", "kv_len"),
    "moe": ("num_tokens",),
    "allreduce": ("message_bytes",),
    "elementwise": ("m", "width"),
}
"""What each operator's latency should grow along."""
_FOLLOWS: Final = {"attention_prefill": ("kv_len",), "elementwise": ("io_bytes",)}
"""Axes that the others imply: without a prefix kv_len is q_len."""
STREAMING_L2S: Final = 8
"""A row that moves this many L2 caches streams from memory."""
FALL_LIMIT: Final = 0.90
FP8_LIMIT: Final = 1.0 / 1.05
OUTLIER_RATIO: Final = 1.5


class Bandwidth(NamedTuple):
    """The most bytes a second that any streaming row reached, and the row."""

    bytes_per_s: float
    operator: str
    row: dict[str, Any]


def of_kernels(table: MeasuredTable) -> MeasuredTable:
    """Leave out rows that are no kernel: what finding fp8 scales adds is a difference of two."""
    if table.operator != "elementwise":
        return table
    keep = table.columns["kind"] != "fp8_scale"
    return replace(table, columns={name: values[keep] for name, values in table.columns.items()})


def highest_bandwidth(measured: MeasuredTables, gpu: GpuSpec) -> Bandwidth:
    """Find the highest bandwidth that a measured kernel reached over rows far beyond the L2 cache.

    MoE is left out: which experts a row reached is not recorded.
    """
    best = Bandwidth(0.0, "", {})
    for operator in ("gemm", "attention_prefill", "attention_decode", "elementwise"):
        table = measured.tables[operator]
        work = OPERATORS[operator].work(table.columns, gpu)
        reached = work.moved_bytes * US_PER_S / table.columns["latency_us"]
        reached = np.where(work.moved_bytes > STREAMING_L2S * gpu.l2_bytes, reached, 0.0)
        row = int(np.argmax(reached))
        if reached[row] > best.bytes_per_s:
            place = {c.name: table.columns[c.name][row] for c in table.schema.required}
            best = Bandwidth(float(reached[row]), operator, place)
    return best


def under_work(table: MeasuredTable, gpu: GpuSpec, bytes_per_s: float) -> list[Found]:
    """Find rows faster than their FLOPs at the dtype's peak, or than their bytes beyond the L2 cache.

    Bytes that fit the cache may stay there from one replay to the next, so only those beyond count.
    """
    operator, columns = table.operator, table.columns
    work = OPERATORS[operator].work(columns, gpu)
    latency_us = columns["latency_us"]
    at = _coordinates(table, np.arange(table.num_rows))
    beyond_l2 = np.maximum(work.moved_bytes - gpu.l2_bytes, 1.0)
    bytes_us = beyond_l2 / bytes_per_s * US_PER_S
    found = [Found.under(f"{operator}: at least its bytes", 1.0, latency_us / bytes_us, at)]
    if not np.isnan(work.flops).all():
        flops_us = work.flops / work.limit_flops_per_s * US_PER_S
        found.append(Found.under(f"{operator}: at least its FLOPs", 1.0, latency_us / flops_us, at))
    return found


def falls(table: MeasuredTable, axis: str) -> Found:
    """Find points that are faster than the next smaller one along an axis, by more than a tenth."""
    here, there = _neighbours(table, axis)
    latency_us = table.columns["latency_us"]
    sizes, kernel = table.columns[axis], table.columns["kernel"]
    at = _coordinates(table, here) | {f"next_{axis}": sizes[there], "apart": sizes[there] - sizes[here]}
    at["kernel"] = np.where(kernel[here] == kernel[there], "same", "other")
    ratio = latency_us[there] / latency_us[here]
    return Found.under(f"{table.operator}: grows along {axis}", FALL_LIMIT, ratio, at)


def fp8_over_bf16(table: MeasuredTable) -> Found:
    """Find fp8 rows that take more than 1.05 times the bf16 row of the same shape."""
    columns = table.columns
    key = "dtype" if "dtype" in columns else "kv_dtype"
    others = [c.name for c in (*table.schema.keys, *table.schema.axes) if c.name != key]
    code = _codes([columns[name] for name in others])
    bf16, fp8 = (np.flatnonzero(columns[key] == dtype) for dtype in ("bf16", "fp8"))
    _, in_bf16, in_fp8 = np.intersect1d(code[bf16], code[fp8], return_indices=True)
    bf16, fp8 = bf16[in_bf16], fp8[in_fp8]
    ratio = columns["latency_us"][bf16] / columns["latency_us"][fp8]
    return Found.under(
        f"{table.operator}: fp8 no slower than bf16", FP8_LIMIT, ratio, _coordinates(table, fp8)
    )


def outliers(table: MeasuredTable) -> Found:
    """Find points off both neighbours, the same way, on every axis on which they have two.

    The ratio is that to the nearer neighbour, of the least telling axis, as a number below 1.
    """
    rows, latency_us = table.num_rows, table.columns["latency_us"]
    high, low, seen = np.full(rows, np.inf), np.full(rows, np.inf), np.zeros(rows, bool)
    for axis in AXES[table.operator]:
        here, there = _neighbours(table, axis)
        before, after = np.full(rows, -1), np.full(rows, -1)
        before[there], after[here] = here, there
        both = np.flatnonzero((before >= 0) & (after >= 0))
        seen[both] = True
        around = latency_us[[before[both], after[both]]]
        high[both] = np.minimum(high[both], latency_us[both] / around.max(axis=0))
        low[both] = np.minimum(low[both], around.min(axis=0) / latency_us[both])
    off = np.where(seen, np.maximum(high, low), 1.0)
    at = _coordinates(table, np.arange(rows))
    return Found.under(f"{table.operator}: near its neighbours", 1.0 / OUTLIER_RATIO, 1.0 / off, at)


def _coordinates(table: MeasuredTable, rows: Array) -> dict[str, Array]:
    return {c.name: table.columns[c.name][rows] for c in table.schema.required}


def _neighbours(table: MeasuredTable, axis: str) -> tuple[Array, Array]:
    """Rows of each pair of points that follow each other along an axis, everything else equal.

    Of a point that was measured several times, the fastest is compared.
    """
    schema, columns = table.schema, table.columns
    fixed = [c.name for c in (*schema.keys, *schema.axes) if c.name != axis]
    if axis in ("q_len", "m", "width"):
        fixed = [name for name in fixed if name not in _FOLLOWS.get(table.operator, ())]
    code = _codes([columns[name] for name in fixed])
    order = np.lexsort((columns["latency_us"], columns[axis], code))
    place = np.stack((code[order], columns[axis][order]))
    first = order[np.r_[True, (place[:, 1:] != place[:, :-1]).any(axis=0)]]
    same = code[first[1:]] == code[first[:-1]]
    return first[:-1][same], first[1:][same]


def _codes(columns: list[Array]) -> Array:
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        distinct, each = np.unique(column, return_inverse=True)
        code = np.unique(code * len(distinct) + each, return_inverse=True)[1]
    return code
