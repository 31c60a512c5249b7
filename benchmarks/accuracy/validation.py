"""Compare predictions with measured runs of one GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.accuracy.aiconfigurator_estimates import with_aiconfigurator_estimates
from benchmarks.accuracy.calibration import profiles_of, profiles_without
from benchmarks.accuracy.independent import judge, profile_of_served
from benchmarks.accuracy.measured import Measured, measured_on
from benchmarks.accuracy.predicted_runs import (
    PredictedRun,
    ProfileOf,
    judged_times,
    predict_runs,
    refitted_front_ends,
    with_drafts,
)
from fastroof._version import __version__
from fastroof.engines import EngineProfile, load_engine
from fastroof.errors import TableError
from fastroof.evidence.prediction_errors import PredictedTime, Validation
from fastroof.evidence.predictions import Plans
from fastroof.evidence.rows import LeftOut
from fastroof.evidence.validation import Skipped, counted, is_taken, predicted_steps
from fastroof.tables import Tables


def run_validation(
    measured: Measured | Sequence[str] | None,
    tables: Tables,
    *,
    engine: str | Path | EngineProfile = "auto",
    leave_one_model_out: bool = False,
    with_aiconfigurator: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Validation:
    """Predict measured rows and compare them."""
    evidence = _measured(measured, tables.gpu.name)
    if leave_one_model_out and engine != "auto":
        raise TableError(
            f"leave_one_model_out fits each engine's own profile, so engine must be 'auto', got {engine!r}"
        )
    show = progress or (lambda words: None)
    if with_aiconfigurator:
        show("querying aiconfigurator-core")
        evidence = evidence._replace(rows=with_aiconfigurator_estimates(evidence.rows)[0])
    profile_of = profiles_of(engine)
    if leave_one_model_out:
        profile_of = profiles_without("model", evidence.rows, {tables.gpu.name: tables}, show)
    show(f"predicting {len(evidence.rows) + len(evidence.steps) + len(evidence.independent)} rows")
    on_gpu = predict_gpu(evidence, tables, profile_of)
    independent = judge_independent(evidence, tables, engine, leave_one_model_out, on_gpu.skipped)
    on_gpu = on_gpu._replace(others=(*on_gpu.others, *independent))
    runs = with_drafts(on_gpu.runs)
    if leave_one_model_out:
        runs = refitted_front_ends(runs, "model")
    return on_gpu.judged(runs, engine_name(engine), leave_one_model_out)


def engine_name(engine: str | Path | EngineProfile) -> str:
    """Return the name of the requested engine in a report."""
    return engine if isinstance(engine, str) else load_engine(engine).name


class GpuPredictions(NamedTuple):
    """All predictions of one GPU, before speculative runs use the acceptance of other GPUs."""

    gpu: str
    tables_hash: str
    runs: tuple[PredictedRun, ...]
    others: tuple[PredictedTime, ...]
    skipped: Skipped
    left_out: tuple[LeftOut, ...]

    def judged(self, runs: Sequence[PredictedRun], engine: str, unseen: bool) -> Validation:
        """Compare predictions of the runs with measurements."""
        skipped = self.skipped.copy()
        of_runs = judged_times(runs, unseen, skipped)
        return Validation(
            self.gpu,
            self.tables_hash,
            __version__,
            engine,
            (*of_runs, *self.others),
            (*counted(skipped), *self.left_out),
            unseen,
        )


def predict_gpu(evidence: Measured, tables: Tables, profile_of: ProfileOf) -> GpuPredictions:
    """Predict all measured runs and steps of a GPU."""
    skipped = Skipped()
    rows = [row for row in evidence.rows if is_taken(row, tables.gpu.name, skipped)]
    plans = Plans(tables)
    steps = tuple(predicted_steps(evidence.steps, plans, skipped))
    runs = tuple(predict_runs(rows, plans, profile_of, skipped))
    return GpuPredictions(tables.gpu.name, tables.content_hash, runs, steps, skipped, evidence.left_out)


def judge_independent(
    evidence: Measured, tables: Tables, engine: str | Path | EngineProfile, unseen: bool, skipped: Skipped
) -> tuple[PredictedTime, ...]:
    """Validate independent rows, unless profiles were fitted without a model."""
    if unseen:
        skipped.update(
            (row.dataset, "nothing is fitted to it, so nothing is left out") for row in evidence.independent
        )
        return ()
    one = None if engine == "auto" else load_engine(engine)
    return tuple(judge(evidence.independent, tables, lambda row: one or profile_of_served(row), skipped))


def _measured(measured: Measured | Sequence[str] | None, gpu: str) -> Measured:
    if isinstance(measured, Measured):
        evidence = measured
    else:
        everything = measured_on(gpu)
        if isinstance(measured, str):
            measured = (measured,)
        evidence = everything if measured is None else everything.pick(measured)
    if not evidence.rows and not evidence.steps and not evidence.independent:
        raise TableError(
            f"nothing was measured end to end on {gpu}: give rows of it, or install aiconfigurator-core "
            "for its sample"
        )
    return evidence
