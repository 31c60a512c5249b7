"""What more runs would gain: errors on runs unseen after 3, 5, 10 and 20 of them, by drawing subsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from fastroof.serving.evidence.few_runs import Costs, fit_few_runs
from fastroof.serving.evidence.fit import predicted_us
from fastroof.serving.evidence.kernel_times import KernelTimes

__all__ = ["DRAWS", "SIZES", "CurvePoint", "learning_curve"]

SIZES: Final = (3, 5, 10, 20)
DRAWS: Final = 40
_SEED: Final = 0


class CurvePoint(NamedTuple):
    """How far off runs are that a fit of so many others did not see, as fractions.

    Attributes
    ----------
    runs : int
        How many were fitted.
    draws : int
        Subsets of that size; 0 where it is each run left out in turn.
    mape, low, high : float
        Mean error of the runs left, over subsets, and its 10th and 90th percentile.
    """

    runs: int
    draws: int
    mape: float
    low: float
    high: float


def learning_curve(
    times: KernelTimes, packaged: Costs, sizes: Sequence[int] = SIZES, draws: int = DRAWS, seed: int = _SEED
) -> tuple[CurvePoint, ...]:
    """Fit random subsets of runs, and judge each on the runs that are left.

    Parameters
    ----------
    times : KernelTimes
        The runs.
    packaged : mapping of str to float
        Costs of the packaged profile, us.
    sizes : sequence of int
        Runs of a subset; those that leave no run are skipped.
    draws : int
        Subsets of each size.
    seed : int
        Of the draws.

    Returns
    -------
    tuple of CurvePoint
        By size, and last all runs but one.
    """
    everything = len(times.measured_us)
    generator = np.random.default_rng(seed)
    points = []
    for size in sizes:
        if size >= everything - 1:
            continue
        errors = []
        for _ in range(draws):
            chosen = np.zeros(everything, np.bool_)
            chosen[generator.choice(everything, size, replace=False)] = True
            costs = fit_few_runs(times.pick(chosen), packaged, is_nested=False).costs
            left = times.pick(~chosen)
            errors.append(float(np.abs(predicted_us(left, costs) / left.measured_us - 1.0).mean()))
        low, high = np.percentile(errors, (10.0, 90.0))
        points.append(CurvePoint(size, draws, float(np.mean(errors)), float(low), float(high)))
    if everything > 1:
        left_out = fit_few_runs(times, packaged).left_out_mape
        points.append(CurvePoint(everything - 1, 0, left_out, left_out, left_out))
    return tuple(points)
