"""Deployment sweeps: equal to naive enumeration, nothing lost, rows that agree with the estimates."""

from __future__ import annotations

import json
import math
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fastroof
from fastroof import SpeculativeDecoding, SweepError, Tables, compile_plan
from fastroof.columns import ORIGINS
from fastroof.compiled import closed_loops
from fastroof.compiled import deployments as loops
from fastroof.plan.speculation import speculated
from fastroof.serving import estimate
from fastroof.sweep import DeploymentSummary, checkpoint, load_spec, results, run_sweep
from fastroof.sweep.deployments import COLUMNS, evaluate, rows
from fastroof.sweep.deployments import evaluate as plans
from fastroof.sweep.deployments import kind as units
from fastroof.sweep.deployments.kind import INFEASIBLE
from fastroof.sweep.deployments.rows import BOUNDS, _of_draft
from fastroof.sweep.kind import load_tables_by_gpu
from fastroof.sweep.kinds import sweep_of
from fastroof.units import US_PER_MS
from tests.reference import deployments as naive

SMALL: dict[str, Any] = {
    "models": ["llama-3.1-8b"],
    "tp": [1, 2],
    "isl": [500, 3000],
    "osl": [2, 200],
    "clients": [1, 3, 40],
    "total_gpus": [2, 3],
}
LIMITED: dict[str, Any] = {
    **SMALL,
    "mode": ["aggregated", "disaggregated"],
    "max_num_batched_tokens": [1024, 8192],
    "constraints": {"ttft_ms": 150.0, "tpot_ms": 9.0, "request_latency_ms": 1500.0, "total_gpus": 2},
}


def swept(
    tmp_path: Path, spec: dict[str, Any], **options: Any
) -> tuple[DeploymentSummary, list[dict[str, Any]]]:
    summary = run_sweep(spec, tmp_path / "r.parquet", **options)
    assert isinstance(summary, DeploymentSummary)
    return summary, pq.read_table(tmp_path / "r.parquet").to_pylist()


def assert_rows_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    exact = ("model", "mode", "tp", "dtype", "isl", "osl", "clients", "max_num_batched_tokens",
             "replicas", "prefill_workers", "decode_workers", "total_gpus", "ttft_ms", "tpot_ms",
             "request_latency_ms", "wait_ms")  # fmt: skip
    close = ("tokens_per_s", "tokens_per_s_per_gpu", "tokens_per_s_per_user", "kv_share")
    for row, truth in zip(found, expected, strict=True):
        assert {name: row[name] for name in exact} == {name: truth[name] for name in exact}
        for name in close:
            assert row[name] == pytest.approx(truth[name], rel=1e-12), name


@pytest.mark.slow
@pytest.mark.loops
def test_all_rows_equal_the_naive_ones(tmp_path: Path, truth: list[dict[str, Any]]) -> None:
    summary, found = swept(tmp_path, {**LIMITED, "keep": "all"})
    assert summary.candidates == len(truth) == load_spec(LIMITED).num_candidates
    reasons = Counter(row["reason"] for row in truth)
    assert summary.feasible == reasons.pop(None) > 0
    assert summary.infeasible == dict(reasons)
    assert {"ttft", "tpot", "request_latency", "layout", "total_gpus"} == set(reasons)
    there = [row for row in truth if "ttft_ms" in row]
    assert_rows_equal(found, there)
    assert [row["exceeds"] for row in found] == [row["reason"] for row in there]
    assert summary.rows == len(there)


@pytest.mark.slow
@pytest.mark.loops
def test_prompts_that_an_engine_does_not_cut_are_counted(tmp_path: Path) -> None:
    spec = {"models": ["llama-3.1-8b"], "tp": [1], "osl": [20], "clients": [1], "total_gpus": [1]}
    spec |= {"isl": [1000, 3000], "max_num_batched_tokens": [2048], "engine": ["trtllm"], "keep": "all"}
    summary, found = swept(tmp_path, spec)
    assert [row["isl"] for row in found] == [1000]
    assert summary.infeasible == {"whole_prompt": 1}
    chunked, found = swept(tmp_path, {**spec, "engine": ["vllm"]})
    assert [row["isl"] for row in found] == [1000, 3000]
    assert not chunked.infeasible


@pytest.fixture(scope="module")
def truth(h100: Tables) -> list[dict[str, Any]]:
    return naive.candidates(load_spec(LIMITED), h100)


