"""Errors of predictions, row by row and by group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.engines import EngineProfile
from fastroof.errors import TableError
from fastroof.evidence.rows import LeftOut, ServedModel
from fastroof.evidence.steps.measured_steps import MeasuredStep

GROUPINGS: Final = (
    "model", "tp", "engine", "engine_version", "dtype", "isl", "osl", "concurrency", "profile",
    "bench",
)  # fmt: skip
"""Fields that errors can be grouped by, within a data set and quantity."""


class PredictedTime(NamedTuple):
    """A measured time and its prediction."""

    dataset: str
    row: str
    quantity: str
    engine: str
    engine_version: str
    model: str
    dtype: str
    kv_dtype: str
    profile: str
    tp: int
    isl: float
    osl: float
    concurrency: float
    fitted: bool
    measured_ms: float
    predicted_ms: float
    aic_ms: float
    gpu: str = ""
    architecture: str = ""
    kind: str = "judged"
    layout: str = ""
    bench: str = ""
    clock: str = "client"

    @property
    def error(self) -> float:
        """Signed error, as a share of the measured time."""
        return self.predicted_ms / self.measured_ms - 1.0

    @property
    def aic_error(self) -> float:
        """Signed error of aiconfigurator-core."""
        return self.aic_ms / self.measured_ms - 1.0


class RunFigure(NamedTuple):
    """A figure of a run next to its prediction, and the bounds of 8 in 10 such runs; nan if unknown.

    ``slower_than`` is the share of such engines that are faster, from 0.05 to 0.95.
    """

    quantity: str
    measured: float
    predicted: float
    low: float
    high: float
    slower_than: float = math.nan

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted


class ComparedRun(NamedTuple):
    """The figures of a run next to their predictions, what follows from those in ``by``, and what to do."""

    run: str
    figures: tuple[RunFigure, ...]
    finding: str
    by: tuple[RunFigure, ...]
    look_at: str = ""


def verdicts(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Return a sentence for all runs with the same finding, and their names."""
    alike: dict[tuple[Any, ...], list[ComparedRun]] = {}
    for run in runs:
        alike.setdefault((run.finding, run.look_at, *(one.quantity for one in run.by)), []).append(run)
    found = {}
    for (finding, look_at, *_), group in alike.items():
        words = []
        for figures in zip(*(run.by for run in group), strict=True):
            ends = dict.fromkeys(f"{end(figure.ratio for figure in figures):.2f}" for end in (min, max))
            words.append(f"{figures[0].quantity.upper()} {' to '.join(ends)}")
        sentence = f"{finding}, {' and '.join(words)} times the prediction"
        found[f"{sentence}: look at {look_at}" if look_at else sentence] = [run.run for run in group]
    return found


SHARED: Final = ("dataset", "engine", "engine_version", "model", "dtype", "kv_dtype", "tp", "gpu")
"""Fields that runs and steps have under the names of a predicted time."""


def predicted_time(of: ServedModel | MeasuredStep, profile: EngineProfile, **more: Any) -> PredictedTime:
    """Return a time of a run or step with the fields that it has."""
    return PredictedTime(**{name: getattr(of, name) for name in SHARED}, profile=profile.name, **more)


class ErrorGroup(NamedTuple):
    """Errors of a group of rows, as shares of the measured times."""

    dataset: str
    quantity: str
    values: dict[str, Any]
    fitted: bool
    rows: int
    mape: float
    median: float
    p90: float
    bias: float
    aic_rows: int
    aic_mape: float
    aic_bias: float
    kind: str = "judged"


@dataclass(frozen=True)
class Validation:
    """Predictions compared with measurements."""

    gpu: str
    tables_hash: str
    version: str
    engine: str
    rows: tuple[PredictedTime, ...]
    left_out: tuple[LeftOut, ...]
    unseen: bool = False
    runs: tuple[ComparedRun, ...] = ()

    def errors(self, by: Sequence[str] = ()) -> tuple[ErrorGroup, ...]:
        """Summarise errors by data set, quantity and kind of run."""
        unknown = [name for name in by if name not in GROUPINGS]
        if unknown:
            raise TableError(f"errors can be grouped by {', '.join(GROUPINGS)}, got {', '.join(unknown)}")
        order = {name: i for i, name in enumerate(dict.fromkeys(row.dataset for row in self.rows))}
        groups: dict[tuple[Any, ...], list[PredictedTime]] = {}
        for row in self.rows:
            key = (order[row.dataset], row.quantity, row.kind, *(getattr(row, name) for name in by))
            groups.setdefault(key, []).append(row)
        quantities = {name: i for i, name in enumerate(dict.fromkeys(row.quantity for row in self.rows))}
        keys = sorted(groups, key=lambda key: (quantities[key[1]], key[0], *key[2:]))
        return tuple(_group(groups[key], dict(zip(by, key[3:], strict=True))) for key in keys)


def _group(rows: list[PredictedTime], values: dict[str, Any]) -> ErrorGroup:
    first, is_fitted = rows[0], any(row.fitted for row in rows)
    return ErrorGroup(first.dataset, first.quantity, values, is_fitted, *mean_errors(rows), first.kind)


def mean_errors(rows: Sequence[PredictedTime]) -> tuple[int, float, float, float, float, int, float, float]:
    """Return rows, MAPE, median, p90 and bias, then aiconfigurator-core's rows, MAPE and bias, as shares."""
    errors = np.array([row.error for row in rows])
    aic_errors = np.array([row.aic_error for row in rows if not math.isnan(row.aic_ms)])
    size = np.abs(errors)
    mape, median, p90 = float(size.mean()), float(np.median(size)), float(np.quantile(size, 0.9))
    aic_mape, aic_bias = (
        float(values.mean()) if len(values) else math.nan for values in (np.abs(aic_errors), aic_errors)
    )
    return len(rows), mape, median, p90, float(errors.mean()), len(aic_errors), aic_mape, aic_bias
