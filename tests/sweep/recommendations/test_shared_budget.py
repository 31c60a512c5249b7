"""GPUs shared among models: the best of all splits, what each model holds, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof import FastroofError, SweepError
from fastroof.sweep import SharedBudget, is_shared_spec, recommend, recommend_shared
from fastroof.sweep.recommendations import shared_budget
from fastroof.sweep.recommendations.shared_budget import (
    HeldRates,
    fewest_gpus,
    first_tried,
    largest_scale,
    split_gpus,
)
from fastroof.sweep.recommendations.traffic import load_shared_spec
from tests.reference.gpu_splits import best_split

SMALL: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_num_seqs": 64}
SPEC: dict[str, Any] = {
    "gpu": "h100", "total_gpus": 3, "osl": 50, **SMALL,
    "traffic": [
        {"model": "llama-3.1-8b", "isl": 1000, "requests_per_s": 20, "tpot_ms": 20},
        {"model": "Qwen/Qwen3-8B", "isl": 500, "requests_per_s": 15, "ttft_ms": 300},
    ],
}  # fmt: skip
MISSING = object()
CHAT = SPEC["traffic"][0]
SIZES = (1, 2, 3, 4, 6, 8)

rates = st.one_of(st.just(0.0), st.sampled_from((0.5, 1.0, 1.5, 2.0)), st.floats(0.01, 100.0))
copies = st.fixed_dictionaries(dict.fromkeys(SIZES, rates))
wanted = st.floats(0.1, 10.0)


def of_copies(held: dict[int, float]) -> Callable[[int], float]:
    """The rate of the best copies that fill some GPUs, by the rate of a copy on each number of GPUs."""
    return lambda gpus: max(
        (gpus // size * rate for size, rate in held.items() if gpus % size == 0), default=0.0
    )


def counted(rate_of: Callable[[int], float], requested: list[int]) -> Callable[[int], float]:
    def rate(gpus: int) -> float:
        requested.append(gpus)
        return rate_of(gpus)

    return rate


@given(
    st.integers(1, 3).flatmap(lambda models: st.tuples(*[st.lists(rates, min_size=8, max_size=8)] * models))
)
def test_no_split_is_better(held: tuple[list[float], ...]) -> None:
    ratios = [[0.0, *each] for each in held]
    scale, split = largest_scale([np.array(each) for each in ratios], 8)
    truth, fewest = best_split(ratios, 8)
    assert (scale, sum(split)) == (truth, sum(fewest))
    assert scale == 0.0 or min(each[gpus] for each, gpus in zip(ratios, split, strict=True)) == scale


@given(st.lists(st.tuples(copies, wanted), min_size=1, max_size=2), st.integers(1, 13))
def test_where_copies_add_up_few_questions_find_the_best_of_all_numbers(
    given: list[tuple[dict[int, float], float]], total: int
) -> None:
    logs: list[list[int]] = [[] for _ in given]
    models = [
        HeldRates(counted(of_copies(held), log), want) for (held, want), log in zip(given, logs, strict=True)
    ]
    scale, split = split_gpus(models, total)
    ratios = [[0.0, *(of_copies(held)(gpus) / want for gpus in range(1, total + 1))] for held, want in given]
    truth, fewest = best_split(ratios, total)
    assert scale == pytest.approx(truth, rel=1e-12)
    assert sum(split) <= total
    for log, gpus in zip(logs, split, strict=True):
        assert len(log) == len(set(log))
        assert not scale or gpus in log
    if scale:
        assert min(each[gpus] for each, gpus in zip(ratios, split, strict=True)) == scale
        assert sum(split) <= sum(fewest)


@given(st.lists(st.lists(rates, min_size=24, max_size=24), min_size=2, max_size=2), st.integers(2, 24))
def test_any_rates_give_a_split_that_was_evaluated(held: list[list[float]], total: int) -> None:
    models = [HeldRates(lambda gpus, each=each: each[gpus - 1], 1.0) for each in held]  # type: ignore[misc]
    scale, split = split_gpus(models, total)
    ratios = [[0.0, *each[:total]] for each in held]
    assert scale <= best_split(ratios, total)[0]
    first = first_tried(min(total - 1, shared_budget.NODE_GPUS))
    few = [[each[gpus] if gpus in first else 0.0 for gpus in range(total + 1)] for each in ratios]
    assert scale >= best_split(few, total)[0]
    if scale:
        assert min(each[gpus] for each, gpus in zip(ratios, split, strict=True)) == scale


@given(st.fixed_dictionaries(dict.fromkeys((1, 2, 4, 8), rates)), st.floats(0.1, 100.0), st.integers(1, 16))
def test_the_fewest_gpus_may_be_more_than_there_are(held: dict[int, float], want: float, total: int) -> None:
    rate_of = of_copies(held)
    found = fewest_gpus(HeldRates(rate_of, want), total)
    if found is None:
        assert max(rate / size for size, rate in held.items()) * shared_budget.MOST_GPUS < want
        return
    assert rate_of(found) / want >= 1.0
    # copies of a rate differ from theirs by rounding
    assert all(rate_of(gpus) / want < 1.0 + 1e-12 for gpus in range(1, min(found, 1000)))


def test_rates_below_linear_are_evaluated_until_one_suffices() -> None:
    calls: list[int] = []
    found = fewest_gpus(HeldRates(counted(lambda gpus: gpus**0.9, calls), 100.0), 4)
    assert found is not None
    assert found**0.9 >= 100.0
    assert found <= 2 * 100 ** (1 / 0.9)
    assert len(calls) < 40
    assert fewest_gpus(HeldRates(lambda gpus: min(gpus, 8.0), 9.0), 4) is None


@pytest.fixture(scope="module")
def found() -> SharedBudget:
    return recommend_shared(SPEC)


@pytest.mark.slow
def test_shares_are_the_answers_for_one_model(found: SharedBudget) -> None:
    held = []
    for share, traffic in zip(found.shares, SPEC["traffic"], strict=True):
        options = {**SMALL, "osl": 50, **traffic}
        model, want = options.pop("model"), options.pop("requests_per_s")
        options |= share.traffic.default_limits
        alone = [recommend(model, "h100", total_gpus=gpus, **options) for gpus in (1, 2)]
        mine = share.recommendation
        assert mine is not None
        assert mine.answers.answers[0].choices == alone[share.gpus - 1].answers.answers[0].choices
        assert mine.deployments == alone[share.gpus - 1].deployments
        best = [one.answers.answers[0].choices[0].row["requests_per_s"] for one in alone]
        assert share.requests_per_s == best[share.gpus - 1]
        held.append([0.0, *(rate / want for rate in best), 0.0])
    scale, split = best_split(held, 3)
    assert (found.scale, [share.gpus for share in found.shares]) == (scale, list(split))
    assert found.scale == min(share.ratio for share in found.shares)
    assert found.gpus_left == 3 - sum(split)


def test_a_file_gives_the_answer_of_python(found: SharedBudget, tmp_path: Path) -> None:
    path = tmp_path / "shared.toml"
    path.write_text(
        "total_gpus = 3\nosl = 50\nmax_num_batched_tokens = 2048\nmax_num_seqs = 64\n"
        '[[traffic]]\nmodel = "llama-3.1-8b"\nisl = 1000\nrequests_per_s = 20\ntpot_ms = 20\n'
        '[[traffic]]\nmodel = "Qwen/Qwen3-8B"\nisl = 500\nrequests_per_s = 15\nttft_ms = 300\n'
    )
    assert load_shared_spec(path) == load_shared_spec(SPEC)
    assert is_shared_spec(path)
    whole = {**SPEC, "traffic": [{"osl": 50, **SMALL, **each} for each in SPEC["traffic"]]}
    assert load_shared_spec({key: whole[key] for key in ("total_gpus", "traffic")}) == load_shared_spec(SPEC)


def test_results_are_rows_files_and_html(found: SharedBudget, tmp_path: Path) -> None:
    rows = found.to_arrow().to_pylist()
    assert [row["total_gpus"] for row in rows] == [share.gpus for share in found.shares]
    assert [row["held_requests_per_s"] for row in rows] == [row["requests_per_s"] for row in rows]
    assert "times the wanted rates" in found._repr_html_()
    names = {str(path.relative_to(tmp_path)) for path in found.save(tmp_path)}
    assert {"1-meta-llama-llama-3-1-8b/start.sh", "2-qwen-qwen3-8b/start.sh", "deployments.csv"} <= names


@pytest.mark.slow
@pytest.mark.release
def test_gpus_that_do_not_suffice_name_what_would() -> None:
    traffic = [
        {"model": "llama-3.1-8b", "requests_per_s": 70, "tpot_ms": 20},
        {"model": "qwen3-8b", "requests_per_s": 1, "tpot_ms": 20},
    ]
    few = recommend_shared({"total_gpus": 2, "isl": 1000, "osl": 50, **SMALL, "traffic": traffic})
    assert 0.0 < few.scale < 1.0
    needs = [share.needed_gpus for share in few.shares]
    assert few.needed_gpus is not None
    assert needs == [few.needed_gpus - 1, 1]
    enough = recommend_shared(
        {"total_gpus": few.needed_gpus, "isl": 1000, "osl": 50, **SMALL, "traffic": traffic}
    )
    assert enough.scale >= 1.0
    assert enough.needed_gpus == few.needed_gpus
    fewer = recommend_shared(
        {"total_gpus": few.needed_gpus - 1, "isl": 1000, "osl": 50, **SMALL, "traffic": traffic}
    )
    assert fewer.scale < 1.0


@pytest.mark.slow
@pytest.mark.release
def test_a_model_that_no_number_of_gpus_serves_has_a_reason() -> None:
    traffic = [
        {"model": "llama-3.1-8b", "requests_per_s": 1, "tpot_ms": 0.1, "max_num_seqs": 1},
        {"model": "qwen3-8b", "requests_per_s": 1},
    ]
    none = recommend_shared({"total_gpus": 2, "isl": 1000, "osl": 50, **SMALL, "traffic": traffic})
    assert (none.scale, none.needed_gpus, none.gpus_left) == (0.0, None, 2)
    assert none.to_arrow().num_rows == 0
    failing, fine = none.shares
    assert failing.recommendation is not None
    assert failing.recommendation.answers.answers[0].nearest is not None
    assert (fine.recommendation, fine.needed_gpus) == (None, 1)
    # more models than GPUs: one GPU suffices for each
    three = {"total_gpus": 1, "isl": 100, "osl": 5, **SMALL, "traffic": [traffic[1], traffic[1]]}
    assert recommend_shared(three).needed_gpus == 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
def test_without_a_number_each_model_gets_the_fewest_gpus(mode: str) -> None:
    options = {"isl": 1000, "osl": 50, **SMALL, "mode": mode, "traffic": [{**CHAT, "requests_per_s": 60}]}
    fewest = recommend_shared(options)
    (share,) = fewest.shares
    assert share.recommendation is not None
    assert share.recommendation.answers.answers[0].choices[0].row["mode"] == mode
    assert fewest.total_gpus == share.gpus == share.needed_gpus == fewest.needed_gpus
    assert fewest.total_gpus > 1
    assert fewest.scale == share.ratio >= 1.0
    same = recommend_shared({**options, "total_gpus": fewest.total_gpus})
    assert (same.scale, same.needed_gpus) == (fewest.scale, fewest.needed_gpus)
    assert same.shares[0].recommendation is not None
    assert same.shares[0].recommendation.deployments == share.recommendation.deployments
    fewer = recommend_shared({**options, "total_gpus": fewest.total_gpus - 1})
    assert fewer.scale < 1.0
    assert fewer.needed_gpus == fewest.total_gpus


@pytest.mark.slow
def test_a_limit_that_nothing_keeps_has_no_number_of_gpus() -> None:
    traffic = [CHAT, {**CHAT, "tpot_ms": 0.1, "max_num_seqs": 1}]
    none = recommend_shared({"isl": 100, "osl": 5, **SMALL, "traffic": traffic}, percentile=None)
    assert (none.total_gpus, none.scale, none.needed_gpus) == (0, 0.0, None)
    fine, failing = none.shares
    assert (fine.gpus, fine.recommendation) == (0, None)
    assert fine.needed_gpus
    assert failing.recommendation is not None
    assert failing.recommendation.answers.answers[0].nearest is not None


@pytest.mark.slow
def test_progress_counts_questions(found: SharedBudget) -> None:
    calls: list[tuple[int, int, str]] = []
    again = recommend_shared(SPEC, progress=lambda *reported: calls.append(reported))
    *before, last = calls
    assert [done for done, _, _ in before] == list(range(again.questions + 1))
    assert all(done < known for done, known, _ in before)
    assert last == (again.questions, again.questions, "questions")
    assert again.scale == found.scale


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"traffic": []}, "traffic: got [], need a list of tables like {model"),
        ({"traffic": ["qwen3-8b"]}, "traffic 1: must be a table, got 'qwen3-8b'"),
        ({"traffic": [{"model": "qwen3-8b", "isl": 1}]}, "traffic 1: requests_per_s missing, as in"),
        ({"traffic": [{**CHAT, "tpot": 1}]}, "traffic 1: unknown key 'tpot'; did you mean tpot_ms"),
        ({"traffic": [{**CHAT, "objective": "cost"}]}, "traffic 1: unknown key 'objective'"),
        (
            {"traffic": [CHAT, {**CHAT, "requests_per_s": 0}]},
            "traffic 2: requests_per_s must be a number from",
        ),
        (
            {"traffic": [{**CHAT, "isl": [1, 2]}]},
            "traffic 1: isl must be a whole number of at least 1, got [1, 2]",
        ),
        ({"traffic": [{**CHAT, "prefix_hit": [0, 0.5]}]}, "prefix_hit must be a number from 0 to 0.999"),
        ({"traffic": [{**CHAT, "prefix_hit": 2}]}, "traffic 1: prefix_hit: got 2"),
        ({"traffic": [{**CHAT, "model": 3}]}, "traffic 1: model: got 3"),
        ({"traffic": [{**CHAT, "model": "qwen3-33b"}]}, "unknown model 'qwen3-33b'"),
        ({"traffic": [{**CHAT, "dtype": "bf17"}]}, "traffic 1: dtype: got 'bf17'"),
        ({"traffic": [{**CHAT, "tpot_ms": -1}]}, "traffic 1: constraints.tpot_ms: got -1"),
        ({"gpu": ["h100", "h200"]}, "gpu: got ['h100', 'h200'], need one name of a GPU"),
        ({"gpu": "h1000"}, "unknown GPU 'h1000'"),
        ({"total_gpus": 0}, "total_gpus must be a whole number from 1 to 65,536, got 0"),
        (
            {"total_gpus": MISSING, "traffic": [{**CHAT, "tpot_ms": 0}]},
            "traffic 1: constraints.tpot_ms: got 0",
        ),
        ({"traffic": [{**CHAT, "x": 1}]}, "unknown key 'x'; valid: model, isl, osl, requests_per_s, ttft_ms"),
        ({"totalgpus": 1}, "shared GPUs: unknown key 'totalgpus'; did you mean total_gpus"),
        ({"percentile": 99}, "unknown key 'percentile'"),
    ],
)
def test_wrong_questions_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FastroofError) as refused:
        recommend_shared({key: value for key, value in {**SPEC, **changes}.items() if value is not MISSING})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_wrong_specs_and_progress_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="a spec must be a dict or the path"):
        recommend_shared(3)  # type: ignore[arg-type]
    with pytest.raises(SweepError, match="progress must be a function"):
        recommend_shared(SPEC, progress="x")  # type: ignore[arg-type]
    with pytest.raises(SweepError, match=r"nobody\.toml"):
        recommend_shared(tmp_path / "nobody.toml")
    assert fastroof.recommend_shared is recommend_shared
