"""``python -m benchmarks.accuracy benches``: errors by bench, each predicted by costs fitted without it.

A profile is right on the bench that fitted it, and a user's cluster is another one. Here every run is
predicted by costs fitted to other benches, without a front end learned from its own bench, and its interval
is made of the errors of other benches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import numpy as np
import typer

from benchmarks.accuracy.calibration import profiles_without
from benchmarks.accuracy.independent import judge, profile_of_served
from benchmarks.accuracy.measured import Measured, measured_on
from benchmarks.accuracy.predicted_runs import ProfileOf
from benchmarks.accuracy.run_kinds import JUDGED, kind_of, speculative_runs
from benchmarks.accuracy.whole_sample import measured_gpus, tables_by_gpu
from fastroof.arrays import Floats
from fastroof.engines import EngineProfile
from fastroof.errors import FastroofError, TableError
from fastroof.evidence.prediction_errors import PredictedTime
from fastroof.evidence.predictions import Plans, predict_row
from fastroof.evidence.rows import ServedModel
from fastroof.evidence.validation import (
    INDEPENDENT,
    Skipped,
    is_queueing,
    is_taken,
    kernels_ms,
    tpot_of,
    ttft_of,
)
from fastroof.tables import Tables, load_tables
from fastroof.uncertainty.leave_one_out import NORMAL_80

SHARE: Final = 0.8
"""Nominal share of runs in an interval."""

FEWEST_GROUPS: Final = 4
"""Minimum number of a profile's groups in other benches for an interval of its own."""

ALL: Final = "all"
KERNELS, FITTED, UNSEEN = "kernels alone", "fitted", "without its bench"
KINDS_OF_TABLE: Final = (JUDGED, INDEPENDENT)
"""Kinds whose requests wait neither for room nor for the API server."""


class BenchError(NamedTuple):
    """One quantity of a run, predicted by constants fitted without its bench."""

    profile: str
    bench: str
    group: tuple[str, ...]
    ln_error: float


@dataclass(frozen=True)
class BenchTimes:
    """Judged and independent times of all runs, by how they were predicted."""

    times: Mapping[str, tuple[PredictedTime, ...]]
    absent: Mapping[str, str]

    def of(self, way: str, quantity: str, benches: Sequence[str] | None = None) -> list[PredictedTime]:
        """Return the times of a quantity; the decode of one client is a TPOT."""
        wanted = ("tpot", "decode") if quantity == "tpot" else (quantity,)
        return [
            time
            for time in self.times[way]
            if time.quantity in wanted and (benches is None or time.bench in benches)
        ]

    @property
    def benches(self) -> tuple[str, ...]:
        """Names of all benches."""
        return tuple(sorted({time.bench for time in self.times[UNSEEN]}))

    def errors(self, quantity: str) -> list[BenchError]:
        """Return the errors of constants fitted without each bench."""
        return [
            BenchError(time.profile, time.bench, _group_of(time), math.log(1.0 + time.error))
            for time in self.of(UNSEEN, quantity)
        ]


def _group_of(time: PredictedTime) -> tuple[str, ...]:
    model = time.architecture or time.model
    return (time.bench, model, time.gpu, time.engine, time.engine_version)


def bench_times(
    gpus: Sequence[str] | None = None,
    *,
    load: Callable[[str], Tables] = load_tables,
    show: Callable[[str], None] = lambda words: None,
) -> BenchTimes:
    """Predict all judged and independent runs by kernels, by shipped profiles and without their bench."""
    tables, absent = tables_by_gpu(gpus or measured_gpus(), load, show)
    evidence = {gpu: measured_on(gpu) for gpu in tables}
    every = [row for one in evidence.values() for row in one.rows]
    ways: dict[str, ProfileOf] = {
        KERNELS: lambda row: row.engine_profile.kernels_alone(),
        FITTED: lambda row: row.engine_profile,
        UNSEEN: profiles_without("bench", every, tables, show),
    }
    times: dict[str, list[PredictedTime]] = {way: [] for way in ways}
    for gpu, of_gpu in tables.items():
        show(f"predicting {gpu}")
        for way, found in _times_on(evidence[gpu], of_gpu, ways):
            times[way] += found
    return BenchTimes({way: tuple(found) for way, found in times.items()}, absent)


