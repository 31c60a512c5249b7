"""``fastroof best --model``: it prints what the library answers; errors name valid values."""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import fastroof
from fastroof.cli.best import parse_prices
from fastroof.cli.output import percent
from fastroof.sweep import deployment_question
from tests.command_line import good as printed_by
from tests.command_line import refused

SIZES = ("best", "--model", "Qwen/Qwen3-8B", "--gpus", "2", "--isl", "500", "--osl", "50")
QUESTION = (*SIZES, "--ttft", "inf", "--tpot", "20")
# fewer candidates, for what does not depend on how many are compared
FEWER = (*QUESTION, "--max-num-seqs", "64")
SPEC = """
models = ["qwen3-8b"]
tp = [1, 2]
total_gpus = 2
mode = ["aggregated", "disaggregated"]
isl = 500
osl = 50
clients = %s
max_num_batched_tokens = [1024, 2048, 4096, 8192]
max_num_seqs = [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
[constraints]
tpot_ms = 20
"""


good = functools.cache(printed_by)


def fewer(**changes: Any) -> fastroof.sweep.Recommendation:
    return recommended(max_num_seqs=64, **changes)


def recommended(**changes: Any) -> fastroof.sweep.Recommendation:
    limits = {"ttft_ms": math.inf, "tpot_ms": 20.0}
    return fastroof.recommend("Qwen/Qwen3-8B", total_gpus=2, isl=500, osl=50, **limits, **changes)


def command_in(text: str, program: str) -> list[str]:
    """The command that a person would copy out of what is printed."""
    lines = text[text.index(f" {program}") :].split("\n\n")[0]
    return shlex.split(lines.replace(" \\\n", " "))


def test_one_line_equals_the_answer_of_recommend() -> None:
    truth = fewer(gpu_hour_price={"h100": 2.5})
    found = json.loads(good(*FEWER, "--price", "h100=2.5", "--json"))
    (answer,), (deployment,) = found["answers"], found["deployments"]
    (meant,), (how,) = truth.answers.answers, truth.deployments
    assert how is not None
    assert [choice["row"] for choice in answer["choices"]] == [choice.row for choice in meant.choices]
    assert found["objective"] == "cost_per_million_tokens"
    assert deployment["servers"]["server"]["command"] == how.servers["server"].words()
    assert how.benchmark is not None
    assert deployment["benchmark"]["command"] == how.benchmark.words()
    assert how.price is not None
    assert deployment["price"] == how.price._asdict()
    assert (deployment["release"], deployment["notes"]) == ("0.33.0", list(how.notes))
    explained = good("best", "--help-all")
    most = answer["choices"][0]["percentile"]
    for key in (*found, *answer, *answer["choices"][0], *most, *deployment, *deployment["price"]):
        assert key in explained
    assert (answer["limits_on"], answer["simulated"]) == ("p99", meant.simulated)
    assert most == {**meant.choices[0].percentile._asdict()}  # type: ignore[union-attr]
    assert deployment["benchmark_rate"] == meant.choices[0].row["requests_per_s"] / how.copies


def test_limits_by_default_are_the_first_line_and_in_json() -> None:
    args = (*SIZES, "--max-num-seqs", "64", "--mean", "--mode", "aggregated")
    (answer,) = json.loads(good(*args, "--json"))["answers"]
    ttft, tpot = answer["default_limits"]["ttft_ms"], answer["default_limits"]["tpot_ms"]
    of_ttft = f"limits by default: TTFT <= {ttft:,.0f} ms (1 s + the prompt alone)"
    first, _, rest = good(*args).partition("\n")
    assert (1000 < ttft < 1100, tpot) == (True, 50)
    assert first == f"{of_ttft}, TPOT <= 50 ms; change with --ttft, --tpot"
    given = good(*args, "--ttft", f"{ttft:g}", "--tpot", "50")
    assert given.rpartition("\n\n")[0] == rest.rpartition("\n\n")[0]
    assert good(*args, "--tpot", "20").startswith(f"{of_ttft}; change with --ttft\n")
    assert good(*args, "--ttft", "inf").startswith("limits by default: TPOT <= 50 ms; change with --tpot\n")
    assert good(*args, "--ttft", "inf", "--tpot", "inf").startswith("qwen3-8b at isl 500, osl 50: run ")
    shared = (*args[:3], *args[5:], "--rate", "5")
    assert good(*shared).startswith("limits by default: TTFT <= 1,0")
    (share,) = json.loads(good(*shared, "--json"))["shares"]
    assert share["default_limits"] == share["answer"]["default_limits"]
    assert share["default_limits"]["tpot_ms"] == 50
    assert "default_limits" in good("best", "--help-all")


