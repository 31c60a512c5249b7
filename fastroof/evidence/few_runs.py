"""Fitting an engine's costs from few runs: fewer costs than from a large sample, or none.

Few runs determine few constants. Each candidate is a set of costs to fit (the others keep the packaged
profile's values, or are 0) and a weight between the packaged profile and the runs; leave-one-run-out
selects one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.evidence.kernel_times import KernelTimes, predicted_us

FITTED: Final = ("step_us", "sequence_us")
"""Costs that a few runs determine; others keep their packaged values."""

REPLACED: Final = (*FITTED, "logit_ps")
"""Costs that a fit replaces: runs of one model do not separate a sequence from its logits."""

RUNS_A_COST: Final = 3
"""Minimum number of runs per fitted cost."""

DIFFERENCE_US: Final = 1.0
MOST_ITERATIONS: Final = 30
CLEARLY: Final = 1e-9

MOST_LEFT_OUT: Final = 20
"""Up to this many runs each is left out by itself; beyond it, runs form this many groups."""

Costs = Mapping[str, float]


class Candidate(NamedTuple):
    """A way to fit the runs."""

    name: str
    fitted: tuple[str, ...]
    share: float


CANDIDATES: Final = (
    Candidate("the packaged costs", (), 0.0),
    Candidate("kernels alone", (), 1.0),
    *(
        Candidate(f"{what}{how}", fitted, share)
        for what, fitted in (
            ("a step", ("step_us",)),
            ("a sequence", ("sequence_us",)),
            ("a step and a sequence", FITTED),
        )
        for how, share in ((", half-way to the packaged costs", 0.5), ("", 1.0))
    ),
)
"""All candidates, the simplest first: it wins ties."""


@dataclass(frozen=True)
class FewRunsFit:
    """Costs fitted from few runs."""

    candidate: Candidate
    costs: Costs
    left_out_mape: float
    errors: Mapping[str, float]


def candidates_of(runs: int) -> tuple[Candidate, ...]:
    """Return the candidates available with this many runs."""
    return tuple(c for c in CANDIDATES if RUNS_A_COST * len(c.fitted) <= runs)


def relative_errors(times: KernelTimes, costs: Costs) -> Floats:
    """Return the signed errors of predictions with some costs, as shares of the measured times."""
    errors: Floats = predicted_us(times, costs) / times.measured_us - 1.0
    return errors


def mape(times: KernelTimes, costs: Costs) -> float:
    """Return the mean absolute error of predictions with some costs, a share."""
    return float(np.abs(relative_errors(times, costs)).mean())


def _off_left_out(
    times: KernelTimes, packaged: Costs, candidate: Candidate, runs: Longs, left: Longs
) -> Floats:
    """Return the errors of runs that were left out of a fit of the others."""
    return relative_errors(times, fit_candidate(times, packaged, candidate, np.setdiff1d(runs, left)))[left]


def fit_few_runs(times: KernelTimes, packaged: Costs, *, is_nested: bool = True) -> FewRunsFit:
    """Fit an engine's costs, selecting how much to fit by leave-one-run-out."""
    runs = len(times.measured_us)
    everything = np.arange(runs)
    best, errors = _choose(times, packaged, everything)
    left_out = math.nan
    if is_nested and runs > 1:
        off = []
        for left in _left_out(everything):
            chosen, _ = _choose(times, packaged, np.setdiff1d(everything, left))
            off += np.abs(_off_left_out(times, packaged, chosen, everything, left)).tolist()
        left_out = float(np.mean(off))
    return FewRunsFit(best, fit_candidate(times, packaged, best, everything), left_out, errors)


def _choose(times: KernelTimes, packaged: Costs, runs: Longs) -> tuple[Candidate, dict[str, float]]:
    """Return the candidate with the smallest leave-one-run-out error."""
    found, least = CANDIDATES[0], math.inf
    errors = {}
    # a cost is fitted only if enough runs remain without the one left out
    for candidate in candidates_of(len(runs)):
        # what nothing is fitted to is the same without any run
        parts = _left_out(runs) if candidate.fitted else [runs]
        off = [error for left in parts for error in _off_left_out(times, packaged, candidate, runs, left)]
        errors[candidate.name] = float(np.abs(off).mean()) if len(off) else math.inf
        if errors[candidate.name] < least * (1.0 - CLEARLY):
            found, least = candidate, errors[candidate.name]
    return found, errors


