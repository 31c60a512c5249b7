"""What the engine is measured against: the same steps without plans or compiled loops."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from fastroof import StepPlan, Tables
from fastroof.pack import PackedGrid

CHUNK = 16_384


def _bilinear(grid: PackedGrid, y: Any, x: Any) -> Any:
    """Values of a packed grid at (y, x) by searchsorted and four gathers."""
    ys, xs, node = grid.y_axis, grid.x_axis, grid.cells[..., 0]
    i = np.searchsorted(ys, y, side="right") - 1
    j = np.searchsorted(xs, x, side="right") - 1
    wy = (y - ys[i]) / (ys[i + 1] - ys[i])
    wx = (x - xs[j]) / (xs[j + 1] - xs[j])
    low = node[i, j] + wx * (node[i, j + 1] - node[i, j])
    high = node[i + 1, j] + wx * (node[i + 1, j + 1] - node[i + 1, j])
    return low + wy * (high - low)


def numpy_decode_us(plan: StepPlan, tables: Tables, batch_size: Any, kv_len: Any) -> Any:
    """Every lookup of every step by searchsorted, in chunks that stay in the cache."""
    grid = tables.attention("attention_decode", plan.heads).grid
    out = np.empty(len(batch_size))
    for start in range(0, len(out), CHUNK):
        part = slice(start, start + CHUNK)
        batch, kv = batch_size[part].astype(np.float64), kv_len[part].astype(np.float64)
        total = plan.model.num_layers * _bilinear(grid, batch, kv)
        for curve in plan.row_curves:
            total += curve.operator.times * np.interp(batch, curve.axis, curve.value)
        out[part] = total
    return out


def python_decode_us(plan: StepPlan, tables: Tables, batch: int, kv: int) -> float:
    """One step by one public lookup an operator: what a plain program does."""
    from fastroof.plan.operators import AllReduce, Gemm

    heads = plan.heads
    total = plan.model.num_layers * float(
        tables.lookup(
            "attention_decode", num_q_heads=heads.num_q_heads, num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim, batch_size=batch, kv_len=kv, kv_dtype=heads.kv_dtype,
        ).latency_us
    )  # fmt: skip
    for curve in plan.row_curves:
        op = curve.operator
        if isinstance(op, Gemm):
            found = tables.lookup("gemm", m=batch, n=op.n, k=op.k, dtype=op.dtype)
            total += op.times * float(found.latency_us)
        elif isinstance(op, AllReduce):
            message = int(batch * op.row_bytes)
            found = tables.lookup("allreduce", num_gpus=op.num_gpus, message_bytes=message)
            total += op.times * float(found.latency_us)
        else:
            total += op.times * float(np.interp(batch, curve.axis, curve.value))
    return total


@njit(nogil=True)
def stream(batch_size: Any, kv_len: Any, out: Any) -> None:
    """Move the bytes of a homogeneous batch and do nothing with them: the floor of any evaluation."""
    for i in range(len(out)):
        out[i] = batch_size[i] + kv_len[i]