@pytest.mark.parametrize(
    "per",
    [
        ["model"],
        ["isl", "osl"],
        pytest.param(["mode", "total_gpus", "clients"], marks=[pytest.mark.loops, pytest.mark.slow]),
        pytest.param([], marks=pytest.mark.slow),
    ],
)
def test_the_best_equal_the_naive_ones(tmp_path: Path, truth: list[dict[str, Any]], per: list[str]) -> None:
    for objective, value in (
        ("tokens_per_s_per_gpu", lambda row: row["tokens_per_s_per_gpu"]),
        ("tokens_per_s_per_user", lambda row: row["tokens_per_s_per_user"]),
        ("goodput", lambda row: row["tokens_per_s"]),
    ):
        spec = {**LIMITED, "per": per, "k": 3, "objective": objective}
        summary, found = swept(tmp_path, spec)
        columns = load_spec(spec).per
        assert_rows_equal(found, naive.best(truth, columns, 3, value))
        first = naive.best(truth, columns, 1, value)
        assert {row["ttft_ms"] for row in summary.best} == {row["ttft_ms"] for row in first}


@pytest.mark.slow
@pytest.mark.parametrize("per", [["model"], pytest.param(["isl", "mode"], marks=pytest.mark.loops)])
def test_fronts_equal_the_naive_ones(
    tmp_path: Path, h100: Tables, monkeypatch: pytest.MonkeyPatch, per: list[str]
) -> None:
    monkeypatch.setattr(evaluate, "FIRST_FRONT", 1)
    spec = {**SMALL, "keep": "pareto", "per": per, "clients": [1, 2, 3, 9, 40]}
    _, found = swept(tmp_path, spec)
    expected = naive.front(naive.candidates(load_spec(spec), h100), load_spec(spec).per)
    columns = (*load_spec(spec).per, "tokens_per_s_per_user")
    expected.sort(key=lambda row: tuple(row[name] for name in columns))
    assert_rows_equal(found, expected)
    assert len(found) > len({tuple(row[name] for name in per) for row in found})


@pytest.mark.slow
@pytest.mark.parametrize(
    "keep", ["best", *(pytest.param(keep, marks=pytest.mark.release) for keep in ("pareto", "all"))]
)
def test_threads_and_the_size_of_units_make_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    spec = {**LIMITED, "keep": keep, "k": 2, "dtype": ["bf16", "fp8"], "histogram": True}
    one, _ = swept(tmp_path, spec)
    whole = pq.read_table(one.output)
    again, _ = swept(tmp_path, spec, threads=3)
    assert pq.read_table(again.output).equals(whole, check_metadata=True)
    monkeypatch.setattr(units, "CANDIDATES_A_UNIT", 5)
    monkeypatch.setattr(units, "KEPT_A_UNIT", 5)
    monkeypatch.setattr("fastroof.sweep.results.HELD_ROWS", 3)
    assert len(sweep_of(load_spec(spec)).units()) > 20
    pieces, _ = swept(tmp_path, spec, threads=2)
    assert pq.read_table(pieces.output).equals(whole, check_metadata=True)
    for summary in (again, pieces):
        assert summary.best == one.best
        assert (summary.candidates, summary.infeasible) == (one.candidates, one.infeasible)
        assert summary.histograms == one.histograms


@pytest.mark.parametrize(
    ("per", "blocks"),
    [
        (["model", "isl", "osl"], 8),
        (["osl", "model", "clients"], 12),
        (["mode", "prefix_hit", "tp"], 2),
        (["tp", "isl"], 1),
        ([], 1),
    ],
)
def test_blocks_are_written_when_they_are_complete_and_make_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per: list[str], blocks: int
) -> None:
    spec = {
        **LIMITED, "models": ["llama-3.1-8b", "qwen3-8b"], "clients": [1, 2, 3], "per": per,
        "keep": "pareto", "histogram": True,
    }  # fmt: skip
    monkeypatch.setattr(results, "ROWS_A_GROUP", 5)
    whole, _ = swept(tmp_path, spec)
    expected = pq.read_table(whole.output)
    monkeypatch.setattr(units, "CANDIDATES_A_BLOCK", 1)
    monkeypatch.setattr(units, "CANDIDATES_A_PLAN", 1)
    monkeypatch.setattr(checkpoint, "PART_EVERY_S", 0.0)
    held: list[int] = []
    reduced = results.Collected._reduced
    monkeypatch.setattr(
        results.Collected, "_reduced", lambda self: held.append(len(self._held)) or reduced(self)
    )
    listed = sweep_of(load_spec(spec)).units()
    numbers = [unit.block for unit in listed]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == blocks
    done: list[int] = []

    def stopped(number: int, total: int) -> None:
        done.append(number)
        if number > total / 2 and len(done) < len(listed):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(spec, whole.output, progress=stopped)
    held.clear()
    pieces, _ = swept(tmp_path, spec, resume=True, threads=2)
    # rows of no other block are held
    assert held == [numbers.count(block) for block in range(blocks)]
    assert pq.read_table(pieces.output).equals(expected, check_metadata=True)
    groups = pq.ParquetFile(pieces.output).metadata
    sizes = [groups.row_group(group).num_rows for group in range(groups.num_row_groups)]
    assert sizes[:-1] == [5] * (len(sizes) - 1)
    assert pieces.best == whole.best
    assert (pieces.candidates, pieces.infeasible) == (whole.candidates, whole.infeasible)
    assert pieces.histograms == whole.histograms


