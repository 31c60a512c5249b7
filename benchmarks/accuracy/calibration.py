"""Fit an engine's profile to measured rows, with the evidence for each cost."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.accuracy.fit import are_distinguishable
from benchmarks.accuracy.fit_errors import (
    SPLITS,
    DatasetErrors,
    Split,
    cost_intervals,
    dataset_errors,
    fits_without,
    split_errors,
    unseen_errors,
)
from benchmarks.accuracy.fitted_rows import FittedRows, RowLabels, chosen_rows, is_of, time_rows
from benchmarks.accuracy.predicted_runs import ProfileOf
from benchmarks.accuracy.run_kinds import speculative_runs
from fastroof._version import __version__
from fastroof.arrays import Floats
from fastroof.checks import whole_number
from fastroof.engines import CostForm, EngineProfile, LayerCost, StepCosts, engine_names, load_engine
from fastroof.engines.costs import layers_of
from fastroof.engines.values import UNKNOWN_VERSION
from fastroof.errors import FastroofError, TableError
from fastroof.evidence.kernel_times import OWN_LAYERS, ROUNDS, KernelTimes
from fastroof.evidence.own_fit import FittedCost
from fastroof.evidence.rows import ServingRow
from fastroof.models import load_model
from fastroof.tables import Tables
from fastroof.units import US_PER_MS

RESAMPLES: Final = 400
DIGITS: Final = 3
"""Significant digits of a stored cost; its interval is wider than the fourth."""

NORMAL_P80: Final = 1.2816
"""Standard errors below which 80 % of a normal error's absolute values lie."""

_FITTED_FIELDS: Final = (
    "dataset", "row", "gpu", "engine", "engine_version", "model", "dtype", "kv_dtype", "tp", "pp", "dp", "ep",
    "isl", "osl", "concurrency", "length_factor", "tpot_ms",
)  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """A fitted profile with its intervals and errors."""

    engine: str
    profile: EngineProfile
    costs: tuple[FittedCost, ...]
    datasets: tuple[DatasetErrors, ...]
    without: Mapping[Split, Mapping[str, EngineProfile]]
    fitted_rows: tuple[ServingRow, ...]
    unseen: Mapping[Split, Floats]

    def profile_without(self, row: ServingRow, split: Split = "model") -> EngineProfile | None:
        """Return the profile fitted without a row's model, GPU, version or bench; None without others."""
        by_name = self.without[split]
        if not by_name:
            return None
        name = {
            "model": row.whole_model,
            "gpu": row.gpu,
            "version": row.engine_version,
            "bench": row.bench_label,
        }[split]
        return at_version(by_name.get(name, self.profile), row)


def at_version(profile: EngineProfile, row: ServingRow) -> EngineProfile:
    """Return a profile as of the version and settings of a row."""
    return row.started(profile.at(row.engine_version or UNKNOWN_VERSION))


