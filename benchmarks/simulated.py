"""Workloads of the engine simulation: traces of one kind of step, and other simulators on the same trace."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba
import numpy as np

import fastroof
from fastroof.bench.workload import Baseline
from fastroof.compiled.callers import sums_step_us
from fastroof.simulation.fleet_run import run_engine
from fastroof.simulation.settings import EngineSettings
from fastroof.traces.trace import Trace
from tests.reference.replay import Schedule, TimedRequest, replay

BUDGET, MAX_SEQS, BLOCK_SIZE = 2048, 256, 16
LIMITS = {"max_num_batched_tokens": BUDGET, "max_num_seqs": MAX_SEQS}
CHUNK = 512


def engine(plan: fastroof.StepPlan, **given: Any) -> EngineSettings:
    """vLLM's scheduling, synchronous, with the KV blocks of the plan's GPU."""
    return EngineSettings.of_plan(plan, **{**LIMITS, "async_scheduling": False, **given})


def cpu_s(work: Callable[[], Any]) -> float:
    """Processor seconds that this process takes for some work."""
    before = time.process_time()
    work()
    return time.process_time() - before


def poisson_trace(requests: int, per_s: float, seed: int = 1) -> Trace:
    """Prompts of 1,024 tokens and outputs of mean 200, both lognormal."""
    random = np.random.default_rng(seed)

    def lengths(mean: float, most: int) -> Any:
        return random.lognormal(np.log(mean) - 0.32, 0.8, requests).astype(np.int32).clip(1, most)

    arrival_s = random.exponential(1 / per_s, requests).cumsum()
    return Trace(arrival_s, lengths(1024, 8192), lengths(200, 2048))


def decode_trace(batch_size: int, steps: int) -> Trace:
    """So many requests at once that all decode so many steps, after one step with their prompts."""
    same = np.ones(batch_size, np.int32)
    return Trace(np.zeros(batch_size), same, same * (steps + 1))


def mixed_trace(batch_size: int, steps: int) -> tuple[Trace, int]:
    """Requests whose prompts are of two chunks, a chunk in every step: and the budget that makes it so.

    With outputs of twice the batch, as many run as are admitted.
    """
    count = max(steps // 2, 1)
    same = np.ones(count, np.int32)
    return Trace(np.zeros(count), same * 2 * CHUNK, same * (2 * batch_size)), CHUNK + batch_size


@numba.njit(nogil=True, error_model="numpy")
def _decode_steps_us(arena: Any, batch_size: int, steps: int) -> float:
    """Time the steps of :func:`decode_trace`, and nothing else."""
    total_us, kv_sum = 0.0, 2 * batch_size
    for _ in range(steps):
        total_us += sums_step_us(arena, batch_size, batch_size, kv_sum, 0, 0, 0, 0)
        kv_sum += batch_size
    return total_us


@numba.njit(nogil=True, error_model="numpy")
def _mixed_steps_us(arena: Any, batch_size: int, steps: int) -> float:
    """Time steps of a chunk beside decodes, and nothing else."""
    total_us, kv_sum = 0.0, 1024 * batch_size
    for step in range(steps):
        pairs = CHUNK * (CHUNK + 1) // 2
        prefix = CHUNK * (step & 1)
        total_us += sums_step_us(
            arena, batch_size, batch_size - 1, kv_sum, CHUNK, pairs, CHUNK * prefix, prefix
        )
        kv_sum += batch_size - 1 - ((step & 63) == 0) * batch_size * 63
    return total_us


def step_alone(plan: fastroof.StepPlan, batch_size: int, steps: int, kind: str) -> Baseline:
    """The plan's time of such steps in a compiled loop: what a simulated step costs beside its scheduler."""
    loop = {"decode": _decode_steps_us, "mixed": _mixed_steps_us}[kind]
    loop(plan.arena, 2, 2)

    def run() -> float:
        return cpu_s(lambda: loop(plan.arena, batch_size, steps))

    return Baseline("the steps' times alone", run, steps, None, reports_seconds=True)


def plain_python(plan: fastroof.StepPlan, trace: Trace, settings: EngineSettings) -> Baseline:
    """The second scheduler of the tests: a loop over steps, a walk over each batch."""
    columns = (each.tolist() for each in (trace.arrival_s, trace.input_tokens, trace.output_tokens))
    requests = [TimedRequest(*row) for row in zip(*columns, strict=True)]
    schedule = Schedule(
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        settings.num_gpu_blocks,
        settings.block_size,
        is_asynchronous=False,
    )

    def run() -> Any:
        return replay(requests, lambda ranks: plan.step_scalar(*ranks[0]), schedule)

    seen, mine = run(), run_engine(plan, trace, settings)
    assert seen.steps == mine.counters["steps"]
    np.testing.assert_allclose(seen.last_token_s, mine.last_us / 1e6, rtol=1e-9)
    return Baseline("a scheduler in Python", lambda: cpu_s(run), seen.steps, None, reports_seconds=True)


def vidur(plan: fastroof.StepPlan, trace: Trace, settings: EngineSettings, metrics: bool) -> Baseline:
    """Vidur 0.0.26 on the same trace, with the same plan; ImportError where it is not installed."""
    version("vidur")  # a stand-in of the tests is not installed
    vidur_times = import_module("benchmarks.upstream.vidur").vidur_times
    assert settings.num_gpu_blocks is not None

    def timed() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return vidur_times(
                plan,
                trace,
                Path(folder),
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_num_seqs=settings.max_num_seqs,
                num_gpu_blocks=settings.num_gpu_blocks,
                block_size=settings.block_size,
                metrics=metrics,
            )

    seen, mine = timed(), run_engine(plan, trace, settings)
    np.testing.assert_allclose(seen.e2e_ms, (mine.last_us - mine.arrival_us) / 1e3, rtol=1e-9)
    name = "Vidur 0.0.26" if metrics else "Vidur 0.0.26 without its metrics"
    return Baseline(name, lambda: timed().took_s, seen.steps, None, reports_seconds=True)


def mocker(plan: fastroof.StepPlan, trace: Trace, settings: EngineSettings, folder: Path) -> Baseline:
    """Offline replay of Dynamo's mocker; ImportError where it is not installed. Its steps are not ours."""
    replayed: Callable[..., Any] = import_module("dynamo._core").run_mocker_trace_replay
    from fastroof.backends.dynamo import write_dynamo_profile
    from tests.examples.dynamo import engine as mocker_engine

    path = folder / "profile.npz"
    write_dynamo_profile(plan, path, prompt_len=int(trace.input_tokens.mean()))
    arguments = mocker_engine(plan, path)
    arguments["engine"] |= {
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
    }
    lines, first = [], 0
    for arrival_s, prompt, output in zip(
        trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True
    ):
        blocks = -(-prompt // CHUNK)
        row = {"timestamp": arrival_s * 1e3, "input_length": prompt, "output_length": output}
        lines.append(json.dumps(row | {"hash_ids": list(range(first, first + blocks))}))
        first += blocks
    requests = folder / "trace.jsonl"
    requests.write_text("\n".join(lines))

    def replay_all() -> None:
        report = replayed([str(requests)], extra_engine_args=arguments, trace_block_size=CHUNK)
        assert report.summary["completed_requests"] == len(trace)

    def seconds() -> float:
        return cpu_s(replay_all)

    return Baseline("Dynamo's mocker 1.6.1", seconds, len(trace), None, reports_seconds=True)
