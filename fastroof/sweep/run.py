"""Running a sweep: an executor evaluates its units, and the rows are written in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fastroof.checks import check_flag, check_progress, one_of, shown, whole_number
from fastroof.errors import SweepError
from fastroof.sweep.kinds import Spec, Summary, load_spec, sweep_of
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
    >>> spec = {"models": ["llama-3.1-8b"], "tp": 1, "isl": 1000, "osl": 100, "clients": [1, 32]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = run_sweep(spec, folder + "/results.parquet")
    >>> summary.candidates, summary.best[0]["clients"]
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
    sweep = sweep_of(load_spec(spec))

    # imported after the spec is checked: an invalid one fails fast
    from fastroof.arrow import arrow_schema
    from fastroof.sweep.checkpoint import Checkpoint
    from fastroof.sweep.executors import local_results, ray_results
    from fastroof.sweep.identity import file_metadata
    from fastroof.sweep.kind import load_tables_by_gpu
    from fastroof.sweep.results import Collected, ResultFile

    tables_by_gpu = load_tables_by_gpu(sweep)
    units = sweep.units()
    metadata = file_metadata(sweep, tables_by_gpu)
    schema = arrow_schema(sweep.columns, metadata)

    def evaluate(part: Sequence[WorkUnit]) -> Generator[UnitResult, None, None]:
        if executor == "ray":
            return ray_results(sweep, part, tables_by_gpu, address=address, processors=threads)
        return local_results(sweep, part, tables_by_gpu, threads)

    with (
        Checkpoint(sweep, output, metadata, resume=resume, restart=restart) as checkpoint,
        ResultFile(output, schema) as results,
    ):
        collected = Collected(sweep, results)
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