def calibrate(
    rows: Iterable[ServingRow],
    tables: Tables | Mapping[str, Tables],
    engine: str,
    *,
    datasets: Sequence[str] | None = None,
    resamples: int = RESAMPLES,
    name: str | None = None,
    command: str = "",
    splits: Sequence[Split] = SPLITS,
) -> Calibration:
    """Fit an engine's costs to measured TPOT."""
    base = load_engine(engine) if engine in engine_names() else None
    if base is None or base.fit is None:
        known = [name for name in engine_names() if load_engine(name).fit is not None]
        raise TableError(
            f"engine must be one of {', '.join(known)}, got {engine!r}: no costs are known of it"
        )
    resamples = whole_number("resamples", resamples, 0, error=TableError)
    by_gpu = tables if isinstance(tables, Mapping) else {tables.gpu.name: tables}
    chosen, not_fitted = chosen_rows(rows, by_gpu, base, datasets)
    if len(chosen) < len(base.fit.costs):
        raise TableError(f"{len(base.fit.costs)} costs need at least as many rows, got {len(chosen)}")
    bare = replace(base.unfitted(), name=engine if name is None else name, evidence={})
    kept, times = _timed(chosen, by_gpu, bare, not_fitted)
    fitted = FittedRows(times, RowLabels.of(kept), base.fit.costs)
    costs_us = fitted.fit(fitted.every)
    for _ in range(ROUNDS if costs_us else 0):
        again = time_rows(kept, by_gpu, bare, _profile(bare, costs_us).costs).times
        times = again._replace(own_layers=times.own_layers)
        fitted, before = FittedRows(times, RowLabels.of(kept), base.fit.costs), costs_us
        costs_us = fitted.fit(fitted.every)
        if costs_us == before:
            break
    if not are_distinguishable(times, costs_us):
        raise TableError(
            f"{len(kept)} rows do not distinguish {' and '.join(base.fit.costs)}; "
            "add rows of other concurrency"
        )
    costs = cost_intervals(fitted, costs_us, resamples)
    fits = {split: fits_without(fitted, split) if split in splits else {} for split in SPLITS}
    unseen = {split: unseen_errors(fitted, split, one) for split, one in fits.items()}
    kernels, in_sample = fitted.errors({}), fitted.errors(costs_us)
    errors = dataset_errors(fitted, kernels, in_sample, unseen)
    judged = {"kernels": kernels, "in_sample": in_sample}
    judged |= {f"unseen_{split}": of_split for split, of_split in unseen.items()}
    summary = {key: split_errors(fitted, of_split) for key, of_split in judged.items()}
    evidence: dict[str, Any] = {
        "command": command,
        "fastroof": __version__,
        "gpus": sorted({row.gpu for row in kept}),
        "tables_hash": {gpu: by_gpu[gpu].content_hash for gpu in sorted({row.gpu for row in kept})},
        "rows_hash": _rows_hash(kept),
        "rows": len(kept),
        "resamples": resamples,
        "not_fitted": dict(sorted(not_fitted.items())),
        "interval_95": {
            _cost_name(cost.name, base.fit): [_digits(cost.low_us), _digits(cost.high_us)]
            for cost in costs
            if not math.isnan(cost.low_us)
        },
        "errors": {
            key: {what: round(value, 4) for what, value in one.items()} for key, one in summary.items() if one
        },
        **{
            f"without_{split}": {left_out: _kept_fit(one, base.fit) for left_out, one in of_split.items()}
            for split, of_split in fits.items()
            if of_split and costs_us
        },
        "datasets": {one.dataset: _errors_of(one) for one in errors},
    }
    # for an 80 % interval: the worst of unseen models, GPUs and benches
    p80 = max(summary[f"unseen_{split}"].get("p80", 0.0) for split in ("model", "gpu", "bench"))
    residual = _digits(p80 / NORMAL_P80, 2)
    profiles: dict[Split, dict[str, EngineProfile]] = {
        split: {left_out: _profile(bare, one) for left_out, one in of_split.items()}
        for split, of_split in fits.items()
    }
    rounded = {cost: _digits(us) for cost, us in costs_us.items()}
    profile = _profile(bare, rounded, residual)
    profile = replace(profile, costs=_with_evidence(profile.costs, base.fit, fits["gpu"]))
    return Calibration(engine, replace(profile, evidence=evidence), costs, errors, profiles, kept, unseen)


def _timed(
    rows: Sequence[ServingRow], tables: Mapping[str, Tables], bare: EngineProfile, not_fitted: Counter[str]
) -> tuple[tuple[ServingRow, ...], KernelTimes]:
    """Time rows, except those without a plan and those that speculate."""
    assert bare.fit is not None
    timed = time_rows(rows, tables, bare)
    not_fitted.update(timed.refused)
    speculating = speculative_runs(timed.rows, (timed.times.kernels_us / US_PER_MS).tolist())
    not_fitted.update(reason for reason in speculating if reason)
    plain = np.array([not reason for reason in speculating])
    kept = tuple(row for row, is_plain in zip(timed.rows, plain, strict=True) if is_plain)
    if not kept:
        raise TableError("none of the rows has a plan and takes at least the time of its kernels")
    return kept, timed.times.pick(plain)._replace(own_layers=_own_layers(kept, bare.fit))


def _own_layers(rows: Sequence[ServingRow], form: CostForm) -> Floats | None:
    """Return the layers of each row with an architecture-specific cost, one column per cost."""
    if not form.layers:
        return None
    layers = np.zeros((len(rows), len(form.layers)))
    for i, row in enumerate(rows):
        model = load_model(row.model)
        # the last match wins, as in a plan
        holding = [
            j
            for j, (architecture, versions) in enumerate(form.layers)
            if layers_of(model.architecture) == architecture and is_of(row, versions)
        ]
        if holding:
            layers[i, holding[-1]] = model.num_blocks
    return layers


