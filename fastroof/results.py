"""Stage 5, step times as an Arrow table that says where it came from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from fastroof.columns import ORIGINS, Column

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.run import StepBatch, StepTimes

__all__ = ["STEP_COLUMNS", "arrow_schema", "step_table"]

STEP_COLUMNS: Final = (
    Column("step", "int", "", "position in the batch", 0),
    Column("num_requests", "int", "", "requests in the step", 0),
    Column("num_tokens", "int", "tokens", "new tokens of all its requests", 0),
    Column("latency_us", "float", "us", "time of the step", 0),
    Column("tokens_us", "float", "us", "per-token operators of all layers", 0),
    Column("logits_us", "float", "us", "LM head over the step's requests", 0),
    Column("decode_attention_us", "float", "us", "decode attention of all layers", 0),
    Column("prefill_attention_us", "float", "us", "prefill attention of all layers", 0),
    Column("runtime_us", "float", "us", "what the engine adds", 0),
    Column("origin", "text", "", "how the latency was made: measured to modelled"),
)
"""Columns of :func:`step_table`."""

_ARROW_TYPES: Final = {"int": pa.int64(), "float": pa.float64(), "text": pa.string()}


def arrow_schema(columns: Iterable[Column], metadata: dict[str, str]) -> pa.Schema:
    """Arrow schema of result columns: every field has its unit and meaning, the table its metadata."""
    fields = [
        pa.field(c.name, _ARROW_TYPES[c.kind], metadata={"unit": c.unit, "meaning": c.meaning})
        for c in columns
    ]
    return pa.schema(fields, metadata=metadata)


def step_table(plan: StepPlan, batch: StepBatch, times: StepTimes) -> pa.Table:
    """Lay a batch's step times out as one Arrow table, a row a step.

    Parameters
    ----------
    plan : StepPlan
        The plan that timed them.
    batch : StepBatch
        What was timed.
    times : StepTimes
        What ``plan.run(batch)`` returned.

    Returns
    -------
    pyarrow.Table
        The columns of :data:`STEP_COLUMNS`; the schema's metadata hold fastroof's
        version, the tables' hash, and what the plan is.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.results import step_table
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"))
    >>> batch = fastroof.StepBatch.from_requests([[(2048, 0)], [(1, 100), (1, 200)]])
    >>> step_table(plan, batch, plan.run(batch))["num_tokens"].to_pylist()
    [2048, 2]
    """
    metadata = {
        "fastroof.version": plan.version,
        "fastroof.tables_hash": plan.tables_hash,
        "fastroof.model": plan.model.name,
        "fastroof.gpu": plan.gpu.name,
        "fastroof.tp": str(plan.tp),
        "fastroof.dtype": plan.dtype,
        "fastroof.kv_dtype": plan.kv_dtype,
        "fastroof.runtime": plan.runtime,
        "fastroof.method": plan.method,
    }
    offsets = batch.offsets.astype(np.int64)
    running = np.concatenate([[0], np.cumsum(batch.new_tokens, dtype=np.int64)])
    columns = {
        "step": np.arange(batch.num_steps),
        "num_requests": np.diff(offsets),
        "num_tokens": running[offsets[1:]] - running[offsets[:-1]],
        "latency_us": times.latency_us,
        **times.components._asdict(),
        "origin": np.array(ORIGINS, object)[times.origin],
    }
    schema = arrow_schema(STEP_COLUMNS, metadata)
    return pa.table([pa.array(columns[f.name], f.type) for f in schema], schema=schema)
