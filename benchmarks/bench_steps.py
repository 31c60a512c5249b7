"""Step evaluations a second, as ratios to the baselines of the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fastroof
from benchmarks.baselines import numpy_decode_us, python_decode_us, stream

STEPS = 10_000_000
RAGGED_STEPS = 100_000


@pytest.fixture(scope="module")
def tables() -> Any:
    return fastroof.load_tables("h100")


@pytest.fixture(scope="module")
def plan(tables: Any) -> Any:
    return fastroof.compile_plan("llama-3.1-8b", "h100", tables)


def _decodes(count: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.integers(1, 513, count, dtype=np.int32), rng.integers(1, 32_769, count, dtype=np.int32)


def _seconds(work: Callable[[], Any]) -> float:
    """Median of three runs after a warm one: the baseline's time, in the same process."""
    work()
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return sorted(times)[1]


def _report(benchmark: Any, steps: int, **baselines: float) -> None:
    """Print evaluations a second, and how many times each baseline's (seconds a step)."""
    if benchmark.stats is None:
        return
    mine = benchmark.stats.stats.median / steps
    words = [f"{1e-6 / mine:.1f} M/s"]
    for name, seconds_a_step in baselines.items():
        words.append(f"{seconds_a_step / mine:.3g} x {name}")
    benchmark.extra_info["ratios"] = words
    print(f"\n{benchmark.name}: {', '.join(words)}")


def test_decode(benchmark: Any, plan: Any, tables: Any) -> None:
    batch, kv = _decodes(STEPS)
    out = np.empty(STEPS)
    benchmark.pedantic(lambda: plan.decode_us(batch, kv, out=out), rounds=5, warmup_rounds=1)
    few = slice(0, 200_000)
    numpy_s = _seconds(lambda: numpy_decode_us(plan, tables, batch[few], kv[few])) / 200_000
    stream_s = _seconds(lambda: stream(batch, kv, out)) / STEPS
    python_s = _seconds(lambda: [python_decode_us(plan, tables, 64, 4096) for _ in range(20)]) / 20
    _report(benchmark, STEPS, numpy=numpy_s, streaming=stream_s, lookups=python_s)


def test_ragged(benchmark: Any, plan: Any) -> None:
    rng = np.random.default_rng(0)
    offsets = np.r_[0, np.cumsum(rng.integers(32, 97, RAGGED_STEPS))]
    context = rng.integers(1, 16_384, offsets[-1])
    batch = fastroof.StepBatch(np.ones(offsets[-1], np.int64), context, offsets)
    benchmark.pedantic(lambda: plan.step_us(batch), rounds=5, warmup_rounds=1)
    _report(benchmark, RAGGED_STEPS)


def test_lookup_gemm(benchmark: Any, tables: Any) -> None:
    rng = np.random.default_rng(0)
    m, n, k = (rng.integers(1, limit, 200_000) for limit in (8193, 16_385, 16_385))
    benchmark.pedantic(lambda: tables.lookup("gemm", m=m, n=n, k=k), rounds=5, warmup_rounds=1)
    _report(benchmark, 200_000)
