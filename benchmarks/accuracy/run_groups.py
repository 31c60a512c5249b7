"""Errors of all runs by what they are runs of, and the few figures that sum those groups up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from benchmarks.accuracy.predicted_runs import JUDGED, KINDS
from fastroof.serving.evidence.prediction_errors import PredictedTime
from fastroof.serving.evidence.validation import INDEPENDENT

__all__ = ["LARGE_GROUP", "POOR", "RunGroup", "Totals", "run_groups", "totals_of"]

LARGE_GROUP: Final = 10
"""Rows from which a group counts in the median of groups: the error of fewer is mostly theirs."""

POOR: Final = 0.25
"""Mean absolute error above which a group's cause is asked for."""

_QUANTITIES: Final = ("tpot", "decode", "ttft")


class RunGroup(NamedTuple):
    """Errors of the runs of one model and format, on one GPU, by one version of an engine, as shares.

    Attributes
    ----------
    kind : str
        One of :data:`benchmarks.accuracy.predicted_runs.KINDS`.
    model : str
        What is left out together; of independent runs the data set.
    gpu, engine, version, dtype : str
        Where and how they ran.
    quantity : str
        ``tpot``, ``ttft``; ``decode`` where one request was in flight; a kind of whole step.
    rows : int
        How many.
    mape, median, p90, bias : float
        Mean, median and 90th percentile of the absolute errors, and mean of the signed ones.
    aic_rows : int
        Rows that aiconfigurator-core has a prediction of.
    aic_mape : float
        Its mean absolute error on those; nan where there is none.
    beside_mape : float
        That of fastroof on the same rows.
    fitted : bool
        Whether constants were fitted to some of these rows.
    """

    kind: str
    model: str
    gpu: str
    engine: str
    version: str
    dtype: str
    quantity: str
    rows: int
    mape: float
    median: float
    p90: float
    bias: float
    aic_rows: int
    aic_mape: float
    beside_mape: float
    fitted: bool


def run_groups(times: Iterable[PredictedTime], min_rows: int = 1) -> tuple[RunGroup, ...]:
    """Sum errors up by kind, model, GPU, engine, version, format and quantity.

    Parameters
    ----------
    times : iterable of PredictedTime
        Of any GPUs.
    min_rows : int
        Leave smaller groups out.

    Returns
    -------
    tuple of RunGroup
        By quantity and kind, the largest error first.
    """
    members: dict[tuple[str, ...], list[PredictedTime]] = {}
    for time in times:
        model = time.dataset if time.kind == INDEPENDENT else time.architecture
        key = (time.kind, model, time.gpu, time.engine, time.engine_version, time.dtype, time.quantity)
        if time.kind == INDEPENDENT:
            key = (time.kind, model, time.gpu, time.engine, "", "", time.quantity)
        members.setdefault(key, []).append(time)
    groups = [_group(key, rows) for key, rows in members.items() if len(rows) >= min_rows]
    return tuple(sorted(groups, key=_order))


def _order(group: RunGroup) -> tuple[object, ...]:
    first = _QUANTITIES.index(group.quantity) if group.quantity in _QUANTITIES else len(_QUANTITIES)
    return (first, group.quantity, KINDS.index(group.kind), -group.mape, group[:7])


def _group(key: Sequence[str], times: Sequence[PredictedTime]) -> RunGroup:
    errors = np.array([time.error for time in times])
    beside = np.array([(time.error, time.aic_error) for time in times if not math.isnan(time.aic_ms)])
    size = np.abs(errors)
    own, theirs = np.abs(beside).mean(axis=0) if len(beside) else (math.nan, math.nan)
    kind, model, gpu, engine, version, dtype, quantity = key
    return RunGroup(
        kind,
        model,
        gpu,
        engine,
        version,
        dtype,
        quantity,
        len(times),
        float(size.mean()),
        float(np.median(size)),
        float(np.quantile(size, 0.9)),
        float(errors.mean()),
        len(beside),
        float(theirs),
        float(own),
        any(time.fitted for time in times),
    )


@dataclass(frozen=True)
class Totals:
    """One quantity over all groups of some kinds.

    Attributes
    ----------
    quantity : str
        Of which times.
    kinds : tuple of str
        Kinds of runs in it.
    rows : int
        Runs.
    mape, bias : float
        Over all of them; nan where there is none.
    groups : int
        Groups of :data:`LARGE_GROUP` rows or more.
    median_of_groups : float
        Of the mean absolute errors of these; nan where there is none.
    groups_beside : int
        Those of them where aiconfigurator-core answers a row.
    ahead : float
        Share of these whose error on the same rows is smaller than its; nan where there is none.
    aic_mape, beside_mape : float
        Its error over all rows that it answers, and fastroof's on the same; nan where there is none.
    poor : tuple of str
        Groups of any size with an error above :data:`POOR`, in words.
    """

    quantity: str
    kinds: tuple[str, ...]
    rows: int
    mape: float
    bias: float
    groups: int
    median_of_groups: float
    groups_beside: int
    ahead: float
    aic_mape: float
    beside_mape: float
    poor: tuple[str, ...]


def totals_of(groups: Sequence[RunGroup], quantity: str = "tpot", kinds: Sequence[str] = (JUDGED,)) -> Totals:
    """Sum groups up.

    Parameters
    ----------
    groups : sequence of RunGroup
        All of them, whatever their size.
    quantity : str
        Of which times.
    kinds : sequence of str
        Which kinds of runs to take.

    Returns
    -------
    Totals
        Every run counts the same in ``mape``, every large group in ``median_of_groups`` and ``ahead``.
    """
    some = [group for group in groups if group.quantity == quantity and group.kind in kinds]
    large = [group for group in some if group.rows >= LARGE_GROUP]
    beside = [group for group in large if group.aic_rows]
    rows, answered = sum(group.rows for group in some), sum(group.aic_rows for group in some)
    return Totals(
        quantity,
        tuple(kinds),
        rows,
        sum(group.rows * group.mape for group in some) / rows if rows else math.nan,
        sum(group.rows * group.bias for group in some) / rows if rows else math.nan,
        len(large),
        float(np.median([group.mape for group in large])) if large else math.nan,
        len(beside),
        sum(group.beside_mape < group.aic_mape for group in beside) / len(beside) if beside else math.nan,
        _over(answered, [(group.aic_rows, group.aic_mape) for group in some]),
        _over(answered, [(group.aic_rows, group.beside_mape) for group in some]),
        tuple(
            " ".join(filter(None, (group.model, group.gpu, group.engine, group.version, group.dtype)))
            for group in some
            if group.mape > POOR
        ),
    )


def _over(rows: int, parts: Iterable[tuple[int, float]]) -> float:
    return sum(count * error for count, error in parts if count) / rows if rows else math.nan