@pytest.mark.filterwarnings("ignore:no measured tables")
@pytest.mark.parametrize(
    ("objective", "column"),
    [
        ("tokens_per_s_per_gpu", "tokens_per_s_per_gpu"),
        ("tokens_per_s_per_user", "tokens_per_s_per_user"),
        ("goodput", "tokens_per_s"),
        ("cost", "cost_per_million_tokens"),
    ],
)
def test_what_is_kept_by_default_holds_the_best(tmp_path: Path, objective: str, column: str) -> None:
    # the cheaper card is the slower one, and two of it cost less than one of the other
    spec = {
        "models": ["llama-3.1-8b"], "gpus": ["h100", "a100"], "tables": "datasheet", "tp": [1, 2],
        "gpu_hour_price": {"h100": 3.0, "a100": 0.4}, "total_gpus": [2, 4], "isl": 1000, "osl": 100,
        "clients": [1, 4, 16, 64], "objective": objective, "constraints": {"ttft_ms": 500.0},
    }  # fmt: skip
    kept, rows = swept(tmp_path, spec)
    every, _ = swept(tmp_path, {**spec, "keep": "all"})
    found, truth = ([(row["model"], row[column]) for row in summary.best] for summary in (kept, every))
    assert found == truth
    assert len(found) == 1 <= len(rows) < every.rows


@pytest.mark.slow
def test_units_pickle_and_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "CANDIDATES_A_UNIT", 7)
    spec = load_spec({**LIMITED, "k": 2})
    sweep = sweep_of(spec)
    listed = sweep.units()
    assert [unit.number for unit in listed] == list(range(len(listed)))
    assert sum(unit.size for unit in listed) == spec.num_candidates
    assert sum(unit.is_last for unit in listed) == 4
    tables = load_tables_by_gpu(sweep)
    results = [pickle.loads(pickle.dumps(sweep)).evaluate(pickle.loads(pickle.dumps(unit)), tables)
               for unit in listed]  # fmt: skip
    results = [pickle.loads(pickle.dumps(result)) for result in results]
    swept_rows = swept(tmp_path, {**LIMITED, "k": 2})[1]
    together = pa.Table.from_batches([result.rows for result in results])
    assert sweep.ordered(sweep.reduced(together)).to_pylist() == swept_rows
    half = len(results) // 2
    parts = [
        sweep.reduced(pa.Table.from_batches([result.rows for result in part]))
        for part in (results[:half], results[half:])
    ]
    assert sweep.ordered(sweep.reduced(pa.concat_tables(parts))).to_pylist() == swept_rows


@pytest.mark.slow
@pytest.mark.loops
def test_a_histogram_counts_every_feasible_candidate(tmp_path: Path) -> None:
    spec = {**LIMITED, "per": ["mode", "isl", "total_gpus"], "histogram": True, "keep": "all"}
    summary, found = swept(tmp_path, spec)
    counted: Counter[Any] = Counter()
    for row in found:
        if row["exceeds"] is None:
            place = math.floor((math.log2(row["tokens_per_s_per_gpu"]) + 20) * 4)
            counted[row["mode"], row["total_gpus"], row["isl"], place] += 1
    seen = {
        (*group, place): count
        for group, counts in summary.histograms.items()
        for place, count in enumerate(counts)
        if count
    }
    assert seen == dict(counted)
    assert sum(seen.values()) == summary.feasible


