"""Kernels that look wrong in a user's own runs, if engine costs cannot explain the remaining errors.

Only reported: tables are never changed. Each kind of operator in turn gets a multiplier, fitted together
with the engine's costs, which may explain the same runs. A kind is reported if the interval of its
multiplier excludes 1 and runs that were left out are predicted clearly better with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.evidence.few_runs import least_squares
from fastroof.evidence.kernel_times import KernelTimes, predicted_us
from fastroof.evidence.predictions import Plans, estimate_row
from fastroof.evidence.rows import ServingRow
from fastroof.plan import StepPlan
from fastroof.plan.explain import OperatorTime
from fastroof.serving.serving_estimate import ServingEstimate
from fastroof.tables import Tables

LEAST_RUNS: Final = 12
"""Minimum number of runs: fewer do not determine three constants and a multiplier."""

LEAST_SHARE: Final = 0.05
"""A kind of operator is tested if it has at least this share of the steps in one run in four."""

MIN_DISTINCTION: Final = 6.0
"""Minimum difference between kinds: twice the log-likelihood ratio of their multipliers."""

LEAST_GAIN: Final = 0.15
"""Minimum share of the leave-one-run-out error that a multiplier must remove."""

CONFIDENCE: Final = 0.99
"""Probability that nothing is reported if nothing is wrong, shared by all kinds that are tested."""

LEAST_OFF: Final = 0.1
"""Minimum deviation of a multiplier from 1 to be reported."""

NO_ERROR: Final = 1e-18


class OperatorTimes(NamedTuple):
    """Time per output token of each kind of operator, one row per run."""

    kinds: tuple[str, ...]
    us: Floats


@dataclass(frozen=True)
class SuspectKernel:
    """A kind of operator that looks wrong."""

    kind: str
    multiplier: float
    low: float
    high: float
    better: int
    runs: int
    error_without: float
    error_with: float
    or_else: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Describe the finding in one sentence."""
        text = (
            f"{self.kind} looks {self.multiplier:.2f} [{self.low:.2f}, {self.high:.2f}] times its table: "
            f"{self.better} of {self.runs} affected runs are predicted better, "
            f"{self.error_without:.1%} becomes {self.error_with:.1%}"
        )
        others = ", ".join(self.or_else)
        return f"{text}; these runs do not distinguish it from {others}" if others else text


def operator_times(rows: Sequence[ServingRow], tables: Tables) -> OperatorTimes:
    """Distribute the mean steps of runs over kinds of operators."""
    plans = Plans(tables)
    by_row: list[dict[str, float]] = []
    for row in rows:
        plan = plans.get(row, row.engine_profile.kernels_alone())
        by_row.append(_of_row(plan, row, estimate_row(row, plan)))
    kinds = tuple(sorted({kind for times in by_row for kind in times}))
    return OperatorTimes(kinds, np.array([[times.get(kind, 0.0) for kind in kinds] for times in by_row]))


def _of_row(plan: StepPlan, row: ServingRow, mean: ServingEstimate) -> dict[str, float]:
    """Return the time of each kind in a run's mean step, us."""
    decodes = max(1, round(mean.decodes))
    decoding = [(1, max(1, round(mean.kv_len) - 1))] * decodes
    steps = [(1.0 - mean.mixed_share, mean.decode_step_us, decoding)]
    if mean.mixed_share > 0.0:
        prompts = max(1, round(mean.prompts))
        new = max(2, round(mean.prefill_tokens / prompts))
        before = max(0, round((row.mean_isl - new) / 2.0))
        steps.append((mean.mixed_share, mean.mixed_step_us, [*decoding, *[(new, before)] * prompts]))
    times: dict[str, float] = {}
    for share, step_us, requests in steps:
        if not share > 0.0 or not step_us > 0.0:
            continue
        explained = plan.explain(requests)
        # the mean step lies between integer numbers of requests: scale its parts to the total
        scale = share * step_us / explained.total_us
        for operator in explained.operators:
            if operator.role == "runtime":
                continue
            kind = _kind(operator)
            times[kind] = times.get(kind, 0.0) + operator.total_us * scale
    return times


def _kind(operator: OperatorTime) -> str:
    """Return the name of an operator's table as a user would look it up."""
    if operator.bound == "communication":
        return "communication"
    if operator.role in ("decode_attention", "prefill_attention"):
        return f"{operator.name}, {operator.dtype} cache"
    if math.isnan(operator.mfu):
        return "elementwise kernels"
    if "expert" in operator.role:
        return f"experts, {operator.dtype}"
    if "attention" in operator.name or not operator.dtype:
        return operator.name
    return f"GEMMs, {operator.dtype}"


