"""Results of units as bytes: for other processes, and for the parts of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from fastroof.documents import parse_json
from fastroof.errors import SweepError
from fastroof.sweep.kind import SweepKind
from fastroof.sweep.units import UnitResult, WorkUnit

UNIT_FIELD: Final = pa.field(
    "unit", pa.int64(), metadata={"unit": "", "meaning": "number of the sweep's unit that produced the row"}
)
"""Column that identifies the unit of a row until the rows are split again."""


def tagged_rows(rows: pa.RecordBatch, number: int) -> pa.RecordBatch:
    """Add the unit column to rows."""
    tags = pa.repeat(pa.scalar(number, pa.int64()), rows.num_rows)
    return pa.RecordBatch.from_arrays([*rows.columns, tags], schema=rows.schema.append(UNIT_FIELD))


def joined_rows(sweep: SweepKind, units: Sequence[WorkUnit], results: Sequence[UnitResult]) -> pa.Table:
    """Join the rows of units in order into one table, without rows that cannot be in the results."""
    pairs = zip(units, results, strict=True)
    batches = [tagged_rows(result.rows, unit.number) for unit, result in pairs]
    return sweep.reduced(pa.Table.from_batches(batches))


def rows_by_unit(table: pa.Table, numbers: Iterable[int]) -> list[pa.RecordBatch]:
    """Split rows by unit, and drop the unit column."""
    table = table.combine_chunks()
    at = table.schema.get_field_index(UNIT_FIELD.name)
    tags = table.column(at).to_numpy()
    bare = table.remove_column(at)
    batch = bare.to_batches()[0] if bare.num_rows else pa.RecordBatch.from_pylist([], schema=bare.schema)
    batches = []
    for number in numbers:
        start, stop = np.searchsorted(tags, [number, number + 1]).tolist()
        batches.append(batch.slice(start, stop - start))
    return batches


class PackedResults(NamedTuple):
    """Serialized results of units: rows as a compressed Arrow stream, and the other outcomes."""

    rows: bytes
    outcomes: list[UnitResult]


def packed_results(
    sweep: SweepKind, units: Sequence[WorkUnit], results: Sequence[UnitResult]
) -> PackedResults:
    """Serialize the results of units in order, without rows that cannot be in the results."""
    table = joined_rows(sweep, units, results)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as stream:
        stream.write_table(table)
    return PackedResults(sink.getvalue().to_pybytes(), [result._replace(rows=None) for result in results])


def unpacked_results(units: Sequence[WorkUnit], packed: PackedResults) -> list[UnitResult]:
    """Deserialize results from :func:`packed_results`."""
    table = pa.ipc.open_stream(packed.rows).read_all()
    apart = rows_by_unit(table, [unit.number for unit in units])
    return [result._replace(rows=rows) for result, rows in zip(packed.outcomes, apart, strict=True)]


def outcomes_to_json(units: Sequence[WorkUnit], results: Sequence[UnitResult]) -> str:
    """Serialize the results of units without their rows."""
    listed = [
        {
            "unit": unit.number,
            "counts": result.counts,
            "skipped": result.skipped,
            "for_summary": result.for_summary,
            "evaluate_s": result.evaluate_s,
        }
        for unit, result in zip(units, results, strict=True)
    ]
    return json.dumps(listed)


def outcomes_from_json(text: str | bytes, rows: pa.RecordBatch) -> dict[int, UnitResult]:
    """Deserialize outcomes of :func:`outcomes_to_json`: results by unit number, all with ``rows``."""
    try:
        return {
            outcome["unit"]: UnitResult(
                rows,
                outcome["counts"],
                tuple((reason, name) for reason, name in outcome["skipped"]),
                tuple(outcome["for_summary"]),
                outcome["evaluate_s"],
            )
            for outcome in parse_json(text, "outcomes of units", SweepError, most_bytes=len(text))
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"outcomes of units are not in this version's format ({error})") from None
