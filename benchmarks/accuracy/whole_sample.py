"""Validation over all GPUs with measured runs, in one report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.accuracy.calibration import profiles_of, profiles_without
from benchmarks.accuracy.fit_errors import SPLITS
from benchmarks.accuracy.measured import Measured, measured_on
from benchmarks.accuracy.predicted_runs import refitted_front_ends, with_drafts
from benchmarks.accuracy.run_kinds import JUDGED, KINDS
from benchmarks.accuracy.validation import engine_name, judge_independent, predict_gpu
from fastroof._version import __version__
from fastroof.config.paths import bench_data_root
from fastroof.engines import EngineProfile
from fastroof.errors import FastroofError, TableError
from fastroof.evidence.prediction_errors import PredictedTime, Validation, mean_errors
from fastroof.evidence.validation import INDEPENDENT
from fastroof.load.sources import SERVING_FOLDER
from fastroof.report.serving import STEPS
from fastroof.tables import Tables, load_tables


@dataclass(frozen=True)
class SampleValidation:
    """Predictions compared with measurements, on several GPUs."""

    version: str
    engine: str
    split: str
    gpus: tuple[Validation, ...]
    absent: dict[str, str]
    runs: int
    represented: int
    left_out: dict[str, int]

    @property
    def times(self) -> tuple[PredictedTime, ...]:
        """All compared times of all GPUs."""
        return tuple(time for one in self.gpus for time in one.rows)

    def groups(self, min_rows: int = 1) -> tuple[RunGroup, ...]:
        """Return errors by :func:`run_groups`."""
        return run_groups(self.times, min_rows)

    def together(self) -> Validation:
        """Return all times as one report to draw: by GPU, and those that are not judged by kind."""
        how = self.engine + (f", constants fitted without each run's {self.split}" if self.split else "")
        times = (
            time if time.dataset in STEPS else time._replace(dataset=_series_of(time)) for time in self.times
        )
        return Validation(f"{len(self.gpus)} GPUs", "", self.version, how, tuple(times), ())

    def totals(self) -> tuple[Totals, ...]:
        """Return totals of judged groups, and of all kinds."""
        groups = self.groups()
        return tuple(
            totals_of(groups, quantity, kinds)
            for quantity in ("tpot", "ttft")
            for kinds in ((JUDGED,), KINDS)
        )


def _series_of(time: PredictedTime) -> str:
    return time.gpu if time.kind in (JUDGED, INDEPENDENT) else time.kind


def measured_gpus(root: Path | None = None) -> tuple[str, ...]:
    """Return the names of GPUs with runs or steps in bench_data."""
    root = bench_data_root() if root is None else root
    return tuple(sorted(folder.parent.name for folder in root.glob(f"*/{SERVING_FOLDER}")))


def validate_gpus(
    gpus: Sequence[str] | None = None,
    *,
    engine: str | Path | EngineProfile = "auto",
    leave_out: str | None = None,
    load: Callable[[str], Tables] = load_tables,
    progress: Callable[[str], None] | None = None,
) -> SampleValidation:
    """Predict and compare everything measured on several GPUs."""
    if leave_out is not None and engine != "auto":
        raise TableError(
            f"leaving a {leave_out} out fits each engine's own profile, so engine must be 'auto', "
            f"got {engine!r}"
        )
    if leave_out is not None and leave_out not in SPLITS:
        raise TableError(f"what is left out is one of {', '.join(SPLITS)}, got {leave_out!r}")
    known = measured_gpus()
    unknown = [gpu for gpu in gpus or () if gpu not in known]
    if unknown:
        raise TableError(
            f"nothing was measured end to end on {unknown[0]}; something was on {', '.join(known)}"
        )
    show = progress or (lambda words: None)
    evidence = {gpu: measured_on(gpu) for gpu in gpus or known}
    tables, absent = tables_by_gpu(evidence, load, show)
    profile_of = profiles_of(engine)
    if leave_out is not None:
        runs = [run for gpu in tables for run in evidence[gpu].rows]
        profile_of = profiles_without(leave_out, runs, tables, show)
    predicted = []
    for gpu, measured_kernels in tables.items():
        show(f"{gpu}: predicting {len(evidence[gpu].rows) + len(evidence[gpu].steps)} rows")
        on_gpu = predict_gpu(evidence[gpu], measured_kernels, profile_of)
        if leave_out is None:
            # independent rows are not part of a leave-out report
            others = judge_independent(evidence[gpu], measured_kernels, engine, False, on_gpu.skipped)
            on_gpu = on_gpu._replace(others=(*on_gpu.others, *others))
        predicted.append(on_gpu)
    settled = with_drafts([run for one in predicted for run in one.runs])
    if leave_out is not None:
        show(f"fitting front ends without each {leave_out}")
        settled = refitted_front_ends(settled, leave_out)
    following = iter(settled)
    reports = tuple(
        one.judged([next(following) for _ in one.runs], engine_name(engine), leave_out is not None)
        for one in predicted
    )
    return SampleValidation(
        __version__,
        engine_name(engine),
        leave_out or "",
        reports,
        absent,
        sum(len(one.rows) for one in evidence.values()),
        sum(len(one.runs) for one in predicted),
        _left_out(reports, evidence, absent),
    )


def tables_by_gpu(
    gpus: Iterable[str], load: Callable[[str], Tables], show: Callable[[str], None]
) -> tuple[dict[str, Tables], dict[str, str]]:
    """Return tables by GPU, and why the rest have none (the error names the command that installs them)."""
    tables, absent = {}, {}
    for gpu in gpus:
        show(f"{gpu}: loading tables")
        try:
            tables[gpu] = load(gpu)
        except FastroofError as error:
            absent[gpu] = str(error)
    if not tables:
        raise TableError("no GPU has tables: " + "; ".join(f"{gpu}: {why}" for gpu, why in absent.items()))
    return tables, absent


def _left_out(
    reports: Sequence[Validation], evidence: dict[str, Measured], absent: dict[str, str]
) -> dict[str, int]:
    """Return left-out rows by reason, the most first."""
    reasons = Counter[str]()
    for report in reports:
        no_runs = {row.dataset for row in evidence[report.gpu].independent}
        no_runs |= {step.dataset for step in evidence[report.gpu].steps}
        for entry in report.left_out:
            if not entry.quantity and entry.source not in no_runs:
                reasons[entry.reason] += entry.rows
    for gpu, why in absent.items():
        reasons[f"{gpu}: {why}"] += len(evidence[gpu].rows)
        for entry in evidence[gpu].left_out:
            reasons[entry.reason] += entry.rows
    return dict(reasons.most_common())


def report_document(report: SampleValidation, min_rows: int = 1) -> dict[str, Any]:
    """Return the report as JSON values."""
    return {
        "version": report.version,
        "engine": report.engine,
        "leave_out": report.split,
        "gpus": {one.gpu: {"tables_hash": one.tables_hash} for one in report.gpus},
        "gpus_left_out": report.absent,
        "rows": report.represented + sum(report.left_out.values()),
        "runs": report.runs,
        "represented": report.represented,
        "left_out": report.left_out,
        "totals": [asdict(total) for total in report.totals()],
        "groups": [group._asdict() for group in report.groups(min_rows)],
    }


LARGE_GROUP: Final = 10
"""Minimum rows of a group in the median over groups."""

POOR: Final = 0.25
"""MAPE above which a group is listed as poor."""

_QUANTITIES: Final = ("tpot", "decode", "ttft")


class RunGroup(NamedTuple):
    """Errors of runs of one model, format, GPU and engine version, as shares."""

    kind: str
    model: str
    gpu: str
    engine: str
    version: str
    dtype: str
    quantity: str
    rows: int
    mape: float
    median: float
    p90: float
    bias: float
    aic_rows: int
    aic_mape: float
    compared_mape: float
    fitted: bool


_GroupKey = tuple[str, str, str, str, str, str, str]
"""The first seven fields of a :class:`RunGroup`."""


def run_groups(times: Iterable[PredictedTime], min_rows: int = 1) -> tuple[RunGroup, ...]:
    """Group errors by kind, model, GPU, engine, version, format and quantity."""
    members: dict[_GroupKey, list[PredictedTime]] = {}
    for time in times:
        is_one_source = time.kind == INDEPENDENT or not time.architecture
        model = time.dataset if is_one_source else time.architecture
        key = (time.kind, model, time.gpu, time.engine, time.engine_version, time.dtype, time.quantity)
        if is_one_source:
            key = (time.kind, model, time.gpu, time.engine, "", "", time.quantity)
        members.setdefault(key, []).append(time)
    groups = [_group(key, rows) for key, rows in members.items() if len(rows) >= min_rows]
    return tuple(sorted(groups, key=_order))


def _order(group: RunGroup) -> tuple[object, ...]:
    first = _QUANTITIES.index(group.quantity) if group.quantity in _QUANTITIES else len(_QUANTITIES)
    return (first, group.quantity, KINDS.index(group.kind), -group.mape, group[:7])


def _group(key: _GroupKey, times: Sequence[PredictedTime]) -> RunGroup:
    compared = [abs(time.error) for time in times if not math.isnan(time.aic_ms)]
    compared_mape = float(np.mean(compared)) if compared else math.nan
    return RunGroup(*key, *mean_errors(times)[:-1], compared_mape, any(time.fitted for time in times))


@dataclass(frozen=True)
class Totals:
    """Totals of one quantity over groups of some kinds."""

    quantity: str
    kinds: tuple[str, ...]
    rows: int
    mape: float
    bias: float
    groups: int
    median_of_groups: float
    compared_groups: int
    ahead: float
    aic_mape: float
    compared_mape: float
    poor: tuple[str, ...]


def totals_of(groups: Sequence[RunGroup], quantity: str = "tpot", kinds: Sequence[str] = (JUDGED,)) -> Totals:
    """Return the totals of groups."""
    some = [group for group in groups if group.quantity == quantity and group.kind in kinds]
    large = [group for group in some if group.rows >= LARGE_GROUP]
    compared = [group for group in large if group.aic_rows]
    rows, answered = sum(group.rows for group in some), sum(group.aic_rows for group in some)
    return Totals(
        quantity,
        tuple(kinds),
        rows,
        sum(group.rows * group.mape for group in some) / rows if rows else math.nan,
        sum(group.rows * group.bias for group in some) / rows if rows else math.nan,
        len(large),
        float(np.median([group.mape for group in large])) if large else math.nan,
        len(compared),
        sum(group.compared_mape < group.aic_mape for group in compared) / len(compared)
        if compared
        else math.nan,
        _over(answered, [(group.aic_rows, group.aic_mape) for group in some]),
        _over(answered, [(group.aic_rows, group.compared_mape) for group in some]),
        tuple(
            " ".join(filter(None, (group.model, group.gpu, group.engine, group.version, group.dtype)))
            for group in some
            if group.mape > POOR
        ),
    )


def _over(rows: int, parts: Iterable[tuple[int, float]]) -> float:
    return sum(count * error for count, error in parts if count) / rows if rows else math.nan
