"""Comparing predictions with a user's own runs and measured steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastroof._version import __version__
from fastroof.engines import EngineProfile, load_engine, serving_engines
from fastroof.engines.values import holds_for, is_version
from fastroof.errors import FastroofError, TableError
from fastroof.evidence.prediction_errors import PredictedTime, Validation, predicted_time
from fastroof.evidence.predictions import Plans, RowPrediction, predict_step_ms
from fastroof.evidence.rows import ENGINE_CLOCK, LeftOut, ServingRow
from fastroof.evidence.steps.measured_steps import STEPS_DATASET, MeasuredStep
from fastroof.tables import Tables
from fastroof.units import US_PER_MS

SPECULATIVE, INDEPENDENT = "speculative", "independent"
"""Kinds of a user's own runs: faster than plain steps allow, and all others."""

WAITS: Final = "its requests mostly wait to be admitted"
"""Why TTFT of a run is not evaluated."""

FASTEST: Final = 0.7
"""A run below this share of its kernels' time cannot have run plain steps."""

WAITING: Final = 0.35
"""TTFT share of a request's measured time from which a run waits to be admitted."""

MOST_RUNS: Final = 0.5
"""Share of a series, or of a GPU's data set, below :data:`FASTEST` from which all counts as speculative."""

Skipped = Counter[tuple[str, ...]]


def validate_own(
    rows: Sequence[ServingRow],
    steps: Sequence[MeasuredStep],
    tables: Tables,
    *,
    engine: str | Path | EngineProfile = "auto",
    progress: Callable[[str], None] | None = None,
) -> Validation:
    """Compare predictions of a user's own runs and steps with the measured times.

    What was timed of a step decides what is compared. ``auto`` predicts each run with the profile of its
    engine and version. Runs of other GPUs, and those that cannot be predicted, are counted in ``left_out``.
    """
    if not rows and not steps:
        raise TableError("there are neither runs nor steps to validate")
    one = None if engine == "auto" else load_engine(engine)
    if progress is not None:
        progress(f"predicting {len(rows) + len(steps)} rows")
    skipped = Skipped()
    here = [row for row in rows if is_taken(row, tables.gpu.name, skipped)]
    plans = Plans(tables)
    of_steps = tuple(predicted_steps(steps, plans, skipped, one))
    fast = faster_than_kernels(here, [kernels_ms(row, plans) for row in here])
    tpot: list[PredictedTime] = []
    ttft: list[PredictedTime] = []
    for row, reason in zip(here, fast, strict=True):
        profile = one or row.engine_profile
        kind = SPECULATIVE if reason else INDEPENDENT
        try:
            predicted = plans.predict(row, profile)
        except FastroofError as error:
            skipped[row.dataset, str(error)] += 1
            continue
        tpot.append(tpot_of(row, profile, predicted, kind))
        if is_waiting(row):
            skipped[row.dataset, WAITS, "ttft"] += 1
        elif not math.isnan(row.ttft_ms):
            ttft.append(ttft_of(row, profile, predicted.ttft_ms, kind))
    return Validation(
        tables.gpu.name,
        tables.content_hash,
        __version__,
        str(engine) if one is None or isinstance(engine, str) else one.name,
        (*tpot, *ttft, *of_steps),
        counted(skipped),
    )


def other_versions(rows: Sequence[ServingRow], given: EngineProfile | str) -> list[str]:
    """Return warnings about runs of other engines or versions than the profile that all are judged by."""
    if given == "auto":
        return []
    profile = load_engine(given)
    is_newest = isinstance(given, str) and given in serving_engines()
    found: dict[str, int] = {}
    for row in rows:
        is_of_range = profile.engine in ("", row.engine) and not (
            is_version(row.engine_version) and not holds_for(profile.versions, row.engine_version)
        )
        if not is_of_range or (is_newest and is_version(row.engine_version)):
            name = f"{row.engine} {row.engine_version}".rstrip()
            found[name] = found.get(name, 0) + 1
    return [
        f"{count} of {len(rows)} runs are of {name}, judged by {profile.title}"
        f"{', the newest' if is_newest else ''}: auto takes the profile of each run's version"
        for name, count in found.items()
    ]


def is_taken(row: ServingRow, gpu: str, skipped: Skipped) -> bool:
    """Return whether a run is evaluated on a GPU; otherwise count it."""
    reason = row.left_out
    if row.gpu != gpu:
        reason = f"measured on {row.gpu}, the tables are of {gpu}"
    if reason:
        skipped[row.dataset, reason] += 1
    return not reason


def counted(skipped: Skipped) -> tuple[LeftOut, ...]:
    """Return what was not evaluated, by reason."""
    return tuple(LeftOut(key[0], key[1], rows, *key[2:]) for key, rows in skipped.items())


def is_waiting(run: Any) -> bool:
    """Return whether requests mostly wait to be admitted, so that TPOT is not that of all clients."""
    return bool(run.ttft_ms > WAITING * _latency_ms(run))


