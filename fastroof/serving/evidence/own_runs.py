"""Reading a user's own runs: load-generator files and engine arguments -> rows and a profile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof._version import __version__
from fastroof.engines import EngineProfile, StepCosts
from fastroof.errors import FastroofError, TableError
from fastroof.serving.evidence.engine_arguments import EngineArguments, read_engine_arguments
from fastroof.serving.evidence.few_runs import (
    FITTED,
    Costs,
    CurvePoint,
    FewRunsFit,
    fit_candidate,
    fit_few_runs,
    learning_curve,
)
from fastroof.serving.evidence.kernel_times import COSTS, KernelTimes, kernel_times, predicted_us
from fastroof.serving.evidence.load_generators import GeneratorRun, read_runs
from fastroof.serving.evidence.rows import ServingRow
from fastroof.serving.evidence.suspect_kernels import SuspectKernel, operator_times, suspect_kernels
from fastroof.tables import Tables

ARGS_FILES: Final = tuple(f"engine_args{suffix}" for suffix in (".txt", ".json", ".toml", ".yaml", ".yml"))
"""Files with the engine's arguments that are looked for in a run's folder."""

_ARRIVALS: Final = "closed"
"""Length spread of load generators' clients, for predicting their runs."""

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
class OwnRow(ServingRow):
    """A row of a user's engine, with its schedule at start."""

    own_profile: EngineProfile | None = None

    @property
    def engine_profile(self) -> EngineProfile:
        """The profile of its engine as it was started."""
        return self.own_profile or super().engine_profile


@dataclass(frozen=True)
class OwnRuns:
    """A user's own runs, as rows.

    Attributes
    ----------
    rows : tuple of OwnRow
        All runs; ``left_out`` has the reason if no fit should use one.
    engines : tuple of EngineArguments
        The engines that they ran on.
    warnings : tuple of str
        Messages about content of the files that is not represented, and about assumptions.
    """

    rows: tuple[OwnRow, ...]
    engines: tuple[EngineArguments, ...]
    warnings: tuple[str, ...]

    @property
    def taken(self) -> tuple[OwnRow, ...]:
        """Return the rows that a fit may use."""
        return tuple(row for row in self.rows if not row.left_out)


def read_own_runs(
    runs: Sequence[str | Path],
    engine_args: str | Path | None = None,
    given: Mapping[str, Any] | None = None,
    *,
    engine: str = "",
) -> OwnRuns:
    """Read runs of load generators, with the arguments of their engine.

    Parameters
    ----------
    runs : sequence of str or Path
        Files of load generators, and folders of them.
    engine_args : str or Path, optional
        The engine's arguments. By default, each run's folder is searched for ``engine_args.txt`` (.json,
        .toml, .yaml), so that runs of several engines need a folder each.
    given : mapping, optional
        Settings of the engine in addition to the file's: see ``read_engine_arguments``.
    engine : str, optional
        The engine, if nothing else names it.

    Returns
    -------
    OwnRuns
        One row per run.

    Raises
    ------
    FastroofError
        If a file cannot be read, is from an unknown generator, or contradicts another.
    """
    given = {name: value for name, value in (given or {}).items() if value is not None}
    found = read_runs(runs)
    engines: dict[Path | None, EngineArguments] = {}
    warnings: list[str] = []
    if found.others:
        warnings.append(f"files that are not runs: {_few(found.others)}")
    rows = []
    for run in found.runs:
        path = (
            Path(engine_args)
            if engine_args is not None
            else _arguments_file(run, {"engine": engine or None, **given})
        )
        if path not in engines:
            engines[path] = read_engine_arguments(path, given, engine=engine)
        rows.append(_row(run, engines[path]))
    for arguments in engines.values():
        warnings += arguments.warnings
    unsaid = [run.name for run in found.runs if math.isnan(run.length_spread) and not run.refused]
    if unsaid:
        warnings.append(f"lengths are assumed to be equal, since the file has no spread: {_few(unsaid)}")
    rates = {run.concurrency_from for run in found.runs if "Little" in run.concurrency_from}
    if rates:
        warnings.append(f"requests in flight are from Little's law, not from clients: {len(rates)} runs")
    return OwnRuns(tuple(rows), tuple(engines.values()), tuple(dict.fromkeys(warnings)))


def _few(names: Sequence[str]) -> str:
    listed = ", ".join(names[:3])
    return listed if len(names) <= 3 else f"{listed} and {len(names) - 3} more"


