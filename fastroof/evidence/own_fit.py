"""Fitting the costs of a user's own engine to their runs and whole steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof._version import __version__
from fastroof.engines import EngineProfile, StepCosts
from fastroof.errors import FastroofError, TableError
from fastroof.evidence.few_runs import (
    FITTED,
    REPLACED,
    Costs,
    CurvePoint,
    FewRunsFit,
    fit_candidate,
    fit_few_runs,
    learning_curve,
    mape,
)
from fastroof.evidence.kernel_times import COSTS, ROUNDS, KernelTimes, joined, kernel_times, step_times
from fastroof.evidence.own_runs import OwnRow, OwnRuns
from fastroof.evidence.steps.measured_steps import MeasuredStep
from fastroof.evidence.suspect_kernels import SuspectKernel, operator_times, suspect_kernels
from fastroof.evidence.validation import step_profile
from fastroof.tables import Tables

RESAMPLES: Final = 400
INTERVAL: Final = 95.0
DIGITS: Final = 3
NORMAL_SE_OF_MAPE: Final = math.sqrt(math.pi / 2.0)


class FittedCost(NamedTuple):
    """A cost, us, and the bounds of its 95 % interval."""

    name: str
    us: float
    low_us: float
    high_us: float


@dataclass(frozen=True)
class OwnFit:
    """A profile fitted to a user's own cluster, and its errors.

    ``left_out`` has why other runs or steps were left out, by their names; ``packaged`` are the costs of
    the packaged profile, us. Intervals of ``costs`` are nan if a cost was not fitted, or with fewer than 3
    runs. ``suspects`` are kinds of kernels that look wrong, if engine costs cannot explain them.
    """

    profile: EngineProfile
    rows: tuple[OwnRow, ...]
    steps: tuple[MeasuredStep, ...]
    left_out: Mapping[str, str]
    times: KernelTimes
    packaged: Costs
    fit: FewRunsFit
    costs: tuple[FittedCost, ...]
    curve: tuple[CurvePoint, ...]
    suspects: tuple[SuspectKernel, ...]

    @property
    def kernels_mape(self) -> float:
        """Error of these runs with kernels only, a fraction."""
        return mape(self.times, {})

    @property
    def packaged_mape(self) -> float:
        """Error of these runs with the packaged profile."""
        return mape(self.times, self.packaged)

    @property
    def fitted_mape(self) -> float:
        """Error in sample."""
        return mape(self.times, self.fit.costs)


def fit_own_runs(
    measured: OwnRuns, tables: Tables, *, resamples: int = RESAMPLES, name: str = "", command: str = ""
) -> OwnFit:
    """Fit the costs of a user's own engine to runs and steps of it, of any models and layouts.

    Steps of an engine count as runs; forwards, which no host slows down, are fitted alone. Intervals are from
    ``resamples`` of the runs with the same candidate: runs of one layout share errors that they do not
    include. Leave-one-run-out errors hold for similar runs, not for other models or layouts. ``command`` is
    named in the profile's evidence.
    """
    rows, steps, left_out = _taken(measured)
    if not rows and not steps:
        reasons = "; ".join(f"{run}: {reason}" for run, reason in list(left_out.items())[:3])
        what = f"{len(measured.rows)} runs" if measured.rows else f"{len(measured.steps)} steps"
        raise TableError(f"none of {what} can be fitted: {reasons}")
    gpus = {row.gpu for row in rows} | {step.gpu for step in steps}
    if gpus != {tables.gpu.name}:
        raise TableError(f"the runs are of {', '.join(sorted(gpus))}, but the tables of {tables.gpu.name}")
    profiles = dict.fromkeys([*(row.engine_profile for row in rows), *map(step_profile, steps)])
    if len({(profile.engine, profile.name) for profile in profiles}) > 1:
        names = ", ".join(profile.name for profile in profiles)
        raise TableError(f"runs of {names} are of several engines or ranges of versions; fit each separately")
    base = next(iter(profiles))
    rows, steps, times, refused = _timed(rows, steps, tables, base)
    left_out |= refused
    packaged = _costs_of(base)
    fit = fit_few_runs(times, packaged)
    for _ in range(ROUNDS):
        # longer steps are other numbers of steps
        times, before = _times(rows, steps, tables, base, _costs(base, fit, 0.0)), fit.costs
        fit = fit_few_runs(times, packaged)
        if fit.costs == before:
            break
    curve = learning_curve(times, packaged, fit=fit)
    costs = _intervals(times, packaged, fit, resamples)
    residual = 0.0 if math.isnan(fit.left_out_mape) else _rounded(NORMAL_SE_OF_MAPE * fit.left_out_mape, 2)
    evidence: dict[str, Any] = {
        "command": command,
        "fastroof": __version__,
        "gpu": tables.gpu.name,
        "tables_hash": tables.content_hash,
        "runs": len(rows),
        **({"steps": len(steps), "timed": steps[0].timed} if steps else {}),
        "chosen": fit.candidate.name,
        "chosen_by": {name: _rounded(error, 3) for name, error in fit.errors.items() if math.isfinite(error)},
        "interval_95": {
            cost.name: [_rounded(cost.low_us), _rounded(cost.high_us)]
            for cost in costs
            if not math.isnan(cost.low_us)
        },
        "kernels_mape": _rounded(mape(times, {})),
        "packaged_mape": _rounded(mape(times, packaged)),
    }
    if not math.isnan(fit.left_out_mape):
        evidence["left_out_mape"] = _rounded(fit.left_out_mape)
    profile = replace(base, name=name or base.name, costs=_costs(base, fit, residual), evidence=evidence)
    suspects = _suspects(rows, times, tables)
    return OwnFit(profile, rows, steps, left_out, times, packaged, fit, costs, curve, suspects)


def _taken(measured: OwnRuns) -> tuple[tuple[OwnRow, ...], tuple[MeasuredStep, ...], dict[str, str]]:
    """Return the runs and steps that a fit may use, and why others are left out."""
    left_out = {row.row: row.not_fitted for row in measured.rows if row.not_fitted}
    steps: tuple[MeasuredStep, ...] = ()
    for step in measured.steps:
        if step.timed_together:
            left_out[step.name] = "several steps timed together: use fastroof validate"
        elif step.timed == "kernels":
            left_out[step.name] = "all kernels of a step, and nothing of an engine: use fastroof validate"
        elif step.left_out:
            left_out[step.name] = step.left_out
        else:
            steps += (step,)
    if measured.taken and any(step.timed == "forward" for step in steps):
        raise TableError(
            "forwards have no sampler and no host, which runs have: fit --steps and --runs apart, or give "
            "steps of the engine"
        )
    return measured.taken, steps, left_out


def _suspects(rows: Sequence[OwnRow], times: KernelTimes, tables: Tables) -> tuple[SuspectKernel, ...]:
    """Return kernels that look wrong in runs without drafts, which have other steps."""
    plain = np.zeros(len(times.measured_us), np.bool_)
    plain[: len(rows)] = [row.speculation is None for row in rows]
    if not plain.any():
        return ()
    return suspect_kernels(
        times.pick(plain), operator_times([row for row in rows if row.speculation is None], tables)
    )


def _timed(
    rows: tuple[OwnRow, ...], steps: tuple[MeasuredStep, ...], tables: Tables, base: EngineProfile
) -> tuple[tuple[OwnRow, ...], tuple[MeasuredStep, ...], KernelTimes, dict[str, str]]:
    """Return the runs and steps that a plan represents, their kernels, and why others are left out."""
    try:
        return rows, steps, _times(rows, steps, tables, base), {}
    except FastroofError as error:
        first = error
    refused: dict[str, str] = {}
    alone: list[tuple[str, tuple[OwnRow, ...], tuple[MeasuredStep, ...]]] = [
        *((row.row, (row,), ()) for row in rows),
        *((step.name, (), (step,)) for step in steps),
    ]
    for name, row, step in alone:
        try:
            _times(row, step, tables, base)
        except FastroofError as error:
            refused[name] = str(error)
    rows = tuple(row for row in rows if row.row not in refused)
    steps = tuple(step for step in steps if step.name not in refused)
    if not rows and not steps:
        raise first
    return rows, steps, _times(rows, steps, tables, base), refused


def _times(
    rows: Sequence[OwnRow],
    steps: Sequence[MeasuredStep],
    tables: Tables,
    base: EngineProfile,
    costs: StepCosts | None = None,
) -> KernelTimes:
    """Return the kernels of runs, then those of steps."""
    parts = [kernel_times(rows, tables, base, costs)] if rows else []
    return joined([*parts, step_times(steps, tables, base)]) if steps else parts[0]


def _costs_of(profile: EngineProfile) -> dict[str, float]:
    """Return the costs of a profile that this model of a step time includes, without those in its times."""
    fixed = profile.fit.given if profile.fit else ()
    known = {name: getattr(profile.costs, name) for name in COSTS if name not in fixed}
    return {name: us for name, us in known.items() if us}


def _costs(base: EngineProfile, fit: FewRunsFit, residual: float) -> StepCosts:
    """Return the costs in a profile's form."""
    if not fit.candidate.share:
        return replace(base.costs, residual=residual)
    if not fit.candidate.fitted:
        return replace(base.unfitted().costs, residual=residual)
    step_us, sequence_us, logit_ps = (_rounded(fit.costs.get(name, 0.0)) for name in REPLACED)
    return replace(base.costs, step_us=step_us, sequence_us=sequence_us, logit_ps=logit_ps, residual=residual)


