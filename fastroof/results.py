"""A batch's steps and their times as one Arrow table, with the plan's metadata."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from fastroof.arrow import RELATIVE_ERROR, arrow_schema
from fastroof.columns import Column
from fastroof.run.batch import StepBatch, StepTimes, TimedPlan

_SIZES: Final = (
    Column("num_requests", "int", "", "requests in the step", 0),
    Column("num_tokens", "int", "tokens", "new tokens of all its requests", 0),
)
STEP_COLUMNS: Final = (StepTimes.arrow_columns[0], *_SIZES, *StepTimes.arrow_columns[1:-1])
"""Columns of :func:`step_table`: a step's sizes, times and origin."""


def step_table(plan: TimedPlan, batch: StepBatch, times: StepTimes) -> pa.Table:
    """Return a batch's step times as one Arrow table, one row per step."""
    offsets = batch.offsets.astype(np.int64)
    running = np.concatenate([[0], np.cumsum(batch.new_tokens, dtype=np.int64)])
    table = times.to_arrow()
    sizes = {
        "num_requests": np.diff(offsets),
        "num_tokens": running[offsets[1:]] - running[offsets[:-1]],
    }
    error = () if times.relative_error is None else (RELATIVE_ERROR,)
    schema = arrow_schema((*STEP_COLUMNS, *error), plan.made_from)
    columns = [pa.array(sizes[f.name]) if f.name in sizes else table[f.name] for f in schema]
    return pa.table(columns, schema=schema)
