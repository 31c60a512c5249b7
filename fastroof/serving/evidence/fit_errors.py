"""How well costs are known and how far they carry: bootstrap intervals, and models that a fit did not see."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fastroof.arrays import Floats, Longs
from fastroof.engines import CostForm
from fastroof.serving.evidence.fit import KernelTimes, equal_weights, fit_costs, predicted_us

__all__ = ["DatasetErrors", "FittedCost", "RowLabels", "cost_intervals", "dataset_errors", "fits_without"]

Costs = Mapping[str, float]

INTERVAL: Final = 0.95
_SEED: Final = 0


class FittedCost(NamedTuple):
    """A cost, us, and the ends of its 95 % interval."""

    name: str
    us: float
    low_us: float
    high_us: float


class DatasetErrors(NamedTuple):
    """Relative errors on one data set, as fractions: mean of the absolute ones, and of the signed ones.

    Attributes
    ----------
    dataset : str
        Which rows.
    rows : int
        How many.
    models : tuple of str
        Their models.
    tps : tuple of int
        Their tensor-parallel sizes.
    kernels_mape, kernels_bias : float
        Without any cost.
    fitted_mape, fitted_bias : float
        With the costs fitted to all rows, these among them.
    unseen_mape, unseen_bias : float
        With costs fitted to the rows of the other models; nan where there is no other.
    """

    dataset: str
    rows: int
    models: tuple[str, ...]
    tps: tuple[int, ...]
    kernels_mape: float
    kernels_bias: float
    fitted_mape: float
    fitted_bias: float
    unseen_mape: float
    unseen_bias: float


@dataclass(frozen=True)
class RowLabels:
    """What each row is one of.

    Attributes
    ----------
    dataset, model : ndarray of str
        Where it is from, and what was served.
    tp : ndarray of int64
        On how many GPUs.
    """

    dataset: npt.NDArray[np.str_]
    model: npt.NDArray[np.str_]
    tp: Longs

    @property
    def models(self) -> tuple[str, ...]:
        """All models, sorted."""
        return tuple(str(model) for model in np.unique(self.model))


def fits_without(times: KernelTimes, labels: RowLabels, form: CostForm) -> dict[str, dict[str, float]]:
    """Fit once without each model; nothing where there is only one.

    Returns
    -------
    dict of str to dict
        The costs fitted to the rows of the other models, by the model that was left out.
    """
    if len(labels.models) < 2:
        return {}
    fits = {}
    for model in labels.models:
        seen = labels.model != model
        fits[model] = fit_costs(times.pick(seen), equal_weights(labels.dataset[seen]), form)
    return fits


def cost_intervals(
    times: KernelTimes, labels: RowLabels, form: CostForm, costs: Costs, resamples: int
) -> tuple[FittedCost, ...]:
    """Find 95 % intervals by a bootstrap whose unit is all rows of one model at one tp.

    Rows of one model at one tp share their errors: drawn one by one they would look far surer than they
    are. A row keeps its weight, so that a resample that draws more of a data set leans to it. The ends are
    nan without resamples, and where all rows are of one model at one tp.
    """
    keys = [f"{model} {tp}" for model, tp in zip(labels.model, labels.tp, strict=True)]
    clusters, cluster_of = np.unique(keys, return_inverse=True)
    if not resamples or len(clusters) < 2:
        return tuple(FittedCost(name, costs[name], math.nan, math.nan) for name in form.costs)
    weights = equal_weights(labels.dataset)
    generator = np.random.default_rng(_SEED)
    drawn = np.empty((resamples, len(form.costs)))
    for i in range(resamples):
        picked = generator.integers(len(clusters), size=len(clusters))
        counts = np.bincount(picked, minlength=len(clusters)).astype(np.float64)[cluster_of]
        rows = counts > 0.0
        resampled = fit_costs(times.pick(rows), (weights * counts)[rows], form)
        drawn[i] = [resampled[name] for name in form.costs]
    tail = 50.0 * (1.0 - INTERVAL)
    low, high = np.percentile(drawn, (tail, 100.0 - tail), axis=0)
    return tuple(
        FittedCost(name, costs[name], float(low[i]), float(high[i])) for i, name in enumerate(form.costs)
    )


def dataset_errors(
    times: KernelTimes, labels: RowLabels, costs: Costs, without: Mapping[str, Costs]
) -> tuple[DatasetErrors, ...]:
    """Judge costs on each data set, in sample and on models that their fit did not see."""
    unseen = np.full(len(labels.model), np.nan)
    for model, others in without.items():
        rows = labels.model == model
        unseen[rows] = _errors(times, others)[rows]
    errors_by_fit = (_errors(times, {}), _errors(times, costs), unseen)
    report = []
    for dataset in dict.fromkeys(labels.dataset.tolist()):
        rows = labels.dataset == dataset
        summary = [float(f(errors[rows])) for errors in errors_by_fit for f in (_mape, np.mean)]
        models = tuple(str(model) for model in np.unique(labels.model[rows]))
        tps = tuple(int(tp) for tp in np.unique(labels.tp[rows]))
        report.append(DatasetErrors(dataset, int(rows.sum()), models, tps, *summary))
    return tuple(report)


def _errors(times: KernelTimes, costs: Costs) -> Floats:
    return predicted_us(times, costs) / times.measured_us - 1.0


def _mape(errors: Floats) -> float:
    return float(np.abs(errors).mean())
