"""Results of several units as one table and some JSON: what parts, shards and distant workers hand over."""

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

__all__ = [
    "UNIT_FIELD",
    "PackedResults",
    "joined_rows",
    "outcomes_from_json",
    "outcomes_to_json",
    "packed_results",
    "rows_by_unit",
    "tagged_rows",
    "unpacked_results",
]

UNIT_FIELD: Final = pa.field(
    "unit", pa.int64(), metadata={"unit": "", "meaning": "number of the sweep's unit that the row is of"}
)
"""The column that rows of several units carry until they are all together."""


def tagged_rows(rows: pa.RecordBatch, number: int) -> pa.RecordBatch:
    """Add the column of the unit that rows are of."""
    tags = pa.repeat(pa.scalar(number, pa.int64()), rows.num_rows)
    return pa.RecordBatch.from_arrays([*rows.columns, tags], schema=rows.schema.append(UNIT_FIELD))


def joined_rows(sweep: SweepKind, units: Sequence[WorkUnit], results: Sequence[UnitResult]) -> pa.Table:
    """Put the rows of units in their order into one table, and drop those that cannot be kept."""
    pairs = zip(units, results, strict=True)
    batches = [tagged_rows(result.rows, unit.number) for unit, result in pairs]
    return sweep.reduced(pa.Table.from_batches(batches))


def rows_by_unit(table: pa.Table, numbers: Iterable[int]) -> list[pa.RecordBatch]:
    """Take rows in the order of their units apart, and the column off that says which they are of."""
    table = table.combine_chunks()
    at = table.schema.get_field_index(UNIT_FIELD.name)
    tags = table.column(at).to_numpy()
    bare = table.remove_column(at)
    whole = bare.to_batches()[0] if bare.num_rows else pa.RecordBatch.from_pylist([], schema=bare.schema)
    batches = []
    for number in numbers:
        start, stop = np.searchsorted(tags, [number, number + 1]).tolist()
        batches.append(whole.slice(start, stop - start))
    return batches


class PackedResults(NamedTuple):
    """Results of some units as they travel: rows as a compressed Arrow stream, and the rest of each."""

    rows: bytes
    outcomes: list[UnitResult]


def packed_results(
    sweep: SweepKind, units: Sequence[WorkUnit], results: Sequence[UnitResult]
) -> PackedResults:
    """Drop rows that cannot be kept out of the results of some units in their order, and pack the others."""
    table = joined_rows(sweep, units, results)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as stream:
        stream.write_table(table)
    return PackedResults(sink.getvalue().to_pybytes(), [result._replace(rows=None) for result in results])


def unpacked_results(units: Sequence[WorkUnit], packed: PackedResults) -> list[UnitResult]:
    """Results of some units, as :func:`packed_results` packed them."""
    table = pa.ipc.open_stream(packed.rows).read_all()
    apart = rows_by_unit(table, [unit.number for unit in units])
    return [result._replace(rows=rows) for result, rows in zip(packed.outcomes, apart, strict=True)]


def outcomes_to_json(units: Sequence[WorkUnit], results: Sequence[UnitResult]) -> str:
    """Write down everything but the rows of some units' results."""
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
    """Read back what :func:`outcomes_to_json` wrote: results by unit number, with these rows."""
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
        raise ValueError(f"no outcomes of units as this version writes them ({error})") from None