def _arguments_file(run: GeneratorRun, given: Mapping[str, Any]) -> Path | None:
    folder = Path(run.path).parent
    there = [folder / name for name in ARGS_FILES if (folder / name).is_file()]
    if len(there) > 1:
        raise TableError(f"{folder} has {' and '.join(path.name for path in there)}; keep one")
    if not there and any(given.get(name) is None for name in ("gpu", "engine", "model")):
        raise TableError(
            f"{run.file}: no engine arguments; give --engine-args with its command line, put it "
            f"next to the runs as {ARGS_FILES[0]}, or give --gpu, --engine and --model"
        )
    return there[0] if there else None


def _row(run: GeneratorRun, engine: EngineArguments) -> OwnRow:
    layout = engine.layout
    return OwnRow(
        dataset="own",
        row=run.name,
        gpu=engine.gpu,
        engine=engine.engine,
        engine_version=engine.version,
        checkpoint=engine.checkpoint,
        model=engine.model,
        dtype=engine.dtype,
        kv_dtype=engine.kv_dtype,
        kv_dtype_from=engine.kv_dtype_from,
        tp=layout.tp,
        isl=run.isl,
        osl=run.osl,
        concurrency=run.concurrency,
        length_factor=1.0,
        prefix_tokens=0.0,
        requests_per_client=run.requests_per_client,
        frontend="",
        ttft_ms=run.ttft_ms,
        tpot_ms=run.tpot_ms,
        aic_ttft_ms=math.nan,
        aic_tpot_ms=math.nan,
        left_out=run.refused,
        pp=layout.pp,
        dp=layout.dp,
        ep=layout.ep,
        length_spread=0.0 if math.isnan(run.length_spread) else run.length_spread,
        own_profile=engine.profile,
    )


@dataclass(frozen=True)
class OwnFit:
    """A profile fitted to a user's own cluster, and its errors.

    Attributes
    ----------
    profile : EngineProfile
        The packaged profile with the fitted costs, the engine's own schedule, and evidence.
    rows : tuple of OwnRow
        The runs that were fitted.
    left_out : mapping of str to str
        Why each other run was left out, by its name.
    times : KernelTimes
        Their kernels.
    packaged : mapping of str to float
        Costs of the packaged profile, us.
    fit : FewRunsFit
        The selected candidate, and the errors by which it was selected.
    costs : tuple of FittedCost
        Each cost with its 95 % interval; nan if it was not fitted, or with fewer than 3 runs.
    kernels_mape, packaged_mape, fitted_mape : float
        Errors of these runs with kernels only, with the packaged profile, and in sample, fractions.
    curve : tuple of CurvePoint
        Errors on unseen runs after fits of fewer runs.
    suspects : tuple of SuspectKernel
        Kinds of kernels that look wrong in these runs, if engine costs cannot explain them.
    """

    profile: EngineProfile
    rows: tuple[OwnRow, ...]
    left_out: Mapping[str, str]
    times: KernelTimes
    packaged: Costs
    fit: FewRunsFit
    costs: tuple[FittedCost, ...]
    kernels_mape: float
    packaged_mape: float
    fitted_mape: float
    curve: tuple[CurvePoint, ...]
    suspects: tuple[SuspectKernel, ...]


