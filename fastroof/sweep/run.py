"""Running a sweep: units are evaluated and reduced somewhere, and their rows written here."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastroof._version import __version__
from fastroof.config import load_gpu
from fastroof.errors import SweepError
from fastroof.sweep.deployments.spec import DeploymentSpec
from fastroof.sweep.spec import SweepSpec, load_spec
from fastroof.sweep.summary import DeploymentSummary, SweepSummary, with_standings
from fastroof.sweep.units import UnitResult, WorkUnit, work_units

# Checking a spec needs no numba; whatever needs it is imported when a sweep runs.
if TYPE_CHECKING:
    from fastroof.sweep.shards import Shard
    from fastroof.sweep.sources import GpuTables

__all__ = ["run_sweep"]

ENGINES: Final = ("local", "ray")
HELD_ROWS: Final = 2**16
"""Rows that are held before those that cannot be kept are dropped."""
LOST_WHOLE: Final = ("tp", "layout", "tables", "plan")
"""Reasons for which nothing is evaluated."""

Progress = Callable[[int, int], None]


def run_sweep(
    spec: SweepSpec | DeploymentSpec | Mapping[str, Any] | str | Path | None,
    output: str | Path,
    engine: str = "local",
    *,
    threads: int = 1,
    address: str | None = None,
    shard: tuple[int, int] | None = None,
    resume: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
) -> SweepSummary | DeploymentSummary:
    """Evaluate every candidate of a spec, and write the ones that are kept.

    Parameters
    ----------
    spec : SweepSpec, DeploymentSpec, mapping, str, Path or None
        What to sweep: see :func:`fastroof.sweep.load_spec`. With ``isl`` it is a sweep over deployments
        under a load, otherwise one over decode steps. None is the packaged sweep over steps.
    output : str or Path
        The results, ending in .parquet, .csv or .jsonl. Replaced as a whole when the sweep is done.
    engine : str
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
        Remove what such a run has left, and begin anew.
    progress : callable, optional
        Called with the evaluations done and all there are.

    Returns
    -------
    SweepSummary or DeploymentSummary
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
    if engine not in ENGINES:
        raise SweepError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise SweepError(f"threads must be a whole number of at least 1, got {threads!r}")
    if address is not None and engine != "ray":
        raise SweepError(f"address goes with engine 'ray', got {engine!r}")
    if resume and restart:
        raise SweepError("resume continues an unfinished run, restart removes it: choose one")
    output = Path(output)
    spec = load_spec(spec)

    from fastroof.sweep.checkpoint import Checkpoint
    from fastroof.sweep.output import ResultFile, result_schema
    from fastroof.sweep.sources import load_tables_by_gpu

    part = None if shard is None else _checked_shard(shard, output)
    tables_by_gpu = load_tables_by_gpu(spec)
    units = work_units(spec)
    metadata = file_metadata(spec, tables_by_gpu)
    schema = result_schema(spec, metadata)
    kind: type[Collected] = Collected
    if part is not None:
        from fastroof.sweep.shard_files import CollectedShard, shard_schema
        from fastroof.sweep.shards import shard_units

        units, schema, kind = shard_units(units, part), shard_schema(schema, part), CollectedShard
        metadata["fastroof.shard"] = str(part)

    def evaluate(some: Sequence[WorkUnit]) -> Generator[UnitResult, None, None]:
        if engine == "ray":
            from fastroof.sweep.ray_engine import ray_results

            return ray_results(spec, some, tables_by_gpu, address=address, processors=threads)
        from fastroof.sweep.local import local_results

        return local_results(spec, some, tables_by_gpu, threads)

    with (
        Checkpoint(spec, output, metadata, resume=resume, restart=restart) as checkpoint,
        ResultFile(output, schema) as results,
    ):
        collected = kind(spec, results)
        found = checkpoint.results(units, evaluate)
        total = sum(unit.size for unit in units)
        done = 0
        try:
            for unit, result in zip(units, found, strict=True):
                collected.add(unit, result)
                done += unit.size
                if progress is not None:
                    progress(done, total)
        finally:
            found.close()
        collected.finish()
    return collected.summary(time.perf_counter() - started)


def _checked_shard(given: tuple[int, int], output: Path) -> Shard:
    from fastroof.sweep.shards import Shard

    if output.suffix != ".parquet":
        raise SweepError(f"output {output} of a shard must end in .parquet, to be merged")
    return Shard(*given).checked()


def file_metadata(spec: SweepSpec | DeploymentSpec, tables_by_gpu: Mapping[str, GpuTables]) -> dict[str, str]:
    """What a results file says about where it comes from."""
    from fastroof.sweep.identity import inputs_hash
    from fastroof.sweep.sources import tables_hash

    return {
        "fastroof.version": __version__,
        "fastroof.tables_hash": tables_hash(tables_by_gpu),
        "fastroof.inputs_hash": inputs_hash(spec),
        "fastroof.gpu": " ".join(load_gpu(gpu).name for gpu in tables_by_gpu),
        "fastroof.kind": "steps" if isinstance(spec, SweepSpec) else "deployments",
        "fastroof.spec": spec.model_dump_json(),
    }


