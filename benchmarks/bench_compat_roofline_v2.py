"""Roofline V2 in bulk: steps and lookups a second on one thread, as ratios to a naive port in this run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.conftest import Timed
from fastroof.bench.workload import Baseline, Workload
from fastroof.compat import roofline_v2 as v2
from tests.reference import roofline_v2 as naive

STEPS = 1_000_000
BATCH = 32
LOOKUPS = 1_000_000
NAIVE_STEPS = 50
NAIVE_LOOKUPS = 2_000

SHAPE = "32-8-128"
MODEL = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "bytes_per_param": 2,
}
HARDWARE = {"TFlopsPeak": 989.5, "BwPeakTBs": 3.35, "bwEfficiencyFactor": 0.82, "perLayerOverhead": 100}


class Both(NamedTuple):
    mine: v2.RooflineV2Tables
    naive: naive.Tables


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """The frozen sample of the published tables, as files."""
    sample = Path(__file__).resolve().parents[1] / "tests" / "golden_sample" / "roofline_v2"
    root = naive.write_tree(sample, tmp_path_factory.mktemp("roofline_v2"))
    return Both(v2.load(root), naive.Tables(root))


def _compare(
    timed: Timed, unit: str, count: int, mine: Callable[[], Any], naively: Callable[[], Any]
) -> None:
    few = NAIVE_STEPS if unit == "step" else NAIVE_LOOKUPS
    baseline = Baseline("naive Python", naively, few, 0.0)
    timed(Workload("roofline_v2", f"{count:,} {unit}s", unit, count, mine, baselines=(baseline,)))


def test_decode_steps(timed: Timed, both: Both) -> None:
    """Steps of 32 decodes at random progress, through arrays."""
    progress = np.random.default_rng(0).integers(1, 8192, STEPS * BATCH)
    no_prefill = np.zeros(STEPS + 1, np.int64)
    batch = v2.StepRequests([], [], no_prefill, progress, np.arange(STEPS + 1) * BATCH)
    model = naive.Model(both.naive, MODEL, HARDWARE, 1)
    few = progress[: NAIVE_STEPS * BATCH].reshape(NAIVE_STEPS, BATCH).tolist()
    mine = partial(v2.step_us, both.mine, MODEL, HARDWARE, 1, batch)
    _compare(timed, "step", STEPS, mine, lambda: [model.step([], step)[0] for step in few])


def test_mixed_steps(timed: Timed, both: Both) -> None:
    """Steps of 32 decodes and two chunks."""
    steps = STEPS // 10
    rng = np.random.default_rng(0)
    decodes = rng.integers(1, 8192, (steps, BATCH))
    chunks = rng.integers(1, 2048, (steps, 2, 2))
    batch = v2.StepRequests(
        chunks[..., 0].ravel(),
        chunks[..., 1].ravel(),
        np.arange(steps + 1) * 2,
        decodes.ravel(),
        np.arange(steps + 1) * BATCH,
    )
    model = naive.Model(both.naive, MODEL, HARDWARE, 1)
    few = list(zip(chunks[:NAIVE_STEPS].tolist(), decodes[:NAIVE_STEPS].tolist(), strict=True))
    mine = partial(v2.step_us, both.mine, MODEL, HARDWARE, 1, batch)
    _compare(timed, "step", steps, mine, lambda: [model.step(*step)[0] for step in few])


def _lookups(
    timed: Timed, sizes: list[Any], mine: Callable[..., Any], reference: Callable[..., float]
) -> None:
    few = list(zip(*(size[:NAIVE_LOOKUPS].tolist() for size in sizes), strict=True))
    _compare(
        timed, "lookup", len(sizes[0]), lambda: mine(*sizes), lambda: [reference(*point) for point in few]
    )


def _sizes(*largest: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, limit, LOOKUPS) for limit in largest]


def test_lookup_decode(timed: Timed, both: Both) -> None:
    _lookups(
        timed,
        _sizes(513, 131_073),
        lambda batch, kv: v2.decode_mfu(both.mine, SHAPE, batch, kv, 1),
        lambda batch, kv: naive.decode_mfu(both.naive, SHAPE, batch, kv, 1),
    )


def test_lookup_prefill(timed: Timed, both: Both) -> None:
    _lookups(
        timed,
        _sizes(32_769),
        lambda seq_len: v2.prefill_mfu(both.mine, SHAPE, seq_len),
        lambda seq_len: naive.prefill_mfu(both.naive, SHAPE, seq_len),
    )


def test_lookup_gemm(timed: Timed, both: Both) -> None:
    _lookups(
        timed,
        _sizes(131_073, 9000, 12_000),
        lambda m, k, n: v2.gemm_mfu(both.mine, m, k, n),
        lambda m, k, n: naive.gemm_mfu(both.naive, m, k, n),
    )
