"""Stage 5, the steps of a batch with their times as an Arrow table that says where it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from fastroof.arrow import RELATIVE_ERROR, arrow_schema
from fastroof.columns import Column
from fastroof.run import StepTimes

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.run import StepBatch

_SIZES: Final = (
    Column("num_requests", "int", "", "requests in the step", 0),
    Column("num_tokens", "int", "tokens", "new tokens of all its requests", 0),
)
STEP_COLUMNS: Final = (StepTimes.arrow_columns[0], *_SIZES, *StepTimes.arrow_columns[1:-1])
"""Columns of :func:`step_table`: a step's times, origin and what it is of."""


def step_table(plan: StepPlan, batch: StepBatch, times: StepTimes) -> pa.Table:
    """Lay a batch's step times out as one Arrow table, a row a step."""
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
