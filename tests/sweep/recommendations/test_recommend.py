"""What to run: the one question in two ways, its numbers, and answers if nothing fits."""

from __future__ import annotations

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

import fastroof
from fastroof import ModelError, SweepError
from fastroof.engines import load_engine
from fastroof.models import load_model
from fastroof.serving import estimate
from fastroof.sweep import Recommendation, best_deployments, deployment_question, load_spec, recommend
from fastroof.sweep.recommendations import layouts_to_try

QUESTION: dict[str, Any] = {"total_gpus": 4, "isl": 1000, "osl": 200, "ttft_ms": 300, "tpot_ms": 15}
SEQS = [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]


NO_LIMITS: dict[str, Any] = {"ttft_ms": math.inf, "tpot_ms": math.inf}
by_means = functools.partial(recommend, percentile=None, mode="aggregated")
best_by_means = functools.partial(best_deployments, percentile=None)


@pytest.fixture(scope="module")
def found() -> Recommendation:
    return by_means("Qwen/Qwen3-32B-FP8", ["h100", "h200"], gpu_hour_price={"h100": 2, "h200": 3}, **QUESTION)


def written_spec(**changes: Any) -> dict[str, Any]:
    """The same question as a person writes it into a file."""
    return {
        "models": ["Qwen/Qwen3-32B-FP8"], "gpus": ["h100", "h200"], "tp": [1, 2, 4], "total_gpus": 4,
        "isl": 1000, "osl": 200, "clients": deployment_question("qwen3-32b-fp8", **QUESTION).clients,
        "max_num_batched_tokens": [1024, 2048, 4096, 8192], "max_num_seqs": SEQS,
        "constraints": {"ttft_ms": 300, "tpot_ms": 15},
        "objective": "cost", "gpu_hour_price": {"h100": 2.0, "h200": 3.0}, **changes,
    }  # fmt: skip


@pytest.mark.slow
def test_the_one_line_and_a_spec_of_the_same_deployments_agree(found: Recommendation) -> None:
    (mine,), (theirs,) = found.answers.answers, best_by_means(written_spec()).answers
    assert mine.choices == theirs.choices
    assert mine.group == theirs.group
    assert len(mine.choices) == 4


@pytest.mark.slow
def test_experts_equal_a_spec_with_every_size(found: Recommendation) -> None:
    mine = by_means("qwen3-30b-a3b", **QUESTION, runners_up=99).answers.answers[0]
    spec = written_spec(
        models=["qwen3-30b-a3b"], gpus=["h100"], dp=[1, 2, 4], ep=[1, 2, 4],
        objective="tokens_per_s_per_gpu", gpu_hour_price=None,
    )  # fmt: skip
    theirs = best_by_means(spec, runners_up=99).answers[0]
    assert mine.choices == theirs.choices
    assert {choice.row["dp"] for choice in mine.choices} == {1, 2, 4}


def test_a_leaders_numbers_are_the_estimates(found: Recommendation) -> None:
    for choice in found.answers.answers[0].choices:
        row = choice.row
        plan = fastroof.compile_plan(
            "qwen3-32b-fp8", row["gpu"], fastroof.load_tables(row["gpu"]), tp=row["tp"], engine="vllm",
            max_num_batched_tokens=row["max_num_batched_tokens"],
            max_num_seqs=1024 + row["max_num_batched_tokens"] + 8,
        )  # fmt: skip
        answer = estimate(
            plan, row["isl"], row["osl"], row["clients"] / row["replicas"],
            max_num_batched_tokens=row["max_num_batched_tokens"], max_num_seqs=row["max_num_seqs"],
            requests_per_client="steady",
        )  # fmt: skip
        for name in ("ttft_ms", "tpot_ms", "request_latency_ms"):
            assert getattr(answer, name) == pytest.approx(row[name], rel=1e-12), name
        assert answer.tokens_per_s_per_gpu == pytest.approx(row["tokens_per_s_per_gpu"], rel=1e-12)