@pytest.mark.slow
@pytest.mark.loops
@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_a_request_rate_is_made_by_the_clients_that_it_needs(
    tmp_path: Path, h100: Tables, engine: str
) -> None:
    spec = {**SMALL, "isl": 3000, "osl": 200, "clients": None, "total_gpus": 2, "engine": engine}
    spec |= {"rate": [0.01, 1.0, 5.5, 9.0, 1000.0], "keep": "all"}
    del spec["clients"]
    summary, found = swept(tmp_path, spec)
    assert summary.infeasible["rate"] >= 2
    assert summary.candidates == 10 == len(found) + summary.infeasible["rate"]
    for row in found:
        assert row["requests_per_s"] == row["request_rate_per_s"]
        assert row["tokens_per_s"] == pytest.approx(row["request_rate_per_s"] * 200)
        # Little's law
        seconds = row["request_latency_ms"] / 1e3
        assert row["clients"] == pytest.approx(row["request_rate_per_s"] * seconds, rel=1e-9)
        plan = compile_plan(
            "llama-3.1-8b", "h100", h100, tp=row["tp"], engine=engine, max_num_batched_tokens=9000
        )
        clients = max(row["clients"] / row["replicas"], 1.0)
        truth = estimate(plan, 3000, 200, clients, max_kv_tokens=row["max_kv_tokens"], arrivals="random")
        assert row["tpot_ms"] == pytest.approx(truth.tpot_ms, rel=1e-3)
        assert row["ttft_ms"] == pytest.approx(truth.ttft_ms, rel=2e-2)
    alone = [row for row in found if row["request_rate_per_s"] == 0.01]
    assert all(row["clients"] < 1 for row in alone)


@pytest.mark.slow
@pytest.mark.loops
@pytest.mark.parametrize(("isl", "engine"), [(500, "vllm"), (4000, "vllm"), (4000, "trtllm")])
def test_the_highest_rate_is_that_of_all_the_clients_that_fit(tmp_path: Path, isl: int, engine: str) -> None:
    spec = {"models": "llama-3.1-8b", "tp": 1, "isl": isl, "osl": 300, "engine": engine, "keep": "all"}
    (full,) = swept(tmp_path, {**spec, "clients": 5000})[1]
    # requests of a rate come at random moments, and wait longer than those of a closed loop
    rates = [full["requests_per_s"] * share for share in (0.9, 0.95, 1.05, 2.0)]
    summary, found = swept(tmp_path, {**spec, "rate": rates})
    assert summary.infeasible == {"rate": 2}
    assert [row["request_rate_per_s"] for row in found] == rates[:2]
    # without a queue
    assert found[1]["wait_ms"] == 0.0 < full["wait_ms"]
    assert found[0]["clients"] < found[1]["clients"] < 5000


@pytest.mark.loops
def test_disaggregated_workers_make_a_rate_too(tmp_path: Path) -> None:
    spec = {"models": "llama-3.1-8b", "tp": 1, "mode": "disaggregated", "isl": 2000, "osl": 100}
    spec |= {
        "prefill_workers": [1, 2],
        "decode_workers": 1,
        "rate": [2.0, 15.0, 5000.0],
        "keep": "all",
    }
    summary, found = swept(tmp_path, spec)
    assert summary.infeasible == {"rate": 6 - len(found)}
    assert 5000.0 not in {row["request_rate_per_s"] for row in found}
    assert [row["prefill_workers"] for row in found if row["request_rate_per_s"] == 2.0] == [1, 2]
    for row in found:
        seconds = row["request_latency_ms"] / 1e3
        assert row["clients"] == pytest.approx(row["request_rate_per_s"] * seconds, rel=1e-9)


@pytest.mark.slow
@pytest.mark.loops
@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_prompt_found_in_the_prefix_cache_costs_no_prefill_and_all_of_its_context(
    tmp_path: Path, h100: Tables, is_chunked: bool
) -> None:
    spec = {"models": "llama-3.1-8b", "tp": 1, "isl": 4000, "osl": [1, 100], "clients": [1, 30, 600]}
    engine = tmp_path / "engine.toml"
    engine.write_text(f"scheduling.chunked_prefill = {str(is_chunked).lower()}")
    spec |= {"prefix_hit": [0.0, 0.5, 0.9], "engine": str(engine), "keep": "all"}
    _, found = swept(tmp_path, spec)
    plan = compile_plan("llama-3.1-8b", "h100", h100, engine="kernels")
    by = {(row["osl"], row["clients"], row["prefix_hit"]): row for row in found}
    for hit in (0.5, 0.9):
        cached = round(4000 * hit)
        for osl in (1, 100):
            # one request at a time: its own steps, exactly
            one = by[osl, 1, hit]
            own_us = plan.prefill_us(4000 - cached, cached)
            assert one["ttft_ms"] == pytest.approx(own_us / US_PER_MS, rel=1e-12)
            assert one["tpot_ms"] == by[osl, 1, 0.0]["tpot_ms"] or one["tpot_ms"] == pytest.approx(
                by[osl, 1, 0.0]["tpot_ms"], rel=1e-12
            )
        for clients in (30, 600):
            more, less = by[100, clients, 0.0], by[100, clients, hit]
            assert less["ttft_ms"] < more["ttft_ms"]
            assert less["tpot_ms"] < more["tpot_ms"]
            assert less["tokens_per_s"] > more["tokens_per_s"]
            # the cache holds what is found in it
            assert less["effective_concurrency"] == pytest.approx(more["effective_concurrency"], rel=1e-9)
            assert less["kv_share"] <= 1.0 + 1e-9
    assert by[100, 600, 0.9]["wait_ms"] > 0


