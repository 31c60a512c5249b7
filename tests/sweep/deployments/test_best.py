"""The deployment to run: against a sweep of everything, its reasons, and answers without one."""

from __future__ import annotations

import functools
import itertools
import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fastroof import SweepError, run_sweep
from fastroof.sweep import DeploymentSpec, load_spec
from fastroof.sweep.answers import Choice
from fastroof.sweep.best import CHOICE_COLUMNS, best_deployments, nearest_to_limits
from tests.command_line import run

by_means = functools.partial(best_deployments, percentile=None)

SPEC: dict[str, Any] = {
    "models": ["llama-3.1-8b", "qwen3-32b"],
    "tp": [1, 2, 4],
    "dtype": ["bf16", "fp8"],
    "total_gpus": [4, 8],
    "isl": [500, 4000],
    "osl": 200,
    "clients": [1, 8, 20, 64],
    "max_num_batched_tokens": [2048, 8192],
    "constraints": {"ttft_ms": 300, "tpot_ms": 20},
}


def every_row(spec: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """All candidates within the limits, from a sweep that keeps all."""
    run_sweep(spec | {"keep": "all"}, folder / "all.parquet")
    rows: list[dict[str, Any]] = pq.read_table(folder / "all.parquet").to_pylist()
    return [row for row in rows if row["exceeds"] is None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "column", "is_less_better"),
    [
        ({}, "tokens_per_s_per_gpu", False),
        # as the first, of another column
        pytest.param(
            {"objective": "tokens_per_s_per_user"}, "tokens_per_s_per_user", False, marks=pytest.mark.release
        ),
        pytest.param({"objective": "goodput"}, "tokens_per_s", False, marks=pytest.mark.release),
        ({"objective": "cost", "gpu_hour_price": 2.0}, "cost_per_million_tokens", True),
    ],
)
def test_it_is_the_best_of_all(
    changes: dict[str, Any], column: str, is_less_better: bool, tmp_path: Path
) -> None:
    spec = SPEC | changes
    rows = every_row(spec, tmp_path)
    found = by_means(spec, runners_up=99)
    assert found.objective == column
    assert [(a.group["model"], a.group["isl"]) for a in found.answers] == [
        (model, isl) for model in SPEC["models"] for isl in SPEC["isl"]
    ]
    best = min if is_less_better else max
    for answer in found.answers:
        of_group = [row for row in rows if all(row[name] == value for name, value in answer.group.items())]
        kinds = {tuple(row[name] for name in CHOICE_COLUMNS) for row in of_group}
        values = [choice.objective for choice in answer.choices]
        assert values[0] == best(row[column] for row in of_group)
        assert {tuple(choice.row[name] for name in CHOICE_COLUMNS) for choice in answer.choices} == kinds
        assert len(answer.choices) == len(kinds)
        for choice in answer.choices:
            kind = [row for row in of_group if all(row[name] == choice.row[name] for name in CHOICE_COLUMNS)]
            assert choice.objective == best(row[column] for row in kind)
            assert choice.row in kind
        for one, after in itertools.pairwise(values):
            assert (one <= after * (1 + 1e-8)) if is_less_better else (one * (1 + 1e-8) >= after)


@pytest.mark.slow
def test_counts_add_up(tmp_path: Path) -> None:
    found = by_means(SPEC, threads=2)
    summary: Any = run_sweep(SPEC, tmp_path / "best.parquet")
    by_model = {answer.group["model"]: answer for answer in found.answers}
    assert found.candidates == summary.candidates == sum(a.candidates for a in by_model.values())
    assert summary.feasible == sum(a.feasible for a in by_model.values())
    for answer in by_model.values():
        assert answer.candidates == answer.feasible + sum(answer.infeasible.values())
    assert by_means(SPEC).answers == found.answers