@pytest.mark.slow
def test_a_simpler_deployment_is_recommended_with_what_is_ahead() -> None:
    args = ("best", "--model", "llama-3.1-8b", "--gpus", "2", "--isl", "1000", "--osl", "200", "--mean",
            "--ttft", "300", "--tpot", "12")  # fmt: skip
    first, second, *_ = json.loads(good(*args, "--json"))["answers"][0]["choices"]
    assert [choice["row"]["mode"] for choice in (first, second)] == ["aggregated", "disaggregated"]
    assert -second["tie_within"] < second["behind"] < 0
    text = good(*args)
    assert ": run 1 x tp 2 on 2 x h100" in text
    ahead, error = percent(-second["behind"]), percent(second["tie_within"])
    assert f"1 prefill + 1 decode x tp 1 would be {ahead} ahead, within the error of such a " in text
    assert f" {error}: the simpler deployment is recommended\n" in text
    assert f" {ahead} ahead (tie) " in text


@pytest.mark.slow
def test_means_and_percentiles_are_named_as_in_python() -> None:
    # other tests read what is printed of p99, the default
    for options, of in ((("--mean",), None), (("--percentile", "90"), 90.0)):
        (meant,) = fewer(percentile=of).answers.answers
        found = json.loads(good(*FEWER, *options, "--json"))
        (answer,) = found["answers"]
        name = "mean" if of is None else f"p{of:g}"
        assert answer["limits_on"] == meant.limits_on == name
        assert [choice["row"] for choice in answer["choices"]] == [choice.row for choice in meant.choices]
        text = good(*FEWER, *options)
        assert (
            "limits are on means of a steady state: percentiles"
            if of is None
            else f"limits are on {name}, by"
        ) in text
        assert ("--max-concurrency" if of is None else "--request-rate") in text
        assert (f"{name} TPOT ms" in text) == (of is not None)
        free_ms = answer["choices"][0]["row"]["ttft_ms"]
        assert f"without a limit, on average: TTFT {free_ms:,.1f} ms\n" in text
        limit = answer["choices"][0]["margins"][0]
        assert f"limit: {'' if of is None else f'{name} '}TPOT {limit['value']:,.4g} of 20 ms" in text
    assert "give --mean or --percentile, got both" in refused(*FEWER, "--mean", "--percentile", "99")


@pytest.mark.slow
@pytest.mark.release
def test_gaps_between_tokens_can_be_limited() -> None:
    loose, tight = (
        json.loads(good(*FEWER, "--itl", itl, "--json"))["answers"][0]["choices"][0] for itl in ("60", "12")
    )
    assert {margin["name"] for margin in tight["margins"]} == {"itl_ms", "tpot_ms"}
    assert tight["percentile"]["values_ms"]["itl_p99_ms"] <= 12
    assert tight["objective"] < loose["objective"]
    untold = tuple(word for word in FEWER if word not in ("--tpot", "20"))
    means = json.loads(good(*untold, "--itl", "12", "--mean", "--json"))["answers"][0]["choices"][0]
    tpot = json.loads(good(*untold, "--tpot", "12", "--mean", "--json"))["answers"][0]["choices"][0]
    assert means["row"] == tpot["row"]


@pytest.mark.slow
@pytest.mark.release
def test_a_specification_and_one_line_print_the_same(tmp_path: Path) -> None:
    spec = tmp_path / "my.toml"
    clients = deployment_question("qwen3-8b", total_gpus=2, isl=500, osl=50).clients
    spec.write_text(SPEC % list(clients or ()))
    one_line, written = good(*QUESTION), good("best", str(spec))
    # but for the id that was named, and how many were compared
    assert one_line.rpartition("\n\n")[0] == written.rpartition("\n\n")[0]
    assert "Qwen/Qwen3-8B" in written


@pytest.mark.slow
def test_what_to_run_can_be_copied() -> None:
    text = good(*FEWER, "--price", "2")
    (how,) = fewer(gpu_hour_price=2).deployments
    assert how is not None
    assert how.benchmark is not None
    assert command_in(text, "vllm serve") == how.servers["server"].words()
    assert command_in(text, "vllm bench serve") == how.benchmark.words()
    assert "for 1M output tokens" in text
    assert text.count("limit: p99 TPOT") == 1
    trt = good(*FEWER, "--engine", "trtllm-1.1")
    (how,) = fewer(engine="trtllm-1.1").deployments
    assert how is not None
    assert command_in(trt, "trtllm-serve") == how.servers["server"].words("engine.yaml")
    assert "free_gpu_memory_fraction: 0.9" in trt


