"""Calibration: measured serving rows in, an engine's profile out, with the evidence for each of its costs."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastroof._version import __version__
from fastroof.checks import whole_number
from fastroof.engines import EngineProfile, KvMemory, OperatorKernel, StepCosts, engine_names, load_engine
from fastroof.engines.layouts import ANY_LAYOUT
from fastroof.errors import TableError
from fastroof.load.write import toml_text
from fastroof.plan import compile_plan
from fastroof.serving.estimate import estimate
from fastroof.serving.evidence.fit import KernelTimes, are_told_apart, equal_weights, fit_costs
from fastroof.serving.evidence.fit_errors import (
    DatasetErrors,
    FittedCost,
    RowLabels,
    cost_intervals,
    dataset_errors,
    fits_without,
)
from fastroof.serving.evidence.rows import ServingRow, dataset_names
from fastroof.tables import Tables
from fastroof.units import US_PER_MS
from fastroof.whole_files import check_file_place, write_output

__all__ = [
    "RESAMPLES",
    "Calibration",
    "calibrate",
    "check_profile_path",
    "kernel_times",
    "profile_text",
    "write_profile",
]

RESAMPLES: Final = 400
DIGITS: Final = 3
"""Significant digits that a profile keeps of a cost: its interval is wider than the fourth."""

NORMAL_SE_OF_MAPE: Final = 1.25
"""Standard error of a normal error over its mean absolute one, sqrt(pi/2)."""

_FITTED_FIELDS: Final = (
    "dataset", "row", "gpu", "engine", "model", "dtype", "kv_dtype", "tp", "isl", "osl", "concurrency",
    "length_factor", "tpot_ms",
)  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """A fitted profile, and how far it can be trusted.

    Attributes
    ----------
    engine : str
        Which engine's rows it was fitted to.
    profile : EngineProfile
        The costs to three significant digits, with their evidence.
    costs : tuple of FittedCost
        The costs in full, with their 95 % intervals.
    datasets : tuple of DatasetErrors
        Errors by data set: of kernels alone, in sample, and on models that a fit did not see.
    without : mapping of str to EngineProfile
        By model, the profile fitted to the rows of all the others; empty where there is only one.
    """

    engine: str
    profile: EngineProfile
    costs: tuple[FittedCost, ...]
    datasets: tuple[DatasetErrors, ...]
    without: Mapping[str, EngineProfile]


def calibrate(
    rows: Iterable[ServingRow],
    tables: Tables,
    engine: str,
    *,
    datasets: Sequence[str] | None = None,
    resamples: int = RESAMPLES,
    name: str | None = None,
    command: str = "",
) -> Calibration:
    """Fit what an engine adds to its kernels to the times per output token that were measured.

    Parameters
    ----------
    rows : iterable of ServingRow
        Those of the engine on the tables' GPU are fitted, but for the ones that are left out.
    tables : Tables
        Measured kernels of that GPU.
    engine : str
        Name of the packaged profile whose rows are fitted, such as vllm or trtllm; its ``fit`` says which
        costs there are, and all but the costs and their evidence stays as it is.
    datasets : sequence of str, optional
        Fit these data sets only.
    resamples : int
        Of the bootstrap; 0 for no intervals.
    name : str, optional
        What the profile is called; by default as the engine.
    command : str
        What the evidence calls the command that made it.

    Returns
    -------
    Calibration
        The profile, its intervals and errors.

    Raises
    ------
    TableError
        If the engine has no costs to fit, or there are too few rows or no such data set.

    Notes
    -----
    Each data set has the same total weight, errors are relative, costs are at least 0 and shared by all
    models and tensor-parallel sizes. How many requests decode in a step, and how many prompts share it, does
    not depend on how long it takes: the kernels of each row's two steps are timed once, whatever is fitted.
    """
    base = load_engine(engine) if engine in engine_names() else None
    if base is None or base.fit is None:
        known = [name for name in engine_names() if load_engine(name).fit is not None]
        raise TableError(
            f"engine must be one of {', '.join(known)}, got {engine!r}: no costs are known of it"
        )
    resamples = whole_number("resamples", resamples, 0, error=TableError)
    form = base.fit
    chosen = _chosen(rows, tables, engine, datasets)
    if len(chosen) < len(form.costs):
        raise TableError(f"{len(form.costs)} costs need at least as many rows, got {len(chosen)}")
    bare = replace(base, name=engine if name is None else name, costs=StepCosts(), evidence={})
    times = kernel_times(chosen, tables, bare)
    labels = RowLabels(
        np.array([row.dataset for row in chosen]),
        np.array([row.model for row in chosen]),
        np.array([row.tp for row in chosen], np.int64),
    )
    fitted = fit_costs(times, equal_weights(labels.dataset), form)
    if not are_told_apart(times, form, fitted):
        raise TableError(
            f"{len(chosen)} rows do not tell {' and '.join(form.costs)} apart; add rows of other concurrency"
        )
    costs = cost_intervals(times, labels, form, fitted, resamples)
    without = fits_without(times, labels, form)
    errors = dataset_errors(times, labels, fitted, without)
    evidence: dict[str, Any] = {
        "command": command,
        "fastroof": __version__,
        "gpu": tables.gpu.name,
        "tables_hash": tables.content_hash,
        "rows_hash": _rows_hash(chosen),
        "resamples": resamples,
        "interval_95": {
            cost.name: [_digits(cost.low_us), _digits(cost.high_us)]
            for cost in costs
            if not math.isnan(cost.low_us)
        },
        "without": {
            model: {cost: _digits(us) for cost, us in others.items()} for model, others in without.items()
        },
        "datasets": {one.dataset: _errors_of(one) for one in errors},
    }
    unseen = [one.unseen_mape for one in errors if not math.isnan(one.unseen_mape)]
    residual = _digits(NORMAL_SE_OF_MAPE * sum(unseen) / len(unseen), 2) if unseen else 0.0
    rounded: dict[str, Any] = {cost: _digits(us) for cost, us in fitted.items()}
    return Calibration(
        engine,
        replace(bare, costs=StepCosts(**rounded, residual=residual), evidence=evidence),
        costs,
        errors,
        {model: replace(bare, costs=_costs(others)) for model, others in without.items()},
    )


def _chosen(
    rows: Iterable[ServingRow], tables: Tables, engine: str, datasets: Sequence[str] | None
) -> list[ServingRow]:
    """Rows to fit, by data set."""
    gpu = tables.gpu.name
    of_engine = [
        row for row in rows if row.engine_profile.name == engine and row.gpu == gpu and not row.left_out
    ]
    names = dataset_names(of_engine)
    if not of_engine:
        raise TableError(f"there are no serving rows of {engine} on {gpu} to fit")
    unknown = [name for name in datasets or () if name not in names]
    if unknown:
        raise TableError(f"{engine} on {gpu} has no data set {unknown[0]!r}; it has {', '.join(names)}")
    short = [row.row for row in of_engine if row.mean_osl <= 1.0]
    if short:
        raise TableError(f"row {short[0]!r} has no output token after the first, so no time per token")
    return [row for name in names if name in (datasets or names) for row in of_engine if row.dataset == name]


def kernel_times(rows: Sequence[ServingRow], tables: Tables, profile: EngineProfile) -> KernelTimes:
    """Time the kernels of the two mean steps of each row.

    Parameters
    ----------
    rows : sequence of ServingRow
        Measured runs.
    tables : Tables
        Kernels of their GPU.
    profile : EngineProfile
        How GEMMs are smoothed and fp8 scales found; its costs are left out.

    Returns
    -------
    KernelTimes
        An entry a row.
    """
    kernels = profile.kernels_alone()
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(rows):
        # nan is no equal of nan
        rounds = None if math.isnan(row.requests_per_client) else row.requests_per_client
        schedule = (row.engine_profile, *row.schedule.values(), rounds)
        place = (row.model, row.layout, row.plan_dtype, row.kv_dtype, schedule)
        alike.setdefault(place, []).append(i)
    columns = np.empty((len(KernelTimes._fields), len(rows)))
    for (model, layout, dtype, kv_dtype, (*_, rounds)), places in alike.items():
        plan = compile_plan(
            model,
            tables.gpu,
            tables,
            tp=layout.tp,
            pp=layout.pp,
            dp=layout.dp,
            ep=layout.ep,
            dtype=dtype,
            kv_dtype=kv_dtype,
            runtime=kernels,
            max_tokens=rows[places[0]].plan_tokens,
            allow_modelled=True,
        )
        predicted = estimate(
            plan,
            [rows[i].mean_isl for i in places],
            [rows[i].mean_osl for i in places],
            [rows[i].concurrency for i in places],
            **rows[places[0]].schedule,
            requests_per_client=rounds,
        )
        columns[:, places] = KernelTimes(
            measured_us=np.array([rows[i].tpot_ms for i in places]) * US_PER_MS,
            decode_us=predicted.decode_step_us,
            mixed_us=predicted.mixed_step_us,
            decode_sequences=predicted.decodes,
            mixed_sequences=predicted.decodes + predicted.prompts,
            mixed_share=predicted.mixed_share,
            num_layers=np.full(len(places), float(plan.model.num_layers)),
        )
    return KernelTimes(*columns)


def _errors_of(one: DatasetErrors) -> dict[str, Any]:
    """A data set's errors as a profile keeps them: fractions, to a hundredth of a percent."""
    kept: dict[str, Any] = {}
    for key, value in one._asdict().items():
        if isinstance(value, float):
            if not math.isnan(value):
                kept[key] = round(value, 4)
        elif key != "dataset":
            kept[key] = list(value) if isinstance(value, tuple) else value
    return kept


