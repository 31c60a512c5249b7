"""``python -m benchmarks.accuracy benches``: errors by bench, each predicted by costs fitted without it.

A profile is right on the bench that fitted it, and a user's cluster is another one. Here every run is
predicted by costs fitted to other benches, without a front end learned from its own bench, and its interval
is made of the errors of other benches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import typer

from benchmarks.accuracy.calibration import profiles_without
from benchmarks.accuracy.independent import RUNNING, judge, profile_of_served
from benchmarks.accuracy.measured import Measured, measured_on
from benchmarks.accuracy.predicted_runs import ProfileOf
from benchmarks.accuracy.published_rows import BURST, OpenLoopRun, ThroughputRow
from benchmarks.accuracy.run_kinds import ADMISSION_LIMITED, JUDGED, kind_of, speculative_runs
from benchmarks.accuracy.whole_sample import measured_gpus, tables_by_gpu
from fastroof.arrays import Floats
from fastroof.engines import EngineProfile
from fastroof.errors import FastroofError, TableError
from fastroof.evidence.prediction_errors import PredictedTime
from fastroof.evidence.predictions import Plans, predict_row
from fastroof.evidence.rows import ServedModel
from fastroof.evidence.validation import (
    INDEPENDENT,
    LEVELS,
    Skipped,
    is_taken,
    kernels_ms,
    time_of,
)
from fastroof.tables import Tables, load_tables
from fastroof.uncertainty.leave_one_out import NORMAL_80

SHARE: Final = 0.8
"""Nominal share of runs in an interval."""

FEWEST_GROUPS: Final = 4
"""Minimum number of a profile's groups in other benches for an interval of its own."""

MOST_FACTOR: Final = 3.0
"""Maximum of the factor for few groups."""

ALL: Final = "all"
KERNELS, FITTED, UNSEEN = "kernels alone", "fitted", "without its bench"
KINDS_OF_TABLE: Final = (JUDGED, INDEPENDENT)
"""Kinds whose requests wait neither for room nor for the API server."""
CLOSED, AT_ONCE, OPEN, WAITS = "closed", "burst", "open", "waiting"
PROTOCOLS: Final = (CLOSED, AT_ONCE, OPEN, WAITS)
"""Clients with one request each, all requests at once, arrivals at a rate, and requests that mostly wait."""


class BenchError(NamedTuple):
    """One quantity of a run, predicted by constants fitted without its bench."""

    profile: str
    bench: str
    group: tuple[str, ...]
    ln_error: float
    protocol: str = CLOSED