@pytest.mark.slow
def test_options_repeat() -> None:
    options = (
        "--model llama-3.1-8b --gpu h100 --gpu h200 --dtype bf16 --dtype fp8 --engine vllm --engine sglang "
        "--runners-up 40 --mean --json"
    )
    found = json.loads(good(*FEWER, *options.split()))
    assert [answer["group"]["model"] for answer in found["answers"]] == ["qwen3-8b", "llama-3.1-8b"]
    for answer in found["answers"]:
        rows = [choice["row"] for choice in answer["choices"]]
        for column, values in (
            ("gpu", {"h100", "h200"}),
            ("dtype", {"bf16", "fp8"}),
            ("engine", {"vllm", "sglang"}),
        ):
            assert {row[column] for row in rows} == values


@pytest.mark.slow
def test_files_are_written_and_named(tmp_path: Path) -> None:
    text = good(*FEWER, "--save", str(tmp_path / "out"))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    written = {"start.sh", "start-all.sh", "start-router.sh", "benchmark.sh", "kubernetes.yaml"}
    assert names == {"deployments.parquet", "deployments.csv", *written}
    assert all(name in text for name in names)
    saved = json.loads(good(*FEWER, "--save", str(tmp_path / "out"), "--json"))["saved"]
    assert {Path(path).name for path in saved} == names
    text = good(*QUESTION, "--save", str(tmp_path / "llm-d"), "--manifest", "llm-d")
    assert {"llm-d.yaml", "llm-d-router.yaml"} < {path.name for path in (tmp_path / "llm-d").iterdir()}
    assert "llm-d-router.yaml" in text