def _rounded(value: float, digits: int = DIGITS) -> float:
    return float(f"{value:.{digits}g}")


def _intervals(
    times: KernelTimes, packaged: Costs, fit: FewRunsFit, resamples: int
) -> tuple[FittedCost, ...]:
    """Return intervals of the fitted costs from resampled runs."""
    runs = len(times.measured_us)
    names = [name for name in FITTED if name in fit.candidate.fitted]
    # a cost of logits that sequences replace is not one
    listed = {name: us for name, us in fit.costs.items() if us or name in fit.candidate.fitted}
    if not names or runs < 3 or not resamples:
        return tuple(FittedCost(name, us, math.nan, math.nan) for name, us in listed.items())
    generator = np.random.default_rng(0)
    drawn = np.empty((resamples, len(names)))
    for i in range(resamples):
        picked = generator.integers(runs, size=runs)
        costs = fit_candidate(times, packaged, fit.candidate, picked)
        drawn[i] = [costs[name] for name in names]
    tail = (100.0 - INTERVAL) / 2.0
    low, high = np.percentile(drawn, (tail, 100.0 - tail), axis=0)
    ends = dict(zip(names, zip(low.tolist(), high.tolist(), strict=True), strict=True))
    return tuple(FittedCost(name, us, *ends.get(name, (math.nan, math.nan))) for name, us in listed.items())