def test_tokens_cost_what_the_gpus_cost(found: Recommendation) -> None:
    deployment = found.deployments[0]
    assert deployment is not None
    assert deployment.price is not None
    row, price = deployment.row, deployment.price
    an_hour = {"h100": 2.0, "h200": 3.0}[row["gpu"]] * 4
    assert price.an_hour == an_hour
    assert price.of_output == pytest.approx(an_hour / (row["tokens_per_s"] * 3600) * 1e6)
    all_tokens = row["requests_per_s"] * (1000 + 200) * 3600
    assert price.of_all == pytest.approx(an_hour / all_tokens * 1e6)
    assert all(
        other.row["cost_per_million_tokens"] >= price.of_output for other in found.answers.answers[0].choices
    )


def test_without_prices_throughput_counts_and_nothing_costs_anything() -> None:
    spec = deployment_question("llama-3.1-8b", **QUESTION)
    assert spec.objective == "tokens_per_s_per_gpu"
    assert deployment_question("llama-3.1-8b", **QUESTION, gpu_hour_price=2).objective == "cost"
    assert (
        deployment_question("llama-3.1-8b", **QUESTION, gpu_hour_price=2, objective="goodput").objective
        == "goodput"
    )


def test_the_command_is_of_the_deployment(found: Recommendation) -> None:
    deployment = found.deployments[0]
    assert deployment is not None
    assert deployment.benchmark is not None
    row = deployment.row
    words = deployment.servers["server"].words()
    assert words[:3] == ["vllm", "serve", "Qwen/Qwen3-32B-FP8"]
    values = dict(itertools.pairwise(words))
    assert values["--tensor-parallel-size"] == str(row["tp"])
    assert values["--max-num-batched-tokens"] == str(row["max_num_batched_tokens"])
    assert values["--max-num-seqs"] == str(row["max_num_seqs"])
    assert values["--gpu-memory-utilization"] == "0.92"
    assert 1200 <= int(values["--max-model-len"]) <= load_model("qwen3-32b").max_position
    options = dict(itertools.pairwise(deployment.benchmark.words()))
    assert (options["--random-input-len"], options["--random-output-len"]) == ("1000", "200")
    assert int(options["--max-concurrency"]) == round(row["clients"] / row["replicas"])
    assert "arguments are those of vLLM 0.33.0" in deployment.notes
    assert (
        "vLLM, profile vllm >=0.33 (not validated beyond 0.28, half of the costs of 0.19), from"
        in deployment.notes[0]
    )


def test_a_context_that_has_no_room_is_cut() -> None:
    found = by_means("llama-3.1-70b", "h100", total_gpus=4, isl=1000, osl=100, runners_up=99, **NO_LIMITS)
    for choice in found.answers.answers[0].choices:
        deployment = fastroof.sweep.deployment_of(found.specs[0], choice)
        values = dict(itertools.pairwise(deployment.servers["server"].words()))
        most = min(load_model("llama-3.1-70b").max_position, choice.row["max_kv_tokens"])
        assert 1100 <= int(values["--max-model-len"]) <= most


@pytest.mark.slow
def test_limits_that_nothing_keeps_have_a_nearest() -> None:
    question = QUESTION | {"ttft_ms": 10, "tpot_ms": 4}
    answer = by_means("llama-3.1-70b", **question).answers.answers[0]
    assert answer.choices == ()
    assert answer.nearest is not None
    row, exceeds = answer.nearest.row, answer.nearest.exceeds
    assert exceeds == {"ttft_ms": row["ttft_ms"] / 10, "tpot_ms": row["tpot_ms"] / 4}
    assert list(exceeds.values()) == sorted(exceeds.values(), reverse=True)
    # limits a hair above what it has are kept by something, below by nothing
    worst = max(exceeds.values())
    kept = {"ttft_ms": 10 * worst * 1.0001, "tpot_ms": 4 * worst * 1.0001}
    assert by_means("llama-3.1-70b", **QUESTION | kept).answers.answers[0].choices
    lost = {"ttft_ms": 10 * worst * 0.9999, "tpot_ms": 4 * worst * 0.9999}
    assert by_means("llama-3.1-70b", **QUESTION | lost).answers.answers[0].choices == ()