@pytest.mark.loops
def test_more_replicas_than_clients_are_idle_some_of_the_time(tmp_path: Path) -> None:
    spec = {"models": "llama-3.1-8b", "tp": 1, "isl": 500, "osl": 100, "clients": 2, "keep": "all"}
    _, found = swept(tmp_path, {**spec, "replicas": [1, 2, 4]})
    one, two, four = found
    assert two["ttft_ms"] == four["ttft_ms"] < one["ttft_ms"]
    assert two["tokens_per_s"] == pytest.approx(four["tokens_per_s"], rel=1e-12)
    assert two["tokens_per_s_per_gpu"] == pytest.approx(2 * four["tokens_per_s_per_gpu"], rel=1e-12)
    assert (two["effective_concurrency"], four["effective_concurrency"]) == (2.0, 2.0)


@pytest.mark.slow
@pytest.mark.loops
def test_what_cannot_be_is_counted_by_reason(tmp_path: Path) -> None:
    spec = {"models": ["qwen2.5-7b", "llama-3.1-70b"], "tp": [1, 8], "isl": [1000, 40_000], "osl": 100,
            "clients": [1, 2], "max_num_batched_tokens": 8192}  # fmt: skip
    summary, _ = swept(tmp_path, spec)
    # 28 query heads do not divide by 8; the 7B knows 32768 tokens; the 70B does not fit one GPU
    assert summary.infeasible == {"tp": 4, "context": 2, "memory": 4}
    assert summary.feasible == 2 * 4 * 2 - 10
    (split,) = summary.skipped["tp"]
    assert split.startswith("qwen2.5-7b cannot run with tp=8: 28 query heads")
    summary, found = swept(tmp_path, {**spec, "constraints": {"tpot_ms": 0.01}, "keep": "pareto"})
    assert (found, summary.feasible, summary.best) == ([], 0, ())
    assert set(summary.infeasible) <= set(INFEASIBLE)


@pytest.mark.loops
def test_each_candidate_has_the_first_reason_that_rules_it_out(tmp_path: Path) -> None:
    small = {
        "models": "llama-3.1-8b",
        "tp": 1,
        "osl": 20,
        "clients": 2,
        "total_gpus": 1,
        "keep": "pareto",
    }
    long = {**small, "isl": [1000, 200_000]}
    assert swept(tmp_path, long)[0].infeasible == {"context": 1}
    whole = {**small, "isl": [1000, 3000], "max_num_batched_tokens": 2048, "engine": "trtllm"}
    assert swept(tmp_path, whole)[0].infeasible == {"whole_prompt": 1}
    large = {**small, "models": "qwen3-32b", "isl": [1000, 40_000]}
    assert swept(tmp_path, large)[0].infeasible == {"memory": 1}
    of_two = {**small, "isl": 1000, "total_gpus": [1, 2], "histogram": True}
    for reason, limit in (
        ("ttft", {"ttft_ms": 1e-3}),
        ("tpot", {"tpot_ms": 1e-3}),
        ("request_latency", {"request_latency_ms": 1e-3}),
    ):
        assert swept(tmp_path, {**of_two, "constraints": limit})[0].infeasible == {reason: 2}
    found = swept(tmp_path, {**of_two, "constraints": {"total_gpus": 1}})[0]
    assert (found.infeasible, found.feasible) == ({"total_gpus": 1}, 1)
    assert sum(sum(counts) for counts in found.histograms.values()) == 1


@pytest.mark.loops
def test_a_small_share_of_the_cache_can_be_given(tmp_path: Path) -> None:
    spec = {"models": "llama-3.1-8b", "tp": 1, "isl": 4000, "osl": 100, "clients": [1, 100]}
    summary, found = swept(tmp_path, {**spec, "constraints": {"kv_share": 0.5}})
    assert summary.infeasible == {"kv_share": 1}
    assert [row["clients"] for row in found] == [1.0]


