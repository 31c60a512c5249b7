"""Predict measured runs, by the kind of each run."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple

from benchmarks.accuracy.front_end import PromptTime, engine_of, fitted_without, is_named
from benchmarks.accuracy.run_kinds import (
    ACCEPTED,
    JUDGED,
    accepted_without,
    drafts_of,
    kind_of,
    speculative_runs,
)
from fastroof.engines import EngineProfile, FrontEnd
from fastroof.errors import FastroofError
from fastroof.evidence.prediction_errors import PredictedTime
from fastroof.evidence.predictions import Plans, RowPrediction, front_end_ms, predict_row
from fastroof.evidence.rows import ServingRow
from fastroof.evidence.validation import SPECULATIVE, Skipped, is_waiting, kernels_ms, time_of

SPLIT_NAMES: Final[Mapping[str, Callable[[ServingRow], Hashable]]] = MappingProxyType(
    {
        "model": lambda row: row.whole_model,
        "gpu": lambda row: row.gpu,
        "version": lambda row: (row.engine, row.engine_version),
        "bench": lambda row: row.bench_label,
    }
)
"""Splits by the attribute of a run that is left out of the fit."""

ProfileOf = Callable[[ServingRow], EngineProfile | None]


class PredictedRun(NamedTuple):
    """A run and its predictions."""

    row: ServingRow
    profile: EngineProfile
    prediction: RowPrediction
    kind: str
    reason: str
    drafting: tuple[RowPrediction, ...] = ()


def predict_runs(
    rows: Sequence[ServingRow], plans: Plans, profile_of: ProfileOf, skipped: Skipped
) -> list[PredictedRun]:
    """Predict the runs of one GPU."""
    speculates = speculative_runs(rows, [kernels_ms(row, plans) for row in rows])
    runs = []
    for row, why in zip(rows, speculates, strict=True):
        profile = profile_of(row)
        if profile is None:
            skipped[row.dataset, f"nothing else of {row.engine} to fit"] += 1
            continue
        kind, reason = kind_of(row, why)
        try:
            plan, prefill_plan = plans.get(row, profile), plans.get_prefill(row, profile)
            plain = predict_row(row, plan, prefill_plan)
            drafting = tuple(
                predict_row(row, plan, prefill_plan, drafts)
                for accepted in ACCEPTED
                if kind == SPECULATIVE and (drafts := drafts_of(row, accepted)) is not None
            )
        except FastroofError as error:
            skipped[row.dataset, str(error)] += 1
            continue
        runs.append(PredictedRun(row, profile, plain, kind, reason, drafting))
    return runs


def with_drafts(runs: Sequence[PredictedRun]) -> list[PredictedRun]:
    """Predict speculative runs by the acceptance of runs of other GPUs, formats and versions."""
    drafting = [run for run in runs if run.drafting]
    places = {id(run.row): run for run in drafting}

    def predict(row: ServingRow, accepted: float) -> float:
        return places[id(row)].drafting[ACCEPTED.index(accepted)].tpot_ms

    found = accepted_without([run.row for run in drafting], predict)
    settled = {
        id(run.row): run._replace(prediction=run.drafting[ACCEPTED.index(accepted)])
        for run, accepted in zip(drafting, found, strict=True)
        if not math.isnan(accepted)
    }
    return [settled.get(id(run.row), run) for run in runs]


def refitted_front_ends(runs: Sequence[PredictedRun], split: str) -> list[PredictedRun]:
    """Replace each run's front end by one that was fitted without its part of a split."""
    name_of = SPLIT_NAMES[split]
    found = fitted_without(prompt_times(runs), name_of)
    refitted = []
    for run in runs:
        if is_named(run.row):
            refitted.append(run)
            continue
        engine = engine_of(PromptTime(run.row, run.profile.name, 0.0))
        front_end = found.get((engine, name_of(run.row)), FrontEnd())
        more_ms = front_end_ms(front_end, run.row) - front_end_ms(run.profile.front_end, run.row)
        times = run.prediction._replace(ttft_ms=run.prediction.ttft_ms + more_ms)
        profile = replace(run.profile, front_end=front_end)
        refitted.append(run._replace(profile=profile, prediction=times))
    return refitted


def prompt_times(runs: Sequence[PredictedRun]) -> list[PromptTime]:
    """Return the judged runs whose measured TTFT is not mostly waiting, by the engine's clock."""
    return [
        PromptTime(
            run.row,
            run.profile.name,
            run.prediction.ttft_ms - front_end_ms(run.row.on_its_clock(run.profile).front_end, run.row),
        )
        for run in runs
        if run.kind == JUDGED and not is_waiting(run.row) and not math.isnan(run.row.ttft_ms)
    ]


def judged_times(runs: Sequence[PredictedRun], unseen: bool, skipped: Skipped) -> list[PredictedTime]:
    """Compare TPOT and TTFT of all runs with predictions."""
    times = []
    for run in runs:
        is_fitted = not unseen and _is_fitted(run.row, run.profile)
        times.append(time_of(run.row, run.profile, "tpot", run.prediction, run.kind, fitted=is_fitted))
    with_ttft = (run for run in runs if not math.isnan(run.row.ttft_ms))
    return times + [time_of(run.row, run.profile, "ttft", run.prediction, run.kind) for run in with_ttft]


def _is_fitted(row: ServingRow, profile: EngineProfile) -> bool:
    evidence = profile.evidence
    gpus = evidence.get("gpus", (evidence.get("gpu"),))
    return row.gpu in gpus and row.dataset in evidence.get("datasets", ())
