"""A simulated engine: nanoseconds a step and requests a second, against other simulators on the same trace.

Steps that only decode and steps with a chunk each, at batches of 1 to 1,024 and at ten thousand requests to
ten million; the plain scheduler in Python, Vidur and Dynamo's mocker where they are installed; a real trace;
capacities; the command. Seconds are of the processor, for others may run at the same time.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fastroof
from benchmarks import simulated
from benchmarks.conftest import Timed
from fastroof.bench.workload import Baseline, Setup, Workload
from fastroof.simulation.fleet_run import run_engine

PER_S = 15.0
TRACES = Path(__file__).parents[2] / "shared" / "reference" / "traces"
FEW_STEPS, MANY_STEPS = 2_000, 200_000
LARGE = bool(os.environ.get("FASTROOF_BENCH_LARGE"))


def engine_work(
    name: str, title: str, plan: Any, trace: Any, settings: Any, baselines: tuple[Baseline, ...] = ()
) -> Workload:
    """An engine's whole runs, counted in their steps: as many runs as make some hundred thousand."""
    steps = int(run_engine(plan, trace, settings).counters["steps"])
    times = 1 if steps < FEW_STEPS else -(-MANY_STEPS // steps)

    def serve() -> None:
        for _ in range(times):
            run_engine(plan, trace, settings)

    title = f"{title}, {steps:,} steps"
    return Workload(
        name, title, "step", steps * times, lambda: simulated.cpu_s(serve),
        baselines=baselines, reports_seconds=True,
    )  # fmt: skip


def counted_in(work: Workload, unit: str, plan: Any, trace: Any, settings: Any, each: int) -> Workload:
    """The same work, counted in so many units a run."""
    steps = int(run_engine(plan, trace, settings).counters["steps"])
    return replace(work, unit=unit, count=work.count // steps * each)


@pytest.fixture(scope="module")
def plan(setup: Setup) -> fastroof.StepPlan:
    """With an engine's overheads."""
    return fastroof.compile_plan(
        setup.model, setup.gpu, setup.tables, engine="vllm", max_num_batched_tokens=8192, max_num_seqs=1024
    )


@pytest.mark.parametrize("batch_size", [1, 16, 64, 256, 1024])
def test_decode_steps(timed: Timed, setup: Setup, plan: fastroof.StepPlan, batch_size: int) -> None:
    """The step alone, as in a compiled caller, is the baseline: the rest is the scheduler."""
    steps = setup.size(200_000, 500)
    trace = simulated.decode_trace(batch_size, steps)
    blocks = batch_size * (steps // simulated.BLOCK_SIZE + 2)
    settings = simulated.engine(
        plan, max_num_seqs=batch_size, max_num_batched_tokens=max(batch_size, 16), num_gpu_blocks=blocks
    )
    alone = simulated.step_alone(plan, batch_size, steps, "decode")
    timed(engine_work(f"decodes-{batch_size}", f"{batch_size} decode", plan, trace, settings, (alone,)))


@pytest.mark.parametrize("batch_size", [1, 16, 64, 256, 1024])
def test_mixed_steps(timed: Timed, setup: Setup, plan: fastroof.StepPlan, batch_size: int) -> None:
    steps = setup.size(200_000, 500)
    trace, budget = simulated.mixed_trace(batch_size, steps)
    settings = simulated.engine(
        plan, max_num_seqs=batch_size, max_num_batched_tokens=budget, num_gpu_blocks=10_000_000
    )
    alone = simulated.step_alone(plan, batch_size, steps, "mixed")
    timed(engine_work(f"mixed-{batch_size}", f"a chunk beside {batch_size}", plan, trace, settings, (alone,)))


@pytest.mark.parametrize("requests", [10_000, 100_000, 1_000_000, *([10_000_000] if LARGE else [])])
def test_requests_at_15_a_second(timed: Timed, setup: Setup, plan: fastroof.StepPlan, requests: int) -> None:
    """A request's cost at any length of the trace: the baseline is a trace of ten thousand."""
    count = setup.size(requests, 100)
    trace, short = (simulated.poisson_trace(n, PER_S) for n in (count, min(count, 10_000)))
    settings = simulated.engine(plan)
    few = engine_work("few", "", plan, short, settings)
    work = engine_work(
        f"at-15-{requests}",
        f"{count:,} requests at {PER_S:g}/s",
        plan,
        trace,
        settings,
        (Baseline("of ten thousand requests", few.run, few.count, None, reports_seconds=True),),
    )
    timed(work)


def test_requests_a_second(timed: Timed, setup: Setup, plan: fastroof.StepPlan) -> None:
    """The same, counted in requests."""
    count = setup.size(10_000, 100)
    trace, settings = simulated.poisson_trace(count, PER_S), simulated.engine(plan)
    work = engine_work("requests", f"{count:,} requests at {PER_S:g}/s", plan, trace, settings)
    timed(counted_in(work, "request", plan, trace, settings, len(trace)))


def test_answers_cost(timed: Timed, setup: Setup, plan: fastroof.StepPlan) -> None:
    """fastroof.simulate and its summary, against the engine alone."""
    count = setup.size(10_000, 100)
    trace, settings = simulated.poisson_trace(count, PER_S), simulated.engine(plan)
    alone = engine_work("engine", "", plan, trace, settings)

    def summed_up() -> Any:
        return fastroof.simulate(plan, trace, async_scheduling=False, **simulated.LIMITS).summary()

    alone = counted_in(alone, "request", plan, trace, settings, len(trace))
    baseline = Baseline("the engine alone", alone.run, alone.count, None, reports_seconds=True)
    work = replace(alone, name="summary", count=count, baselines=(baseline,))
    timed(replace(work, run=lambda: simulated.cpu_s(summed_up)))


def test_plain_python(timed: Timed, setup: Setup, plan: fastroof.StepPlan) -> None:
    trace, settings = simulated.poisson_trace(setup.size(1_000, 50), PER_S), simulated.engine(plan)
    theirs = simulated.plain_python(plan, trace, settings)
    timed(engine_work("beside-python", "a scheduler in Python", plan, trace, settings, (theirs,)))


def test_vidur(timed: Timed, setup: Setup, plan: fastroof.StepPlan) -> None:
    trace, settings = simulated.poisson_trace(setup.size(2_000, 50), PER_S), simulated.engine(plan)
    try:
        theirs = tuple(simulated.vidur(plan, trace, settings, metrics) for metrics in (True, False))
    except ImportError as error:
        pytest.skip(str(error))
    timed(engine_work("beside-vidur", "Vidur", plan, trace, settings, theirs))


def test_mocker(timed: Timed, setup: Setup, plan: fastroof.StepPlan, tmp_path: Path) -> None:
    count = setup.size(10_000, 100)
    trace, settings = simulated.poisson_trace(count, PER_S), simulated.engine(plan)
    work = engine_work("beside-mocker", "Dynamo's mocker", plan, trace, settings)
    try:
        theirs = simulated.mocker(plan, trace, settings, tmp_path)
    except ImportError:
        pytest.skip("needs ai-dynamo-runtime==1.6.1")
    work = counted_in(work, "request", plan, trace, settings, len(trace))
    timed(replace(work, baselines=(theirs,)))


@pytest.mark.parametrize("file", ["azure_2023_conv.csv", "azure_2023_code.csv"])
def test_real_traces(timed: Timed, setup: Setup, plan: fastroof.StepPlan, file: str) -> None:
    """Requests in memory; that they are read is test_reading's."""
    path = TRACES / file
    if not path.exists():
        pytest.skip("no folder `shared` beside the checkout")
    trace, settings = fastroof.load_trace(path), simulated.engine(plan)
    if setup.size(1, 0) == 0:
        trace = trace.limited(100)
    work = engine_work(path.stem, f"{path.stem}, {len(trace):,} requests", plan, trace, settings)
    timed(counted_in(work, "trace", plan, trace, settings, 1))


def test_capacities(timed: Timed, setup: Setup, plan: fastroof.StepPlan) -> None:
    """The largest rate within two percentiles, of ten thousand requests each, against one simulation."""
    count, requests = setup.size(10, 2), setup.size(10_000, 100)
    settings = simulated.engine(plan)
    trace = simulated.poisson_trace(requests, 20.0)
    once = counted_in(engine_work("once", "", plan, trace, settings), "run", plan, trace, settings, 1)

    def search() -> None:
        for seed in range(count):
            workload = fastroof.Workload(
                rate=10.0, requests=requests, seed=seed,
                isl="lognormal:1024:0.8", osl="lognormal:200:0.8",
            )  # fmt: skip
            fastroof.capacity(
                plan,
                workload,
                **simulated.LIMITS,
                ttft_p99_ms=500.0,
                tpot_p99_ms=50.0,
                steady=False,
                with_range=False,
            )

    one = Baseline("one simulation", once.run, once.count, None, reports_seconds=True)
    title = f"{count} capacities of {requests:,} requests"
    timed(
        Workload(
            "capacities", title, "capacity", count, lambda: simulated.cpu_s(search),
            baselines=(one,), reports_seconds=True,
        )
    )  # fmt: skip


def test_command(timed: Timed, setup: Setup) -> None:
    """Process start to answer, loops and tables from the cache, against ``fastroof step``: seconds of CPU."""

    def cpu_s(*words: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "fastroof", *words, "--model", "llama-3.1-8b", "--json"]
        subprocess.run(command, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    def simulate() -> float:
        return cpu_s("simulate", "--rate", "15", "--num-requests", "10000")

    step = Baseline(
        "fastroof step", lambda: cpu_s("step", "--decode", "64x4096"), 1, None, reports_seconds=True
    )
    simulate()
    work = Workload("command", "fastroof simulate", "process", 1, simulate, baselines=(step,))
    timed(replace(work, reports_seconds=True))
