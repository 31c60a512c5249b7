"""Predictions of independent evidence: published throughput, open-loop runs and runs of other benches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.accuracy.published_rows import BenchRun, OpenLoopRun, ThroughputRow
from benchmarks.accuracy.run_kinds import kind_of_independent
from fastroof.arrays import Bools
from fastroof.engines import EngineProfile
from fastroof.engines.values import holds_for
from fastroof.errors import FastroofError, TableError
from fastroof.evidence.prediction_errors import PredictedTime
from fastroof.evidence.predictions import Plans
from fastroof.evidence.rows import LARGEST_STEP, ServedModel
from fastroof.plan import StepPlan
from fastroof.serving.estimate import estimate
from fastroof.serving.scenarios import STEADY
from fastroof.simulation.engine import too_long
from fastroof.simulation.fleet_run import run_pools
from fastroof.simulation.pools import EnginePool
from fastroof.simulation.requests import RequestTimes
from fastroof.tables import Tables
from fastroof.units import MS_PER_S, US_PER_S


class PredictedRate(PredictedTime):
    """A measured throughput and its prediction, both as ms per output token of all clients."""

    __slots__ = ()

    @property
    def error(self) -> float:
        """Signed error, as a share of the measured time."""
        return self.measured_ms / self.predicted_ms - 1.0

    @property
    def aic_error(self) -> float:
        """Signed error of aiconfigurator-core."""
        return self.measured_ms / self.aic_ms - 1.0


RUNNING: Final = "running"
"""Quantity of a run's mean number of requests that decode: measured by Little's law, and simulated."""
SEQUENCES: Final = 2048
"""Maximum sequences of these rows' plans."""


def profile_of_served(row: ServedModel) -> EngineProfile:
    """Return the profile of a row's engine and version."""
    profile = row.engine_profile
    return profile if holds_for(profile.versions, row.engine_version) else profile.kernels_alone()


def concurrency_of(row: ThroughputRow, plan: StepPlan) -> int:
    """Return the concurrency of a published throughput, as far as known."""
    room: int = plan.memory.max_sequences(int(row.isl + row.osl))
    return min(min(room, row.max_concurrency) * row.dp, row.requests)


def predict_throughput(row: ThroughputRow, plan: StepPlan) -> float:
    """Predict a published throughput, output tokens/s of all GPUs."""
    concurrency = concurrency_of(row, plan)
    if concurrency < 1:
        raise TableError("no request fits next to the weights")
    scheduling = plan.profile.scheduling
    seen = estimate(
        plan,
        row.isl,
        row.osl,
        concurrency,
        chunked_prefill=scheduling.chunked_prefill or row.isl > scheduling.max_num_batched_tokens,
        max_num_seqs=row.max_concurrency,
        requests_per_client=STEADY,
    )
    return float(seen.tokens_per_s_per_gpu) * row.layout.world_size


def predict_open_loop(run: OpenLoopRun, plan: StepPlan) -> dict[tuple[str, str], float]:
    """Predict the client times of an open-loop run by simulating its requests."""
    settings = run.settings(plan)
    seen = []
    for weight, from_s, trace in run.loads():
        if too_long(trace, settings).any():
            raise TableError(f"{run.row}: {settings.num_gpu_blocks:,} blocks never have room for its longest")
        times = RequestTimes.of(trace, run_pools([EnginePool(plan, settings)], trace))
        seen.append((weight, trace.arrival_s >= from_s, times))
    return {key: _statistic(*key, seen) for key in run.measured_ms}


class SeenRun(NamedTuple):
    """What the clients of a bench saw: means, output tokens/s of all GPUs, and requests that decoded."""

    ttft_ms: float
    tpot_ms: float
    output_tokens_per_s: float
    running: float


def predict_bench_run(run: BenchRun, plan: StepPlan) -> SeenRun:
    """Predict a run of another bench by simulating its requests."""
    trace = run.trace()
    settings = run.settings(plan, trace)
    if too_long(trace, settings).any():
        raise TableError(f"{run.row}: {settings.num_gpu_blocks:,} blocks never have room for its longest")
    outcomes = run_pools([EnginePool(plan, settings)], trace)
    times = RequestTimes.of(trace, outcomes)
    duration_s = float(outcomes.counters["end_us"]) / US_PER_S
    ttft_ms, tpot_ms = (float(np.nanmean(values)) for values in (times.ttft_ms, times.tpot_ms))
    running = float(np.nansum(outcomes.last_us - outcomes.first_us)) / US_PER_S / duration_s
    return SeenRun(ttft_ms, tpot_ms, float(trace.output_tokens.sum()) / duration_s, running)


