"""Choose the form of an engine's costs by cross-validation on the fitted rows only.

The choices are the set of costs, the weight of outliers, GEMM smoothing and fp8 scales. Each is judged by
leaving out groups of rows in turn. Rows that validate a fit are never used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.accuracy.fit import Form, equal_weights, fit_costs
from fastroof.arrays import Bools, Floats, Longs
from fastroof.serving.evidence.kernel_times import KernelTimes, predicted_us

_STEP, _SEQUENCE, _ALLREDUCE, _LAYER = "step_us", "sequence_us", "allreduce_us", "layer_us"
_PREFILL_LAYER, _FLOOR = "prefill_layer_us", "prefill_floor_layer_us"

FORMS: Final[tuple[tuple[str, ...], ...]] = (
    (),
    (_STEP,), (_SEQUENCE,), (_ALLREDUCE,), (_LAYER,), (_PREFILL_LAYER,), (_FLOOR,),
    (_STEP, _SEQUENCE), (_STEP, _ALLREDUCE), (_STEP, _PREFILL_LAYER), (_STEP, _FLOOR),
    (_SEQUENCE, _ALLREDUCE), (_SEQUENCE, _LAYER), (_SEQUENCE, _PREFILL_LAYER), (_SEQUENCE, _FLOOR),
    (_ALLREDUCE, _FLOOR),
    (_STEP, _SEQUENCE, _ALLREDUCE), (_STEP, _SEQUENCE, _FLOOR), (_SEQUENCE, _ALLREDUCE, _FLOOR),
)  # fmt: skip
"""Forms of costs, the fewest costs first."""

HOST_FORMS: Final = (("host_step_us",), ("host_step_us", "host_sequence_us"))
"""A step as the longer of kernels and host: scored, but in no profile."""

OUTLIERS: Final = (0.0, 0.1)
SIMPLER: Final = 0.02
"""A form with fewer costs is preferred within this share of the best error."""

NOTHING: Final = 1e-6
"""Error below which a form explains everything."""

FEWEST_ROWS: Final = 10
"""Data sets with fewer rows count less in a fit and its error."""

MOST_GROUPS: Final = 12
"""Maximum number of groups that rows of one model and layout are left out in."""


@dataclass(frozen=True)
class RowLabels:
    """Labels of each row."""

    dataset: npt.NDArray[np.str_]
    model: npt.NDArray[np.str_]
    gpu: npt.NDArray[np.str_]
    version: npt.NDArray[np.str_]
    tp: Longs

    @property
    def models(self) -> tuple[str, ...]:
        """All models, sorted."""
        return tuple(str(model) for model in np.unique(self.model))

    @property
    def cell(self) -> npt.NDArray[np.str_]:
        """Data set and GPU: each cell has the same weight."""
        return np.array([f"{d} {g}" for d, g in zip(self.dataset, self.gpu, strict=True)])

    @property
    def cluster(self) -> npt.NDArray[np.str_]:
        """Model, tp and GPU: rows with correlated errors."""
        return np.array([f"{m} {t} {g}" for m, t, g in zip(self.model, self.tp, self.gpu, strict=True)])


class Choice(NamedTuple):
    """One choice: the kernels to sum and the costs to add."""

    gemm_smoothing: str
    fp8_scales: str
    form: Form

    @property
    def kernels(self) -> tuple[str, str]:
        """The kernel options of the choice."""
        return self.gemm_smoothing, self.fp8_scales


class Trial(NamedTuple):
    """A choice and its error on groups left out in turn."""

    choice: Choice
    error: float


@dataclass(eq=False)
class FittedRows:
    """Rows to fit, with their kernel times under every choice."""

    times: Mapping[tuple[str, str], KernelTimes]
    labels: RowLabels
    forms: tuple[tuple[str, ...], ...] = FORMS
    outliers: tuple[float, ...] = OUTLIERS
    _fits: dict[tuple[bytes, Choice], dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Number the cells once; weights are computed thousands of times."""
        self._cells = np.unique(self.labels.cell, return_inverse=True)[1]
        self._every = np.ones(len(self._cells), bool)

    def weights(self, rows: Bools) -> Floats:
        """Return weights of the selected rows: every data set of a GPU has the same total."""
        return equal_weights(self._cells[rows], FEWEST_ROWS)

    def fit(self, rows: Bools, choice: Choice, *, thorough: bool = True) -> dict[str, float]:
        """Fit a choice to the selected rows."""
        key = (np.packbits(rows).tobytes() + bytes([thorough]), choice)
        if key not in self._fits:
            times = self.times[choice.kernels].pick(rows)
            self._fits[key] = fit_costs(times, self.weights(rows), choice.form, thorough=thorough)
        return self._fits[key]

    def errors(self, choice: Choice, costs: Mapping[str, float]) -> Floats:
        """Return the relative error of every row."""
        times = self.times[choice.kernels]
        return np.asarray(predicted_us(times, costs) / times.measured_us - 1.0)

    def choose(self, rows: Bools | None = None) -> Choice:
        """Return the simplest choice whose leave-out error is close to the best."""
        rows = self._every if rows is None else rows
        trials = self.trials(rows)
        best = min(trial.error for trial in trials)
        chosen = next(trial for trial in trials if trial.error <= best * (1.0 + SIMPLER) + NOTHING).choice
        if not chosen.form.costs or len(self.outliers) < 2:
            return chosen
        ways = [chosen._replace(form=Form(chosen.form.costs, outlier)) for outlier in self.outliers]
        scores = [self._judged(rows, way).error for way in ways]
        return ways[int(np.argmin(scores))]

    def trials(self, rows: Bools, forms: tuple[tuple[str, ...], ...] | None = None) -> list[Trial]:
        """Judge every form with every kind of kernels, simpler forms and the first kernels first."""
        of_group = [int((self.left_out_by(rows)[rows] == group).sum()) for group in self._groups(rows)]
        most_costs = int(rows.sum()) - max(of_group, default=0) - 1
        distinct = self._distinct_kernels(rows)
        return [
            self._judged(rows, Choice(*kernels, Form(form, self.outliers[0])))
            for form in (self.forms if forms is None else forms)
            if len(form) <= max(most_costs, 0) or len(self.forms) == 1
            for kernels in distinct
        ]

    def _distinct_kernels(self, rows: Bools) -> list[tuple[str, str]]:
        """Return the kernel options that differ on these rows."""
        kept: list[tuple[str, str]] = []
        for kernels, times in self.times.items():
            mine = times.kernels_us[rows]
            if not any(np.array_equal(mine, self.times[other].kernels_us[rows]) for other in kept):
                kept.append(kernels)
        return kept

    def left_out_by(self, rows: Bools) -> npt.NDArray[np.str_]:
        """Return the groups to leave out: models, GPUs, layouts or, with one of each, single rows."""
        labels = self.labels
        for names in (labels.model, labels.gpu, labels.tp.astype(np.str_)):
            if len(np.unique(names[rows])) > 1:
                return names
        return np.array([f"{i % MOST_GROUPS}" for i in np.cumsum(rows)])

    def _groups(self, rows: Bools) -> list[str]:
        return [str(name) for name in np.unique(self.left_out_by(rows)[rows])]

    def _judged(self, rows: Bools, choice: Choice) -> Trial:
        """Return a choice's leave-out error, every data set weighted equally."""
        names, groups = self.left_out_by(rows), self._groups(rows)
        weights = np.zeros(len(rows))
        weights[rows] = self.weights(rows)
        weights /= weights.sum()
        times = self.times[choice.kernels]
        error = 0.0
        for group in groups:
            held = rows & (names == group)
            kept = rows & ~held
            costs = self.fit(kept, choice, thorough=False) if kept.any() else {}
            some = times.pick(held)
            error += float(weights[held] @ np.abs(predicted_us(some, costs) / some.measured_us - 1.0))
        return Trial(choice, error)