def _costs(us: Mapping[str, Any]) -> StepCosts:
    return StepCosts(**us)


def _digits(value: float, digits: int = DIGITS) -> float:
    return float(f"{value:.{digits}g}")


def _rows_hash(rows: Iterable[ServingRow]) -> str:
    """SHA-256 of what was fitted, whatever file it came from."""
    text = "\n".join("\t".join(str(getattr(row, name)) for name in _FITTED_FIELDS) for row in rows)
    return hashlib.sha256(text.encode()).hexdigest()


def profile_text(profile: EngineProfile) -> str:
    """Write a profile as the TOML that :func:`fastroof.engines.load_engine` reads.

    Examples
    --------
    >>> print(profile_text(EngineProfile("mine", costs=StepCosts(step_us=600.0))), end="")
    name = "mine"
    <BLANKLINE>
    [costs]
    step_us = 600.0
    <BLANKLINE>
    [scheduling]
    chunked_prefill = true
    max_num_batched_tokens = 8192
    max_num_seqs = 1024
    <BLANKLINE>
    [memory]
    kv_reservation = "mean"
    <BLANKLINE>
    [kernels]
    gemm_smoothing = "none"
    fp8_scales = "dynamic"
    shared_experts = "apart"
    latent_attention = "parts"
    """
    content = {key: value for key, value in asdict(profile).items() if value not in ("", None, {})}
    if not content["kernels"]["engines"]:
        del content["kernels"]["engines"]
    figures = content["kernels"].pop("mixed_attention")
    if figures:
        content["kernels"]["mixed_attention"] = [
            {key: list(value) if isinstance(value, tuple) else value for key, value in one.items() if value}
            for one in figures
        ]
    layers = content["costs"].pop("layers")
    unsaid = asdict(KvMemory())
    content["memory"] = {
        key: value
        for key, value in content["memory"].items()
        if key == "kv_reservation" or value != unsaid[key]
    }
    content["errors"] = {name: error for name, error in content["errors"].items() if error}
    if not content["errors"]:
        del content["errors"]
    content["costs"] = {cost: us for cost, us in content["costs"].items() if us}
    if layers:
        content["costs"]["layers"] = [{key: value for key, value in one.items() if value} for one in layers]
    operators = content["kernels"].pop("operators")
    unsaid = {"operator": "", **{key.name: key.default for key in fields(OperatorKernel)[1:]}}
    if operators:
        content["kernels"]["operators"] = [
            {
                key: dict(value) if key == "layout" else value
                for key, value in one.items()
                if value != unsaid[key]
            }
            for one in operators
        ]
    plain = asdict(ANY_LAYOUT)
    layout = {key: value for key, value in content.pop("layout").items() if value != plain[key]}
    if "gathered_bytes" in layout:
        layout["gathered_bytes"] = dict(layout["gathered_bytes"])
    if layout:
        content["layout"] = layout
    order = [field.name for field in fields(profile)]
    return toml_text(dict(sorted(content.items(), key=lambda part: order.index(part[0]))))


def check_profile_path(path: str | Path) -> Path:
    """Return where a profile may be written.

    Raises
    ------
    TableError
        If the name does not end in .toml, or its folder does not exist.
    """
    path = Path(path)
    if path.suffix != ".toml" or os.path.isdir(path):
        raise TableError(f"an engine profile is a .toml file, got {path}")
    check_file_place(path, f"profile {path}", TableError)
    return path


def write_profile(profile: EngineProfile, path: str | Path) -> Path:
    """Write a profile as TOML, whole or not at all.

    Raises
    ------
    TableError
        If the name does not end in .toml, or the file cannot be written.
    """
    return write_output(check_profile_path(path), profile_text(profile), "profile", TableError)