def _latency_ms(run: Any) -> float:
    """Return the measured time of a request, ms."""
    return float(run.ttft_ms + run.tpot_ms * (run.mean_osl - 1.0))


def kernels_ms(row: ServingRow, plans: Plans) -> float:
    """Return the TPOT of kernels only, ms, of the requests that decode at once; nan without a plan."""
    if is_waiting(row):
        # by Little's law: the share of the time after the first token
        decoding = row.concurrency * (1.0 - row.ttft_ms / _latency_ms(row))
        row = replace(row, concurrency=max(decoding, 1.0))
    try:
        return plans.predict(row, row.engine_profile.kernels_alone()).tpot_ms
    except FastroofError:
        return math.nan


def faster_than_kernels(rows: Sequence[ServingRow], kernels_ms: Sequence[float]) -> list[str]:
    """Return why each run must have drafted tokens, judged by time only; empty for plain runs."""
    fast = np.array([row.tpot_ms for row in rows]) / np.array(kernels_ms, np.float64) < FASTEST
    reasons = [f"it took less than {FASTEST:g} of what its own kernels take" * bool(one) for one in fast]
    of_set: list[tuple[object, ...]] = [(row.dataset, row.gpu) for row in rows]
    for which, keys in {"series": [series_of(row) for row in rows], "data set": of_set}.items():
        together: dict[tuple[object, ...], list[int]] = {}
        for i, key in enumerate(keys):
            together.setdefault(key, []).append(i)
        for places in together.values():
            if float(np.mean(fast[places])) >= MOST_RUNS:
                why = f"most of its {which} took less than {FASTEST:g} of what their kernels take"
                for i in places:
                    reasons[i] = reasons[i] or why
    return reasons


def series_of(row: ServingRow) -> tuple[object, ...]:
    """Return the common properties of one launch's runs under one load, without their number of clients."""
    return (
        row.dataset, row.gpu, row.tp, row.dp, row.ep, row.prefill_workers, row.prefill_tp, row.prefill_dp,
        row.decode_workers, row.isl, row.osl, row.measured_on,
    )  # fmt: skip


def tpot_of(
    row: ServingRow, profile: EngineProfile, predicted: RowPrediction, kind: str, fitted: bool = False
) -> PredictedTime:
    """Compare the TPOT of a run with its prediction."""
    quantity, measured_ms = "decode" if row.is_single else "tpot", row.tpot_ms
    times = {"measured_ms": measured_ms, "predicted_ms": predicted.tpot_ms, "aic_ms": row.aic_tpot_ms}
    return _time(row, profile, quantity=quantity, kind=kind, fitted=fitted, **times)


def ttft_of(row: ServingRow, profile: EngineProfile, predicted_ms: float, kind: str) -> PredictedTime:
    """Compare the TTFT of a run with its prediction."""
    times = {"measured_ms": row.ttft_ms, "predicted_ms": predicted_ms, "aic_ms": row.aic_ttft_ms}
    return _time(row, profile, quantity="ttft", kind=kind, fitted=False, **times)


def _time(row: ServingRow, profile: EngineProfile, **more: Any) -> PredictedTime:
    return predicted_time(
        row, profile, row=row.row, isl=row.isl, osl=row.osl, concurrency=row.concurrency,
        architecture=row.whole_model, layout=str(row.layout), bench=row.bench_label, clock=row.clock, **more,
    )  # fmt: skip


def predicted_steps(
    steps: Sequence[MeasuredStep], plans: Plans, skipped: Skipped, one: EngineProfile | None = None
) -> Iterator[PredictedTime]:
    """Predict whole steps, and count those without a prediction.

    Kernels and forwards are predicted without an engine's costs; steps of an engine with ``one`` profile, or
    that of its version.
    """
    for step in steps:
        profile = step_profile(step, one)
        try:
            if step.gpu != plans.tables.gpu.name:
                raise TableError(f"measured on {step.gpu}, the tables are of {plans.tables.gpu.name}")
            if step.left_out:
                raise TableError(step.left_out)
            plan = plans.get(step, profile)
            predicted_ms = predict_step_ms(step, plan, plans.drafter(step, plan))
        except FastroofError as error:
            skipped[step.dataset, str(error)] += 1
            continue
        layout = "" if step.dataset == STEPS_DATASET else str(step.layout)
        yield predicted_time(
            step, profile, row=step.name, quantity=step.phase, isl=float(sum(step.new_tokens)), osl=0.0,
            concurrency=float(len(step.new_tokens)), fitted=False, measured_ms=step.latency_us / US_PER_MS,
            predicted_ms=predicted_ms, aic_ms=math.nan, architecture=step.model, kind=INDEPENDENT,
            layout=layout, bench=step.dataset, clock=ENGINE_CLOCK,
        )  # fmt: skip


def step_profile(step: MeasuredStep, one: EngineProfile | None = None) -> EngineProfile:
    """Return the profile that predicts a step."""
    if step.timed == "engine":
        profile = one or step.profile
        assert profile is not None
        return profile
    return load_engine("kernels") if step.profile is None else step.profile.kernels_alone()