def _times_on(
    evidence: Measured, tables: Tables, ways: Mapping[str, ProfileOf]
) -> Iterator[tuple[str, list[PredictedTime]]]:
    """Yield the times of a GPU by way, of requests that wait neither for room nor for the API server."""
    plans = Plans(tables)
    rows = [row for row in evidence.rows if is_taken(row, tables.gpu.name, Skipped())]
    drafting = speculative_runs(rows, [kernels_ms(row, plans) for row in rows])
    kinds = [kind_of(row, why)[0] for row, why in zip(rows, drafting, strict=True)]
    for way, profile_of in ways.items():
        times = []
        for row, kind in zip(rows, kinds, strict=True):
            profile = profile_of(row)
            if profile is None or kind not in KINDS_OF_TABLE:
                continue
            try:
                predicted = predict_row(row, plans.get(row, profile))
            except FastroofError:
                continue
            times.append(tpot_of(row, profile, predicted, kind))
            if not is_queueing(predicted) and not math.isnan(row.ttft_ms):
                times.append(ttft_of(row, profile, predicted.ttft_ms, kind))
        served = _SERVED.get(way, profile_of_served)
        others = judge(evidence.independent, tables, served, Skipped())
        yield way, [*times, *(time for time in others if time.kind in KINDS_OF_TABLE)]


def _served_by_kernels(row: ServedModel) -> EngineProfile:
    return profile_of_served(row).kernels_alone()


def _served_unseen(row: ServedModel) -> EngineProfile:
    return profile_of_served(row).without_bench(row.dataset)


_SERVED: Final[Mapping[str, Callable[[ServedModel], EngineProfile]]] = {
    KERNELS: _served_by_kernels,
    UNSEEN: _served_unseen,
}
"""Profiles of independent runs by way, of :func:`profile_of_served` in others."""


def stated_error(errors: Sequence[BenchError]) -> float:
    """Return the standard error whose 80 % interval holds 80 % of the runs, each group weighted alike."""
    sizes = np.abs([one.ln_error for one in errors])
    if not sizes.size or not np.isfinite(sizes).all():
        raise TableError(f"an error needs finite errors of at least one run, got {sizes.size} runs")
    order = np.argsort(sizes)
    reached = np.cumsum(_weights(errors)[order])
    at = int(np.searchsorted(reached, SHARE * reached[-1]))
    return float(sizes[order[min(at, len(order) - 1)]]) / NORMAL_80


def _weights(errors: Sequence[BenchError]) -> Floats:
    """Return weights that sum to one in each group."""
    groups = [one.group for one in errors]
    counts = {group: groups.count(group) for group in set(groups)}
    return np.array([1.0 / counts[group] for group in groups])


def error_of(errors: Sequence[BenchError], profile: str) -> float:
    """Return a profile's stated error: of its own groups, or of all if these are few or of one bench."""
    own = [one for one in errors if one.profile == profile]
    is_enough = len({one.group for one in own}) >= FEWEST_GROUPS and len({one.bench for one in own}) > 1
    return stated_error(own if is_enough else errors)


def held_shares(errors: Sequence[BenchError]) -> dict[str, float]:
    """Return the share of each bench's runs in intervals made of the other benches' errors."""
    held: dict[str, list[bool]] = {}
    for bench in dict.fromkeys(one.bench for one in errors):
        others = [one for one in errors if one.bench != bench]
        if not others:
            continue
        limits = {}
        for one in errors:
            if one.bench == bench:
                if one.profile not in limits:
                    limits[one.profile] = error_of(others, one.profile) * NORMAL_80
                held.setdefault(bench, []).append(abs(one.ln_error) <= limits[one.profile])
    return {bench: float(np.mean(inside)) for bench, inside in held.items()}


class Summary(NamedTuple):
    """Errors of some times, as shares."""

    runs: int
    mape: float
    median: float
    bias: float