def fit_own_runs(
    own: OwnRuns, tables: Tables, *, resamples: int = RESAMPLES, name: str = "", command: str = ""
) -> OwnFit:
    """Fit the costs of a user's own engine.

    Parameters
    ----------
    own : OwnRuns
        Runs of one engine and version, of any models and layouts.
    tables : Tables
        Measured kernels of their GPU.
    resamples : int
        Number of bootstrap resamples of the runs; 0 for no intervals.
    name, command : str
        Name of the profile, and the command named in its evidence.

    Returns
    -------
    OwnFit
        The profile, and its errors on unseen runs.

    Raises
    ------
    TableError
        If no run can be used, the runs are of another GPU than the tables, or of several engines.
    FastroofError
        If none of them has a plan.

    Notes
    -----
    Intervals are from resampled runs with the same candidate: runs of one layout share errors that the
    intervals do not include. Leave-one-run-out errors hold for similar runs, not for other models or layouts.
    """
    rows = own.taken
    left_out = {row.row: row.left_out for row in own.rows if row.left_out}
    if not rows:
        reasons = "; ".join(f"{run}: {reason}" for run, reason in list(left_out.items())[:3])
        raise TableError(f"none of {len(own.rows)} runs can be fitted: {reasons}")
    gpus = {row.gpu for row in rows}
    if gpus != {tables.gpu.name}:
        raise TableError(f"the runs are of {', '.join(sorted(gpus))}, but the tables of {tables.gpu.name}")
    profiles = dict.fromkeys(row.engine_profile for row in rows)
    if len({(profile.engine, profile.name) for profile in profiles}) > 1:
        names = ", ".join(profile.name for profile in profiles)
        raise TableError(f"runs of {names} are of several engines or ranges of versions; fit each separately")
    base = next(iter(profiles))
    rows, times, refused = _timed(rows, tables, base)
    left_out |= refused
    packaged = _costs_of(base)
    fit = fit_few_runs(times, packaged)
    curve = learning_curve(times, packaged)
    costs = _intervals(times, packaged, fit, resamples)
    residual = 0.0 if math.isnan(fit.left_out_mape) else _rounded(NORMAL_SE_OF_MAPE * fit.left_out_mape, 2)
    evidence: dict[str, Any] = {
        "command": command,
        "fastroof": __version__,
        "gpu": tables.gpu.name,
        "tables_hash": tables.content_hash,
        "runs": len(rows),
        "chosen": fit.candidate.name,
        "chosen_by": {name: _rounded(error, 3) for name, error in fit.errors.items() if math.isfinite(error)},
        "interval_95": {
            cost.name: [_rounded(cost.low_us), _rounded(cost.high_us)]
            for cost in costs
            if not math.isnan(cost.low_us)
        },
        "kernels_mape": _rounded(_mape(times, {})),
        "packaged_mape": _rounded(_mape(times, packaged)),
    }
    if not math.isnan(fit.left_out_mape):
        evidence["left_out_mape"] = _rounded(fit.left_out_mape)
    profile = replace(base, name=name or base.name, costs=_costs(base, fit, residual), evidence=evidence)
    return OwnFit(
        profile,
        rows,
        left_out,
        times,
        packaged,
        fit,
        costs,
        _mape(times, {}),
        _mape(times, packaged),
        _mape(times, fit.costs),
        curve,
        suspect_kernels(times, operator_times(rows, tables)),
    )


def _timed(
    rows: tuple[OwnRow, ...], tables: Tables, base: EngineProfile
) -> tuple[tuple[OwnRow, ...], KernelTimes, dict[str, str]]:
    """Return the rows that a plan represents, their kernels, and why others are left out."""
    try:
        return rows, kernel_times(rows, tables, base, _ARRIVALS), {}
    except FastroofError as error:
        first = error
    used: list[OwnRow] = []
    refused: dict[str, str] = {}
    for row in rows:
        try:
            kernel_times([row], tables, base, _ARRIVALS)
            used.append(row)
        except FastroofError as error:
            refused[row.row] = str(error)
    if not used:
        raise first
    return tuple(used), kernel_times(used, tables, base, _ARRIVALS), refused


def _costs_of(profile: EngineProfile) -> dict[str, float]:
    """Return the costs of a profile that this model of a step time includes."""
    return {name: getattr(profile.costs, name) for name in COSTS if getattr(profile.costs, name)}


def _costs(base: EngineProfile, fit: FewRunsFit, residual: float) -> StepCosts:
    """Return the costs in a profile's form."""
    if not fit.candidate.share:
        return replace(base.costs, residual=residual)
    if not fit.candidate.fitted:
        return StepCosts(residual=residual)
    step_us, sequence_us = (_rounded(fit.costs.get(name, 0.0)) for name in FITTED)
    return replace(base.costs, step_us=step_us, sequence_us=sequence_us, residual=residual)


def _rounded(value: float, digits: int = DIGITS) -> float:
    return float(f"{value:.{digits}g}")


def _mape(times: KernelTimes, costs: Costs) -> float:
    return float(np.abs(predicted_us(times, costs) / times.measured_us - 1.0).mean())


def _intervals(
    times: KernelTimes, packaged: Costs, fit: FewRunsFit, resamples: int
) -> tuple[FittedCost, ...]:
    """Return intervals of the fitted costs from resampled runs."""
    runs = len(times.measured_us)
    names = [name for name in FITTED if name in fit.candidate.fitted]
    if not names or runs < 3 or not resamples:
        return tuple(FittedCost(name, us, math.nan, math.nan) for name, us in fit.costs.items())
    generator = np.random.default_rng(0)
    drawn = np.empty((resamples, len(names)))
    for i in range(resamples):
        picked = generator.integers(runs, size=runs)
        costs = fit_candidate(times, packaged, fit.candidate, picked)
        drawn[i] = [costs[name] for name in names]
    tail = (100.0 - INTERVAL) / 2.0
    low, high = np.percentile(drawn, (tail, 100.0 - tail), axis=0)
    ends = dict(zip(names, zip(low.tolist(), high.tolist(), strict=True), strict=True))
    return tuple(
        FittedCost(name, us, *ends.get(name, (math.nan, math.nan))) for name, us in fit.costs.items()
    )
