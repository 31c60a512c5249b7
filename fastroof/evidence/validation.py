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
from fastroof.evidence.load_generators.runs import POISSON, GeneratorRun
from fastroof.evidence.own_runs import OwnRow
from fastroof.evidence.prediction_errors import (
    ComparedRun,
    PredictedTime,
    RunFigure,
    Validation,
    predicted_time,
)
from fastroof.evidence.predictions import Plans, RowPrediction, estimate_row, predict_step_ms
from fastroof.evidence.rows import ENGINE_CLOCK, LeftOut, ServingRow
from fastroof.evidence.steps.measured_steps import STEPS_DATASET, MeasuredStep
from fastroof.serving.estimate import LENGTH_SPREAD
from fastroof.serving.serving_estimate import ServingEstimate
from fastroof.tables import Tables
from fastroof.units import MS_PER_S, US_PER_MS

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

MOST_ROUNDS: Final = 40
"""Estimates until the requests in flight at a rate are those of their own latency."""

SETTLED: Final = 1e-3

LEVELS: Final = (0.05, *(tenths / 10.0 for tenths in range(1, 10)), 0.95)
RESIDUALS: Final = {
    "tpot": (-1.00, -0.49, -0.23, -0.00, 0.20, 0.43, 0.68, 1.01, 1.49, 2.11, 2.95),
    "ttft": (-1.35, -0.81, -0.30, -0.05, 0.08, 0.20, 0.31, 0.52, 0.94, 1.52, 2.09),
}  # fmt: skip
"""Stated standard errors by which a share of LEVELS of public runs is at most slower (in ln) than predicted.

Each is predicted by costs that its bench was not fitted to, and groups weigh alike:
``python -m benchmarks.accuracy benches``.
"""

LOOK_AT: Final = {
    ("tpot",): "CUDA graphs, the attention backend, and clocks and other processes of the GPUs and the host",
    ("ttft",): "the API server and its tokenizer, requests that arrive together, and the tokens of a step",
    ("ttft", "tpot"): "clocks, power limits and other processes of the GPUs, the checkpoint's format and the "
    "engine's version",
}
"""What makes an engine slow, by the times that are."""

Skipped = Counter[tuple[str, ...]]


