"""Running a sweep: an executor evaluates its units, and their rows are written here."""

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
    """Evaluate every candidate of a spec, and write the ones that are kept.

    Parameters
    ----------
    spec : StepSpec, DeploymentSpec, CapacitySpec, mapping, str, Path or None
        What to sweep: see :func:`fastroof.sweep.load_spec`. With ``slo`` it is a sweep over capacities, with
        ``isl`` one over deployments under a load, otherwise one over decode steps. None is the packaged sweep
        over steps.
    output : str or Path
        The results, ending in .parquet, .csv or .jsonl. Replaced as a whole when the sweep is done.
    executor : str
        Where it runs: ``local``, or ``ray`` (extra ``ray``): as tasks of a Ray cluster.
    threads : int
        Threads to share the work over; any number gives the same rows. With ``ray`` the processors of a
        cluster that is started for the sweep.
    address : str, optional
        With ``ray`` a cluster that is there: ``auto``, ``host:port`` or ``ray://host:port``.
    shard : (int, int), optional
        ``(i, n)`` with i from 1 to n: one of n parts of the sweep, which
        :func:`fastroof.sweep.merge_shards` joins. The output must be Parquet.
    resume : bool
        Continue a run to the same output that was killed or interrupted, if there is one.
    restart : bool
        Remove what such a run has left and start over.
    progress : callable, optional
        Called with the evaluations done and all there are.

    Returns
    -------
    StepSummary, DeploymentSummary or CapacitySummary
        Counts, times, what was left out and why, and the best of it.

    Raises
    ------
    SweepError
        If the spec or the output is wrong, or no plan can be evaluated; if an unfinished run to the output
        is there, and it is of another sweep or neither ``resume`` nor ``restart`` is set.
    TableError
        If the tables cannot be read.

    Notes
    -----
    Each candidate is evaluated by itself; nothing is inferred from a neighbour, since measured kernels
    are jagged. Every one is in the counts, with the reason if it is infeasible. Rows of steps are in the
    order of the spec's models, tp, dtype, kv_dtype, kv_len and batch_size; of deployments, in the order of
    the spec's axes where all are kept, else by group. The file's metadata hold fastroof's version, the
    tables' hash, the GPUs, the spec, the kind of sweep and the counts. What a longer sweep has done is kept
    in a folder beside the output, ``.NAME.parts``, until the output is complete.

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
    check_progress(progress, "the evaluations done and all there are", SweepError)
    if not isinstance(output, str | Path) or not str(output):
        raise SweepError(f"output must be a path, got {shown(output)}")
    output = Path(output)
    part = None if shard is None else _checked_shard(shard, output)
    sweep = sweep_of(load_spec(spec))

    # checking a spec needs neither numba nor pyarrow
    from fastroof.arrow import arrow_schema
    from fastroof.sweep.checkpoint import Checkpoint

    # SELF
    from fastroof.sweep.kind import load_tables_by_gpu
    from fastroof.sweep.results import ResultFile, file_metadata
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
        # SELF

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
        raise SweepError(f"output {output} of a shard must end in .parquet, to be merged")
    return Shard(*given).checked()


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


AHEAD: Final = 2
"""Units a thread that are under way or done before their turn: results do not pile up."""


def local_results(
    sweep: SweepKind,
    units: Sequence[WorkUnit],
    tables_by_gpu: Mapping[str, GpuTables],
    threads: int = 1,
) -> Generator[UnitResult, None, None]:
    """Evaluate units by some threads."""
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
