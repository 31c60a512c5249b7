"""Running a sweep: plans are compiled, each one's grid is timed and reduced, rows are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastroof._version import __version__
from fastroof.config import GpuSpec, load_gpu
from fastroof.errors import SweepError
from fastroof.sweep.spec import DATASHEET, SweepSpec, load_spec
from fastroof.sweep.summary import BestStep, SweepSummary, with_standings

# Checking a spec needs no numba; whatever needs it is imported when a sweep runs.
if TYPE_CHECKING:
    from fastroof.sweep.evaluate import Evaluated
    from fastroof.tables import Tables

__all__ = ["run_sweep"]

ENGINES: Final = ("local",)

Progress = Callable[[int, int], None]


def run_sweep(
    spec: SweepSpec | Mapping[str, Any] | str | Path | None,
    output: str | Path,
    engine: str = "local",
    *,
    threads: int = 1,
    progress: Progress | None = None,
) -> SweepSummary:
    """Time every step of a grid, and write the best batch of each plan and length, or all steps.

    Parameters
    ----------
    spec : SweepSpec, mapping, str, Path or None
        What to sweep: see :func:`fastroof.sweep.load_spec`. None is the packaged spec.
    output : str or Path
        The results, ending in .parquet or .csv. Replaced as a whole when the sweep is done.
    engine : str
        Where it runs: ``local``.
    threads : int
        Threads to share the plans over; any number gives the same rows.
    progress : callable, optional
        Called with the plans done and the plans there are.

    Returns
    -------
    SweepSummary
        Counts, times, what was left out and why, and the best step of each plan.

    Raises
    ------
    SweepError
        If the spec or the output is wrong, or no plan can be evaluated.
    TableError
        If the tables cannot be read.

    Notes
    -----
    A plan's grid is timed point by point; nothing is inferred from a neighbour, since measured kernels
    are jagged. Only points beyond memory are counted without being timed where the best batch is kept.
    Rows are in the order of the spec's models, then tp, dtype, kv_dtype, kv_len and batch_size. The
    file's metadata hold fastroof's version, the tables' hash, the GPU and the spec.

    Examples
    --------
    >>> import tempfile
    >>> spec = {"models": ["llama-3.1-8b"], "batch_size": [16, 64], "kv_len": [1024, 4096]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = run_sweep(spec, folder + "/results.parquet")
    >>> summary.evaluations, summary.best[0].batch_size
    (4, 64)
    """
    started = time.perf_counter()
    if engine not in ENGINES:
        raise SweepError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise SweepError(f"threads must be a whole number of at least 1, got {threads!r}")
    spec = load_spec(spec)
    gpu = load_gpu(spec.gpu)
    tables = _load_tables(spec, gpu)

    from fastroof.sweep.evaluate import Evaluator
    from fastroof.sweep.output import ResultFile, result_schema
    from fastroof.sweep.units import Skipped, unit_batches

    metadata = {
        "fastroof.version": __version__,
        "fastroof.tables_hash": "" if tables is None else tables.content_hash,
        "fastroof.gpu": gpu.name,
        "fastroof.spec": spec.model_dump_json(),
    }
    schema = result_schema(spec.keep, metadata)
    evaluator = Evaluator(spec, schema, threads)
    skipped = Skipped()
    tally = _Tally()
    with ExitStack() as stack:
        results = stack.enter_context(ResultFile(Path(output), schema))
        for units in unit_batches(spec, gpu, tables, skipped):
            evaluator.compile_loops(units[0].plan)
            began = time.perf_counter()
            evaluated = evaluator.evaluate(units)
            tally.evaluate_s += time.perf_counter() - began
            tally.add(evaluated)
            done = [unit for unit in units if unit.is_last]
            tally.best += evaluator.best_steps(
                [unit.plan for unit in done], [unit.report_kv_len for unit in done]
            )
            results.write([evaluated.rows])
            if progress is not None and done:
                progress(done[-1].number, spec.num_plans)
        if not tally.best:
            raise SweepError(f"nothing to evaluate: {skipped}")
    if progress is not None:
        progress(spec.num_plans, spec.num_plans)
    return SweepSummary(
        best=with_standings(tally.best),
        plans=len(tally.best),
        evaluations=tally.evaluations,
        rows=results.num_rows,
        infeasible={"memory": tally.over_memory, "tpot": tally.over_tpot},
        skipped=skipped.by_reason,
        evaluate_s=tally.evaluate_s,
        total_s=time.perf_counter() - started,
        output=results.path,
    )


@dataclass
class _Tally:
    """What a running sweep has counted so far."""

    best: list[BestStep] = field(default_factory=list)
    evaluations: int = 0
    over_memory: int = 0
    over_tpot: int = 0
    evaluate_s: float = 0.0

    def add(self, evaluated: Evaluated) -> None:
        self.evaluations += evaluated.evaluations
        self.over_memory += evaluated.over_memory
        self.over_tpot += evaluated.over_tpot


def _load_tables(spec: SweepSpec, gpu: GpuSpec) -> Tables | None:
    from fastroof.tables import load_tables

    if spec.tables == DATASHEET:
        return None
    return load_tables(spec.tables or gpu.name, gpu=gpu.name, source=spec.source)