@pytest.mark.slow
def test_engines_that_reserve_whole_outputs_run_fewer_requests(tmp_path: Path) -> None:
    spec = {"models": "llama-3.1-8b", "tp": 1, "isl": 1000, "osl": 8000, "clients": 500, "keep": "all"}
    _, found = swept(tmp_path, {**spec, "engine": ["vllm", "trtllm-1.0"]})
    # each in the room that its engine leaves
    vllm, trtllm = (row["effective_concurrency"] / row["max_kv_tokens"] for row in found)
    # half of a last block is open: of 16 tokens, and of 32
    assert trtllm == pytest.approx(vllm * (5000 + 7.5) / (9000 + 15.5), rel=1e-9)


@pytest.mark.loops
def test_price_makes_cost(tmp_path: Path) -> None:
    spec = {**SMALL, "gpu_hour_price": {"H100": 2.5}, "objective": "cost", "k": 100}
    _, found = swept(tmp_path, spec)
    for row in found:
        hours = 1e6 / row["tokens_per_s"] / 3600
        assert row["cost_per_million_tokens"] == pytest.approx(2.5 * row["total_gpus"] * hours)
    for group in {(row["isl"], row["osl"]) for row in found}:
        costs = [row["cost_per_million_tokens"] for row in found if (row["isl"], row["osl"]) == group]
        assert costs == sorted(costs)


@pytest.mark.slow
def test_a_single_token_is_not_the_best_by_tokens_after_the_first(tmp_path: Path) -> None:
    spec = {**SMALL, "osl": 1, "objective": "tokens_per_s_per_user"}
    for keep in ("best", "all"):
        assert swept(tmp_path, {**spec, "keep": keep})[0].best == ()
    several = {
        keep: swept(tmp_path, {**spec, "osl": [1, 20], "keep": keep})[0].best for keep in ("best", "all")
    }
    assert {row["osl"] for row in several["all"]} == {20}
    assert several["all"] == several["best"][: len(several["all"])]


@pytest.mark.slow
def test_a_row_depends_on_no_other_value_of_the_spec(tmp_path: Path) -> None:
    alone = {"models": "llama-3.1-8b", "tp": 1, "isl": 500, "osl": 100, "clients": 64, "keep": "all",
             "max_num_batched_tokens": 512}  # fmt: skip
    (row,) = swept(tmp_path, alone)[1]
    among = {
        **alone,
        "isl": [500, 9000],
        "clients": [1, 64, 5000],
        "max_num_batched_tokens": [512, 16384],
    }
    found = swept(tmp_path, among)[1]
    key = ("isl", "clients", "max_num_batched_tokens")
    (same,) = (r for r in found if [r[k] for k in key] == [row[k] for k in key])
    assert same == row


@pytest.mark.slow
def test_the_bound_is_that_of_the_operators(tmp_path: Path, h100: Tables) -> None:
    spec = {"models": "llama-3.1-8b", "tp": [1, 8], "isl": [16, 8000], "osl": [1, 2, 500], "keep": "all",
            "clients": [1, 256], "engine": "kernels"}  # fmt: skip
    found = swept(tmp_path, spec)[1]
    assert {row["bound"] for row in found} <= set(BOUNDS)
    by = {(row["tp"], row["isl"], row["osl"], row["clients"]): row for row in found}
    # prompts alone compute, a few decodes stream weights
    assert by[1, 8000, 1, 256]["bound"] == "compute"
    assert by[1, 8000, 500, 1]["bound"] == "memory"
    plan = compile_plan("llama-3.1-8b", "h100", h100, engine="kernels")
    times: Counter[str] = Counter()
    for operator in plan.explain([(1, 8249)]).operators:
        times[operator.bound] += operator.total_us
    assert times.most_common(1)[0][0] == "memory"
    # with little to do, eight GPUs wait for each other and for launches
    assert by[8, 16, 500, 1]["bound"] in ("communication", "launch", "memory")
    slow = tmp_path / "slow.toml"
    slow.write_text('name = "slow"\n[costs]\nstep_us = 1e5\nprefill_floor_layer_us = 1e5\n')
    hosted = swept(tmp_path, {**spec, "engine": str(slow)})[1]
    assert {row["bound"] for row in hosted} == {"host"}
    assert {row["engine"] for row in hosted} == {"slow"}


