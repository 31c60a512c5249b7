"""Sweeps over capacities: rows against one search after the other, ranks, pieces that are put together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import fastroof
from fastroof import SweepError, Trace, Workload, capacity, compile_plan, load_tables, run_sweep
from fastroof.simulation.pools import ROUTINGS
from fastroof.sweep import CapacitySpec, CapacitySummary, checkpoint, load_spec
from fastroof.sweep.capacities.spec import ROUTERS
from fastroof.sweep.checkpoint import parts_folder
from fastroof.sweep.kinds import sweep_of
from tests.sweep.conftest import stopped_after

WORKLOAD = {"requests": 120, "isl": "lognormal:600:0.5", "osl": 40, "seed": 2}
SPEC: dict[str, Any] = {
    "models": ["llama-3.1-8b", "qwen3-32b"],
    "tp": [1, 2, 4],
    "max_num_seqs": [16, 128],
    "workload": WORKLOAD,
    "slo": {"ttft_p99_ms": 300, "tpot_p90_ms": 25},
    # a search to 1 % simulates ten times as many requests
    "tolerance": 0.05,
}
EVERY_SIZE = {"start": 1, "stop": 1024, "step": 1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[CapacitySummary, list[dict[str, Any]], Path]:
    output = tmp_path_factory.mktemp("capacities") / "whole.parquet"
    summary = run_sweep(SPEC, output)
    assert isinstance(summary, CapacitySummary)
    return summary, pq.read_table(output).to_pylist(), output


def test_a_row_is_what_capacity_answers(whole: Any) -> None:
    _, rows, _ = whole
    tables = load_tables("h100")
    for row in rows[::3]:
        plan = compile_plan(
            row["model"], "h100", tables, tp=row["tp"], engine="vllm",
            max_num_batched_tokens=row["max_num_batched_tokens"], max_num_seqs=row["max_num_seqs"],
        )  # fmt: skip
        most = capacity(
            plan, Workload(rate=1.0, **WORKLOAD), **SPEC["slo"], block_size=None,
            max_num_batched_tokens=row["max_num_batched_tokens"], max_num_seqs=row["max_num_seqs"],
            tolerance=SPEC["tolerance"],
        )  # fmt: skip
        for name in ("requests_per_s", "limit", "low", "high", "relative_error", "requests_per_s_per_gpu"):
            assert row[name] == getattr(most, name)
        assert row["max_kv_tokens"] == plan.memory_of(max_num_seqs=row["max_num_seqs"]).max_kv_tokens
        assert most.at_capacity == {
            name: row[name] for name in ("ttft_p99_ms", "tpot_p90_ms") if row[name] is not None
        }


def test_requests_are_by_default_within_the_tokens_of_a_step(tmp_path: Path) -> None:
    limits = {"models": ["llama-3.1-8b"], "tp": [1], "max_num_seqs": None, "max_num_batched_tokens": [256]}
    run_sweep(SPEC | limits, tmp_path / "few.parquet")
    assert pq.read_table(tmp_path / "few.parquet")["max_num_seqs"].to_pylist() == [256]


def test_every_deployment_is_a_row_or_counted_and_ranked_by_what_a_gpu_serves(whole: Any) -> None:
    summary, rows, _ = whole
    assert summary.candidates == 12
    assert summary.rows == len(rows)
    lost = {name: count for name, count in summary.infeasible.items() if name != "limits"}
    assert len(rows) == 12 - sum(lost.values())
    assert summary.feasible == sum(row["requests_per_s"] > 0 for row in rows)
    for model in SPEC["models"]:
        served = [row["requests_per_s_per_gpu"] for row in rows if row["model"] == model]
        assert served == sorted(served, reverse=True)
    assert [best["model"] for best in summary.best] == SPEC["models"]
    assert all(best in rows for best in summary.best)
    assert {row["max_num_batched_tokens"] for row in rows} == {8192}
    assert all(row["low"] <= row["requests_per_s"] <= row["high"] for row in rows)
    json.dumps(summary.document(), default=str)


def test_the_best_of_each_group_are_the_first_of_all(whole: Any, tmp_path: Path) -> None:
    changes = {"keep": "best", "k": 1, "per": ["model", "tp"]}
    run_sweep(SPEC | changes, tmp_path / "best.parquet")
    best = pq.read_table(tmp_path / "best.parquet").to_pylist()
    firsts: dict[Any, Any] = {}
    for row in whole[1]:
        firsts.setdefault((row["model"], row["tp"]), row)
    assert {(row["model"], row["tp"]): row for row in best} == firsts


@pytest.fixture
def small_units(cut_units: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    cut_units(1)
    monkeypatch.setattr(checkpoint, "PART_EVERY_S", 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("small_units")
def test_threads_and_a_resumed_run_give_the_same_rows(whole: Any, tmp_path: Path) -> None:
    _, rows, _ = whole
    assert len(sweep_of(load_spec(SPEC)).units()) == 12
    run_sweep(SPEC, tmp_path / "threads.parquet", threads=3)
    assert pq.read_table(tmp_path / "threads.parquet").to_pylist() == rows
    output = tmp_path / "resumed.parquet"
    stopped_after(SPEC, output, 5)
    assert parts_folder(output).is_dir()
    with pytest.raises(SweepError, match="resume"):
        run_sweep(SPEC, output)
    run_sweep(SPEC, output, resume=True)
    assert pq.read_table(output).to_pylist() == rows


@pytest.mark.slow
@pytest.mark.usefixtures("small_units")
def test_a_trace_that_changed_is_another_sweep(tmp_path: Path) -> None:
    def write(arrivals: str) -> None:
        lines = [f"{at},500,20" for at in arrivals.split()]
        (tmp_path / "mine.csv").write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]))

    spec_file = tmp_path / "spec.toml"
    spec_file.write_text(
        'models = ["llama-3.1-8b"]\ntp = [1, 2]\n[workload]\ntrace = "./mine.csv"\n[slo]\nttft_p99_ms = 300\n'
    )
    write("0 0.5 0.7 0.75 1.5 2.0")
    loaded = load_spec(spec_file)
    assert isinstance(loaded, CapacitySpec)
    assert len(loaded.requests.trace() if isinstance(loaded.requests, Workload) else loaded.requests) == 6
    output = tmp_path / "rows.parquet"
    stopped_after(loaded, output, 1)
    write("0 0.5 0.7 0.75 1.5 2.5")
    with pytest.raises(SweepError, match="models, GPUs, engines and requests"):
        run_sweep(spec_file, output, resume=True)
    write("0 0.5 0.7 0.75 1.5 2.0")
    summary = run_sweep(spec_file, output, resume=True)
    assert isinstance(summary, CapacitySummary)
    assert summary.rows == 2


def test_a_trace_is_read_by_the_workload(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("Begun;In;Out;Model\n2025-10-26 02:59:00;10;1;a\n2025-10-26 03:01:00;20;2;b\n")
    workload = {"trace": str(path), "columns": {"arrival": "begun", "input": "in", "output": "out"}}
    spec = load_spec(SPEC | {"workload": workload})
    assert isinstance(spec, CapacitySpec)
    assert isinstance(spec.requests, Trace)
    assert spec.requests.duration_s == 120
    spec = load_spec(SPEC | {"workload": workload | {"where": ["model=b"]}})
    assert isinstance(spec, CapacitySpec)
    assert isinstance(spec.requests, Trace)
    assert spec.requests.input_tokens.tolist() == [20]
    with pytest.raises(SweepError, match=r"workload: .*has no rows with model=c"):
        load_spec(SPEC | {"workload": workload | {"where": "model=c"}})


def test_deployments_without_a_plan_or_room_are_counted_with_the_reason(tmp_path: Path) -> None:
    changes = {
        "models": ["llama-3.1-70b"],
        "tp": [1, 2],
        "total_gpus": [2, 3],
        "max_num_seqs": 16,
        "gpus": ["h100"],
    }
    summary = run_sweep(SPEC | changes, tmp_path / "rows.parquet")
    assert isinstance(summary, CapacitySummary)
    assert summary.candidates == 4
    # 3 GPUs are no two; 141 GB do not fit one, whether there are two or three of them
    assert summary.infeasible["layout"] == 1
    assert summary.infeasible["engine"] == 2
    assert "leave no room for KV cache" in summary.skipped["engine"][0]
    assert summary.rows == summary.candidates - 3


def test_nothing_to_evaluate_has_a_reason(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="no room"):
        run_sweep(SPEC | {"models": ["llama-3.1-405b"], "tp": 1}, tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slo": {}}, "slo: a capacity needs a limit"),
        ({"slo": {"ttft_p99": 3}}, "slo: unknown limit 'ttft_p99'"),
        ({"slo": {"ttft_p99_ms": "3"}}, "slo: ttft_p99_ms must be milliseconds above 0, got '3'"),
        ({"slo": {"goodput": 0.9}}, "slo: goodput"),
        ({"slo": {"goodput": 2, "ttft_ms": 3}}, "slo: goodput must be a share"),
        ({"slo": 3}, "slo: got 3, need a table of limits"),
        ({"slo": None}, "slo: got None, need a table of limits"),
        ({"workload": {"rate": 3}}, "workload: unknown key: rate"),
        ({"workload": {"trace": "/nowhere/mine.csv"}}, "workload: .*mine.csv"),
        ({"workload": {"trace": "x.csv", "seed": 3}}, "workload: unknown key: seed; the keys are with"),
        ({"workload": {"requests": "many"}}, "workload: requests must be a whole number"),
        ({"workload": {"clients": 4}}, "workload: unknown key: clients"),
        ({"workload": []}, r"workload: got \[\], need a table"),
        ({"isl": 4000}, "isl: unknown key"),
        ({"keep": "pareto"}, "keep: got 'pareto'"),
        ({"tp": [3]}, "tp: got 3"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"replicas": [1, 2], "total_gpus": 8}, "total_gpus: determines replicas"),
        ({"per": ["isl"]}, "per: got 'isl'"),
        ({"tolerance": 0}, "tolerance"),
        ({"tolerance": 0.6}, "tolerance: got 0.6, need .* a number up to 0.5"),
        ({"draws": 0}, "draws"),
        ({"draws": 1001}, "draws: got 1001, need .* a whole number up to 1,000"),
        ({"router": "mine"}, "router: got 'mine', need one of round_robin"),
        ({"workload": {"trace": "example"}, "draws": 2}, "draws: a trace from a file has one draw"),
        ({"engine": ["no-such"]}, "engine: unknown engine"),
        ({"replicas": EVERY_SIZE, "max_num_seqs": EVERY_SIZE}, "deployments are too many"),
    ],
)  # fmt: skip
def test_a_wrong_spec_is_refused_with_the_key_and_valid_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SweepError, match=message):
        load_spec(SPEC | changes)


def test_sessions_are_refused(tmp_path: Path) -> None:
    trace = tmp_path / "agents.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens,session\n0,9,2,1\n0,20,2,1\n1,9,2,2\n")
    trace.write_text("arrival_s,input_tokens,output_tokens,parent\n0,9,2,\n0,20,2,0\n1,9,2,\n")
    with pytest.raises(SweepError, match="has sessions, which sweeps of capacities do not serve"):
        load_spec(SPEC | {"workload": {"trace": str(trace)}})


@pytest.mark.slow
def test_routers_are_those_of_replicas(tmp_path: Path) -> None:
    assert ROUTERS == ROUTINGS
    changes = {
        "models": ["llama-3.1-8b"],
        "tp": 1,
        "max_num_seqs": 32,
        "replicas": [1, 2],
        "workload": WORKLOAD,
    }
    by_router = []
    for router in ("round_robin", "least_load"):
        run_sweep(SPEC | changes | {"router": router}, tmp_path / "rows.parquet")
        rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
        by_router.append({row["replicas"]: row["requests_per_s"] for row in rows})
    assert by_router[0][1] == by_router[1][1]
    assert by_router[0][2] != by_router[1][2]


def test_a_missing_half_is_named() -> None:
    for key in ("slo", "workload"):
        with pytest.raises(SweepError, match=f"{key}: missing, need a table"):
            load_spec({name: value for name, value in SPEC.items() if name != key})


def test_changes_are_added_to_the_limits_and_the_workload() -> None:
    changed = load_spec(SPEC, {"slo": {"ttft_p99_ms": 200}, "workload": {"requests": 50}})
    assert isinstance(changed, CapacitySpec)
    assert changed.slo == {"ttft_p99_ms": 200.0, "tpot_p90_ms": 25.0}
    assert changed.workload == {**WORKLOAD, "requests": 50}
    assert load_spec(changed) is changed
    assert load_spec(json.loads(changed.model_dump_json())) == changed


@pytest.mark.slow
def test_on_ray_the_rows_are_the_same(whole: Any, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray")
    summary = run_sweep(SPEC, tmp_path / "ray.parquet", "ray", threads=2)
    assert pq.read_table(tmp_path / "ray.parquet").to_pylist() == whole[1]
    assert isinstance(summary, CapacitySummary)
    assert summary.best == whole[0].best


def test_the_schema_has_units_and_limits(whole: Any) -> None:
    schema = pq.read_schema(whole[2])
    assert schema.field("tpot_p90_ms").metadata[b"unit"] == b"ms"
    assert b"at most 25" in schema.field("tpot_p90_ms").metadata[b"meaning"]
    assert schema.field("requests_per_s_per_gpu").metadata[b"unit"] == b"1/s"
    assert schema.metadata[b"fastroof.kind"] == b"capacities"
    assert fastroof.__version__.encode() == schema.metadata[b"fastroof.version"]