@dataclass(frozen=True)
class BenchTimes:
    """Judged and independent times of all runs, by how they were predicted."""

    times: Mapping[str, tuple[PredictedTime, ...]]
    absent: Mapping[str, str]
    protocols: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def of(
        self,
        way: str,
        quantity: str,
        benches: Sequence[str] | None = None,
        kinds: Sequence[str] = KINDS_OF_TABLE,
    ) -> list[PredictedTime]:
        """Return the times of a quantity; the decode of one client is a TPOT."""
        wanted = ("tpot", "decode") if quantity == "tpot" else (quantity,)
        return [
            time
            for time in self.times[way]
            if time.quantity in wanted and time.kind in kinds and (benches is None or time.bench in benches)
        ]

    def protocol(self, time: PredictedTime) -> str:
        """Return how a run's requests came, or that they mostly waited, as measured."""
        if time.kind == ADMISSION_LIMITED:
            return WAITS
        return self.protocols.get((time.dataset, time.row), CLOSED)

    @property
    def benches(self) -> tuple[str, ...]:
        """Names of all benches."""
        return tuple(sorted({time.bench for time in self.times[UNSEEN]}))

    @property
    def others(self) -> tuple[str, ...]:
        """Names of the benches that no profile is fitted to."""
        in_sample = {time.bench for time in self.times[UNSEEN] if time.kind == JUDGED}
        return tuple(bench for bench in self.benches if bench not in in_sample)

    def errors(self, quantity: str) -> list[BenchError]:
        """Return the errors of constants fitted without each bench."""
        kinds = (*KINDS_OF_TABLE, ADMISSION_LIMITED)
        return [
            BenchError(
                time.profile, time.bench, _group_of(time), math.log(1.0 + time.error), self.protocol(time)
            )
            for time in self.of(UNSEEN, quantity, kinds=kinds)
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
    protocols = {
        (run.dataset, run.row): OPEN if isinstance(run, OpenLoopRun) else AT_ONCE
        for one in evidence.values()
        for run in one.independent
        if isinstance(run, OpenLoopRun | ThroughputRow) or getattr(run, "protocol", "") == BURST
    }
    return BenchTimes({way: tuple(found) for way, found in times.items()}, absent, protocols)


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
            if profile is None or kind not in (*KINDS_OF_TABLE, ADMISSION_LIMITED):
                continue
            try:
                predicted = predict_row(row, plans.get(row, profile))
            except FastroofError:
                continue
            times.append(time_of(row, profile, "tpot", predicted, kind))
            if not math.isnan(row.ttft_ms):
                times.append(time_of(row, profile, "ttft", predicted, kind))
        served = _SERVED.get(way, profile_of_served)
        others = judge(evidence.independent, tables, served, Skipped())
        yield way, [*times, *others]


def without_bench(profile: EngineProfile, bench: str) -> EngineProfile:
    """Return an engine with given costs that no run of a bench chose."""
    chosen = {cost: us for cost, by, us in (profile.fit.chosen_on if profile.fit else ()) if by == bench}
    # fused kernels have no pauses, whoever chose these
    known: dict[str, Any] = {cost: us for cost, us in chosen.items() if getattr(profile.costs, cost)}
    rules = tuple(rule for rule in profile.costs.rules if rule.chosen_on != bench)
    if not known and rules == profile.costs.rules:
        return profile
    return replace(profile, costs=replace(profile.costs, **known, rules=rules))


_SERVED: Final[Mapping[str, Callable[[ServedModel], EngineProfile]]] = {
    KERNELS: lambda row: profile_of_served(row).kernels_alone(),
    UNSEEN: lambda row: without_bench(profile_of_served(row), row.dataset),
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


def error_of(errors: Sequence[BenchError], profile: str, protocol: str = CLOSED) -> float:
    """Return a profile's stated error of a protocol, for a group that it has not seen.

    It is that of the profile's own groups, or of all if these are few or of one bench.
    """
    same = [one for one in errors if one.protocol == protocol]
    own = [one for one in same if one.profile == profile]
    is_enough = len(_groups(own)) >= FEWEST_GROUPS and len({one.bench for one in own}) > 1
    chosen = own if is_enough else same or errors
    return stated_error(chosen) * new_group_factor(len(_groups(chosen)))


def _groups(errors: Sequence[BenchError]) -> set[tuple[str, ...]]:
    return {one.group for one in errors}


def new_group_factor(groups: int) -> float:
    """Return the factor from the error of known groups to that of one more, by Student's t.

    A new group adds its own error to that of the mean of so many groups.
    """
    if groups < 2:
        return MOST_FACTOR
    z, freedom = NORMAL_80, groups - 1.0
    # Cornish-Fisher expansion of the quantile
    more = (z**3 + z) / (4.0 * freedom) + (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / (96.0 * freedom**2)
    return min((z + more) / z * math.sqrt(1.0 + 1.0 / groups), MOST_FACTOR)


def scaled_errors(errors: Sequence[BenchError]) -> Iterator[tuple[BenchError, float]]:
    """Yield by how many standard errors of the other benches each run is slower than predicted."""
    for bench in dict.fromkeys(one.bench for one in errors):
        others = [one for one in errors if one.bench != bench]
        stated: dict[tuple[str, str], float] = {}
        for one in errors if others else ():
            if one.bench == bench:
                key = one.profile, one.protocol
                stated[key] = stated.get(key) or error_of(others, *key)
                yield one, -one.ln_error / stated[key]


def held_shares(errors: Sequence[BenchError]) -> dict[tuple[str, str], float]:
    """Return the share of each bench's runs in intervals made of the other benches, by bench and protocol."""
    held: dict[tuple[str, str], list[bool]] = {}
    for one, scaled in scaled_errors(errors):
        held.setdefault((one.bench, one.protocol), []).append(abs(scaled) <= NORMAL_80)
    return {key: float(np.mean(inside)) for key, inside in held.items()}


def residuals(errors: Sequence[BenchError]) -> list[float]:
    """Return scaled errors at :data:`LEVELS`, each group weighted alike: those of ``evidence.validation``."""
    found = sorted(scaled_errors(errors), key=lambda pair: pair[1])
    reached = np.cumsum(_weights([one for one, _ in found]))
    return [found[at][1] for at in np.searchsorted(reached, np.array(LEVELS) * reached[-1])]


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
    parts: dict[str, Sequence[str]] = {bench: (bench,) for bench in found.benches}
    parts["others"] = found.others
    parts[ALL] = found.benches
    for name, benches in parts.items():
        tpot = {way: summary_of(found.of(way, "tpot", benches)) for way in (KERNELS, FITTED, UNSEEN)}
        ttft, rate = (summary_of(found.of(UNSEEN, quantity, benches)) for quantity in ("ttft", "throughput"))
        inside = [share for (bench, of), share in held.items() if bench in benches and of != WAITS]
        share = float(np.mean(inside)) if inside else math.nan
        cells = (
            name, f"{max(tpot[UNSEEN].runs, rate.runs)}", *(_percent(tpot[way].mape) for way in tpot),
            _percent(tpot[UNSEEN].bias, sign=True), _percent(share, 0),
            _percent(ttft.mape), _percent(ttft.median), _percent(ttft.bias, sign=True),
            _percent(rate.mape), _percent(rate.bias, sign=True),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def unfitted_table(found: BenchTimes) -> list[str]:
    """Return the errors of the benches that nothing is fitted to, by protocol, as lines of Markdown."""
    names = ("tpot", "ttft", "throughput", RUNNING)
    columns = (
        "protocol", "benches", "runs", "TPOT", "bias", "TTFT", "median", "output tokens/s", "running, bias",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    kinds = (*KINDS_OF_TABLE, ADMISSION_LIMITED)
    times = {name: found.of(UNSEEN, name, found.others, kinds) for name in names}
    for protocol in (*PROTOCOLS, ALL):
        some = {
            name: [time for time in every if protocol in (ALL, found.protocol(time))]
            for name, every in times.items()
        }
        runs = {(time.dataset, time.row) for every in some.values() for time in every}
        if not runs:
            continue
        tpot, ttft, rate, running = (summary_of(some[name]) for name in names)
        benches = {time.bench for every in some.values() for time in every}
        cells = (
            protocol, f"{len(benches)}", f"{len(runs)}", _percent(tpot.mape), _percent(tpot.bias, sign=True),
            _percent(ttft.mape), _percent(ttft.median), _percent(rate.mape),
            _percent(running.bias, sign=True),
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
    print("\nAll figures in %. others: benches that no profile is fitted to; by protocol:\n")
    print("\n".join(unfitted_table(found)))
    print("\nrunning: requests that decode in the simulation over those by Little's law, as measured.")
    for quantity in ("tpot", "ttft"):
        errors = found.errors(quantity)
        held = held_shares(errors)
        print(f"\nstated errors of {quantity.upper()}, and the share that intervals of other benches hold:")
        for protocol in dict.fromkeys(one.protocol for one in errors):
            stated = {
                name: error_of(errors, name, protocol) for name in sorted({one.profile for one in errors})
            }
            words = ", ".join(f"{name} {error:.3f}" for name, error in stated.items())
            inside = [share for (_, of), share in held.items() if of == protocol]
            print(f"{protocol}: {words}; {len(inside)} benches, {np.mean(inside):.0%}")
        print(f"all, each bench and protocol weighted alike: {np.mean([*held.values()]):.0%}")
        words = ", ".join(f"{by:.2f}" for by in residuals(errors))
        print(f"standard errors by which 5, 10, 20 .. 90, 95 % of runs are at most slower: {words}")
    print("\n| worst groups | runs | TPOT | bias |\n|---|---:|---:|---:|")
    for name, one in worst_groups(found):
        print(f"| {name} | {one.runs} | {_percent(one.mape)} | {_percent(one.bias, sign=True)} |")
    for name, why in found.absent.items():
        print(f"\nnot judged on {name}: {why}")