def test_tokens_found_in_the_prefix_cache_do_not_count_in_the_bound(tmp_path: Path, h100: Tables) -> None:
    spec = {"models": "llama-3.1-8b", "tp": 1, "isl": 8000, "osl": 1, "keep": "all", "clients": 1,
            "engine": "kernels", "prefix_hit": [0.0, 0.5, 0.995]}  # fmt: skip
    found = swept(tmp_path, spec)[1]
    # 8,000 tokens and 4,000 compute, 40 read the weights
    bound = {row["prefix_hit"]: row["bound"] for row in found}
    assert bound == {0.0: "compute", 0.5: "compute", 0.995: "memory"}


def test_many_decodes_are_bound_by_the_cache_that_they_read(tmp_path: Path, h100: Tables) -> None:
    spec = {"models": "llama-3.1-8b", "tp": 1, "isl": 100, "osl": 1000, "keep": "all", "clients": 500,
            "engine": "kernels"}  # fmt: skip
    (row,) = swept(tmp_path, spec)[1]
    plan = compile_plan("llama-3.1-8b", "h100", h100, max_num_seqs=512, engine="kernels")
    kinds = {"attention": Counter[str](), "others": Counter[str]()}
    for operator in plan.explain([(1, 600)] * 500).operators:
        kind = "attention" if "attention" in operator.name else "others"
        kinds[kind][operator.bound] += operator.total_us
    # what is not attention computes in such steps, and takes less time
    assert kinds["others"].most_common(1)[0][0] == "compute"
    assert kinds["attention"].total() > kinds["others"].total()
    assert row["bound"] == "memory"


def test_drafting_takes_a_step_of_the_draft_for_each_token(h100: Tables) -> None:
    sizes = {"tp": 4, "engine": "kernels", "max_num_batched_tokens": 128, "max_num_seqs": 16}
    target, draft = (
        compile_plan(model, "h100", h100, **{"engine": "kernels", **sizes})
        for model in ("llama-3.1-70b", "llama-3.1-8b")
    )
    speculation = speculated(target, SpeculativeDecoding(3, 2.0, draft))
    batch = np.array([0.5, 1.0, 2.0, 8.0])
    took_us = _of_draft(speculation, batch, np.full(4, 500.0)).sum(axis=0)
    # a step is of one request at least
    assert took_us == pytest.approx([3 * draft.decode_us(max(int(b), 1), 500) for b in batch], rel=1e-9)


@pytest.mark.loops
def test_prompts_that_run_ahead_are_steps_of_their_own(tmp_path: Path, h100: Tables) -> None:
    spec = {"models": "llama-3.1-8b", "tp": 1, "isl": 1000, "osl": 20, "keep": "all", "clients": 4}
    (ahead,) = swept(tmp_path, {**spec, "engine": "sglang"})[1]
    plan = compile_plan("llama-3.1-8b", "h100", h100, engine="sglang")
    seen = estimate(plan, 1000, 20, 4, requests_per_client="steady")
    assert (ahead["ttft_ms"], ahead["tpot_ms"]) == (seen.ttft_ms, seen.tpot_ms)
    assert ahead["origin"] == ORIGINS[int(plan.explain([(1, 1009)] * 4).origin)]


@pytest.mark.slow
def test_decodes_that_share_the_cache_with_prompts_bind_by_memory(tmp_path: Path) -> None:
    spec = {"models": "llama-3.1-8b", "tp": 1, "isl": 2000, "osl": 20, "keep": "all", "clients": 64}
    bound = {}
    for ns in (0.001, 2.0):
        profile = tmp_path / f"slower_{ns}.toml"
        profile.write_text(f"[[kernels.mixed_attention]]\nns = {ns}\n")
        (row,) = swept(tmp_path, {**spec, "engine": str(profile)})[1]
        bound[ns] = row["bound"]
    assert bound == {0.001: "compute", 2.0: "memory"}


@pytest.mark.slow
def test_errors_are_those_of_the_step_of_decodes(tmp_path: Path, h100: Tables) -> None:
    spec = {"models": "llama-3.1-8b", "tp": 1, "isl": 1000, "osl": [1, 200], "clients": 1, "keep": "all"}
    one, more = swept(tmp_path, spec)[1]
    assert one["relative_error"] is None
    assert one["tpot_ms"] is one["tokens_per_s_per_user"] is None
    plan = compile_plan("llama-3.1-8b", "h100", h100, engine="vllm")
    assert more["relative_error"] == plan.decode_error(1, 1100)
    nearest = swept(tmp_path, {**spec, "method": "nearest"})[1]
    assert [row["relative_error"] for row in nearest] == [None, None]


