"""Predictions against what was measured end to end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from fastroof._version import __version__
from fastroof.engines import EngineProfile, load_engine
from fastroof.errors import FastroofError, TableError
from fastroof.serving.evidence.aiconfigurator_estimates import with_aiconfigurator_estimates
from fastroof.serving.evidence.calibration import calibrate
from fastroof.serving.evidence.independent import judge, profile_of_served
from fastroof.serving.evidence.measured import Measured, measured_on
from fastroof.serving.evidence.measured_steps import STEPS_DATASET, MeasuredStep
from fastroof.serving.evidence.prediction_errors import PredictedTime, Validation
from fastroof.serving.evidence.predictions import (
    Plans,
    RowPrediction,
    frontend_us_per_token,
    predict_row,
    predict_step_ms,
)
from fastroof.serving.evidence.rows import LeftOut, ServingRow
from fastroof.tables import Tables
from fastroof.units import US_PER_MS

__all__ = ["FULL_KV_LOAD", "run_validation"]

FULL_KV_LOAD: Final = 0.9
"""KV load from which TTFT is mostly waiting: such rows are judged by their TPOT alone."""

FULL_KV: Final = "the KV cache is full, so that requests wait"


def run_validation(
    measured: Measured | Sequence[str] | None,
    tables: Tables,
    *,
    runtime: str | Path | EngineProfile = "auto",
    leave_one_model_out: bool = False,
    ask_aiconfigurator: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Validation:
    """Predict measured rows and judge the predictions.

    Parameters
    ----------
    measured : Measured, sequence of str or None
        What to judge: rows, or names of data sets of the tables' GPU; None judges all of them.
    tables : Tables
        Measured kernels of one GPU.
    runtime : str, Path or EngineProfile
        ``auto`` predicts each row by the profile of its engine and version. Else one profile for all
        rows. Whole steps are kernels alone, always.
    leave_one_model_out : bool
        Predict each model's rows by constants fitted to the other models' rows of its engine; engines
        that have no other model are left out. Needs ``runtime="auto"``.
    ask_aiconfigurator : bool
        Ask the installed aiconfigurator-core, instead of taking the predictions beside the rows.
    progress : callable, optional
        Called with words about what is being done.

    Returns
    -------
    Validation
        Rows of other GPUs, and those that cannot be predicted, are counted in ``left_out``.

    Raises
    ------
    FastroofError
        If a data set or runtime is unknown, nothing was measured on the GPU, or aiconfigurator-core was
        asked for and is not installed.

    Notes
    -----
    TTFT gets what the test bench's front end adds, as the other data sets of the same bench say: see
    :func:`fastroof.serving.evidence.predictions.frontend_us_per_token`. It is left out where the clients
    ask for more than 0.9 of the KV cache: there it is waiting.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.serving.evidence.validation import run_validation
    >>> report = run_validation(["vllm-synchronous"], fastroof.load_tables("h100"))
    >>> [group.rows for group in report.errors()]
    [7, 7]
    """
    evidence = _measured(measured, tables.gpu.name)
    if leave_one_model_out and runtime != "auto":
        raise TableError(
            f"leave_one_model_out fits each engine's own profile, so runtime must be 'auto', got {runtime!r}"
        )
    say = progress or (lambda words: None)
    if ask_aiconfigurator:
        say("asking aiconfigurator-core")
        evidence = evidence._replace(rows=with_aiconfigurator_estimates(evidence.rows)[0])
    skipped = Counter[tuple[str, ...]]()
    rows = [row for row in evidence.rows if not _refused(row, tables.gpu.name, skipped)]
    profile_of = _refitted(rows, tables, say) if leave_one_model_out else _profiles(runtime)
    say(f"predicting {len(rows) + len(evidence.steps) + len(evidence.independent)} rows")
    plans = Plans(tables)
    of_steps = list(_predicted_steps(evidence.steps, plans, skipped))
    of_runs, frontends = _predicted_runs(rows, plans, profile_of, leave_one_model_out, skipped)
    independent = _independent(evidence, tables, runtime, leave_one_model_out, skipped)
    counted = tuple(LeftOut(key[0], key[1], rows, *key[2:]) for key, rows in skipped.items())
    return Validation(
        tables.gpu.name,
        tables.content_hash,
        __version__,
        runtime if isinstance(runtime, str) else load_engine(runtime).name,
        leave_one_model_out,
        (*of_runs, *of_steps, *independent),
        (*counted, *evidence.left_out),
        frontends,
    )


def _independent(
    evidence: Measured,
    tables: Tables,
    runtime: str | Path | EngineProfile,
    unseen: bool,
    skipped: Counter[tuple[str, ...]],
) -> list[PredictedTime]:
    """Judge what nothing is fitted to; profiles that were fitted without a model say nothing new of it."""
    if unseen:
        skipped.update(
            (row.dataset, "nothing is fitted to it, so nothing is left out") for row in evidence.independent
        )
        return []
    one = None if runtime == "auto" else load_engine(runtime)
    return list(judge(evidence.independent, tables, lambda row: one or profile_of_served(row), skipped))


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


def _refused(row: ServingRow, gpu: str, skipped: Counter[tuple[str, ...]]) -> bool:
    reason = row.left_out
    if row.gpu != gpu:
        reason = f"measured on {row.gpu}, the tables are of {gpu}"
    if reason:
        skipped[row.dataset, reason] += 1
    return bool(reason)


ProfileOf = Callable[[ServingRow], EngineProfile | None]


def _profiles(runtime: str | Path | EngineProfile) -> ProfileOf:
    if runtime != "auto":
        one = load_engine(runtime)
        return lambda row: one
    return lambda row: row.engine_profile


def _refitted(rows: Sequence[ServingRow], tables: Tables, say: Callable[[str], None]) -> ProfileOf:
    """Profiles by engine and the model that each has not seen."""
    profiles: dict[tuple[str, str], EngineProfile] = {}
    for engine in dict.fromkeys(row.engine_profile for row in rows):
        if engine.fit is not None:
            say(f"fitting {engine.name} without each of its models")
            without = calibrate(rows, tables, engine.name, resamples=0).without
            profiles |= {(engine.name, model): profile for model, profile in without.items()}
    return lambda row: profiles.get((row.engine_profile.name, row.model))


def _predicted_runs(
    rows: Sequence[ServingRow],
    plans: Plans,
    profile_of: ProfileOf,
    unseen: bool,
    skipped: Counter[tuple[str, ...]],
) -> tuple[list[PredictedTime], dict[str, float]]:
    """Judge runs of engines by TPOT, and by TTFT where that is no waiting."""
    predicted: list[tuple[ServingRow, EngineProfile, RowPrediction]] = []
    for row in rows:
        profile = profile_of(row)
        if profile is None:
            skipped[row.dataset, f"no other model of {row.engine} to fit"] += 1
            continue
        try:
            predicted.append((row, profile, predict_row(row, plans.get(row, profile))))
        except FastroofError as error:
            skipped[row.dataset, str(error)] += 1
    prompt = []
    for row, profile, times in predicted:
        if times.kv_load >= FULL_KV_LOAD:
            skipped[row.dataset, FULL_KV, "ttft"] += 1
        elif not math.isnan(row.ttft_ms):
            prompt.append((row, profile, times))
    frontends = frontend_us_per_token([(row, times.ttft_ms) for row, _, times in prompt])
    times_beside = [
        _predicted_time(row, profile, "decode" if row.is_single else "tpot", times.tpot_ms, unseen)
        for row, profile, times in predicted
    ]
    for row, profile, times in prompt:
        added_ms = frontends[row.dataset] * row.mean_isl / US_PER_MS
        times_beside.append(_predicted_time(row, profile, "ttft", times.ttft_ms + added_ms, unseen))
    return times_beside, frontends


def _predicted_time(
    row: ServingRow, profile: EngineProfile, quantity: str, predicted_ms: float, unseen: bool
) -> PredictedTime:
    is_ttft = quantity == "ttft"
    return PredictedTime(
        row.dataset,
        row.row,
        quantity,
        row.engine,
        row.engine_version,
        row.model,
        row.dtype,
        row.kv_dtype,
        profile.name,
        row.tp,
        row.isl,
        row.osl,
        row.concurrency,
        not (unseen or is_ttft) and _is_fitted(row, profile),
        row.ttft_ms if is_ttft else row.tpot_ms,
        predicted_ms,
        row.aic_ttft_ms if is_ttft else row.aic_tpot_ms,
    )


def _is_fitted(row: ServingRow, profile: EngineProfile) -> bool:
    evidence = profile.evidence
    return evidence.get("gpu") == row.gpu and row.dataset in evidence.get("datasets", ())


def _predicted_steps(
    steps: Sequence[MeasuredStep], plans: Plans, skipped: Counter[tuple[str, ...]]
) -> Iterator[PredictedTime]:
    kernels = load_engine("kernels")
    for step in steps:
        try:
            if step.gpu != plans.tables.gpu.name:
                raise TableError(f"measured on {step.gpu}, the tables are of {plans.tables.gpu.name}")
            predicted_ms = predict_step_ms(step, plans.get(step, kernels))
        except FastroofError as error:
            skipped[STEPS_DATASET, str(error)] += 1
            continue
        yield PredictedTime(
            STEPS_DATASET,
            step.name,
            step.phase,
            "",
            "",
            step.model,
            step.dtype,
            step.kv_dtype,
            kernels.name,
            step.tp,
            float(sum(step.new_tokens)),
            0.0,
            float(len(step.new_tokens)),
            False,
            step.latency_us / US_PER_MS,
            predicted_ms,
            math.nan,
        )
