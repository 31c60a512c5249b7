"""Shards of a sweep: its units dealt out to jobs."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from fastroof.checks import is_whole_number, shown
from fastroof.documents import parse_json
from fastroof.errors import SweepError
from fastroof.parquet import PARQUET_ERRORS, fault_of, open_parquet
from fastroof.sweep.kind import SweepKind
from fastroof.sweep.results import IDENTITY_KEYS
from fastroof.sweep.units import UnitResult, WorkUnit

MAX_SHARDS: Final = 100_000


class Shard(NamedTuple):
    """One of some jobs that share a sweep: ``number`` from 1 to ``total``."""

    number: int
    total: int

    @classmethod
    def from_text(cls, text: str) -> Shard:
        """Read ``"3/16"``.

        Raises
        ------
        SweepError
            If it is something else.

        Examples
        --------
        >>> Shard.from_text("3/16")
        Shard(number=3, total=16)
        """
        written = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
        if written is None:
            raise SweepError(f"shard must be i/n, as 1/8 to 8/8 for eight jobs, got {shown(text)}")
        return cls(*map(int, written.groups())).checked()

    def checked(self) -> Shard:
        """Return itself.

        Raises
        ------
        SweepError
            If the number is not from 1 to the total.
        """
        whole = all(is_whole_number(value) for value in self)
        if not whole or not 1 <= self.number <= self.total <= MAX_SHARDS:
            raise SweepError(
                f"shard must be i/n with i from 1 to n and n up to {MAX_SHARDS:,}, "
                f"got {self.number}/{self.total}"
            )
        return self

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


def shard_units(units: Sequence[WorkUnit], shard: Shard) -> list[WorkUnit]:
    """Deal units out, the largest first and each to the shard that has the least, and take one shard's."""
    load = [(0, number) for number in range(1, shard.total + 1)]
    mine = []
    for unit in sorted(units, key=lambda unit: (-unit.size, unit.number)):
        size, number = load[0]
        # a unit of no evaluations is work too: its plan is compiled
        heapq.heapreplace(load, (size + max(unit.size, 1), number))
        if number == shard.number:
            mine.append(unit)
    return sorted(mine, key=lambda unit: unit.number)


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


OF_A_SHARD: Final = ("fastroof.shard", "fastroof.outcomes", "fastroof.outcomes_sha256")
"""Metadata of a shard's file in addition to that of results."""


def shard_schema(schema: pa.Schema, shard: Shard) -> pa.Schema:
    """Schema of a shard's file: the results' columns, and the unit that each row is of."""
    metadata = {**(schema.metadata or {}), b"fastroof.shard": str(shard).encode()}
    return schema.append(UNIT_FIELD).with_metadata(metadata)


class ShardFile:
    """A shard's results, checked to be that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.parquet = open_parquet(path)
        except FileNotFoundError:
            raise SweepError(f"{path}: file does not exist") from None
        except PARQUET_ERRORS as error:
            raise SweepError(f"{path} cannot be read as Parquet ({error})") from None
        # of the file, not of its schema: what is known at the end of writing is in there only
        metadata = self.parquet.metadata.metadata or {}
        self.metadata = {
            key.decode(errors="replace"): value.decode(errors="replace")
            for key, value in metadata.items()
            if key.startswith(b"fastroof.")
        }
        if not {*OF_A_SHARD, *IDENTITY_KEYS} <= self.metadata.keys():
            raise SweepError(
                f"{path} is not a shard of a sweep: need files that `fastroof sweep --shard i/n` wrote"
            )
        self.shard = Shard.from_text(self.metadata["fastroof.shard"])

    def check_columns(self, schema: pa.Schema) -> None:
        """Raise SweepError where the columns are not those of the sweep's results, which have this schema."""
        columns = self.parquet.schema_arrow.remove_metadata()
        if columns != shard_schema(schema, self.shard).remove_metadata():
            raise SweepError(f"{self.path} has other columns than its sweep: run shard {self.shard} again")

    def results(self, units: Sequence[WorkUnit]) -> Iterator[tuple[int, UnitResult]]:
        """Yield the number and result of each of its units in order, and check that they are its units."""
        nothing = pa.RecordBatch.from_pylist([], schema=_bare_schema(self.parquet.schema_arrow))
        written = self.metadata["fastroof.outcomes"]
        if sha256(written.encode()).hexdigest() != self.metadata["fastroof.outcomes_sha256"]:
            raise SweepError(f"{self.path} is damaged: run shard {self.shard} again")
        try:
            outcomes = outcomes_from_json(written, nothing)
        except ValueError:
            raise SweepError(
                f"{self.path} was written by another version of fastroof: run shard {self.shard} again"
            ) from None
        expected = [unit.number for unit in units]
        if list(outcomes) != expected:
            raise SweepError(f"{self.path} does not hold the units of shard {self.shard}: run it again")
        rows = self._rows_in_order()
        number, batch = next(rows, (None, nothing))
        for unit, result in outcomes.items():
            batches = []
            while number == unit:
                batches.append(batch)
                number, batch = next(rows, (None, nothing))
            whole = pa.Table.from_batches(batches, nothing.schema).combine_chunks().to_batches()
            yield unit, result._replace(rows=whole[0] if whole else nothing)
        if number is not None:
            raise SweepError(f"{self.path} holds rows of unit {number}, which is not of shard {self.shard}")

    def _rows_in_order(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield rows of one unit after another; those of one unit may come in several batches."""
        batches = self.parquet.iter_batches()
        while True:
            try:
                batch = next(batches, None)
            except PARQUET_ERRORS as error:
                advice = "" if isinstance(error, MemoryError) else f": run shard {self.shard} again"
                raise SweepError(f"{self.path} {fault_of(error)}{advice}") from None
            if batch is None:
                return
            table = pa.Table.from_batches([batch]).replace_schema_metadata(None)
            numbers = table[UNIT_FIELD.name].unique().to_pylist()
            yield from zip(numbers, rows_by_unit(table, numbers), strict=True)


def _bare_schema(schema: pa.Schema) -> pa.Schema:
    return schema.remove(schema.get_field_index(UNIT_FIELD.name)).remove_metadata()
