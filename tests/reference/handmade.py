"""Tables made by hand, small enough to check with pencil and paper."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fastroof import Tables, load_gpu
from fastroof.load import MeasuredTable, MeasuredTables
from fastroof.operators.operator import HoldoutGrid
from fastroof.operators.registry import OPERATORS
from fastroof.tables.holdout import taking_part

Row = tuple[Any, ...]


def handmade_tables(gpu: str = "h100", **rows: Iterable[Row]) -> Tables:
    """Tables of one GPU: for each operator its rows, as (*keys, *axes, latency_us)."""
    tables = {operator: _table(operator, list(listed)) for operator, listed in rows.items()}
    return Tables(MeasuredTables(gpu, tables, Path("by hand")), load_gpu(gpu))


def _table(operator: str, rows: list[Row]) -> MeasuredTable:
    columns = {}
    kinds = {"int": np.int64, "float": np.float64, "text": object}
    for i, column in enumerate(OPERATORS[operator].required):
        columns[column.name] = np.array([row[i] for row in rows], dtype=kinds[column.kind])
    # measured on the very machine that is predicted: errors are those of interpolating
    campaign = {"scale": 0.0, "common": 0.0}
    provenance = {"gpu": "h100", "operators": {operator: {"campaign": campaign}}}
    return MeasuredTable(operator, columns, source="by hand", provenance=provenance)


def gemm_rows(points: dict[tuple[int, int, int], float], dtype: str = "bf16") -> list[Row]:
    """Rows of a GEMM table out of points (m, n, k)."""
    return [(dtype, *point, us) for point, us in points.items()]


HEADS = (32, 8, 128)


def attention_rows(
    points: dict[tuple[int, int], float],
    heads: tuple[int, int, int] = HEADS,
    kv_dtype: str = "bf16",
    *,
    is_decode: bool = True,
    window: int = 0,
) -> list[Row]:
    """Rows of an attention table out of points (batch_size, kv_len), or (batch_size, q_len) for prefill."""
    return [
        (kv_dtype, *heads, window, batch, *((x,) if is_decode else (x, x)), us)
        for (batch, x), us in points.items()
    ]


def grids_with_rows(tables: Tables, grids: Iterable[HoldoutGrid]) -> list[HoldoutGrid]:
    """The given grids that the tables have rows of."""
    measured = tables.measured.tables
    return [g for g in grids if g.operator in measured and taking_part(measured[g.operator], g.only).any()]


def step_tables(latencies_us: dict[tuple[int, int], float]) -> Tables:
    """Return tables of a few GEMMs and copies, and of attention with some latencies by batch and length."""
    return handmade_tables(
        gemm=gemm_rows({(1, 64, 64): 3.0, (16, 64, 64): 4.0, (8, 256, 64): 5.0, (16, 128, 512): 6.0}),
        attention_decode=attention_rows(latencies_us),
        attention_prefill=attention_rows(latencies_us, is_decode=False),
        elementwise=[("copy", 1, 2**28, 2**30, 400.0)],
    )
