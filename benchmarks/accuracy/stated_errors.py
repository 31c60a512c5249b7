"""Stated errors of profiles from predictions of unseen runs, and the coverage of their intervals.

Runs of one model, GPU and version share their error, so a hundred of them say little more than one. A group's
interval is therefore made from the other groups, and the share of its runs inside is reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from benchmarks.accuracy.fit_errors import SPLITS
from benchmarks.accuracy.run_kinds import JUDGED
from benchmarks.accuracy.whole_sample import validate_gpus
from fastroof.arrays import Floats
from fastroof.errors import TableError
from fastroof.serving.evidence.prediction_errors import PredictedTime
from fastroof.uncertainty.leave_one_out import NORMAL_80

SHARE: Final = 0.8
"""Nominal coverage."""

FEWEST_GROUPS: Final = 4
"""Minimum number of other groups of the profile for a profile-specific interval."""


class UnseenError(NamedTuple):
    """One run, predicted by constants fitted without it."""

    profile: str
    group: tuple[str, ...]
    ln_error: float


class Coverage(NamedTuple):
    """Coverage of 80 % intervals, each made without the run's group."""

    profile: str
    groups: int
    runs: int
    held: float
    error: float


def stated_error(ln_errors: Sequence[float] | Floats) -> float:
    """Return the standard error whose 80 % interval contains 80 % of the errors."""
    sizes = np.abs(np.asarray(ln_errors, np.float64))
    if not sizes.size or not np.isfinite(sizes).all():
        raise TableError(f"an error needs finite errors of at least one run, got {sizes.size} runs")
    return float(np.quantile(sizes, SHARE)) / NORMAL_80


def coverages(errors: Iterable[UnseenError]) -> tuple[Coverage, ...]:
    """Return the coverage of intervals, each made of the other groups' errors."""
    runs = list(errors)
    profiles = np.array([run.profile for run in runs])
    keys = sorted({run.group for run in runs})
    if len(keys) < 2:
        raise TableError(
            f"an interval is judged on another group than it was made of: got {len(keys)} groups"
        )
    place = {key: i for i, key in enumerate(keys)}
    group = np.array([place[run.group] for run in runs])
    sizes = np.abs(np.array([run.ln_error for run in runs]))
    held = np.zeros(len(runs), bool)
    for i in range(len(keys)):
        own = group == i
        for profile in np.unique(profiles[own]):
            judged = own & (profiles == profile)
            others = (profiles == profile) & ~own
            if len(np.unique(group[others])) < FEWEST_GROUPS:
                others = ~own
            held[judged] = sizes[judged] <= stated_error(sizes[others]) * NORMAL_80
    names = [*sorted(set(profiles.tolist())), ""]
    found = []
    for name in names:
        of_it = (profiles == name) if name else np.ones(len(runs), bool)
        found.append(
            Coverage(
                name,
                len(np.unique(group[of_it])),
                int(of_it.sum()),
                float(held[of_it].mean()),
                stated_error(sizes[of_it]),
            )
        )
    return tuple(found)


def unseen_errors(times: Iterable[PredictedTime], quantity: str) -> list[UnseenError]:
    """Return the judged runs of one quantity from a leave-out validation."""
    wanted = ("tpot", "decode") if quantity == "tpot" else (quantity,)
    return [
        UnseenError(
            time.profile,
            (time.architecture, time.gpu, time.engine, time.engine_version),
            math.log(time.predicted_ms / time.measured_ms),
        )
        for time in times
        if time.kind == JUDGED and time.quantity in wanted and time.gpu
    ]


def main() -> None:
    """Check whether stated 80 % intervals cover unseen runs; takes minutes."""
    reports = {split: validate_gpus(leave_out=split).times for split in SPLITS}
    for quantity in ("tpot", "ttft"):
        pooled: list[UnseenError] = []
        print(f"\n{quantity.upper()}\n\n| left out | profile | groups | runs | held of 80 % | error |")
        print("|---|---|---:|---:|---:|---:|")
        of_splits = {split: unseen_errors(times, quantity) for split, times in reports.items()}
        for runs in of_splits.values():
            pooled += runs
        for split, runs in (*of_splits.items(), ("any of them", pooled)):
            for one in coverages(runs):
                name = one.profile or "all"
                held = f"{one.held:.1%}".replace("%", " %")
                print(f"| {split} | {name} | {one.groups} | {one.runs} | {held} | {one.error:.3f} |")