def summary_of(times: Sequence[PredictedTime]) -> Summary:
    """Return the errors of times; nan without any."""
    if not times:
        return Summary(0, math.nan, math.nan, math.nan)
    errors = np.array([time.error for time in times])
    sizes = np.abs(errors)
    return Summary(len(times), float(sizes.mean()), float(np.median(sizes)), float(errors.mean()))


def worst_groups(found: BenchTimes, most: int = 10, fewest_runs: int = 3) -> list[tuple[str, Summary]]:
    """Return the groups with the largest TPOT errors without their bench, the largest first."""
    members: dict[tuple[str, ...], list[PredictedTime]] = {}
    for time in found.of(UNSEEN, "tpot"):
        members.setdefault((*_group_of(time), time.dtype), []).append(time)
    groups = [(" ".join(filter(None, key)), summary_of(times)) for key, times in members.items()]
    return sorted((one for one in groups if one[1].runs >= fewest_runs), key=lambda one: -one[1].mape)[:most]


COLUMNS: Final = (
    "bench", "runs", "TPOT, kernels alone", "fitted", "without its bench", "bias", "80 % interval holds",
    "TTFT, mean", "median", "bias", "output tokens/s", "bias",
)  # fmt: skip


def table(found: BenchTimes) -> list[str]:
    """Return the table of benches as lines of Markdown."""
    held = held_shares(found.errors("tpot"))
    lines = [f"| {' | '.join(COLUMNS)} |", f"|---|{'---:|' * (len(COLUMNS) - 1)}"]
    in_sample = {time.bench for time in found.times[UNSEEN] if time.kind == JUDGED}
    parts: dict[str, Sequence[str]] = {bench: (bench,) for bench in found.benches}
    parts["others"] = tuple(bench for bench in found.benches if bench not in in_sample)
    parts[ALL] = found.benches
    for name, benches in parts.items():
        tpot = {way: summary_of(found.of(way, "tpot", benches)) for way in (KERNELS, FITTED, UNSEEN)}
        ttft, rate = (summary_of(found.of(UNSEEN, quantity, benches)) for quantity in ("ttft", "throughput"))
        inside = [held[bench] for bench in benches if bench in held]
        share = float(np.mean(inside)) if inside else math.nan
        cells = (
            name, f"{max(tpot[UNSEEN].runs, rate.runs)}", *(_percent(tpot[way].mape) for way in tpot),
            _percent(tpot[UNSEEN].bias, sign=True), _percent(share, 0),
            _percent(ttft.mape), _percent(ttft.median), _percent(ttft.bias, sign=True),
            _percent(rate.mape), _percent(rate.bias, sign=True),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _percent(share: float, digits: int = 1, *, sign: bool = False) -> str:
    return "" if math.isnan(share) else f"{share * 100.0:{'+' if sign else ''}.{digits}f}"


def main(
    gpu: Annotated[list[str] | None, typer.Option(help="GPU; repeatable.  [default: all]")] = None,
) -> None:
    """Print errors by bench, stated errors and the worst groups, as Markdown; takes a minute."""
    found = bench_times(gpu, show=lambda words: typer.echo(words, err=True))
    print("\n".join(table(found)))
    print("\nAll figures in %. others: benches that no profile is fitted to.")
    for quantity in ("tpot", "ttft"):
        errors = found.errors(quantity)
        stated = {name: error_of(errors, name) for name in sorted({one.profile for one in errors})}
        held = float(np.mean([*held_shares(errors).values()]))
        words = ", ".join(f"{name} {error:.3f}" for name, error in stated.items())
        print(f"\nstated errors of {quantity.upper()}: {words}")
        print(f"intervals made of other benches hold {held:.0%}, each bench weighted alike")
    print("\n| worst groups | runs | TPOT | bias |\n|---|---:|---:|---:|")
    for name, one in worst_groups(found):
        print(f"| {name} | {one.runs} | {_percent(one.mape)} | {_percent(one.bias, sign=True)} |")
    for name, why in found.absent.items():
        print(f"\nnot judged on {name}: {why}")
