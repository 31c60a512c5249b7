"""Runs of serving engines beside their predictions, and of what kind each is.

A kind is settled by what was measured, by lists of what is known, and by kernels alone; never by the
prediction on trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from benchmarks.accuracy.defects import defect_of
from benchmarks.accuracy.front_end import FrontEnd, PromptTime, front_ends
from benchmarks.accuracy.speculative_runs import ACCEPTED, accepted_without, drafts_of, speculative_runs
from fastroof.engines import EngineProfile
from fastroof.errors import FastroofError
from fastroof.serving.evidence.prediction_errors import PredictedTime
from fastroof.serving.evidence.predictions import Plans, RowPrediction, predict_row
from fastroof.serving.evidence.rows import ServingRow
from fastroof.serving.evidence.validation import (
    FULL_KV,
    INDEPENDENT,
    SPECULATIVE,
    Skipped,
    is_queueing,
    kernels_ms,
    tpot_of,
    ttft_of,
)

JUDGED, DISAGGREGATED = "judged", "disaggregated"
ADMISSION_LIMITED, DEFECTIVE = "admission-limited", "defective"
KINDS: Final = (JUDGED, INDEPENDENT, DISAGGREGATED, SPECULATIVE, ADMISSION_LIMITED, DEFECTIVE)
"""What a run can be, in the order in which tables list them."""

WAITING: Final = 0.35
"""Share of a request's measured time before its first token, from which admission limits the run."""

SPLIT_NAMES: Final[Mapping[str, Callable[[ServingRow], Hashable]]] = MappingProxyType(
    {
        "model": lambda row: row.whole_model,
        "gpu": lambda row: row.gpu,
        "version": lambda row: (row.engine, row.engine_version),
    }
)
"""What can be left out of the fits that predict it, and what a run is one of."""

ProfileOf = Callable[[ServingRow], EngineProfile | None]


class PredictedRun(NamedTuple):
    """A run, and what was predicted of it.

    Attributes
    ----------
    row : ServingRow
        What was measured.
    profile : EngineProfile
        What it was predicted by.
    prediction : RowPrediction
        TTFT without what a front end adds, and TPOT.
    kind : str
        One of :data:`KINDS`.
    reason : str
        Why it is of a kind of its own; empty for one that is judged.
    drafting : tuple of RowPrediction
        The same for each of :data:`benchmarks.accuracy.speculative_runs.ACCEPTED` tokens accepted in a
        step; empty for runs that do not speculate, or whose model has no draft layer.
    """

    row: ServingRow
    profile: EngineProfile
    prediction: RowPrediction
    kind: str
    reason: str
    drafting: tuple[RowPrediction, ...] = ()


def kind_of(row: ServingRow, speculates: str) -> tuple[str, str]:
    """Say of what kind a run is, and why.

    Parameters
    ----------
    row : ServingRow
        A run.
    speculates : str
        Why it is taken to speculate, as :func:`speculative_runs` says; else empty.

    Returns
    -------
    kind, reason : str
        One of :data:`KINDS`; why it is not simply judged.
    """
    defect = defect_of(row)
    if defect:
        return DEFECTIVE, defect
    if speculates:
        return SPECULATIVE, speculates
    if row.is_disaggregated:
        return DISAGGREGATED, "some workers prefill, others decode"
    if not row.architecture:
        return INDEPENDENT, "its source is no sample that constants are fitted to"
    is_in_order = row.schedule.get("order") != "prefill_first"
    request_ms = row.ttft_ms + row.tpot_ms * (row.mean_osl - 1.0)
    if is_in_order and row.ttft_ms > WAITING * request_ms:
        return ADMISSION_LIMITED, f"its requests wait for more than {WAITING:.0%} of their time"
    return JUDGED, ""


def predict_runs(
    rows: Sequence[ServingRow], plans: Plans, profile_of: ProfileOf, skipped: Skipped
) -> list[PredictedRun]:
    """Predict the runs of one GPU.

    Parameters
    ----------
    rows : sequence of ServingRow
        Runs of the plans' GPU.
    plans : Plans
        Of its tables.
    profile_of : callable
        The profile that predicts a run; None where there is none.
    skipped : Counter
        Counts the runs that cannot be predicted by data set and reason.

    Returns
    -------
    list of PredictedRun
        In the order of the rows.
    """
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
    """Predict runs that speculate with what runs of other GPUs, formats and versions accept.

    Parameters
    ----------
    runs : sequence of PredictedRun
        Of all GPUs that are judged.

    Returns
    -------
    list of PredictedRun
        Runs without drafts, or without such others, as they are.
    """
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


def front_ends_of(runs: Sequence[PredictedRun], split: str = "model") -> dict[int, FrontEnd]:
    """Find what each run's test bench adds to TTFT, from judged runs that its split leaves in.

    Parameters
    ----------
    runs : sequence of PredictedRun
        Of all GPUs that are judged.
    split : str
        What the runs that say it are without: model, gpu or version of the run's own.

    Returns
    -------
    dict of int to FrontEnd
        By id of the run's row; see :func:`benchmarks.accuracy.front_end.front_ends`. Runs of kinds of
        their own say nothing, and are given what a judged run in their place has.
    """
    name_of = SPLIT_NAMES[split]
    judged = [
        PromptTime(run.row, run.prediction.ttft_ms, run.prediction.tpot_ms)
        for run in runs
        if run.kind == JUDGED and not is_queueing(run.prediction) and not math.isnan(run.row.ttft_ms)
    ]

    def place(row: ServingRow) -> tuple[object, ...]:
        return (row.bench or row.frontend, row.engine, name_of(row))

    found = front_ends(judged, name_of)
    known = {place(one.row): front_end for one, front_end in zip(judged, found, strict=True)}
    return {id(run.row): known.get(place(run.row), FrontEnd()) for run in runs}


def judged_times(
    runs: Sequence[PredictedRun], front_end_of: Mapping[int, FrontEnd], unseen: bool, skipped: Skipped
) -> tuple[list[PredictedTime], dict[str, FrontEnd]]:
    """Put measured times beside predictions: TPOT of all runs, and TTFT where that is no waiting.

    Parameters
    ----------
    runs : sequence of PredictedRun
        Of one GPU.
    front_end_of : mapping of int to FrontEnd
        As :func:`front_ends_of` says.
    unseen : bool
        Whether the constants have not seen them.
    skipped : Counter
        Counts the times to first token that are not judged.

    Returns
    -------
    times : list of PredictedTime
        TPOT of all, then TTFT.
    frontends : dict of str to FrontEnd
        What TTFT was given for the front end, by data set.
    """
    times = [
        tpot_of(
            run.row, run.profile, run.prediction, run.kind, not unseen and _is_fitted(run.row, run.profile)
        )
        for run in runs
    ]
    frontends: dict[str, FrontEnd] = {}
    for run in runs:
        if is_queueing(run.prediction):
            skipped[run.row.dataset, FULL_KV, "ttft"] += 1
        elif not math.isnan(run.row.ttft_ms):
            front_end = frontends[run.row.dataset] = front_end_of[id(run.row)]
            added_ms = front_end.added_ms(run.row, run.prediction.tpot_ms)
            times.append(ttft_of(run.row, run.profile, run.prediction.ttft_ms + added_ms, run.kind))
    return times, frontends


def _is_fitted(row: ServingRow, profile: EngineProfile) -> bool:
    evidence = profile.evidence
    gpus = evidence.get("gpus", (evidence.get("gpu"),))
    return row.gpu in gpus and row.dataset in evidence.get("datasets", ())
