"""Simulate measured runs with attention data parallelism, request by request.

Each run is a closed loop: clients start together and send as many requests as in the public benchmark, over
all ranks. Lengths are uniform; engine, version and layout are the row's. Nothing is fitted.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final, NamedTuple

import numpy as np
import typer

from benchmarks.accuracy.predicted_runs import PredictedRun, predict_runs
from benchmarks.accuracy.rows import shipped_rows
from benchmarks.accuracy.run_kinds import DEFECTIVE, JUDGED
from benchmarks.accuracy.whole_sample import measured_gpus
from fastroof.errors import FastroofError
from fastroof.evidence.predictions import Plans
from fastroof.evidence.rows import ServingRow
from fastroof.plan import StepPlan
from fastroof.simulation import Workload
from fastroof.simulation.fleet_run import run_pools
from fastroof.simulation.pools import EnginePool
from fastroof.simulation.requests import RequestTimes
from fastroof.simulation.settings import EngineSettings
from fastroof.tables import load_tables

ROUNDS: Final = 10
"""Requests per client in the public benchmark's scripts."""

MOST_REQUESTS: Final = 10_000


class RankRun(NamedTuple):
    """A measured run of several ranks, estimated and simulated."""

    run: PredictedRun
    simulated_ms: float


def simulated_tpot_ms(row: ServingRow, plan: StepPlan) -> float:
    """Return the mean simulated TPOT of a run's clients, ms."""
    clients = max(round(row.concurrency), 1)
    rounds = ROUNDS if math.isnan(row.requests_per_client) else row.requests_per_client
    requests = int(min(rounds * clients, max(MOST_REQUESTS, 2 * clients)))

    def lengths(nominal: float) -> str | int:
        mean = nominal * row.length_factor
        if not row.length_spread:
            return max(round(mean), 1)
        half = 0.5 * row.length_spread * nominal
        return f"uniform:{max(round(mean - half), 1)}:{max(round(mean + half), 1)}"

    trace = Workload(clients=clients, requests=requests, isl=lengths(row.isl), osl=lengths(row.osl)).trace()
    own = plan.profile.scheduling
    budget = row.max_num_batched_tokens or None
    if not own.chunked_prefill and row.isl > (budget or own.max_num_batched_tokens):
        budget = min(math.ceil(row.isl), plan.max_num_batched_tokens)
    seqs = min(row.engine_seqs, plan.max_num_seqs)
    settings = EngineSettings.of_plan(plan, max_num_batched_tokens=budget, max_num_seqs=seqs)
    times = RequestTimes.of(trace, run_pools([EnginePool(plan, settings)], trace))
    return float(np.nanmean(times.tpot_ms))


def rank_runs(skipped: Counter[str], gpus: Sequence[str] | None = None) -> Iterator[RankRun]:
    """Estimate and simulate all measured runs of several ranks."""
    for gpu in gpus or measured_gpus():
        rows = [row for row in shipped_rows(gpu) if row.dp > 1 and not row.is_disaggregated]
        if not rows:
            continue
        plans = Plans(load_tables(gpu))
        counted: Counter[tuple[str, ...]] = Counter()
        runs = predict_runs(rows, plans, lambda row: row.engine_profile, counted)
        skipped.update({reason: count for (_, reason, *_), count in counted.items()})
        for run in runs:
            if run.kind not in (JUDGED, DEFECTIVE):
                skipped[run.kind] += 1
                continue
            try:
                yield RankRun(run, simulated_tpot_ms(run.row, plans.get(run.row, run.profile)))
            except FastroofError as error:
                skipped[str(error)] += 1


def _group(one: RankRun) -> tuple[str, ...]:
    row = one.run.row
    version = ".".join(row.engine_version.split(".")[:2]) or "no version"
    return row.engine, version, row.model, f"dp {row.dp}", one.run.kind


def _errors(ratios: Iterable[float]) -> str:
    errors = np.array(list(ratios)) - 1.0
    return f"{100 * errors.mean():+7.1f} /{100 * np.abs(errors).mean():6.1f}"


def main(
    gpus: Annotated[list[str] | None, typer.Argument(help="GPUs.  [default: all measured]")] = None,
) -> None:
    """Compare estimated and simulated TPOT with measured runs of several ranks."""
    skipped: Counter[str] = Counter()
    groups: dict[tuple[str, ...], list[RankRun]] = defaultdict(list)
    for one in rank_runs(skipped, gpus or None):
        groups[_group(one)].append(one)
    print(f"{'runs':78} {'n':>3} {'estimate':>16} {'simulate':>16}")
    for name, runs in sorted(groups.items()):
        measured = [one.run.row.tpot_ms for one in runs]
        estimated = [one.run.prediction.tpot_ms for one in runs]
        simulated = [one.simulated_ms for one in runs]
        columns = [_errors(np.divide(predicted, measured)) for predicted in (estimated, simulated)]
        print(f"{' '.join(name):78} {len(runs):3} {columns[0]:>16} {columns[1]:>16}")
    for reason, count in skipped.most_common():
        print(f"left out {count}: {reason[:150]}")
