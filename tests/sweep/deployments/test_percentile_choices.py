"""The closed form's leaders ranked by what they serve within a percentile: against capacities, one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fastroof import SweepError, Workload, capacity, compile_plan, load_tables
from fastroof.sweep import best
from fastroof.sweep.best import Answers, PercentileCapacity, best_deployments, percentile_limits, ranked_anew

SPEC: dict[str, Any] = {
    "models": ["llama-3.1-8b"],
    "tp": [1, 2, 4],
    "replicas": [2],
    "isl": 700,
    "osl": 60,
    "concurrency": [8, 64, 200],
    "prefix_hit": 0.25,
    "max_num_seqs": 256,
    "constraints": {"ttft_ms": 300, "tpot_ms": 25},
}


@pytest.fixture(scope="module")
def found() -> Answers:
    return best_deployments(SPEC, percentile=95, requests=200, seed=7)


@pytest.mark.slow
def test_a_leader_serves_what_capacity_answers_for_it(found: Answers) -> None:
    tables = load_tables("h100")
    (answer,) = found.answers
    assert len(answer.choices) == 3
    for choice in answer.choices:
        row, most = choice.row, choice.percentile
        assert most is not None
        plan = compile_plan(
            "llama-3.1-8b", "h100", tables, tp=row["tp"], engine="vllm",
            max_tokens=row["max_num_batched_tokens"], max_seqs=256,
        )  # fmt: skip
        requests = Workload(
            rate=1.0, requests=200, input_tokens=700, output_tokens=60, cached_tokens=175, seed=7
        )
        alone = capacity(
            plan, requests, ttft_p95_ms=300, tpot_p95_ms=25, replicas=2, block_size=None,
            max_num_batched_tokens=row["max_num_batched_tokens"], max_num_seqs=256,
        )  # fmt: skip
        assert (most.requests_per_s, most.low, most.high) == (alone.requests_per_s, alone.low, alone.high)
        assert most.limit == alone.limit
        assert most.tokens_per_s_per_gpu == alone.requests_per_s * 60 / row["total_gpus"]


@pytest.mark.slow
@pytest.mark.parametrize("split", [{"dp": 2, "ep": 2}, {"dp": 2}, {"tp": 2, "ep": 2}], ids=str)
def test_what_is_simulated_has_the_layout_of_its_row(split: dict[str, int]) -> None:
    layout = {"tp": 1, "pp": 1, "dp": 1, "ep": 1} | split
    spec = SPEC | {"models": ["qwen3-30b-a3b"], "replicas": [1], "concurrency": 64, "prefix_hit": 0.0}
    spec |= {name: [size] for name, size in layout.items() if name not in ("dp", "ep")}
    spec |= {name: size for name, size in layout.items() if name in ("dp", "ep")}
    (choice,) = best_deployments(spec, percentile=95, requests=200, seed=7).answers[0].choices
    assert choice.percentile is not None
    plan = compile_plan(
        "qwen3-30b-a3b", "h100", load_tables("h100"), engine="vllm",
        max_tokens=choice.row["max_num_batched_tokens"], max_seqs=256, **layout,
    )  # fmt: skip
    requests = Workload(rate=1.0, requests=200, input_tokens=700, output_tokens=60, seed=7)
    alone = capacity(
        plan, requests, ttft_p95_ms=300, tpot_p95_ms=25, replicas=1, block_size=None,
        max_num_batched_tokens=choice.row["max_num_batched_tokens"], max_num_seqs=256,
    )  # fmt: skip
    assert choice.percentile.requests_per_s == alone.requests_per_s
    assert choice.percentile.tokens_per_s_per_gpu == alone.requests_per_s * 60 / 2


@pytest.mark.slow
@pytest.mark.parametrize("formats", [{"kv_dtype": "fp8"}, {"dtype": "fp8"}], ids=str)
def test_what_is_simulated_has_the_formats_of_its_row(formats: dict[str, str]) -> None:
    spec = SPEC | {"tp": [1], "concurrency": 64, "prefix_hit": 0.0}
    found = []
    for one in (spec, spec | {name: [value] for name, value in formats.items()}):
        (choice,) = best_deployments(one, percentile=95, requests=200, seed=7).answers[0].choices
        assert choice.percentile is not None
        found.append(choice.percentile.requests_per_s)
    # fewer bytes a step
    assert found[1] != found[0]


def test_the_order_is_that_of_the_percentile_and_the_place_that_of_the_closed_form(found: Answers) -> None:
    choices = found.answers[0].choices
    before = best_deployments(SPEC, runners_up=9).answers[0].choices
    served = [choice.percentile.tokens_per_s_per_gpu for choice in choices if choice.percentile]
    assert served == sorted(served, reverse=True)
    for choice in choices:
        assert choice.percentile is not None
        assert before[choice.percentile.place - 1].row == choice.row
        ratio = choice.percentile.tokens_per_s_per_gpu / served[0]
        assert choice.behind == pytest.approx(1.0 - ratio)
        spread = choice.percentile.relative_error
        assert spread is not None
        first = choices[0].percentile
        assert first is not None
        assert first.relative_error is not None
        close = choice is not choices[0] and -math.log(ratio) < math.hypot(spread, first.relative_error)
        assert choice.is_tie == close
    assert all(choice.percentile is None for choice in before)


def test_a_rate_that_is_asked_for_is_kept_by_those_in_front() -> None:
    spec = {key: value for key, value in SPEC.items() if key != "concurrency"} | {"request_rate": 60.0}
    choices = best_deployments(spec, percentile=99, requests=200).answers[0].choices
    keeps = [choice.percentile.requests_per_s >= 60.0 for choice in choices if choice.percentile]
    assert keeps == sorted(keeps, reverse=True)
    per_gpu = [choice.percentile.tokens_per_s_per_gpu for choice in choices if choice.percentile]
    kept = sum(keeps)
    assert per_gpu[:kept] == sorted(per_gpu[:kept], reverse=True)


@pytest.mark.slow
def test_what_is_not_simulated_comes_last_and_says_why() -> None:
    spec = SPEC | {"mode": ["aggregated", "disaggregated"], "prefix_hit": 0.0, "tp": [1]}
    choices = best_deployments(spec, percentile=99, requests=100).answers[0].choices
    said = [(choice.row["mode"], choice.percentile.why_not) for choice in choices if choice.percentile]
    assert said == [("aggregated", ""), ("disaggregated", "disaggregated deployments are not simulated")]


def test_equals_keep_their_order_and_misses_come_after() -> None:
    def of(per_s: float, why_not: str = "") -> PercentileCapacity:
        return PercentileCapacity(per_s, per_s, per_s, per_s, "", 1, why_not)

    capacities = [of(10.0), of(math.nan, "no room"), of(30.0), of(10.0)]
    assert ranked_anew(capacities, [1.0] * 4, [None] * 4) == [2, 0, 3, 1]
    assert ranked_anew(capacities, [1.0, 1.0, 4.0, 1.0], [None] * 4) == [0, 3, 2, 1]
    assert ranked_anew(capacities, [1.0] * 4, [20.0] * 4) == [2, 0, 3, 1]
    assert ranked_anew(capacities, [1.0, 1.0, 9.0, 1.0], [20.0] * 4) == [2, 0, 3, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("runners_up", "simulated"), [(0, 8), (4, 10)])
def test_twice_as_many_as_are_returned_are_simulated_and_eight_at_least(
    runners_up: int, simulated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []

    def served(spec: Any, row: Any, place: int, tables: Any, limits: Any, requests: int, seed: int) -> Any:
        seen.append((place, requests))
        # the last of them turns out the best
        return PercentileCapacity(place, place, place, place / row["total_gpus"], "", place)

    monkeypatch.setattr(best, "percentile_capacity", served)
    spec = SPEC | {"dtype": ["bf16", "fp8"], "kv_dtype": ["bf16", "fp8"], "concurrency": 8}
    (answer,) = best_deployments(spec, percentile=95, runners_up=runners_up).answers
    assert seen == [(place, 10_000) for place in range(1, simulated + 1)]
    assert len(answer.choices) == 1 + runners_up


@pytest.mark.parametrize("percentile", [0, -1, 100.5, math.nan, True, "99"])
def test_a_percentile_is_a_share_of_a_hundred(percentile: Any) -> None:
    with pytest.raises(SweepError, match="percentile must be a number above 0 and up to 100"):
        best_deployments(SPEC, percentile=percentile)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"constraints": {"kv_share": 0.9}}, "percentile 99 needs a limit: set ttft_ms"),
        ({"objective": "tokens_per_s_per_user"}, "does not depend on how many requests are served"),
    ],
)
def test_a_percentile_needs_limits_and_an_objective_of_rates(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SweepError, match=said):
        best_deployments(SPEC | changes, percentile=99)
    with pytest.raises(SweepError, match="requests must be"):
        best_deployments(SPEC, percentile=99, requests=1)


def test_limits_are_named_by_their_percentile() -> None:
    from fastroof.sweep import DeploymentSpec, load_spec

    spec = load_spec(SPEC | {"constraints": {"request_latency_ms": 4000, "tpot_ms": 20}})
    assert isinstance(spec, DeploymentSpec)
    assert percentile_limits(spec, 99) == {"tpot_p99_ms": 20.0, "e2e_p99_ms": 4000.0}
    assert percentile_limits(spec, 99.9) == {"tpot_p99_9_ms": 20.0, "e2e_p99_9_ms": 4000.0}