@pytest.mark.slow
def test_unreachable_limits_print_the_nearest_and_memory_more_gpus() -> None:
    text = good(*SIZES, "--tpot", "0.1", "--ttft", "1")
    assert "no deployment is within the limits" in text
    assert "nearest: " in text
    assert re.search(r"with (one client|\d+ clients): TPOT", text)
    assert text.count("times the limit") == 2
    assert "Looser limits, less load or more GPUs may help" in text
    too_long = good("best", "--model", "qwen3-8b", "--gpus", "1", "--isl", "90000", "--osl", "50")
    assert "beyond the model's context" in too_long
    assert "Shorter requests or another model may help" in too_long
    large = good("best", "--model", "llama-3.1-70b", "--gpus", "1", "--isl", "500", "--osl", "50")
    assert "x h100 would hold it, as " in large


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("best", "--model", "qwen3-8b", "--isl", "5"), "--gpus, --osl are missing"),
        (("best", "--gpus", "8"), "--gpus belongs to --model; name a model with --model"),
        ((*QUESTION, "--manifest", "dynamo"), "--manifest dynamo needs --save DIR"),
        (("best", "my.toml", "--isl", "5", "--dtype", "fp8"), "my.toml sets that: change it there"),
        (("best", "my.toml", "--model", "qwen3-8b"), "give --model or a specification"),
        ((*QUESTION, "--model", "Qwen/Qwen3-9B"), "did you mean qwen3-"),
        ((*QUESTION, "--gpu", "h101"), "h100"),
        ((*QUESTION, "--engine", "tgi"), "engine: unknown engine 'tgi'; `fastroof engines` lists"),
        ((*QUESTION, "--price", "h100"), "--price takes GPU=PRICE"),
        ((*QUESTION, "--price", "h100=-1"), "--price takes GPU=PRICE"),
        ((*QUESTION, "--price", "h100=nan"), "--price takes GPU=PRICE"),
        ((*QUESTION, "--price", "=3"), "--price takes GPU=PRICE"),
        ((*QUESTION, "--price", "2", "--price", "h100=3"), "got both"),
        ((*QUESTION, "--price", "b200=3"), "missing for h100"),
        ((*QUESTION, "--percentile", "0"), "percentile"),
        ((*QUESTION, "--save", __file__), "test_best.py is not a folder"),
        ((*QUESTION, "--save", f"{__file__}/new"), "test_best.py is not a folder"),
        ((*QUESTION, "--save", "/dev/null/new"), "/dev/null is not a folder"),
        ((*QUESTION, "--save", "new", "--manifest", "helm"), "manifest must be"),
    ],
)
def test_wrong_questions_name_valid_values(arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(*arguments)


def test_prices_are_for_one_or_for_all() -> None:
    assert parse_prices(["H100=2.5", "b200=6"]) == {"H100": 2.5, "b200": 6.0}
    assert parse_prices(["2.5"]) == 2.5
    assert parse_prices([]) is None


def test_the_question_knows_no_default_engine_of_its_own() -> None:
    (how,) = fewer(percentile=None).deployments
    assert how is not None
    assert how.row["engine"] == fastroof.sweep.DeploymentSpec.model_fields["engine"].default[0]


SHARED = (
    "best", "--model", "llama-3.1-8b", "--model", "Qwen/Qwen3-8B", "--gpus", "2", "--isl", "500", "--isl",
    "300", "--osl", "50", "--rate", "20", "--rate", "10", "--tpot", "20", "--max-num-batched-tokens", "2048",
    "--max-num-seqs", "64",
)  # fmt: skip


@pytest.mark.slow
def test_models_with_rates_share_the_gpus() -> None:
    truth = fastroof.recommend_shared(
        {
            "total_gpus": 2, "osl": 50, "tpot_ms": 20, "max_num_batched_tokens": 2048, "max_num_seqs": 64,
            "traffic": [
                {"model": "llama-3.1-8b", "isl": 500, "requests_per_s": 20},
                {"model": "Qwen/Qwen3-8B", "isl": 300, "requests_per_s": 10},
            ],
        }
    )  # fmt: skip
    found = json.loads(good(*SHARED, "--json"))
    assert (found["scale"], found["gpus_left"], found["needed_gpus"]) == (truth.scale, 0, truth.needed_gpus)
    for share, meant in zip(found["shares"], truth.shares, strict=True):
        assert meant.recommendation is not None
        (how,) = meant.recommendation.deployments
        assert how is not None
        assert (share["model"], share["gpus"]) == (meant.traffic.model, meant.gpus)
        assert share["held_requests_per_s"] == meant.requests_per_s
        assert share["answer"]["choices"][0]["row"] == how.choice.row
        assert share["deployment"]["servers"]["server"]["command"] == how.servers["server"].words()
    explained = good("best", "--help-all")
    for key in (*found, *found["shares"][0]):
        assert key in explained


@pytest.mark.slow
def test_shared_gpus_are_printed_with_commands_and_files(tmp_path: Path) -> None:
    text = good(*SHARED, "--save", str(tmp_path / "out"))
    assert "2 x h100 can serve" in text
    assert "all wanted rates need 2 GPUs: llama-3.1-8b 1; Qwen/Qwen3-8B 1" in text
    assert command_in(text, "vllm serve Qwen")[:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {
        "1-meta-llama-llama-3-1-8b",
        "2-qwen-qwen3-8b",
    }
    spec = tmp_path / "shared.toml"
    spec.write_text(
        "total_gpus = 2\nosl = 50\ntpot_ms = 20\nmax_num_batched_tokens = 2048\nmax_num_seqs = 64\n"
        '[[traffic]]\nmodel = "llama-3.1-8b"\nisl = 500\nrequests_per_s = 20\n'
        '[[traffic]]\nmodel = "Qwen/Qwen3-8B"\nisl = 300\nrequests_per_s = 10\n'
    )
    assert good("best", str(spec)).rpartition("\n\n")[0] == good(*SHARED).rpartition("\n\n")[0]


@pytest.mark.slow
def test_rates_beyond_the_gpus_print_how_many_suffice() -> None:
    beyond = list(SHARED)
    beyond[beyond.index("20")] = "90"
    text = good(*beyond)
    assert "of 90 requests/s" in text
    assert "all wanted rates need" in text
    beyond[beyond.index("2")] = "1"
    assert "1 x h100 cannot run all models" in good(*beyond)
    nothing = good(*SIZES, "--tpot", "20", "--rate", "3", "--ttft", "0.01", "--max-num-seqs", "1")
    assert "2 x h100 cannot run this model\nQwen/Qwen3-8B holds 3 requests/s on no number of GPUs" in nothing
    assert "nearest: " in nothing


@pytest.mark.slow
def test_a_rate_without_gpus_is_answered_with_the_fewest() -> None:
    options = ("--isl", "500", "--osl", "50", *SHARED[-4:], "--mean")
    args = ("best", "--model", "llama-3.1-8b", *options, "--rate")
    found = json.loads(good(*args, "70", "--json"))
    assert found["total_gpus"] == found["needed_gpus"] == found["shares"][0]["gpus"] > 1
    assert found["scale"] >= 1.0
    text = good(*args, "70", "--tpot", "0.1")
    assert text.splitlines()[1] == "llama-3.1-8b holds 70 requests/s on no number of GPUs that was tried"
    assert "nearest: " in text
    assert "--model needs --isl, --osl too, as in --rate 20" in refused(
        "best", "--model", "qwen3-8b", "--rate", "3"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (*SHARED, "--rate", "3"),
            "--rate was given 3 times for 2 x --model: give it once for all models, or",
        ),
        ((*SHARED, "--objective", "goodput"), "--objective does not go with --rate"),
        (
            (*SHARED, "--gpu", "h100", "--gpu", "h200"),
            "--rate shares GPUs of one kind, got --gpu h100 --gpu h200",
        ),
        ((*QUESTION, "--isl", "3"), "--isl was given 2 times: once per --model needs --rate too"),
        (("best", "--rate", "3"), "--rate belongs to --model"),
    ],
)
def test_wrong_traffic_is_refused(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(*arguments)