@pytest.mark.slow
def test_why_it_is_the_best() -> None:
    answer = by_means(SPEC | {"isl": 4000}).answers[1]
    assert len(answer.choices) == 4
    first = answer.choices[0]
    assert (first.behind, first.is_tie) == (0.0, False)
    for choice in answer.choices:
        assert {margin.name for margin in choice.margins} == {"ttft_ms", "tpot_ms"}
        assert choice.relative_error == choice.row["relative_error"]
        for margin in choice.margins:
            assert margin.value == choice.row[margin.name] <= margin.limit
            assert margin.left == 1 - margin.value / margin.limit
        assert choice.margins[0].left <= choice.margins[1].left
        assert choice.behind == pytest.approx(1 - choice.objective / first.objective)
        assert choice.at_edge == (choice.row["clients"] == 64)
    for choice in answer.choices[1:]:
        own = "dtype", "kv_dtype"
        error = math.hypot(choice.row["relative_error"], first.row["relative_error"])
        error = math.hypot(0.055, 0.01, 0.01) if all(choice.row[n] == first.row[n] for n in own) else error
        assert choice.is_tie == (abs(math.log(1 - choice.behind)) < error)
    assert by_means(SPEC | {"isl": 4000}, runners_up=0).answers[1].choices == (first,)


def test_equals_are_ordered_by_gpus_then_latency() -> None:
    spec = {
        "models": "llama-3.1-8b", "tp": [1, 2, 4, 8], "total_gpus": [4, 8], "isl": 1000, "osl": 100,
        "rate": [1, 2], "objective": "cost", "gpu_hour_price": 1,
        "per": ["model", "request_rate_per_s"],
    }  # fmt: skip
    found = by_means(spec)
    assert [answer.group["request_rate_per_s"] for answer in found.answers] == [1, 2]
    for answer in found.answers:
        four = [choice for choice in answer.choices if choice.row["total_gpus"] == 4]
        assert answer.choices[: len(four)] == tuple(four)
        assert len(four) == 3
        assert all(choice.is_tie for choice in four[1:])
        latency = [choice.row["request_latency_ms"] for choice in four]
        assert latency == sorted(latency)
        assert not answer.choices[-1].is_tie
        assert answer.choices[-1].behind == pytest.approx(0.5)
        # the load is the given one, not the chosen one
        assert not any(choice.at_edge for choice in answer.choices)


@pytest.mark.slow
def test_models_without_a_deployment_are_answered_too() -> None:
    spec = SPEC | {"models": ["llama-3.1-70b", "llama-3.1-8b"], "tp": [1, 2], "isl": 4000, "dtype": "bf16"}
    # sorts the logits of all requests, for which it keeps memory
    spec["engine"] = ["vllm-0.12"]
    none, some = by_means(spec).answers
    assert none.group["model"] == "llama-3.1-70b"
    assert none.choices == ()
    assert none.feasible == 0
    # in bf16 neither one nor two of these GPUs hold it beside what the engine keeps for itself
    assert none.infeasible == {"memory": none.candidates}
    assert some.choices
    # a model that no tp splits is named
    found = by_means(spec | {"models": ["qwen2.5-7b", "llama-3.1-8b"], "tp": [8]})
    assert found.answers[0].choices == ()
    assert found.answers[0].infeasible == {"tp": found.answers[0].candidates}
    assert "qwen2.5-7b cannot run with tp=8" in found.skipped[0]


@pytest.mark.slow
def test_it_shows_progress() -> None:
    seen: list[tuple[int, int, str]] = []
    began = time.perf_counter()
    found = by_means(SPEC, progress=lambda *reported: seen.append(reported))
    assert 0 < found.total_s <= time.perf_counter() - began
    assert seen[0] == (0, found.candidates, "candidates")
    assert seen[-1] == (found.candidates, found.candidates, "candidates")
    assert seen == sorted(seen)


def test_wrong_questions_name_valid_values() -> None:
    steps = {"models": "llama-3.1-8b", "batch_size": 1, "kv_len": 9}
    with pytest.raises(SweepError, match="the spec is not a deployment spec"):
        by_means(steps)
    with pytest.raises(SweepError, match="runners_up must be a whole number of at least 0, got -1"):
        by_means(SPEC, runners_up=-1)
    with pytest.raises(SweepError, match="threads must be a whole number of at least 1, got True"):
        by_means(SPEC, threads=True)
    with pytest.raises(SweepError, match="unknown model"):
        by_means(SPEC | {"models": ["llama-9"]})


# -- the command ---------------------------------------------------------------------------------


command = partial(run, "best")


@pytest.mark.slow
@pytest.mark.release
def test_the_packaged_example_is_answered() -> None:
    code, out, _ = command("--runners-up", "1")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("llama-3.1-70b at isl 4,000, osl 500: run ")
    assert " of 30 ms (" in lines[2]
    assert " of 500 ms (" in lines[2]
    assert lines[-1].startswith("32 deployments compared, ")
    assert " of them simulated, in " in lines[-1]
    rows = [line for line in lines if " x tp " in line and "run " not in line]
    assert len(rows) == 4


