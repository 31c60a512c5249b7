"""The same trace in the real Vidur 0.0.26 and in fastroof's engine: every request, at three rates.

Needs an environment with vidur==0.0.26, as test_native.py does; without it these tests skip.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof import StepPlan, Tables
from fastroof.errors import BackendError
from fastroof.simulation.fleet_run import run_engine
from fastroof.simulation.settings import EngineSettings
from fastroof.traces.trace import Trace

CHECKOUT = Path(__file__).resolve().parents[3]
RTOL = 1e-9
ENGINE = {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "block_size": 16}


@pytest.fixture(scope="session")
def plan(h100: Tables) -> StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="vllm")


@pytest.fixture(scope="session")
def trace_run() -> Any:
    pytest.importorskip("vidur._native", reason="needs vidur==0.0.26 in an environment of its own")
    from benchmarks.upstream import vidur

    return vidur


def made_trace(requests: int, per_s: float, seed: int) -> Trace:
    random = np.random.default_rng(seed)

    def lengths(mean: float, most: int) -> Any:
        return random.lognormal(np.log(mean) - 0.32, 0.8, requests).astype(np.int32).clip(1, most)

    return Trace(random.exponential(1 / per_s, requests).cumsum(), lengths(1024, 8192), lengths(200, 2048))


def differences(plan: StepPlan, trace: Trace, theirs: Any, **engine: Any) -> list[float]:
    """Largest relative difference of each time, of fastroof's to Vidur's."""
    # Vidur schedules a step when the one before has ended
    settings = EngineSettings.of_plan(plan, **{**ENGINE, "async_scheduling": False, **engine})
    ours = run_engine(plan, trace, settings)
    gaps = np.where(trace.output_tokens > 1, trace.output_tokens - 1.0, np.nan)
    times_us = {
        "ttft_ms": ours.first_us - ours.arrival_us,
        "tpot_ms": (ours.last_us - ours.first_us) / gaps,
        "e2e_ms": ours.last_us - ours.arrival_us,
    }
    apart = []
    for name, us in times_us.items():
        theirs_ms = getattr(theirs, name)
        assert np.array_equal(np.isnan(us), np.isnan(theirs_ms)), name
        apart.append(float(np.nanmax(np.abs(us / 1e3 / theirs_ms - 1))))
    return apart


@pytest.mark.slow
@pytest.mark.parametrize("per_s", [5.0, 15.0, 25.0])
def test_every_time_of_2000_requests_is_vidurs(
    trace_run: Any, plan: StepPlan, tmp_path: Path, per_s: float
) -> None:
    trace = made_trace(2000, per_s, seed=int(per_s))
    blocks = plan.memory.max_kv_tokens // 16
    theirs = trace_run.vidur_times(plan, trace, tmp_path, num_gpu_blocks=blocks, **ENGINE)
    assert max(differences(plan, trace, theirs, num_gpu_blocks=blocks)) < RTOL
    # the highest rate fills the batch, so that requests wait for places
    assert (np.median(theirs.ttft_ms) > 60) == (per_s == 25.0)


@pytest.mark.parametrize(
    "engine",
    [
        {"max_num_batched_tokens": 256, "max_num_seqs": 8},
        {"max_num_batched_tokens": 8192, "max_num_seqs": 1024},
        {"max_num_batched_tokens": 512, "max_num_seqs": 512, "block_size": 32},
    ],
)
def test_other_engines_too(trace_run: Any, plan: StepPlan, tmp_path: Path, engine: dict[str, int]) -> None:
    trace = made_trace(60, 20.0, seed=4)
    theirs = trace_run.vidur_times(plan, trace, tmp_path, num_gpu_blocks=20_000, **{**ENGINE, **engine})
    assert max(differences(plan, trace, theirs, num_gpu_blocks=20_000, **engine)) < RTOL


def test_few_blocks_hold_requests_back_in_both(trace_run: Any, plan: StepPlan, tmp_path: Path) -> None:
    """Outputs within the last block of their prompts: requests wait for blocks, and none is preempted."""
    count = 200
    trace = Trace(np.arange(count) * 0.02, np.full(count, 1020), np.full(count, 5))
    engine = {"num_gpu_blocks": 130}
    theirs = trace_run.vidur_times(plan, trace, tmp_path, **ENGINE, **engine)
    plenty = trace_run.vidur_times(plan, trace, tmp_path, num_gpu_blocks=20_000, **ENGINE)
    assert np.median(theirs.ttft_ms) > 2 * np.median(plenty.ttft_ms)
    assert max(differences(plan, trace, theirs, **engine)) < RTOL


def test_what_vidur_cannot_hold_is_refused(trace_run: Any, plan: StepPlan, tmp_path: Path) -> None:
    trace = made_trace(5, 5.0, seed=1)
    cached = Trace(trace.arrival_s, trace.input_tokens + 1, trace.output_tokens, np.ones(5, np.int32))
    closed = replace(trace, arrival_s=np.zeros(5), clients=2)
    for wrong in (cached, closed):
        with pytest.raises(BackendError, match="neither cached tokens nor clients"):
            trace_run.vidur_times(plan, wrong, tmp_path, num_gpu_blocks=20_000)


def test_the_example_runs(trace_run: Any) -> None:
    command = [sys.executable, "-m", "benchmarks.upstream.vidur"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "steps: Vidur" in done.stdout
