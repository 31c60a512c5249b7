"""Bootstrap intervals of costs, and errors on unseen rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.accuracy.fit import fit_costs
from benchmarks.accuracy.fitted_rows import FEWEST_ROWS, FittedRows
from fastroof.arrays import Bools, Floats
from fastroof.evidence.own_fit import FittedCost

Split = Literal["model", "gpu", "version", "bench"]
SPLITS: Final[tuple[Split, ...]] = ("model", "gpu", "version", "bench")

INTERVAL: Final = 0.95
_SEED: Final = 0


class DatasetErrors(NamedTuple):
    """Relative errors on one data set, as fractions: MAPE and bias."""

    dataset: str
    rows: int
    models: tuple[str, ...]
    gpus: tuple[str, ...]
    tps: tuple[int, ...]
    kernels_mape: float
    kernels_bias: float
    fitted_mape: float
    fitted_bias: float
    unseen_mape: float
    unseen_bias: float
    unseen_gpu_mape: float
    unseen_gpu_bias: float
    unseen_version_mape: float
    unseen_version_bias: float
    unseen_bench_mape: float
    unseen_bench_bias: float


Costs = Mapping[str, float]


def fits_without(fitted: FittedRows, split: Split) -> dict[str, dict[str, float]]:
    """Fit without each model, GPU, version or bench; empty if there is only one."""
    names: npt.NDArray[np.str_] = getattr(fitted.labels, split)
    each = np.unique(names)
    return {str(name): fitted.fit(names != name) for name in each} if len(each) > 1 else {}


def unseen_errors(fitted: FittedRows, split: Split, fits: Mapping[str, Costs]) -> Floats:
    """Return each row's relative error by the fit without it; nan if missing."""
    names: npt.NDArray[np.str_] = getattr(fitted.labels, split)
    unseen = np.full(len(names), np.nan)
    for name, costs in fits.items():
        rows = names == name
        unseen[rows] = fitted.errors(costs)[rows]
    return unseen


def cost_intervals(fitted: FittedRows, costs: Costs, resamples: int) -> tuple[FittedCost, ...]:
    """Return 95 % intervals by a bootstrap over clusters of model, tp and GPU."""
    clusters, cluster_of = np.unique(fitted.labels.cluster, return_inverse=True)
    if not resamples or len(clusters) < 2 or not costs:
        return tuple(FittedCost(name, us, math.nan, math.nan) for name, us in costs.items())
    weights = fitted.weights(fitted.every)
    generator = np.random.default_rng(_SEED)
    drawn = np.empty((resamples, len(costs)))
    for i in range(resamples):
        picked = generator.integers(len(clusters), size=len(clusters))
        counts = np.bincount(picked, minlength=len(clusters)).astype(np.float64)[cluster_of]
        rows: Bools = counts > 0.0
        resampled = fit_costs(fitted.times.pick(rows), (weights * counts)[rows], fitted.costs)
        drawn[i] = [resampled[name] for name in costs]
    tail = 50.0 * (1.0 - INTERVAL)
    low, high = np.percentile(drawn, (tail, 100.0 - tail), axis=0)
    return tuple(
        FittedCost(name, us, float(low[i]), float(high[i])) for i, (name, us) in enumerate(costs.items())
    )


def dataset_errors(
    fitted: FittedRows, kernels: Floats, in_sample: Floats, unseen: Mapping[Split, Floats]
) -> tuple[DatasetErrors, ...]:
    """Return errors by data set: kernels only, in sample, and of fits without the row."""
    labels = fitted.labels
    report = []
    for dataset in dict.fromkeys(labels.dataset.tolist()):
        rows = labels.dataset == dataset
        summary = [
            float(f(errors[rows]))
            for errors in (kernels, in_sample, *(unseen[split] for split in SPLITS))
            for f in (_mape, _mean)
        ]
        models, gpus = (
            tuple(str(name) for name in np.unique(names[rows])) for names in (labels.model, labels.gpu)
        )
        tps = tuple(int(tp) for tp in np.unique(labels.tp[rows]))
        report.append(DatasetErrors(dataset, int(rows.sum()), models, gpus, tps, *summary))
    return tuple(report)


def split_errors(fitted: FittedRows, errors: Floats) -> dict[str, float]:
    """Return MAPE over rows, and the median of a GPU's data sets with ten rows or more."""
    there = ~np.isnan(errors)
    if not there.any():
        return {}
    size, cells = np.abs(errors[there]), fitted.labels.cell[there]
    large = [float(size[cells == c].mean()) for c in np.unique(cells) if (cells == c).sum() >= FEWEST_ROWS]
    order = np.argsort(size)
    reached = np.cumsum(fitted.weights(there)[order])
    at = int(np.searchsorted(reached, 0.8 * reached[-1]))
    found = {"rows": float(there.sum()), "mape": float(size.mean()), "bias": float(errors[there].mean())}
    if large:
        found["median_of_groups"] = float(np.median(large))
    return {**found, "p80": float(size[order[min(at, len(order) - 1)]])}


def _mape(errors: Floats) -> float:
    return _mean(np.abs(errors))


def _mean(errors: Floats) -> float:
    """Return the mean of finite values; nan without any."""
    there = errors[~np.isnan(errors)]
    return float(there.mean()) if len(there) else math.nan
