"""What the units of a sweep came to, put together: rows into the results file, the rest for the summary."""

from __future__ import annotations

import json
from collections import Counter
from hashlib import sha256
from typing import Any, Final

import pyarrow as pa

from fastroof.errors import SweepError
from fastroof.sweep.kind import SweepKind, SweepTotals
from fastroof.sweep.result_file import ResultFile
from fastroof.sweep.unit_rows import outcomes_to_json, tagged_rows
from fastroof.sweep.units import UnitResult, WorkUnit

__all__ = ["Collected", "CollectedShard"]

HELD_ROWS: Final = 2**16
"""Rows that are held before those that cannot be kept are dropped."""


class Collected:
    """What units came to, put together in their order."""

    def __init__(self, sweep: SweepKind, results: ResultFile) -> None:
        self.sweep = sweep
        self.results = results
        self.counts: Counter[str] = Counter()
        self.skipped: dict[str, dict[str, None]] = {}  # dicts as ordered sets
        self.for_summary: list[dict[str, Any]] = []
        self.evaluate_s = 0.0
        self._held: list[pa.RecordBatch] = []
        self._best: pa.Table | None = None

    def add(self, unit: WorkUnit, result: UnitResult) -> None:
        """Take the next unit's result; they come in order."""
        self.counts.update(result.counts)
        for reason, name in result.skipped:
            self.skipped.setdefault(reason, {})[name] = None
        self.for_summary += result.for_summary
        self.evaluate_s += result.evaluate_s
        if self.sweep.has_final_rows:
            self._write(self._table([result.rows]))
            return
        self._held.append(result.rows)
        if sum(rows.num_rows for rows in self._held) > HELD_ROWS:
            self._held = self._reduced().to_batches()

    def finish(self) -> None:
        """Write what is held, and the counts."""
        lost = self.sweep.lost_whole
        if self.counts["evaluated"] == sum(self.counts[reason] for reason in lost):
            said = [f"{reason}: {', '.join(names)}" for reason, names in self.skipped.items()]
            said += [words for reason, words in lost.items() if words and self.counts[reason]]
            raise SweepError(f"nothing to evaluate: {'; '.join(said)}")
        if not self.sweep.has_final_rows:
            self._write(self.sweep.ordered(self._reduced()))
        self.results.add_metadata({"fastroof.counts": json.dumps(dict(self.counts))})

    def totals(self, total_s: float) -> SweepTotals:
        """What the sweep's summary is made of."""
        infeasible = dict(self.counts)
        return SweepTotals(
            evaluated=infeasible.pop("evaluated", 0),
            infeasible=infeasible,
            skipped={reason: tuple(names) for reason, names in self.skipped.items()},
            for_summary=self.for_summary,
            best_rows=[] if self._best is None else self._best.to_pylist(),
            num_rows=self.results.num_rows,
            evaluate_s=self.evaluate_s,
            total_s=total_s,
            output=self.results.path,
        )

    def _write(self, rows: pa.Table) -> None:
        """Write rows, and keep the best of all that are written."""
        self.results.write(rows.to_batches())
        best = self.sweep.best_rows(rows)
        self._best = (
            best if self._best is None else self.sweep.best_rows(pa.concat_tables([self._best, best]))
        )

    def _table(self, rows: list[pa.RecordBatch]) -> pa.Table:
        return pa.Table.from_batches(rows, self.results.schema.remove_metadata())

    def _reduced(self) -> pa.Table:
        return self.sweep.reduced(self._table(self._held))


class CollectedShard(Collected):
    """What a shard's units came to: what may be kept, with what is needed to join it to the other shards."""

    def __init__(self, sweep: SweepKind, results: ResultFile) -> None:
        super().__init__(sweep, results)
        self._outcomes: list[tuple[WorkUnit, UnitResult]] = []

    def add(self, unit: WorkUnit, result: UnitResult) -> None:
        """Take the next unit's result; they come in order."""
        super().add(unit, result._replace(rows=tagged_rows(result.rows, unit.number)))
        self._outcomes.append((unit, result._replace(rows=None)))

    def finish(self) -> None:
        """Write what is held, in the order of the units; a shard may well be of nothing that is possible."""
        if self._held:
            self._write(self._reduced())
        units, results = zip(*self._outcomes, strict=True) if self._outcomes else ((), ())
        outcomes = outcomes_to_json(units, results)
        # metadata has no checksum of Parquet's
        digest = sha256(outcomes.encode()).hexdigest()
        self.results.add_metadata({"fastroof.outcomes": outcomes, "fastroof.outcomes_sha256": digest})