def test_the_file_has_provenance_and_documented_columns(tmp_path: Path, h100: Tables) -> None:
    summary, _ = swept(tmp_path, SMALL)
    schema = pq.read_schema(summary.output)
    metadata = pq.read_metadata(summary.output).metadata
    assert metadata[b"fastroof.kind"] == b"deployments"
    assert metadata[b"fastroof.tables_hash"].decode() == h100.content_hash
    assert metadata[b"fastroof.version"].decode() == fastroof.__version__
    assert load_spec(json.loads(metadata[b"fastroof.spec"])) == load_spec(SMALL)
    assert json.loads(metadata[b"fastroof.counts"]) == {"evaluated": summary.candidates, **summary.infeasible}
    assert schema.names == [column.name for column in COLUMNS]
    for column in COLUMNS:
        about = schema.field(column.name).metadata
        assert about == {b"unit": column.unit.encode(), b"meaning": column.meaning.encode()}


def test_several_gpus_have_tables_of_their_own(tmp_path: Path) -> None:
    spec = {**SMALL, "gpus": ["h100", "h200"], "tables": "datasheet", "keep": "all", "per": ["gpu"]}
    with pytest.warns(UserWarning, match="no measured tables of h"):
        summary, found = swept(tmp_path, spec)
    assert {row["gpu"] for row in summary.best} == {row["gpu"] for row in found} == {"h100", "h200"}
    assert {row["origin"] for row in found} == {"modelled"}


def test_nothing_to_evaluate_is_an_error_with_a_reason(tmp_path: Path) -> None:
    spec = {"models": "qwen2.5-7b", "tp": 8, "isl": 10, "osl": 10, "clients": 1}
    with pytest.raises(SweepError, match=r"nothing to evaluate: tp: qwen2\.5-7b cannot run with tp=8"):
        run_sweep(spec, tmp_path / "r.parquet")
    spec |= {"tp": 2, "total_gpus": 3}
    with pytest.raises(SweepError, match="no number of total_gpus divides"):
        run_sweep(spec, tmp_path / "r.parquet")
    assert not list(tmp_path.iterdir())


@pytest.mark.loops
def test_a_plan_that_is_too_small_is_a_reason_and_no_crash(h100: Tables) -> None:
    found = []
    for load in ({"clients": [1, 64]}, {"rate": [0.001, 20.0]}):
        for limits in ({"max_num_batched_tokens": 8}, {"max_num_seqs": 2}):
            spec = load_spec({"models": "llama-3.1-8b", "tp": 1, "isl": 500, "osl": 100, **load})
            plan = compile_plan("llama-3.1-8b", "h100", h100, engine="vllm", **limits)
            target = speculated(plan, None)
            axes = plans.candidate_axes(spec, target, "aggregated")
            options = plans.candidate_options(spec, target, "aggregated")
            answers, codes = np.empty((closed_loops.ANSWERS, 2)), np.empty(2, np.uint8)
            loops.evaluate_candidates(
                plan.arena, axes, options, np.arange(2), closed_loops.new_scratch(), answers, codes
            )
            found.append(codes.tolist())
    too_small = closed_loops.PLAN_SIZE
    assert found == [[too_small] * 2, [closed_loops.FEASIBLE, too_small]] * 2


def test_codes_are_in_the_order_of_their_names() -> None:
    for code, name in enumerate(evaluate.CODE_NAMES):
        attribute = {"request_latency": "REQUEST", "kv_share": "KV_SHARE_OVER", "total_gpus": "GPUS",
                     "plan size": "PLAN_SIZE"}.get(name, name.upper())  # fmt: skip
        assert getattr(closed_loops, attribute) == code
    assert len(evaluate.CODE_NAMES) == closed_loops.CODES
    assert set(evaluate.CODE_NAMES[1:]) <= set(INFEASIBLE)
    assert evaluate.CODE_NAMES[closed_loops.TTFT : closed_loops.GPUS + 1] == rows._LIMIT_NAMES


@pytest.mark.slow
def test_a_million_scenarios_take_seconds(tmp_path: Path) -> None:
    spec = {
        "models": ["llama-3.1-8b", "qwen3-32b"],
        "tp": [1, 2, 4, 8],
        "total_gpus": 8,
        "isl": {"start": 1000, "stop": 8000, "step": 1000},
        "osl": {"start": 100, "stop": 1000, "step": 100},
        "clients": {"start": 1, "stop": 512, "step": 1},
        "max_num_batched_tokens": [2048, 4096, 8192],
        "keep": "best",
    }
    summary, found = swept(tmp_path, spec, threads=2)
    assert summary.candidates == 983_040
    # 1 s here; gated against collapse
    assert summary.total_s < 30
    assert len(found) == 2 * 8 * 10 * 5
    assert np.isfinite([row["ttft_ms"] for row in found]).all()
