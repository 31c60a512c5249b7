"""Results of units as bytes: for other processes, and for the parts of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from fastroof.documents import parse_json
from fastroof.errors import SweepError
from fastroof.sweep.kind import SweepKind
from fastroof.sweep.units import UnitResult, WorkUnit

UNIT: Final = "unit"
"""Column with the number of the unit of a row, until the rows are split again."""

OUTCOMES: Final = b"fastroof.outcomes"
"""Metadata key of all but the rows, by unit."""


def packed_results(sweep: SweepKind, units: Sequence[WorkUnit], results: Sequence[UnitResult]) -> bytes:
    """Serialize the results of units in order, without rows that cannot be in the sweep's results."""
    pairs = list(zip(units, results, strict=True))
    numbers = np.repeat([unit.number for unit in units], [result.rows.num_rows for result in results])
    rows = pa.Table.from_batches([result.rows for result in results])
    table = sweep.reduced(rows.append_column(UNIT, pa.array(numbers, pa.int64())))
    outcomes = [(unit.number, *result[1:]) for unit, result in pairs]
    sink = pa.BufferOutputStream()
    schema = table.schema.with_metadata({OUTCOMES: json.dumps(outcomes)})
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as stream:
        stream.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def unpacked_results(content: bytes) -> dict[int, UnitResult]:
    """Return the results of units by their numbers."""
    table = pa.ipc.open_stream(content).read_all().combine_chunks()
    text = (table.schema.metadata or {}).get(OUTCOMES, b"")
    tags = table.column(UNIT).to_numpy()
    bare = table.drop_columns(UNIT).replace_schema_metadata(None)
    rows = bare.to_batches()[0] if bare.num_rows else pa.RecordBatch.from_pylist([], schema=bare.schema)
    results = {}
    outcomes = parse_json(text, "outcomes of units", SweepError, most_bytes=len(text))
    for number, counts, skipped, for_summary, evaluate_s in outcomes:
        start, stop = np.searchsorted(tags, [number, number + 1]).tolist()
        why = tuple((reason, name) for reason, name in skipped)
        results[number] = UnitResult(
            rows.slice(start, stop - start), counts, why, tuple(for_summary), evaluate_s
        )
    return results