class Collected:
    """What units came to, put together in their order.

    Rows of a sweep that keeps all of them are written as they come; others are held, and reduced.

    Parameters
    ----------
    spec : SweepSpec or DeploymentSpec
        What is swept.
    results : ResultFile
        Where rows are written.
    """

    def __init__(self, spec: SweepSpec | DeploymentSpec, results: Any) -> None:
        self.spec = spec
        self.results = results
        self.counts: Counter[str] = Counter()
        self.skipped: dict[str, dict[str, None]] = {}  # dicts as ordered sets
        self.best_steps: list[Any] = []
        self.histograms: dict[tuple[Any, ...], list[int]] = {}
        self.evaluate_s = 0.0
        self._held: list[Any] = []
        self._best: Any = None

    def add(self, unit: WorkUnit, result: UnitResult) -> None:
        """Take the next unit's result; they come in order."""
        self.counts.update(result.counts)
        for reason, name in result.skipped:
            self.skipped.setdefault(reason, {})[name] = None
        self.best_steps += result.best
        for group, counts in result.histograms.items():
            before = self.histograms.get(group, [0] * len(counts))
            self.histograms[group] = [a + b for a, b in zip(before, counts, strict=True)]
        self.evaluate_s += result.evaluate_s
        if isinstance(self.spec, SweepSpec):
            self.results.write([result.rows])
            return
        if self.spec.keep == "all":
            self.results.write([result.rows])
            self._find_best(result.rows)
            return
        self._held.append(result.rows)
        if sum(rows.num_rows for rows in self._held) > HELD_ROWS:
            self._held = self._reduced().to_batches()

    def finish(self) -> None:
        """Write what is held, and the counts.

        Raises
        ------
        SweepError
            If nothing was evaluated.
        """
        lost = sum(self.counts[reason] for reason in LOST_WHOLE)
        if self.counts["evaluated"] == lost:
            said = [f"{reason}: {', '.join(names)}" for reason, names in self.skipped.items()]
            if self.counts["layout"]:
                said.append("no number of total_gpus divides by tp into the workers that the mode needs")
            raise SweepError(f"nothing to evaluate: {'; '.join(said)}")
        if isinstance(self.spec, DeploymentSpec) and self.spec.keep != "all":
            from fastroof.sweep.evaluate import final_rows

            rows = final_rows(self.spec, self._table(self._held))
            self.results.write(rows.to_batches())
            self._find_best(rows)
        self.results.add_metadata({"fastroof.counts": json.dumps(dict(self.counts))})

    def summary(self, total_s: float) -> SweepSummary | DeploymentSummary:
        """What the sweep hands back."""
        counts = dict(self.counts)
        evaluated = counts.pop("evaluated", 0)
        skipped = {reason: tuple(names) for reason, names in self.skipped.items()}
        if isinstance(self.spec, SweepSpec):
            return SweepSummary(
                best=with_standings(self.best_steps),
                plans=len(self.best_steps),
                evaluations=evaluated,
                rows=self.results.num_rows,
                infeasible=counts,
                skipped=skipped,
                evaluate_s=self.evaluate_s,
                total_s=total_s,
                output=self.results.path,
            )
        return DeploymentSummary(
            best=() if self._best is None else tuple(self._best.to_pylist()),
            candidates=evaluated,
            feasible=evaluated - sum(counts.values()),
            rows=self.results.num_rows,
            infeasible=counts,
            skipped=skipped,
            histograms=self.histograms,
            evaluate_s=self.evaluate_s,
            total_s=total_s,
            output=self.results.path,
        )

    def _table(self, rows: list[Any]) -> Any:
        import pyarrow as pa

        schema = self.results.schema.remove_metadata()
        return pa.Table.from_batches(rows, schema)

    def _reduced(self) -> Any:
        from fastroof.sweep.evaluate import thinned_rows

        return thinned_rows(self.spec, self._table(self._held))

    def _find_best(self, rows: Any) -> None:
        """Keep the best row of each group that is within the limits."""
        import pyarrow as pa
        import pyarrow.compute as pc

        from fastroof.sweep.deployments.rows import reduced_rows

        assert isinstance(self.spec, DeploymentSpec)
        table = rows if isinstance(rows, pa.Table) else self._table([rows])
        table = table.filter(pc.is_null(table["exceeds"]))
        together = table if self._best is None else pa.concat_tables([self._best, table])
        self._best = reduced_rows(self.spec, together, "best", 1)
