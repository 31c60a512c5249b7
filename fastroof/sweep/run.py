"""Running a sweep: an executor evaluates its units, and the rows are written in order."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from fastroof.checks import check_flag, check_progress, one_of, shown, whole_number
from fastroof.errors import SweepError
from fastroof.sweep.kind import GpuTables, SweepKind, SweepTotals
from fastroof.sweep.kinds import Spec, Summary, load_spec, sweep_of
from fastroof.sweep.results import ResultFile
from fastroof.sweep.shards import Shard, outcomes_to_json, shard_units, tagged_rows
from fastroof.sweep.units import UnitResult, WorkUnit

EXECUTORS: Final = ("local", "ray")

Progress = Callable[[int, int], None]


def run_sweep(
    spec: Spec | Mapping[str, Any] | str | Path | None,
    output: str | Path,
    executor: str = "local",
    *,
    threads: int = 1,
    address: str | None = None,
    shard: tuple[int, int] | None = None,
    resume: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Evaluate every candidate of a spec, and write the selected rows.

    Parameters
    ----------
    spec : StepSpec, DeploymentSpec, CapacitySpec, mapping, str, Path or None
        The sweep's spec: see :func:`fastroof.sweep.load_spec`. With ``slo`` it is a sweep over capacities,
        with ``isl`` one over deployments under a load, otherwise one over decode steps. None is the packaged
        sweep over steps.
    output : str or Path
        Path of the results, ending in .parquet, .csv or .jsonl. Replaced atomically when the sweep is done.
    executor : str
        Where the sweep runs: ``local``, or ``ray`` for tasks of a Ray cluster (needs the extra ``ray``).
    threads : int
        Number of threads; the rows do not depend on it. With ``ray``, the processors of a cluster that is
        started for the sweep.
    address : str, optional
        With ``ray``, an existing cluster: ``auto``, ``host:port`` or ``ray://host:port``.
    shard : (int, int), optional
        ``(i, n)`` with i from 1 to n: one of n parts of the sweep, which
        :func:`fastroof.sweep.merge_shards` joins. The output must be Parquet.
    resume : bool
        Continue a run to the same output that was killed or interrupted, if there is one.
    restart : bool
        Remove the checkpoint of such a run and start over.
    progress : callable, optional
        Called with the number of evaluations done and the total.

    Returns
    -------
    StepSummary, DeploymentSummary or CapacitySummary
        Counts, times, skipped plans with reasons, and the best results.

    Raises
    ------
    SweepError
        If the spec or the output is invalid, or no plan can be evaluated; if there is an unfinished run to
        the same output, and it is of another sweep or neither ``resume`` nor ``restart`` is set.
    TableError
        If the tables cannot be read.

    Notes
    -----
    Each candidate is evaluated independently; nothing is inferred from neighbours, since measured kernels
    are jagged. Every candidate is counted, with the reason if it is infeasible. Rows of steps are in the
    order of the spec's models, tp, dtype, kv_dtype, kv_len and batch_size; rows of deployments in the order
    of the spec's axes if all are kept, otherwise by group. The file's metadata hold fastroof's version, the
    tables' hash, the GPUs, the spec, the kind of sweep and the counts. Longer sweeps store finished work
    in a folder next to the output, ``.NAME.parts``, until the output is complete.

    Examples
    --------
    >>> import tempfile
    >>> spec = {"models": ["llama-3.1-8b"], "batch_size": [16, 64], "kv_len": [1024, 4096]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = run_sweep(spec, folder + "/results.parquet")
    >>> summary.evaluations, summary.best[0].batch_size
    (4, 64)
    >>> spec = {"models": ["llama-3.1-8b"], "tp": 1, "isl": 1000, "osl": 100, "concurrency": [1, 32]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = run_sweep(spec, folder + "/results.parquet")
    >>> summary.candidates, summary.best[0]["concurrency"]
    (2, 32.0)
    """
    started = time.perf_counter()
    one_of("executor", executor, EXECUTORS, SweepError)
    threads = whole_number("threads", threads, error=SweepError)
    if address is not None and executor != "ray":
        raise SweepError(f"address needs executor='ray', got {executor!r}")
    check_flag("resume", resume, SweepError)
    check_flag("restart", restart, SweepError)
    if resume and restart:
        raise SweepError("resume continues an unfinished run, restart removes it: choose one")
    check_progress(progress, "the number of evaluations done and the total", SweepError)
    if not isinstance(output, str | Path) or not str(output):
        raise SweepError(f"output must be a path, got {shown(output)}")
    output = Path(output)
    part = None if shard is None else _checked_shard(shard, output)
    sweep = sweep_of(load_spec(spec))

    # imported after the spec is checked: an invalid one fails fast
    from fastroof.arrow import arrow_schema
    from fastroof.sweep.checkpoint import Checkpoint
    from fastroof.sweep.kind import load_tables_by_gpu
    from fastroof.sweep.results import file_metadata
    from fastroof.sweep.shards import shard_schema

    tables_by_gpu = load_tables_by_gpu(sweep)
    units = sweep.units()
    metadata = file_metadata(sweep, tables_by_gpu)
    schema = arrow_schema(sweep.columns, metadata)
    if part is not None:
        units, schema = shard_units(units, part), shard_schema(schema, part)
        metadata["fastroof.shard"] = str(part)

    def evaluate(some: Sequence[WorkUnit]) -> Generator[UnitResult, None, None]:
        if executor == "ray":
            from fastroof.sweep.ray_executor import ray_results

            return ray_results(sweep, some, tables_by_gpu, address=address, processors=threads)
        return local_results(sweep, some, tables_by_gpu, threads)

    with (
        Checkpoint(sweep, output, metadata, resume=resume, restart=restart) as checkpoint,
        ResultFile(output, schema) as results,
    ):
        collected = Collected(sweep, results) if part is None else CollectedShard(sweep, results)
        evaluated = checkpoint.results(units, evaluate)
        total = sum(unit.size for unit in units)
        done = 0
        try:
            for unit, result in zip(units, evaluated, strict=True):
                collected.add(unit, result)
                done += unit.size
                if progress is not None:
                    progress(done, total)
        finally:
            evaluated.close()
        collected.finish()
    return sweep.summary(collected.totals(time.perf_counter() - started))


def _checked_shard(given: tuple[int, int], output: Path) -> Shard:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise SweepError(f"a shard must be (i, n), one of n parts, got {shown(given)}")
    if output.suffix != ".parquet":
        raise SweepError(f"output {output} of a shard must end in .parquet, so that it can be merged")
    return Shard(*given).checked()


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


class CollectedShard(Collected):
    """Results of a shard's units, with the outcomes that merging with other shards needs."""

    def __init__(self, sweep: SweepKind, results: ResultFile) -> None:
        super().__init__(sweep, results)
        self._outcomes: list[tuple[WorkUnit, UnitResult]] = []

    def add(self, unit: WorkUnit, result: UnitResult) -> None:
        """Add the next unit's result."""
        super().add(unit, result._replace(rows=tagged_rows(result.rows, unit.number)))
        self._outcomes.append((unit, result._replace(rows=None)))

    def finish(self) -> None:
        """Write the held rows in the order of the units; a shard may have no feasible candidate."""
        if self._held:
            self._write(self._reduced())
        units, results = zip(*self._outcomes, strict=True) if self._outcomes else ((), ())
        outcomes = outcomes_to_json(units, results)
        # Parquet has no checksum for metadata
        digest = sha256(outcomes.encode()).hexdigest()
        self.results.add_metadata({"fastroof.outcomes": outcomes, "fastroof.outcomes_sha256": digest})


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