@pytest.mark.slow
def test_specs_give_the_nearest_of_each_load() -> None:
    spec = written_spec(isl=[500, 2000], constraints={"tpot_ms": 1}, gpus=["h100"], gpu_hour_price=2.0)
    answers = best_by_means(spec).answers
    assert [answer.group["isl"] for answer in answers] == [500, 2000]
    for answer in answers:
        assert answer.nearest is not None
        assert answer.nearest.row["isl"] == answer.group["isl"]
        assert answer.nearest.exceeds["tpot_ms"] > 1


@pytest.mark.slow
def test_a_model_that_does_not_fit_names_the_gpus_that_it_needs() -> None:
    found = by_means("llama-3.1-70b", "h100", **QUESTION | {"total_gpus": 1})
    answer = found.answers.answers[0]
    assert (answer.choices, answer.nearest, found.deployments) == ((), None, (None,))
    assert (
        found.would_fit["llama-3.1-70b"]["total_gpus"] == 2
        or found.would_fit["llama-3.1-70b"]["total_gpus"] == 4
    )
    more = found.would_fit["llama-3.1-70b"]["total_gpus"]
    fewer = by_means("llama-3.1-70b", "h100", **QUESTION | {"total_gpus": more // 2, **NO_LIMITS})
    assert fewer.answers.answers[0].choices == ()


@pytest.mark.slow
def test_fewer_gpus_than_given_may_hold_a_model() -> None:
    # 12 GPUs have replicas of 1, 2 and 4 at most; one of 8 holds it
    found = recommend("deepseek-v3", "h200", total_gpus=12, isl=3000, osl=600, allow_modelled=True)
    assert found.answers.answers[0].choices == ()
    assert found.would_fit["deepseek-v3"]["total_gpus"] == 8


def test_a_note_names_kernels_that_were_not_measured() -> None:
    def notes(model: str, **options: Any) -> str:
        (deployment,) = by_means(model, "h100", total_gpus=1, isl=3000, osl=600, **options).deployments
        assert deployment is not None
        return "\n".join(deployment.notes)

    # chunks after the first are computed from whole prompts, and all kernels are measured
    assert "modelled" not in notes("llama-3.1-8b", max_num_batched_tokens=2048)
    mamba = notes("bamba-9b", allow_modelled=True)
    assert "modelled from the datasheet, not measured (standard error 22%): mamba recurrence (mamba)" in mamba


def test_limits_that_are_not_given_are_those_of_a_person() -> None:
    question: dict[str, Any] = {"total_gpus": 2, "isl": 4000, "osl": 200}
    found = by_means("llama-3.1-8b", **question)
    (answer,) = found.answers.answers
    # in one step, on both GPUs
    plans = [fastroof.compile_plan("llama-3.1-8b", "h100", tp=tp, engine="vllm") for tp in (1, 2)]
    alone_ms = min(estimate(plan, 4000, 200, 1, requests_per_client="steady").ttft_ms for plan in plans)
    assert answer.default_limits == {"ttft_ms": math.ceil(1000 + alone_ms), "tpot_ms": 50.0}
    # as if they had been given
    given = by_means("llama-3.1-8b", **question, **answer.default_limits)
    assert given.answers.answers[0].choices == answer.choices
    assert given.specs == found.specs
    assert answer.choices[0].row["ttft_ms"] < answer.default_limits["ttft_ms"]
    free = by_means("llama-3.1-8b", **question, **NO_LIMITS).answers.answers[0]
    assert (free.default_limits, free.choices[0].margins) == ({}, ())
    assert free.choices[0].row["ttft_ms"] > 5000
    # a specification has its own limits only
    written = best_by_means({"models": ["llama-3.1-8b"], "isl": 100, "osl": 20, "clients": 1}).answers[0]
    assert (written.default_limits, written.choices[0].margins) == ({}, ())


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"tpot_ms": 30}, ["ttft_ms"]),
        ({"ttft_ms": math.inf}, ["tpot_ms"]),
        ({"itl_ms": 30}, ["ttft_ms"]),
        # which bounds both
        ({"request_latency_ms": 9000}, []),
        ({"osl": 1}, ["ttft_ms"]),
    ],
)
def test_one_limit_leaves_the_default_of_the_other(given: dict[str, Any], names: list[str]) -> None:
    question: dict[str, Any] = {"total_gpus": 1, "isl": 100, "osl": 20, "max_num_seqs": 16, **given}
    (answer,) = by_means("llama-3.1-8b", **question).answers.answers
    assert list(answer.default_limits) == names
    (shared,) = fastroof.recommend_shared(
        {**question, "traffic": [{"model": "llama-3.1-8b", "requests_per_s": 1}]}, percentile=None
    ).shares
    assert shared.traffic.default_limits == answer.default_limits