def validate_own(
    rows: Sequence[OwnRow],
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
    runs: list[ComparedRun] = []
    for row, reason in zip(here, fast, strict=True):
        profile = one or row.engine_profile
        kind = SPECULATIVE if reason else INDEPENDENT
        try:
            seen = estimate_run(row, plans, profile)
        except FastroofError as error:
            skipped[row.dataset, str(error)] += 1
            continue
        predicted = RowPrediction(seen.ttft_ms, seen.tpot_ms)
        if row.run is not None:
            runs.append(compared_run(row, row.run, seen, reason))
        tpot.append(time_of(row, profile, "tpot", predicted, kind))
        if is_waiting(row):
            skipped[row.dataset, WAITS, "ttft"] += 1
        elif not math.isnan(row.ttft_ms):
            ttft.append(time_of(row, profile, "ttft", predicted, kind))
    return Validation(
        tables.gpu.name,
        tables.content_hash,
        __version__,
        str(engine) if one is None or isinstance(engine, str) else one.name,
        (*tpot, *ttft, *of_steps),
        counted(skipped),
        runs=tuple(runs),
    )


def estimate_run(row: OwnRow, plans: Plans, profile: EngineProfile) -> ServingEstimate:
    """Estimate a run at its clients, or at its rate and the requests in flight of the estimated latency."""
    plan, run = plans.get(row, profile), row.run
    speculation = plans.speculation(row, plan)
    if run is None or not run.has_rate:
        return estimate_row(row, plan, speculation, with_error=True)
    rate_per_ms, own = run.running / run.latency_s / MS_PER_S, float(run.arrivals == POISSON)
    most = run.clients if run.clients >= 1.0 else math.inf
    # requests of one length do not end together if they did not arrive together
    at_rate = replace(row, length_spread=max(row.length_spread, LENGTH_SPREAD))
    for _ in range(MOST_ROUNDS):
        seen = estimate_row(at_rate, plan, speculation, with_error=True)
        met = min(max(rate_per_ms * seen.request_latency_ms + own, 1.0), most)
        if abs(met / at_rate.concurrency - 1.0) < SETTLED:
            return seen
        at_rate = replace(at_rate, concurrency=met)
    raise TableError(f"at {rate_per_ms * MS_PER_S:.4g} requests/s its requests pile up, as predicted")


def compared_run(row: OwnRow, run: GeneratorRun, seen: ServingEstimate, fast: str) -> ComparedRun:
    """Put a run's figures next to their predictions; ``fast`` is why it cannot have run plain steps."""
    times = [_figure(name, getattr(row, f"{name}_ms"), seen) for name in ("ttft", "tpot")]
    # TTFT and TPOT of a slow engine are taken as slow together
    predicted_s, low_s, high_s = (
        (ttft_ms + tpot_ms * (run.osl - 1.0)) / MS_PER_S
        for ttft_ms, tpot_ms in zip(times[0][2:5], times[1][2:5], strict=True)
    )
    if run.has_rate:
        rate, sending_s = run.running / run.latency_s, run.duration_s - run.latency_s
        tokens = [run.requests * run.osl / (sending_s + s) for s in (predicted_s, high_s, low_s)]
        running = [rate * s for s in (predicted_s, low_s, high_s)]
    else:
        tokens = [row.concurrency * run.osl / s for s in (predicted_s, high_s, low_s)]
        running = [row.concurrency] * 3
    per_s = RunFigure("tokens_per_s", run.requests * run.osl / run.duration_s, *tokens)
    figures = (*times, per_s, RunFigure("running", run.running, *running))
    return ComparedRun(row.row, figures, *_finding(row, times, fast))


def _figure(quantity: str, measured_ms: float, seen: ServingEstimate) -> RunFigure:
    """Return a time with the bounds of 8 in 10 such runs, by the residuals of public runs."""
    predicted_ms, error = getattr(seen, f"{quantity}_ms"), getattr(seen, f"{quantity}_relative_error")
    if error is None or not measured_ms > 0.0 or not predicted_ms > 0.0:
        return RunFigure(quantity, measured_ms, predicted_ms, math.nan, math.nan)
    residuals = RESIDUALS[quantity]
    low_ms, high_ms = (predicted_ms * math.exp(residuals[LEVELS.index(at)] * error) for at in (0.1, 0.9))
    slower_than = float(np.interp(math.log(measured_ms / predicted_ms) / error, residuals, LEVELS))
    return RunFigure(quantity, measured_ms, predicted_ms, low_ms, high_ms, slower_than)


def _finding(row: OwnRow, times: Sequence[RunFigure], fast: str) -> tuple[str, tuple[RunFigure, ...], str]:
    """Return how a run compares with 8 in 10 such runs of its engine, by which times, and what to look at."""
    judged = [one for one in times if one.ratio > 0.0 and not (one.quantity == "ttft" and is_waiting(row))]
    if fast:
        finding = f"faster than plain steps allow, since {fast}"
        return finding, tuple(judged), "its drafts, and at the tokens that were counted"
    if slow := tuple(one for one in judged if one.measured > one.high):
        flags = f"{', '.join(row.changing)}, which is not modelled; " if row.changing else ""
        look_at = flags + LOOK_AT[tuple(one.quantity for one in slow)]
        return "slower than 9 of 10 such engines", slow, look_at
    if quick := tuple(one for one in judged if one.measured < one.low):
        # half of the quick ones are so by the runs' own scatter
        far = any(one.slower_than <= LEVELS[0] for one in quick)
        look_at = "prefixes found in the cache, and at outputs that ended early" if far else ""
        return "faster than 9 of 10 such engines", quick, look_at
    is_known = not any(math.isnan(one.high) for one in judged)
    return "like 8 in 10 such engines" if is_known else "not judged (accuracy unknown)", tuple(judged), ""


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


def time_of(
    row: ServingRow,
    profile: EngineProfile,
    name: str,
    predicted: RowPrediction,
    kind: str,
    *,
    fitted: bool = False,
) -> PredictedTime:
    """Compare the TTFT or TPOT of a run, by ``name``, with its prediction; one request's TPOT is a decode."""
    return predicted_time(
        row, profile, row=row.row, isl=row.isl, osl=row.osl, concurrency=row.concurrency,
        architecture=row.whole_model, layout=str(row.layout), bench=row.bench_label, clock=row.clock,
        quantity="decode" if name == "tpot" and row.is_single else name, kind=kind,
        measured_ms=getattr(row, f"{name}_ms"), predicted_ms=getattr(predicted, f"{name}_ms"),
        aic_ms=getattr(row, f"aic_{name}_ms"), fitted=fitted,
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