def _profile(bare: EngineProfile, costs: Mapping[str, float], residual: float = 0.0) -> EngineProfile:
    """Return a profile with the costs of a fit."""
    assert bare.fit is not None
    layers = tuple(
        LayerCost(architecture, costs.get(f"{OWN_LAYERS}.{i}", 0.0), versions)
        for i, (architecture, versions) in enumerate(bare.fit.layers)
        if costs.get(f"{OWN_LAYERS}.{i}", 0.0) > 0.0
    )
    shared: dict[str, Any] = {name: us for name, us in costs.items() if not name.startswith(OWN_LAYERS)}
    return replace(bare, costs=replace(bare.costs, **shared, residual=residual, layers=layers))


def _with_evidence(
    costs: StepCosts, form: CostForm, without_gpu: Mapping[str, Mapping[str, float]]
) -> StepCosts:
    """Return the costs; evidence of each architecture-specific one is its value without each GPU."""
    layers = []
    for one in costs.layers:
        name = f"{OWN_LAYERS}.{form.layers.index((one.architecture, one.versions))}"
        others = ", ".join(f"{_digits(fit[name]):g} without {gpu}" for gpu, fit in without_gpu.items())
        layers.append(replace(one, evidence=f"fitted with the shared costs; us: {others}" if others else ""))
    return replace(costs, layers=tuple(layers))


def _cost_name(name: str, form: CostForm) -> str:
    if not name.startswith(OWN_LAYERS):
        return name
    architecture, versions = form.layers[int(name.partition(".")[2])]
    return f"layers {architecture} {versions}".rstrip()


def _kept_fit(costs_us: Mapping[str, float], form: CostForm) -> dict[str, float]:
    """Return a fit as stored in a profile's evidence."""
    return {_cost_name(name, form): _digits(us) for name, us in costs_us.items()}


def _errors_of(one: DatasetErrors) -> dict[str, Any]:
    """Return a data set's errors as stored in a profile: fractions, to 0.01 %."""
    kept: dict[str, Any] = {}
    for key, value in one._asdict().items():
        if isinstance(value, float):
            if not math.isnan(value):
                kept[key] = round(value, 4)
        elif key != "dataset":
            kept[key] = list(value) if isinstance(value, tuple) else value
    return kept


def _digits(value: float, digits: int = DIGITS) -> float:
    return float(f"{value:.{digits}g}")


def _rows_hash(rows: Iterable[ServingRow]) -> str:
    """Return the SHA-256 of the fitted rows, independent of their file."""
    text = "\n".join("\t".join(str(getattr(row, name)) for name in _FITTED_FIELDS) for row in rows)
    return hashlib.sha256(text.encode()).hexdigest()


def profiles_of(engine: str | Path | EngineProfile) -> ProfileOf:
    """Return each run's own profile for ``auto``, otherwise one for all."""
    if engine != "auto":
        one = load_engine(engine)
        return lambda row: one
    return lambda row: row.engine_profile


def profiles_without(
    split: str, rows: Iterable[ServingRow], tables: Mapping[str, Tables], show: Callable[[str], None]
) -> ProfileOf:
    """Fit each engine's costs without each model, GPU, version or bench."""
    if split not in SPLITS:
        raise TableError(f"what is left out is one of {', '.join(SPLITS)}, got {split!r}")
    known = [row for row in rows if not row.left_out]
    fitted: dict[str, Calibration] = {}
    for name in dict.fromkeys(row.engine_profile.name for row in known):
        if load_engine(name).fit is None:
            continue
        show(f"fitting {name} without each {split}")
        try:
            fitted[name] = calibrate(known, tables, name, resamples=0, splits=(split,))
        except FastroofError as error:
            show(f"{name} is predicted by its kernels alone: {error}")

    def profile_of(row: ServingRow) -> EngineProfile:
        own = row.engine_profile
        of_engine = fitted.get(own.name)
        unseen = None if of_engine is None else of_engine.profile_without(row, split)
        return own.kernels_alone() if unseen is None else unseen

    return profile_of