def test_layouts_fill_the_gpus() -> None:
    dense, sparse = load_model("llama-3.1-70b"), load_model("deepseek-v3")
    for total, node in itertools.product((1, 2, 3, 6, 8, 12, 16, 32, 64), (1, 4, 8)):
        for model in (dense, sparse):
            splits = layouts_to_try(model, total, node)
            assert splits, (total, node)
            assert len({json.dumps(split, sort_keys=True) for split in splits}) == len(splits)
            for split in splits:
                gpus = split["tp"] * split.get("dp", 1) * split.get("pp", 1)
                assert total % gpus == 0
                assert split["tp"] * split.get("dp", 1) <= node or split["ep"] == gpus
                assert split["tp"] <= node
            within = layouts_to_try(model, total, node, node)
            assert within == [split for split in splits if split["tp"] * split.get("dp", 1) <= node
                              and "pp" not in split]  # fmt: skip
    assert [split["tp"] for split in layouts_to_try(dense, 8, 8)] == [1, 2, 4, 8]
    assert {"tp": 1, "dp": 8, "ep": 8} in layouts_to_try(sparse, 8, 8)
    assert [split["pp"] for split in layouts_to_try(dense, 256, 8) if "pp" in split] == [2, 4, 8]


def test_ways_to_deploy_are_those_that_are_possible_and_known() -> None:
    both = ("aggregated", "disaggregated")
    call = functools.partial(deployment_question, "llama-3.1-8b")
    assert call(**QUESTION).mode == both
    assert call(**QUESTION).link_bytes_per_s is None
    assert call(**QUESTION | {"total_gpus": 1}).mode == both[:1]
    assert call(**QUESTION | {"osl": 1}).mode == both[:1]
    assert call(**QUESTION, prefix_hit=0.5).mode == both[:1]
    assert call(**QUESTION, mode="disaggregated").mode == both[1:]
    # workers of several nodes send over the network
    wide = call(**QUESTION | {"total_gpus": 16})
    assert wide.mode == both
    assert wide.link_bytes_per_s == fastroof.load_gpu("h100").inter_node_bytes_per_s
    assert call(**QUESTION | {"total_gpus": 16}, mode="aggregated").link_bytes_per_s is None
    with pytest.raises(SweepError, match="most_gpus_each must be a whole number from 1"):
        call(**QUESTION, most_gpus_each=0)


@pytest.mark.slow
@pytest.mark.parametrize("percentile", [None, pytest.param(99.0, marks=pytest.mark.release)])
def test_ways_to_deploy_are_compared_with_the_best_within_a_node(percentile: float | None) -> None:
    question: dict[str, Any] = {"total_gpus": 16, "isl": 3000, "osl": 600, "ttft_ms": 1500, "tpot_ms": 40}
    options: dict[str, Any] = {"percentile": percentile, "requests": 2000}
    found = recommend("deepseek-v3.1", "h200", **question, **options)
    (answer,) = found.answers.answers
    by_family = {one.family: one for one in answer.families}
    names = ["aggregated", "experts_across_nodes", "stages_across_nodes", "disaggregated"]
    assert list(by_family) == names
    # each as if only it had been asked for
    alone = recommend(
        "deepseek-v3.1", "h200", **question, **options, mode="aggregated", most_gpus_each=8, runners_up=0
    ).answers.answers[0]
    within = alone.choices[0]
    assert alone.families == ()
    assert by_family["aggregated"].choice is not None
    assert by_family["aggregated"].choice.row == within.row
    for name, one in by_family.items():
        if one.choice is None:
            assert (name, one.gain) == ("stages_across_nodes", None)
            continue
        row = one.choice.row
        assert one.gain == pytest.approx(one.choice.objective / within.objective - 1.0)
        assert (row["mode"] == "disaggregated") == (name == "disaggregated")
        assert (row["tp"] * row["dp"] * row["pp"] > 8) == name.endswith("_nodes") or name == "disaggregated"
    wide = by_family["experts_across_nodes"].choice
    assert wide is not None
    assert wide.row["ep"] == 16
    apart = by_family["disaggregated"]
    assert apart.gain is not None
    assert apart.gain > 0.3
    assert answer.choices[0].row == apart.choice.row  # type: ignore[union-attr]
    assert found.deployments[0] is not None
    assert list(found.deployments[0].servers) == ["prefill", "decode"]