def _left_out(runs: Longs) -> list[Longs]:
    """Return the runs to leave out together: one by one, or every twentieth of many."""
    return [runs[i::MOST_LEFT_OUT] for i in range(min(len(runs), MOST_LEFT_OUT))]


def fit_candidate(times: KernelTimes, packaged: Costs, candidate: Candidate, runs: Longs) -> Costs:
    """Return the costs that a candidate fits to some runs, us."""
    if not candidate.share:
        return dict(packaged)
    if not candidate.fitted:
        return {}
    fixed = {name: us for name, us in packaged.items() if name not in REPLACED}
    # a run drawn twice counts twice
    fitted = _least_squares(times.pick(runs), fixed, candidate.fitted)
    share = candidate.share
    return fixed | {
        name: (1.0 - share) * packaged.get(name, 0.0) + share * fitted.get(name, 0.0)
        for name in REPLACED
        if name in FITTED or name in packaged
    }


def _least_squares(times: KernelTimes, fixed: Costs, free: tuple[str, ...]) -> dict[str, float]:
    """Fit relative errors by Gauss-Newton: the prediction is linear in each cost except for a floor."""
    costs = dict.fromkeys(free, 0.0)
    for _ in range(MOST_ITERATIONS):
        predicted = predicted_us(times, {**fixed, **costs})
        slopes = np.stack(
            [
                (predicted_us(times, {**fixed, **costs, name: costs[name] + DIFFERENCE_US}) - predicted)
                / DIFFERENCE_US
                for name in free
            ],
            axis=1,
        )
        target = times.measured_us - predicted + slopes @ np.array(list(costs.values()))
        solved = least_squares(slopes / times.measured_us[:, None], target / times.measured_us).tolist()
        moved = max(abs(us - before) for us, before in zip(solved, costs.values(), strict=True))
        costs = dict(zip(free, solved, strict=True))
        if moved < 1e-3 * DIFFERENCE_US:
            break
    return costs


def least_squares(matrix: Floats, target: Floats, free: int = 0) -> Floats:
    """Solve least squares with the unknowns after the first ``free`` >= 0, by trying every active set."""
    unknowns = matrix.shape[1]
    best, least = np.zeros(unknowns), math.inf
    for which in range(2 ** (unknowns - free)):
        chosen = [i for i in range(unknowns) if i < free or which >> (i - free) & 1]
        solution = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0] if chosen else np.zeros(0)
        off = matrix[:, chosen] @ solution - target
        if (solution[free:] >= 0.0).all() and float(off @ off) < least * (1.0 - CLEARLY):
            best, least = np.zeros(unknowns), float(off @ off)
            best[chosen] = solution
    return best


SIZES: Final = (3, 5, 10, 20)
DRAWS: Final = 40


class CurvePoint(NamedTuple):
    """Errors on unseen runs, as fractions, after a fit of some number of other runs."""

    runs: int
    draws: int
    mape: float
    low: float
    high: float


def learning_curve(
    times: KernelTimes, packaged: Costs, draws: int = DRAWS, fit: FewRunsFit | None = None
) -> tuple[CurvePoint, ...]:
    """Fit random subsets of runs, and evaluate each on the others; ``fit`` is that of all runs, if known."""
    everything = len(times.measured_us)
    generator = np.random.default_rng(0)
    points = []
    for size in SIZES:
        if size >= everything - 1:
            continue
        errors = []
        for _ in range(draws):
            chosen = np.zeros(everything, np.bool_)
            chosen[generator.choice(everything, size, replace=False)] = True
            costs = fit_few_runs(times.pick(chosen), packaged, is_nested=False).costs
            left = times.pick(~chosen)
            errors.append(mape(left, costs))
        low, high = np.percentile(errors, (10.0, 90.0))
        points.append(CurvePoint(size, draws, float(np.mean(errors)), float(low), float(high)))
    if everything > 1:
        left_out = (fit or fit_few_runs(times, packaged)).left_out_mape
        points.append(CurvePoint(everything - 1, 0, left_out, left_out, left_out))
    return tuple(points)
