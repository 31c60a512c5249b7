"""The files of shards: a sweep's rows with the unit they are of, and what else is known of each unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from fastroof.errors import SweepError
from fastroof.sweep.engine import Collected
from fastroof.sweep.identity import IDENTITY_KEYS
from fastroof.sweep.shards import Shard
from fastroof.sweep.unit_rows import (
    UNIT_FIELD,
    outcomes_from_json,
    outcomes_to_json,
    rows_by_unit,
    tagged_rows,
)
from fastroof.sweep.units import UnitResult, WorkUnit

if TYPE_CHECKING:
    from fastroof.sweep.deployments.spec import DeploymentSpec
    from fastroof.sweep.spec import SweepSpec

__all__ = ["CollectedShard", "ShardFile", "shard_schema"]


def shard_schema(schema: pa.Schema, shard: Shard) -> pa.Schema:
    """Schema of a shard's file: the results' columns, and the unit that each row is of."""
    metadata = {**(schema.metadata or {}), b"fastroof.shard": str(shard).encode()}
    return schema.append(UNIT_FIELD).with_metadata(metadata)


class CollectedShard(Collected):
    """What a shard's units came to: what may be kept, with what is needed to join it to the other shards."""

    def __init__(self, spec: SweepSpec | DeploymentSpec, results: Any) -> None:
        super().__init__(spec, results)
        self._outcomes: list[tuple[WorkUnit, UnitResult]] = []

    def add(self, unit: WorkUnit, result: UnitResult) -> None:
        """Take the next unit's result; they come in order."""
        super().add(unit, result._replace(rows=tagged_rows(result.rows, unit.number)))
        self._outcomes.append((unit, result._replace(rows=None)))

    def finish(self) -> None:
        """Write what is held, in the order of the units; a shard may well be of nothing that is possible."""
        if self._held:
            rows = self._reduced()
            self.results.write(rows.to_batches())
            self._find_best(rows)
        units, results = zip(*self._outcomes, strict=True) if self._outcomes else ((), ())
        self.results.add_metadata({"fastroof.outcomes": outcomes_to_json(units, results)})


class ShardFile:
    """A shard's results, checked to be that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.parquet = pq.ParquetFile(path)
        except FileNotFoundError:
            raise SweepError(f"{path}: there is no such file") from None
        except (OSError, pa.ArrowException) as error:
            raise SweepError(f"{path} cannot be read as Parquet ({error})") from None
        # of the file, not of its schema: what is known at the end of writing is in there only
        found = self.parquet.metadata.metadata or {}
        self.metadata = {
            key.decode(): value.decode() for key, value in found.items() if key.startswith(b"fastroof.")
        }
        if not {"fastroof.shard", "fastroof.outcomes", *IDENTITY_KEYS} <= self.metadata.keys():
            raise SweepError(
                f"{path} is no shard of a sweep: need files that `fastroof sweep --shard i/n` wrote"
            )
        self.shard = Shard.from_text(self.metadata["fastroof.shard"])

    def results(self, units: Sequence[WorkUnit]) -> Iterator[tuple[int, UnitResult]]:
        """Yield the number and result of each of its units in order, and check that they are its units."""
        nothing = pa.RecordBatch.from_pylist([], schema=_bare_schema(self.parquet.schema_arrow))
        outcomes = outcomes_from_json(self.metadata["fastroof.outcomes"], nothing)
        expected = [unit.number for unit in units]
        if list(outcomes) != expected:
            raise SweepError(f"{self.path} does not hold the units of shard {self.shard}: run it again")
        rows = _rows_in_order(self.parquet)
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


def _bare_schema(schema: pa.Schema) -> pa.Schema:
    return schema.remove(schema.get_field_index(UNIT_FIELD.name)).remove_metadata()


def _rows_in_order(parquet: pq.ParquetFile) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield rows of one unit after another; those of one unit may come in several batches."""
    for batch in parquet.iter_batches():
        table = pa.Table.from_batches([batch]).replace_schema_metadata(None)
        numbers = table[UNIT_FIELD.name].unique().to_pylist()
        yield from zip(numbers, rows_by_unit(table, numbers), strict=True)