def test_clients_reach_what_can_run_and_steps_what_is_cut() -> None:
    spec = deployment_question("llama-3.1-8b", **QUESTION, max_num_seqs=10)
    assert spec.clients == tuple(range(1, 42))
    spec = deployment_question("llama-3.1-8b", **QUESTION | {"total_gpus": 32}, max_num_seqs=[10, 20])
    assert (spec.clients[0], spec.clients[-1]) == (1, 641)
    for one, after in itertools.pairwise(spec.clients):
        assert one < after <= max(one + 1, 1.01 * one)
    assert spec.max_num_seqs == (10, 20)
    assert spec.max_num_batched_tokens == (1024, 2048, 4096, 8192)
    # as many as a spec may ask for, however many GPUs there are
    most = deployment_question("llama-3.1-8b", **QUESTION | {"total_gpus": 2**16}).clients
    assert (most[-1], len(most) < 2000) == (2**20, True)
    whole = deployment_question("llama-3.1-8b", **QUESTION | {"isl": 20_000}, engine="trtllm-1.1")
    assert whole.max_num_batched_tokens == (1024, 2048, 4096, 8192, 16_384, 32_768)
    own = {load_engine(name).scheduling.max_num_seqs for name in ("vllm", "trtllm")}
    tried = deployment_question("llama-3.1-8b", **QUESTION, engine=["vllm", "trtllm"]).max_num_seqs
    assert own <= set(tried)
    assert set(SEQS) <= {*tried, 1024}
    assert deployment_question(
        "llama-3.1-8b", **QUESTION, max_num_batched_tokens=512
    ).max_num_batched_tokens == (512,)


LIMITS = [
    ("qwen3-32b", "vllm-0.12", 1, 264.6, 459.0),
    # the other model and the other engine
    pytest.param("llama-3.1-70b", "vllm", 2, 170.3, 205.6, marks=pytest.mark.release),
    pytest.param("llama-3.1-70b", "vllm-0.12", 2, 0.0, 177.3, marks=pytest.mark.release),
    pytest.param("qwen3-32b", "vllm", 1, 451.3, 503.5, marks=pytest.mark.release),
]
"""Questions that memory decides: model, engine, GPUs, and tokens/s a GPU with 1,024 requests and searched.

Before 0.17, vLLM sorts the logits of all requests to sample, which takes more memory than later versions.
"""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "engine", "gpus", "own", "searched"), LIMITS)
def test_a_smaller_limit_on_requests_is_found_and_printed(
    model: str, engine: str, gpus: int, own: float, searched: float
) -> None:
    question: dict[str, Any] = {"total_gpus": gpus, "isl": 2000, "osl": 200, "engine": engine, **NO_LIMITS}
    found = by_means(model, "h100", **question)
    best = found.answers.answers[0].choices[0]
    alone = {}
    for seqs in SEQS:
        choices = by_means(model, "h100", **question, max_num_seqs=seqs).answers.answers[0].choices
        alone[seqs] = choices[0].objective if choices else 0.0
    # a smaller limit alone tries fewer clients, of whom a larger share is in the front end
    assert best.objective == pytest.approx(max(alone.values()), rel=3e-3)
    assert max(alone.values()) == pytest.approx(alone[best.row["max_num_seqs"]], rel=1e-9)
    assert alone[1024] == pytest.approx(own, rel=0.02)
    assert best.objective == pytest.approx(searched, rel=0.02)
    # the engine's own unless a smaller one gives more
    assert best.row["max_num_seqs"] == max(
        seqs for seqs, rate in alone.items() if rate == pytest.approx(max(alone.values()), rel=1e-9)
    )
    deployment = found.deployments[0]
    assert deployment is not None
    values = dict(itertools.pairwise(deployment.servers["server"].words()))
    assert values["--max-num-seqs"] == str(best.row["max_num_seqs"])
    assert values["--max-num-batched-tokens"] == str(best.row["max_num_batched_tokens"])


