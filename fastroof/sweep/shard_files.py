"""The files of shards: a sweep's rows with the unit they are of, and what else is known of each unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

import pyarrow as pa

from fastroof.errors import SweepError
from fastroof.parquet import PARQUET_ERRORS, fault_of, open_parquet
from fastroof.sweep.identity import IDENTITY_KEYS
from fastroof.sweep.shards import Shard
from fastroof.sweep.unit_rows import UNIT_FIELD, outcomes_from_json, rows_by_unit
from fastroof.sweep.units import UnitResult, WorkUnit

__all__ = ["OF_A_SHARD", "ShardFile", "shard_schema"]

OF_A_SHARD: Final = ("fastroof.shard", "fastroof.outcomes", "fastroof.outcomes_sha256")
"""Metadata that a shard's file has beside that of results."""


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
            raise SweepError(f"{path}: there is no such file") from None
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
                f"{path} is no shard of a sweep: need files that `fastroof sweep --shard i/n` wrote"
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
