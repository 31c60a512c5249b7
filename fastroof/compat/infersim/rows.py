"""Rows that InferSim's lookups read, on checked arrays: what the public lookups and `evaluate` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fastroof.arrays import Longs, Reals
from fastroof.compat.infersim.hardware import MISSING_PREFILL_MFU
from fastroof.compat.infersim.tree import Blocks, InfersimTables
from fastroof.compiled import compat_infersim as loops

__all__ = [
    "attn_decode_rows",
    "attn_prefill_rows",
    "gdn_rows",
    "gdn_us_of",
    "gemm_rows",
    "grouped_gemm_rows",
    "mfu_of",
    "prefill_mfu_of",
    "shared_heads",
]


def attn_decode_rows(
    tables: InfersimTables,
    kind: str,
    device: Longs,
    heads: tuple[Longs, ...],
    fp8: Longs,
    batch: Longs,
    kv: Longs,
) -> Longs:
    """Rows of decode attention; EMPTY_BLOCK where the file has no row of the KV dtype."""
    return _rows(loops.nearest_row, tables.blocks[kind], (device, *heads, fp8), (batch, kv))


def attn_prefill_rows(
    tables: InfersimTables, kind: str, device: Longs, heads: tuple[Longs, ...], seq_len: Longs
) -> Longs:
    """Rows of prefill attention."""
    return _rows(loops.floor_row, tables.blocks[kind], (device, *heads), (seq_len,))


def gemm_rows(tables: InfersimTables, device: Longs, m: Longs, k: Longs, n: Longs) -> Longs:
    """Rows of GEMMs."""
    return _rows(loops.ceiling_shape_row, tables.blocks["gemm"], (device, k, n), (m,))


def grouped_gemm_rows(
    tables: InfersimTables, kind: str, device: Longs, layer: tuple[Longs, ...], tokens: Longs
) -> Longs:
    """Rows of grouped GEMMs, by the six columns that name a layer."""
    loop = loops.nearest_row if kind.endswith("decode") else loops.floor_row
    return _rows(loop, tables.blocks[kind], (device, *layer), (tokens,))


def gdn_rows(
    tables: InfersimTables, kind: str, device: Longs, layer: tuple[Longs, ...], tokens: Longs
) -> Longs:
    """Rows of gated delta nets."""
    return _rows(loops.nearest_row, tables.blocks[kind], (device, *layer), (tokens,))


def mfu_of(blocks: Blocks, row: Longs, default_mfu: Reals | float, column: int = 0) -> Reals:
    """MFUs of rows; the default where there is none."""
    return _taken(blocks, row, column, default_mfu)


def prefill_mfu_of(blocks: Blocks, row: Longs, default_mfu: Reals | float) -> Reals:
    """MFUs of prefill attention, where a missing file has a default of its own."""
    return _taken(blocks, row, 0, np.where(row == loops.NO_KEY, MISSING_PREFILL_MFU, default_mfu))


def gdn_us_of(blocks: Blocks, row: Longs, tokens: Longs) -> Reals:
    """Latencies of rows scaled to the tokens, us; NaN where there is no row."""
    scale = _taken(blocks, row, None, np.nan) / tokens
    total = np.zeros(len(row))
    for kernel in range(len(blocks.values)):
        total += _taken(blocks, row, kernel, np.nan) / scale
    return total


def _rows(
    loop: Callable[[Longs, Longs, Longs, Longs, Longs, Longs], None],
    blocks: Blocks,
    key: tuple[Longs, ...],
    at: tuple[Longs, ...],
) -> Longs:
    row = np.empty(len(at[0]), np.int64)
    loop(blocks.keys, blocks.starts, blocks.axes, np.stack(key), np.stack(at), row)
    return row


def _taken(blocks: Blocks, row: Longs, column: int | None, default: Any) -> Reals:
    """A column of values, or with None the first axis, where there is a row."""
    values = blocks.axes[0] if column is None else blocks.values[column]
    if not len(values):
        return np.broadcast_to(np.asarray(default, np.float64), row.shape).copy()
    taken: Reals = np.where(row >= 0, values[np.maximum(row, 0)], default)
    return taken


def shared_heads(
    mla: bool, num_heads: Longs, middle: Longs, last: Longs, tp: Longs
) -> tuple[Longs, Longs, Longs]:
    """Heads in the name of a GPU's file: the latent widths of MLA are not divided."""
    return num_heads // tp, (middle if mla else middle // tp), last