def test_a_limit_that_changes_nothing_is_the_engines_own() -> None:
    found = by_means("llama-3.1-8b", "h100", total_gpus=1, isl=500, osl=100, tpot_ms=10)
    assert found.answers.answers[0].choices[0].row["max_num_seqs"] == 1024


def test_unknown_options_are_errors() -> None:
    unknown: dict[str, Any] = {"engines": "vllm"}
    with pytest.raises(TypeError, match="'engines'"):
        by_means("llama-3.1-8b", **QUESTION, **unknown)


@pytest.mark.slow
def test_no_threads_start_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a thread")

    monkeypatch.setattr("fastroof.sweep.executors.ThreadPoolExecutor", refuse)
    small = {"models": ["llama-3.1-8b"], "tp": 1, "isl": 100, "osl": 10, "clients": 1}
    found = fastroof.sweep.recommend_for_spec(small, percentile=None).answers
    assert found.answers == best_by_means(small).answers
    assert fastroof.run_sweep(small, tmp_path / "rows.parquet").candidates == found.candidates
    with pytest.raises(AssertionError, match="a thread"):
        fastroof.run_sweep(small, tmp_path / "rows.parquet", threads=2)


def test_the_default_engine_is_that_of_sweeps() -> None:
    spec = load_spec({"models": ["llama-3.1-8b"], "isl": 1, "osl": 2, "clients": 1})
    assert deployment_question("llama-3.1-8b", **QUESTION).engine == spec.engine


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "Qwen/Qwen3-33B"}, ModelError, "did you mean qwen3-32b"),
        ({"model": []}, SweepError, "at least one"),
        ({"gpu": "h101"}, fastroof.GpuError, "h100"),
        ({"total_gpus": 0}, SweepError, "total_gpus"),
        ({"isl": 0}, SweepError, "isl"),
        ({"ttft_ms": -1}, SweepError, "ttft_ms"),
        ({"dtype": "fp9"}, SweepError, "fp8"),
        ({"engine": "vlllm"}, SweepError, "vllm"),
        ({"gpu_hour_price": {"b200": 1}}, SweepError, "missing for h100"),
        ({"objective": "speed"}, SweepError, "tokens_per_s_per_gpu"),
    ],
)
def test_wrong_questions_name_valid_values(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    options = {"model": "llama-3.1-8b", "gpu": "h100", **QUESTION, **changes}
    with pytest.raises(error, match=words):
        by_means(**options)


@pytest.mark.slow
def test_models_are_answered_one_by_one_in_order() -> None:
    found = by_means(["qwen3-8b", "llama-3.1-8b", "Qwen/Qwen3-8B"], **QUESTION)
    assert [answer.group["model"] for answer in found.answers.answers] == ["qwen3-8b", "llama-3.1-8b"]
    assert len(found.deployments) == len(found.specs) == 2
    assert found.answers.candidates == sum(spec.num_candidates for spec in found.specs)
    # a deployment under another load is no other deployment
    compared = 2 * 3 * 4 * 13
    assert found.answers.configurations == sum(spec.num_configurations for spec in found.specs) == compared


def test_a_spec_with_workers_apart_has_a_command_of_each(tmp_path: Path) -> None:
    spec = written_spec(
        mode=["disaggregated"],
        engine=["sglang"],
        gpus=["h100"],
        gpu_hour_price=2.0,
        max_num_batched_tokens=8192,
    )
    found = fastroof.sweep.recommend_for_spec(spec, percentile=None)
    deployment = found.deployments[0]
    assert deployment is not None
    assert list(deployment.servers) == ["prefill", "decode"]
    for role, command in deployment.servers.items():
        assert command.words()[command.words().index("--disaggregation-mode") + 1] == role
    assert "sglang-router 0.3.2 on port 8100 gives requests to" in " ".join(deployment.notes)
    names = {path.name for path in found.save(tmp_path)} - {"deployments.parquet", "deployments.csv"}
    starts = {f"start-{name}.sh" for name in ("prefill", "decode", "router", "all")}
    assert names == {"benchmark.sh", "kubernetes.yaml", *starts}


def test_a_runtime_without_an_engine_has_no_command() -> None:
    found = by_means("llama-3.1-8b", **QUESTION, engine="kernels")
    deployment = found.deployments[0]
    assert deployment is not None
    assert deployment.servers == {}
    assert "is not a server" in deployment.notes[0]


def test_a_gpu_that_runs_another_ones_kernels_is_marked() -> None:
    with pytest.warns(UserWarning, match="comes from kernels of h100"):
        found = by_means("qwen3-8b", "h100_nvl", **{**QUESTION, "total_gpus": 1})
    deployment = found.deployments[0]
    assert deployment is not None
    assert "modelled from kernels of h100, scaled (standard error 15%): all kernels" in deployment.notes


def test_a_gpu_without_tables_uses_its_datasheet_and_is_marked() -> None:
    question = {**QUESTION, "total_gpus": 2}
    with pytest.warns(UserWarning, match="datasheet model"):
        found = by_means("qwen3-8b", "mi300x", **question)
    deployment = found.deployments[0]
    assert deployment is not None
    assert deployment.row["origin"] == "modelled"
    assert "modelled from the datasheet, not measured (standard error 45%): all kernels" in deployment.notes


@pytest.mark.slow
def test_a_custom_model_is_served_and_measured_by_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    config = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "head_dim": 128,
        "max_position_embeddings": 131072,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for given in (folder, folder / "config.json"):
        deployment = by_means(given, **QUESTION | {"total_gpus": 1}).deployments[0]
        assert deployment is not None
        assert deployment.benchmark is not None
        assert deployment.servers["server"].words()[2] == str(folder)
        assert dict(itertools.pairwise(deployment.benchmark.words()))["--model"] == str(folder)
        assert any("container" in note for note in deployment.notes)


@pytest.mark.filterwarnings("ignore:no measured tables:UserWarning")
def test_a_gpu_given_by_its_file_is_recommended_with_its_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "h100_own.toml").write_text(
        'title = "H100 of our own"\nname = "h100_own"\nnum_sms = 132\nsource = "datasheet"\n'
        "[peak_tflops]\nbf16 = 835\nfp8 = 1671\n[memory]\nhbm_tb_per_s = 3.9\nhbm_gib = 93\n"
        "[links]\nnvlink_gb_per_s = 300\n"
    )
    monkeypatch.chdir(tmp_path)
    question: dict[str, Any] = {"total_gpus": 1, "isl": 1000, "osl": 200, "tpot_ms": 15}
    found = by_means(
        "llama-3.1-8b", "h100_own.toml", tables="datasheet", gpu_hour_price={"h100_own.toml": 2.5}, **question
    )
    assert found.deployments[0].row["gpu"] == "h100_own"
    assert found.deployments[0].price is not None
    assert found.deployments[0].price.an_hour == 2.5
    question["gpu_hour_price"] = {"h100_own": 2.5}
    modelled = by_means("llama-3.1-8b", "h100_own.toml", **question)
    assert modelled.deployments[0].row == found.deployments[0].row
    with pytest.warns(UserWarning, match="no GPU is called h100_own: it is read from"):
        by_name = by_means("llama-3.1-8b", "h100_own", **question, tables="datasheet")
    assert by_name.deployments[0].row == found.deployments[0].row
