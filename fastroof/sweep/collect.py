"""Collecting results of units: rows reduced as they arrive, then written; and the local executor."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import pyarrow as pa

from fastroof.errors import SweepError
from fastroof.sweep.kind import GpuTables, SweepKind, SweepTotals
from fastroof.sweep.result_file import ResultFile
from fastroof.sweep.units import UnitResult, WorkUnit

HELD_ROWS: Final = 2**16
"""Rows to hold in memory before reducing them."""


class Collected:
    """Results of units, combined in order."""

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
        """Add the next unit's result."""
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
        """Write the held rows, and the counts as metadata."""
        lost = self.sweep.lost_whole
        if self.counts["evaluated"] == sum(self.counts[reason] for reason in lost):
            reasons = [f"{reason}: {', '.join(names)}" for reason, names in self.skipped.items()]
            reasons += [text for reason, text in lost.items() if text and self.counts[reason]]
            raise SweepError(f"nothing to evaluate: {'; '.join(reasons)}")
        if not self.sweep.has_final_rows:
            self._write(self.sweep.ordered(self._reduced()))
        self.results.add_metadata({"fastroof.counts": json.dumps(dict(self.counts))})

    def totals(self, total_s: float) -> SweepTotals:
        """Return the inputs of the sweep's summary."""
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
        """Write rows, and remember the best of all written rows."""
        self.results.write(rows.to_batches())
        best = self.sweep.best_rows(rows)
        self._best = (
            best if self._best is None else self.sweep.best_rows(pa.concat_tables([self._best, best]))
        )

    def _table(self, rows: list[pa.RecordBatch]) -> pa.Table:
        return pa.Table.from_batches(rows, self.results.schema.remove_metadata())

    def _reduced(self) -> pa.Table:
        return self.sweep.reduced(self._table(self._held))


AHEAD: Final = 2
"""Units per thread that are submitted ahead, which bounds the finished results in memory."""


def local_results(
    sweep: SweepKind,
    units: Sequence[WorkUnit],
    tables_by_gpu: Mapping[str, GpuTables],
    threads: int = 1,
) -> Generator[UnitResult, None, None]:
    """Evaluate units in threads of this process, and yield their results in order."""
    if threads == 1:
        for unit in units:
            yield sweep.evaluate(unit, tables_by_gpu)
        return
    waiting: deque[Future[UnitResult]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for unit in units:
            if len(waiting) == AHEAD * threads:
                yield waiting.popleft().result()
            waiting.append(pool.submit(sweep.evaluate, unit, tables_by_gpu))
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
