"""``fastroof sweep`` on deployments: flags, the example, the schema, what it prints and where it is quiet."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from fastroof.cli import app
from fastroof.cli import sweep as sweep_summary
from fastroof.sweep import DeploymentSpec, StepSpec, load_spec, run_sweep

FLAGS = [
    *("--model", "llama-3.1-8b,qwen3-8b", "--tp", "1,2", "--gpus", "2", "--isl", "1000"),
    *("--osl", "100", "--clients", "{start = 1, stop = 8, factor = 2}", "--ttft", "200"),
]
SPEC: dict[str, Any] = {
    "models": ["llama-3.1-8b", "qwen3-8b"], "tp": [1, 2], "total_gpus": 2, "isl": 1000, "osl": 100,
    "clients": [1, 2, 4, 8], "constraints": {"ttft_ms": 200},
}  # fmt: skip


def run(*arguments: str | Path) -> Any:
    result = CliRunner().invoke(app, ["sweep", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.slow
def test_flags_are_a_specification(tmp_path: Path) -> None:
    printed = run(*FLAGS, "-o", tmp_path / "r.parquet", "--threads", "2")
    run_sweep(SPEC, tmp_path / "truth.parquet")
    assert pq.read_table(tmp_path / "r.parquet").equals(pq.read_table(tmp_path / "truth.parquet"))
    assert "Best deployments at isl 1,000, osl 100 within the limits" in printed.stdout
    assert "16 deployments estimated in" in printed.stdout
    assert "sweep: 16 of 16 evaluations" in printed.stderr


@pytest.mark.slow
def test_flags_change_a_file(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(
        'models = ["llama-3.1-8b"]\nisl = 1000\nosl = 100\nclients = 1\n[constraints]\ntpot_ms = 100\n'
    )
    output = tmp_path / "r.parquet"
    keys = ("--isl", "[10, 20]", "--set", "max_num_seqs=7", "--set", "keep=all", "--set", "k=3")
    run(tmp_path / "my.toml", *keys, "-o", output)
    spec = load_spec(json.loads(pq.read_metadata(output).metadata[b"fastroof.spec"]))
    assert isinstance(spec, DeploymentSpec)
    assert (spec.isl, spec.max_num_seqs, spec.keep, spec.k) == ((10, 20), (7,), "all", 3)
    assert spec.constraints.tpot_ms == 100
    run(tmp_path / "my.toml", "--ttft", "50", "-o", output)
    spec = load_spec(json.loads(pq.read_metadata(output).metadata[b"fastroof.spec"]))
    assert isinstance(spec, DeploymentSpec)
    # a limit beside those of the file, not instead of them
    assert (spec.constraints.ttft_ms, spec.constraints.tpot_ms) == (50, 100)


def test_steps_can_be_swept_by_flags_too(tmp_path: Path) -> None:
    output = tmp_path / "r.csv"
    run("--model", "llama-3.1-8b", "--set", "batch_size=[1, 8]", "--set", "kv_len=100", "-o", output)
    assert pacsv.read_csv(output).num_rows == 1


def test_a_repeated_option_is_a_list(tmp_path: Path) -> None:
    output = tmp_path / "r.parquet"
    flags = ["--tp", "1", "--isl", "1000", "--osl", "100", "--set", "k=1", "-o", output]
    models = ("--model", "llama-3.1-8b", "--model", "qwen3-8b,qwen3-32b")
    loads = ("--set", "clients=1", "--set", "clients=[2, 3]")
    run(*models, *loads, "--dtype", "fp8", "--dtype", "bf16", *flags)
    spec = load_spec(json.loads(pq.read_metadata(output).metadata[b"fastroof.spec"]))
    assert isinstance(spec, DeploymentSpec)
    assert spec.models == ("llama-3.1-8b", "qwen3-8b", "qwen3-32b")
    assert (spec.clients, spec.dtype) == ((1, 2, 3), ("bf16", "fp8"))


def test_quiet_prints_nothing(tmp_path: Path) -> None:
    result = run(*FLAGS, "--set", "k=5", "--quiet", "-o", tmp_path / "r.jsonl")
    assert (result.stdout, result.stderr) == ("", "")
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 2 * 5


@pytest.mark.slow
def test_the_summary_as_json(tmp_path: Path) -> None:
    result = run(*FLAGS, "--json", "--set", "histogram=true", "-o", tmp_path / "r.parquet")
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["candidates"] == 16
    assert found["feasible"] + sum(found["infeasible"].values()) == 16
    assert [best["model"] for best in found["best"]] == ["llama-3.1-8b", "qwen3-8b"]
    assert sum(map(sum, found["histograms"].values())) == found["feasible"]
    for key in found:
        assert key in run("--help-all").stdout


def test_the_example_runs_and_the_schema_describes_it() -> None:
    example = tomllib.loads(run("--example").stdout)
    assert isinstance(load_spec(example), DeploymentSpec)
    schema = json.loads(run("--schema").stdout)
    deployments, steps, capacities = schema["anyOf"]
    assert capacities["required"] == ["models", "workload", "slo"]
    for kind, properties in ((DeploymentSpec, deployments), (StepSpec, steps)):
        assert set(properties["properties"]) == set(kind.model_fields)
    assert set(example) <= set(deployments["properties"])
    assert "Constraints" in schema["$defs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--isl", "0", "--osl", "1", "--model", "llama-3.1-8b", "--clients", "1"],
            "isl: got 0 at position 0",
        ),
        (["--isl", "1", "--model", "nobody,nothing"], "unknown model 'nothing'"),
        (["--set", "isl"], "takes KEY=VALUE"),
        (
            ["--isl", "1", "--osl", "1", "--model", "qwen3-8b", "--clients", "1", "--set", "keep=best,all"],
            "keep: got ['best', 'all'], need",
        ),
    ],
)
def test_wrong_flags_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["sweep", *arguments])
    assert result.exit_code != 0
    assert message in f"{result.output} {result.exception}"


@pytest.mark.slow
def test_what_cannot_be_is_printed_by_reason(tmp_path: Path) -> None:
    result = run(
        *("--model", "qwen2.5-7b", "--tp", "4,8", "--isl", "1000,40000", "--osl", "100"),
        *("--rate", "1,1e6", "--price", "2", "--engine", "vllm,trtllm-1.0"),
        *("--prefix-hit", "0,0.5", "-o", tmp_path / "r.parquet"),
    )
    found = (
        "the model does not divide by tp",
        "beyond the model's context",
        "cannot be reached",
        "requests/s",
    )
    for words in (*found, "cost of 1M tokens", "left out, the model does not divide by tp: qwen2.5-7b"):
        assert words in result.stdout
    result = run(*FLAGS, "--tpot", "0.01", "--isl", "10,20", "-o", tmp_path / "r.parquet")
    assert "No deployment is within the limits" in result.stdout
    result = run(*FLAGS, "--isl", "10,20", "--mode", "disaggregated", "-o", tmp_path / "r.parquet")
    assert "1 prefill + 1 decode x tp 1" in result.stdout
    assert "isl" in result.stdout.splitlines()[2]


def test_many_groups_are_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_summary, "MOST_GROUPS", 1)
    assert "and 1 more groups" in run(*FLAGS, "-o", tmp_path / "r.parquet").stdout