def _statistic(quantity: str, statistic: str, seen: Sequence[tuple[float, Bools, RequestTimes]]) -> float:
    """Return a statistic of all counted requests, loads weighted by the requests they represent."""
    values = [getattr(times, f"{quantity}_ms")[counts] for _, counts, times in seen]
    if statistic == "mean":
        means = [float(np.nanmean(of_load)) for of_load in values]
        return float(np.average(means, weights=[weight for weight, _, _ in seen]))
    if len(values) > 1:
        raise TableError("percentiles over several stages are not predicted")
    return float(np.nanpercentile(values[0], float(statistic[1:])))


def judge(
    rows: Sequence[ServedModel],
    tables: Tables,
    profile_of: Callable[[ServedModel], EngineProfile],
    skipped: Counter[tuple[str, ...]],
) -> Iterator[PredictedTime]:
    """Predict rows and compare them with their measurements."""
    plans = Plans(tables)
    for row in rows:
        try:
            _refuse(row, tables)
            profile = row.on_its_clock(profile_of(row))
            plan = _plan(row, profile, plans)
            times = list(_judged(row, profile, plan))
        except FastroofError as error:
            skipped[row.dataset, str(error)] += 1
            continue
        kind, layout = kind_of_independent(row), str(row.layout)
        yield from (
            time._replace(gpu=row.gpu, kind=kind, layout=layout, bench=row.dataset, clock=row.clock)
            for time in times
        )


def _judged(row: ServedModel, profile: EngineProfile, plan: StepPlan) -> Iterator[PredictedTime]:
    if isinstance(row, ThroughputRow):
        yield _throughput(row, profile, predict_throughput(row, plan))
    elif isinstance(row, OpenLoopRun):
        yield from _times(row, profile, predict_open_loop(row, plan))
    elif isinstance(row, BenchRun):
        yield from _of_bench(row, profile, predict_bench_run(row, plan))


def _refuse(row: ServedModel, tables: Tables) -> None:
    if row.left_out:
        raise TableError(row.left_out)
    if row.gpu != tables.gpu.name:
        raise TableError(f"measured on {row.gpu}, the tables are of {tables.gpu.name}")


def _plan(row: ServedModel, profile: EngineProfile, plans: Plans) -> StepPlan:
    # limits of a bench's run are those of its card, which its memory depends on
    limits: dict[str, Any] = {"max_num_batched_tokens": LARGEST_STEP}
    if isinstance(row, BenchRun):
        fraction = None if math.isnan(row.memory_fraction) else row.memory_fraction
        limits = {"max_num_batched_tokens": row.max_num_batched_tokens or None, "memory_fraction": fraction}
    formats = {"dtype": row.plan_dtype, "kv_dtype": row.kv_dtype}
    return plans.compiled(row.model, profile, row.layout, max_num_seqs=SEQUENCES, **formats, **limits)


def _throughput(row: ThroughputRow, profile: EngineProfile, tokens_per_s: float) -> PredictedTime:
    lengths = float(row.isl), float(row.osl), float(row.max_concurrency)
    times_ms = MS_PER_S / row.output_tokens_per_s, MS_PER_S / tokens_per_s
    return PredictedRate(*_fields(row, "throughput", profile, lengths, times_ms))


def _of_bench(run: BenchRun, profile: EngineProfile, seen: SeenRun) -> Iterator[PredictedTime]:
    lengths = run.isl, run.osl, float(run.concurrency or run.requests)
    for name in ("tpot", "ttft"):
        times_ms = getattr(run, f"{name}_ms"), getattr(seen, f"{name}_ms")
        yield PredictedTime(*_fields(run, name, profile, lengths, times_ms))
    times_ms = MS_PER_S / run.output_tokens_per_s, MS_PER_S / seen.output_tokens_per_s
    yield PredictedRate(*_fields(run, "throughput", profile, lengths, times_ms))
    yield PredictedTime(*_fields(run, RUNNING, profile, lengths, (run.running, seen.running)))


def _times(
    run: OpenLoopRun, profile: EngineProfile, predicted_ms: dict[tuple[str, str], float]
) -> Iterator[PredictedTime]:
    lengths = float(run.isl), float(run.osl), float(run.max_num_seqs)
    chose = bool(run.chose and getattr(profile.kernels, run.chose, ()))
    for (quantity, statistic), measured_ms in run.measured_ms.items():
        name = quantity if statistic == "mean" else f"{quantity} {statistic}"
        times_ms = measured_ms, predicted_ms[quantity, statistic]
        yield PredictedTime(*_fields(run, name, profile, lengths, times_ms, chose=chose))


def _fields(
    row: ServedModel,
    quantity: str,
    profile: EngineProfile,
    lengths: tuple[float, float, float],
    times_ms: tuple[float, float],
    *,
    chose: bool = False,
) -> tuple[Any, ...]:
    """Return a prediction's fields; ``chose``: the row was used to choose a constant."""
    engine = (row.engine, row.engine_version)
    served = (row.model, row.dtype, row.kv_dtype, profile.name, row.tp)
    return (row.dataset, row.row, quantity, *engine, *served, *lengths, chose, *times_ms, math.nan)