def suspect_kernels(times: KernelTimes, operators: OperatorTimes) -> tuple[SuspectKernel, ...]:
    """Return the kind of operator that looks wrong in the runs, if any."""
    runs = len(times.measured_us)
    if runs < LEAST_RUNS:
        return ()
    kernels = operators.us.sum(axis=1)
    constants = added_by(times, ("step_us", "sequence_us"))
    plain = _left_out(constants, times.measured_us - kernels, times.measured_us, 0)
    without = plain.errors
    often = np.quantile(operators.us / kernels[:, None], 0.75, axis=0)
    tried = [i for i in range(len(operators.kinds)) if often[i] >= LEAST_SHARE]
    found: list[tuple[float, SuspectKernel]] = []
    fits: dict[str, float] = {}
    for i in np.flatnonzero(often > 0.0).tolist():
        design = np.concatenate([operators.us[:, i : i + 1], constants], axis=1)
        remainder_us = kernels - operators.us[:, i]
        fit = _left_out(design, times.measured_us - remainder_us, times.measured_us, 1)
        fits[operators.kinds[i]] = fit.squares
        # a kind with little time is not reported itself, but may explain another
        if i not in tried:
            continue
        freedom = runs - design.shape[1]
        quantile = _student(1.0 - (1.0 - CONFIDENCE) / (2.0 * len(tried)), freedom)
        low, high = _interval(fit.first, fit.each_first, quantile)
        is_clear = (plain.squares - fit.squares) * freedom > quantile**2 * fit.squares
        errors = fit.errors
        gained = 1.0 - float(errors.mean()) / float(without.mean())
        off = abs(fit.first - 1.0) >= LEAST_OFF
        if off and is_clear and gained >= LEAST_GAIN and (low > 1.0 or high < 1.0):
            takes = operators.us[:, i] >= LEAST_SHARE * kernels
            suspect = SuspectKernel(
                operators.kinds[i],
                fit.first,
                low,
                high,
                int((errors < without)[takes].sum()),
                int(takes.sum()),
                float(without.mean()),
                float(errors.mean()),
            )
            found.append((fit.squares, suspect))
    if not found:
        return ()
    squares, best = min(found, key=lambda one: one[0])
    alternatives = tuple(
        kind
        for kind, other in sorted(fits.items(), key=lambda one: one[1])
        if kind != best.kind and runs * math.log(other / squares) < MIN_DISTINCTION
    )
    return (replace(best, or_else=alternatives),)


def added_by(times: KernelTimes, costs: Sequence[str]) -> Floats:
    """Return what 1 us of each cost adds to the time per output token of each run."""
    kernels_us = predicted_us(times, {})
    return np.stack([predicted_us(times, {name: 1.0}) - kernels_us for name in costs], axis=1)


class _Fit(NamedTuple):
    """The first unknown (from all runs, and without each run), left-out errors, and residual squares."""

    first: float
    each_first: Floats
    errors: Floats
    squares: float


def _left_out(design: Floats, target_us: Floats, measured_us: Floats, free: int) -> _Fit:
    """Fit relative errors with all runs and without each; unknowns after the first ``free`` are >= 0."""
    matrix, target = design / measured_us[:, None], target_us / measured_us
    fit = least_squares(matrix, target, free)
    runs = len(target)
    each, errors = np.empty(runs), np.empty(runs)
    for i in range(runs):
        without = np.arange(runs) != i
        solved = least_squares(matrix[without], target[without], free)
        each[i] = solved[0]
        errors[i] = abs(float(matrix[i] @ solved) - target[i])
    off = matrix @ fit - target
    # for runs without any error the ratio of two sums of squares is only rounding
    return _Fit(float(fit[0]), each, errors, max(float(off @ off), NO_ERROR))


def _interval(value: float, each: Floats, quantile: float) -> tuple[float, float]:
    """Return the interval of a multiplier by the jackknife."""
    runs = len(each)
    error = math.sqrt((runs - 1) / runs * float(((each - each.mean()) ** 2).sum()))
    return value - quantile * error, value + quantile * error


def _student(share: float, freedom: int) -> float:
    """Return a quantile of Student's distribution (Abramowitz and Stegun, 26.7.5)."""
    z = NormalDist().inv_cdf(share)
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    return z + first / freedom + second / freedom**2 + third / freedom**3
