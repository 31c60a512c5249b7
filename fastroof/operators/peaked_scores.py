"""Blocks of sparse attention over a model's scores, made of rows that were measured over equal ones.

A top-k takes far longer over equal scores: 81 us of a decode of DeepSeek-V4-Flash on an H100, not 3. SGLang's
blocks were measured so, and its top-k by itself too, over equal scores (flat) and over a model's (top_last).
Every row that picks is corrected by the difference before points are looked up between rows, so that a row's
end is held at a block that is corrected too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import ORIGIN
from fastroof.pack.ragged import RaggedTable, pack_ragged

if TYPE_CHECKING:
    from fastroof.operators.operator import Key
    from fastroof.operators.ragged import RaggedOperator
    from fastroof.tables import Tables

__all__ = ["FLAT", "PEAKED", "peaked_table"]

FLAT: Final = "flat"
PEAKED: Final = "top_last"
"""Scores of which only the last ones are worth picking, so that few bits tell them apart, as a model's."""

_PARTS: Final = "sparse_part"


def peaked_table(
    tables: Tables, block: RaggedOperator, key: Key, part: str, model: str, ratio: int, topk: float
) -> RaggedTable:
    """Rows of a block over a model's scores; as they are where its source has no top-k by itself."""

    def made() -> RaggedTable:
        packed: RaggedTable = tables.packed(block, key)
        over = [_kernel(tables, block, key, (part, model, scores, ratio)) for scores in (FLAT, PEAKED)]
        flat, peaked = over
        if flat is None or peaked is None:
            return packed
        rows = tables.rows(block, key)
        batch, kv_len = (np.asarray(rows[name], np.float64) for name in ("batch_size", "kv_len"))
        q_len = np.asarray(rows.get("q_len", np.ones_like(batch)), np.float64)
        at = (batch, q_len, kv_len - q_len)
        picks = kv_len // ratio > topk
        less_us = np.where(picks, _latency_us(flat, at) - _latency_us(peaked, at), 0.0)
        points = tuple(np.asarray(c, np.float64) for c in block.coordinates(rows))
        latency_us = rows["latency_us"] - less_us
        return pack_ragged(points, latency_us, packed.work_us, packed.segment, rows[ORIGIN])

    return tables.kept(("peaked scores", block.name, key), made)


def _kernel(
    tables: Tables, block: RaggedOperator, key: Key, wanted: tuple[str, str, str, int]
) -> RaggedTable | None:
    """A top-k that the source of a block measured by itself; None without."""
    from fastroof.operators.registry import OPERATORS

    if _PARTS not in tables.sources:
        return None
    parts = cast("RaggedOperator", OPERATORS[_PARTS])
    source = tables.source_of(block.name, key)
    for one in tables.every_key(_PARTS):
        if one[:4] == wanted and tables.source_of(_PARTS, one) == source:
            return tables.packed(parts, one)
    return None


def _latency_us(kernel: RaggedTable, at: tuple[Floats, ...]) -> Floats:
    latency_us, origin = np.empty(len(at[0])), np.zeros(len(at[0]), np.uint8)
    kernel.latency(at, latency_us, origin)
    return latency_us