def toml(folder: Path, *more: str) -> str:
    lines = [
        'models = ["llama-3.1-8b", "llama-3.1-70b"]', "tp = [1, 2]", "isl = 2000", "osl = 100",
        "clients = [1, 4]", *more,
    ]  # fmt: skip
    path = folder / "spec.toml"
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.slow
@pytest.mark.release
def test_the_command_gives_the_same_answers(tmp_path: Path) -> None:
    path = toml(tmp_path, "[constraints]", "tpot_ms = 12")
    code, out, err = command(path, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    expected = best_deployments(path)
    assert found["objective"] == "tokens_per_s_per_gpu"
    assert found["candidates"] == expected.candidates
    for answer, known in zip(found["answers"], expected.answers, strict=True):
        assert answer["group"] == known.group
        assert [choice["row"] for choice in answer["choices"]] == [choice.row for choice in known.choices]
    explained = command("--help-all")[1]
    answer = found["answers"][0]
    for key in (*found, *answer, *Choice._fields, *answer["choices"][0]["margins"][0]):
        assert key in explained


@pytest.mark.slow
def test_it_prints_why(tmp_path: Path) -> None:
    code, out, _ = command(toml(tmp_path, "[constraints]", "tpot_ms = 12"), "--mean")
    assert code == 0
    assert "\n  limit: TPOT " in out
    assert "largest load that was tried" in out
    assert "llama-3.1-70b at isl 2,000, osl 100: no deployment is within the limits" in out
    assert "none of 4 candidates (deployments at a load) qualifies:" in out
    # without limits, and as a question of cost
    code, out, _ = command(toml(tmp_path, 'objective = "cost"', "gpu_hour_price = 2"))
    assert out.splitlines()[2].startswith("  without a limit, on average: TTFT ")
    assert "cost of 1M tokens" in out


@pytest.mark.slow
def test_it_prints_equivalent_runners_up(tmp_path: Path) -> None:
    spec = toml(tmp_path, "total_gpus = 2")
    text = Path(spec).read_text().replace("clients = [1, 4]", "rate = 0.5")
    Path(spec).write_text(text)
    out = command(spec)[1]
    assert "1 runner-up does as well, less simply, with longer requests or on more GPUs" in out
    code, _, err = command(str(tmp_path / "none.toml"))
    assert code == 2
    assert "cannot be read" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype", "kv_dtype"),
    [
        ("qwen3-32b-fp8", "fp8_block", "bf16"),
        ("qwen3-32b-fp8-static", "fp8", "fp8"),
        ("qwen3-32b", "bf16", "bf16"),
    ],
)
def test_the_best_is_in_the_formats_of_its_checkpoint_and_names_them(
    model: str, dtype: str, kv_dtype: str
) -> None:
    spec = {"models": [model], "tp": [2], "isl": 1000, "osl": 100, "clients": [8]}
    (answer,) = by_means(spec).answers
    row = answer.choices[0].row
    assert (row["dtype"], row["kv_dtype"]) == (dtype, kv_dtype)
    named = best_deployments(spec | {"dtype": [dtype], "kv_dtype": [kv_dtype]}).answers[0].choices[0].row
    assert named == row


def test_nearest_is_what_is_least_over_its_worst_limit() -> None:
    """Not the least mean excess over the limits: one limit far beyond reach is not a near miss."""
    spec = load_spec(
        {"models": ["llama-3.1-8b"], "isl": 9, "osl": 9, "clients": 1,
         "constraints": {"ttft_ms": 100.0, "tpot_ms": 10.0}}
    )  # fmt: skip
    assert isinstance(spec, DeploymentSpec)
    rows: list[dict[str, Any]] = [{"ttft_ms": 400.0, "tpot_ms": 1.0}, {"ttft_ms": 210.0, "tpot_ms": 25.0}]
    for given in (rows, rows[::-1]):
        nearest = nearest_to_limits(spec, given)
        assert nearest is not None
        assert nearest.row == rows[1]
        assert list(nearest.exceeds.items()) == [("tpot_ms", 2.5), ("ttft_ms", 2.1)]
