"""Errors by bench, each predicted by costs fitted without it, and intervals made of other benches."""

from __future__ import annotations

import math

import numpy as np
import pytest

import fastroof
from benchmarks.accuracy.benches import (
    AT_ONCE,
    CLOSED,
    FITTED,
    KERNELS,
    UNSEEN,
    BenchError,
    BenchTimes,
    bench_times,
    error_of,
    held_shares,
    new_group_factor,
    stated_error,
    summary_of,
    table,
    worst_groups,
)
from benchmarks.accuracy.run_kinds import JUDGED
from fastroof.errors import TableError
from fastroof.evidence.validation import INDEPENDENT


def drawn(
    seed: int, bench: str, spread: float, *, groups: int = 12, profile: str = "vllm"
) -> list[BenchError]:
    """Runs of a bench whose groups have a bias of their own."""
    rng = np.random.default_rng(seed)
    return [
        BenchError(profile, bench, (bench, f"model-{i}"), bias + error)
        for i, bias in enumerate(rng.normal(0.0, spread, groups))
        for error in rng.normal(0.0, spread / 2.0, int(rng.integers(2, 40)))
    ]


def test_an_interval_holds_80_percent_of_groups_weighted_alike() -> None:
    errors = [BenchError("vllm", "b", (f"{i}",), 0.01 * i) for i in range(1, 11)]
    assert stated_error(errors) * 1.2816 == pytest.approx(0.08)
    # a hundred runs of one group count as much as one of another
    crowded = [*errors, *(BenchError("vllm", "b", ("10",), 0.1) for _ in range(99))]
    assert stated_error(crowded) == stated_error(errors)


def test_benches_alike_hold_80_percent_of_each_other() -> None:
    shares = [
        share
        for seed in range(10)
        for share in held_shares(
            [one for i in range(4) for one in drawn(10 * seed + i, f"bench-{i}", 0.1)]
        ).values()
    ]
    assert np.mean(shares) == pytest.approx(0.8, abs=0.03)


def test_a_bench_does_not_make_its_own_interval() -> None:
    near = [one for i in range(3) for one in drawn(i, f"bench-{i}", 0.02)]
    far = [BenchError("vllm", "far", ("far", f"{i}"), 1.0) for i in range(8)]
    assert held_shares([*near, *far])["far", CLOSED] == 0.0


def test_a_profile_of_few_groups_or_one_bench_takes_those_of_all() -> None:
    wide = [one for bench in ("a", "b") for one in drawn(1, bench, 0.3, profile="sglang")]
    narrow = drawn(2, "a", 0.01)
    together = [*wide, *narrow]
    assert error_of(together, "sglang") == stated_error(wide) * new_group_factor(24)
    of_all = stated_error(together) * new_group_factor(24)
    assert error_of(together, "vllm") == error_of(together, "trtllm") == of_all
    more = [*together, *drawn(3, "b", 0.01)]
    assert error_of(more, "vllm") < 0.1 * error_of(more, "sglang")
    # one bench, or few groups, do not predict the next bench
    few = [*narrow, *drawn(4, "b", 0.9, groups=3, profile="sglang")]
    assert error_of(few, "sglang") == stated_error(few) * new_group_factor(15)


def test_a_new_group_adds_its_own_error() -> None:
    """Student's t over the normal quantile, times sqrt(1 + 1/groups)."""
    for groups, quantile in ((4, 1.6377), (11, 1.3722), (31, 1.3104)):
        expected = quantile / 1.2816 * math.sqrt(1 + 1 / groups)
        assert new_group_factor(groups) == pytest.approx(expected, rel=0.01)
    assert new_group_factor(1) == 3.0
    assert new_group_factor(10**6) == pytest.approx(1.0, abs=1e-4)


def test_each_protocol_has_an_error_of_its_own() -> None:
    closed = [*drawn(1, "a", 0.05), *drawn(2, "b", 0.05)]
    bursts = [one._replace(protocol=AT_ONCE) for one in (*drawn(3, "a", 0.4), *drawn(4, "b", 0.4))]
    every = [*closed, *bursts]
    assert error_of(every, "vllm", AT_ONCE) > 4.0 * error_of(every, "vllm")
    assert set(held_shares(every)) == {(bench, of) for bench in "ab" for of in (CLOSED, AT_ONCE)}


def test_empty_and_infinite_errors_are_refused() -> None:
    with pytest.raises(TableError, match="got 0 runs"):
        stated_error([])
    with pytest.raises(TableError, match="finite"):
        stated_error([BenchError("vllm", "b", ("g",), math.nan)])
    with pytest.raises(TableError, match="no GPU has tables: rtx_4090: "):
        bench_times(["rtx_4090"])


@pytest.fixture(scope="module")
def found(h100: fastroof.Tables) -> BenchTimes:
    return bench_times(["h100"], load=lambda gpu: h100)


@pytest.mark.slow
def test_each_run_is_predicted_three_ways(found: BenchTimes) -> None:
    names = {way: [(time.row, time.quantity) for time in found.of(way, "tpot")] for way in found.times}
    assert set(names) == {KERNELS, FITTED, UNSEEN}
    assert names[KERNELS] == names[FITTED] == names[UNSEEN]
    assert {time.kind for time in found.of(UNSEEN, "tpot")} == {JUDGED, INDEPENDENT}
    assert {"inferencemax", "dynamo", "vllm-synchronous", "sglang-cookbook"} <= set(found.benches)
    # nothing is fitted to other benches: their predictions are those of the shipped profiles
    others = ("vllm-0.15-inference-perf",)
    assert found.of(FITTED, "tpot", others) == found.of(UNSEEN, "tpot", others) != []
    # but the cookbook chose SGLang's pauses
    cookbook = ("sglang-cookbook",)
    assert found.of(FITTED, "tpot", cookbook) != found.of(UNSEEN, "tpot", cookbook)
    # only InferenceMAX ran vLLM from 0.14: without it no cost is left
    of_vllm = [
        [time.predicted_ms for time in found.of(way, "tpot", ("inferencemax",)) if time.profile == "vllm"]
        for way in (KERNELS, UNSEEN)
    ]
    assert of_vllm[0] == of_vllm[1] != []


@pytest.mark.slow
def test_the_table_has_a_line_per_bench(found: BenchTimes) -> None:
    lines = table(found)
    assert len(lines) == 4 + len(found.benches)
    cells = [cell.strip() for cell in lines[-1].split("|")[1:-1]]
    everything = summary_of(found.of(UNSEEN, "tpot"))
    assert cells[0] == "all"
    assert cells[4] == f"{everything.mape * 100.0:.1f}"
    worst = worst_groups(found)
    assert len(worst) == 10
    assert [one.mape for _, one in worst] == sorted((one.mape for _, one in worst), reverse=True)


@pytest.mark.slow
def test_costs_help_on_benches_that_they_were_not_fitted_to(found: BenchTimes) -> None:
    others = ("vllm-0.15-inference-perf", "vllm-synchronous")
    kernels, unseen = (summary_of(found.of(way, "tpot", others)).mape for way in (KERNELS, UNSEEN))
    assert unseen < kernels
    assert unseen <= 0.05
