"""Estimates of whole runs, start included, next to simulations of the same requests."""

from __future__ import annotations

import numpy as np
import pytest

import fastroof
from benchmarks.accuracy.whole_runs import ComparedRun, compare, plans_on, runs, sample

COUNT, SEED = 200, 2026


@pytest.fixture(scope="module")
def plans(h100: fastroof.Tables) -> list[fastroof.StepPlan]:
    return plans_on({"h100": h100}, "none")


@pytest.fixture(scope="module")
def found(plans: list[fastroof.StepPlan]) -> list[ComparedRun]:
    return sample(plans, COUNT, SEED)


def test_one_law_answers_for_bursts_and_loops_of_any_length(found: list[ComparedRun]) -> None:
    """TTFT 5 % off on average and 85 % within 10 %; TPOT and throughput likewise."""
    assert {one.run.kind for one in found} == {"burst", "closed"}
    assert {one.run.spread for one in found} == {0.0, 0.2, 0.8}
    for name in ("ttft", "tpot", "throughput"):
        off = np.abs([getattr(one, name) for one in found])
        assert off.mean() < 0.05, name
        assert (off < 0.1).mean() >= 0.85, name


def test_equal_lengths_keep_their_groups(plans: list[fastroof.StepPlan]) -> None:
    drawn = (run for run in runs(5, 4) if run.kind == "closed" and run.spread == 0.0)
    seen = [compare(run, plans[run.plan]) for run, _ in zip(drawn, range(30), strict=False)]
    ttft, tpot = (np.abs([getattr(one, name) for one in seen]) for name in ("ttft", "tpot"))
    assert np.median(ttft) < 0.05
    assert (ttft < 0.1).mean() >= 0.7
    assert np.median(tpot) < 0.02


@pytest.mark.parametrize("spread", [0.0, 0.2, 0.8])
def test_more_requests_than_places_wait_for_them(plans: list[fastroof.StepPlan], spread: float) -> None:
    """Of a burst once, not as in an endless loop."""
    clients, rng = 600, np.random.default_rng(3)
    isl, osl = (rng.integers(max(1, int(most * (1 - spread))), most + 1, clients) for most in (512, 256))
    trace = fastroof.Trace(np.zeros(clients), isl, osl)
    simulated = fastroof.simulate(plans[0], trace, max_num_seqs=100, block_size=None).summary()
    sizes = (float(isl.mean()), float(osl.mean()), clients)
    options = {"max_num_seqs": 100, "length_spread": spread, "requests_per_client": 1}
    got = fastroof.serving.estimate(plans[0], *sizes, **options)
    assert got.ttft_ms == pytest.approx(simulated["ttft_ms"]["mean"], rel=0.1)
    tokens_per_s = got.tokens_per_s_per_gpu * plans[0].layout.world_size
    assert tokens_per_s == pytest.approx(simulated["output_tokens_per_s"], rel=0.15)
    assert got.wait_ms > 0.8 * got.ttft_ms
