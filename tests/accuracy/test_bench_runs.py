"""Runs of other benches: their file, how their requests are replayed, their kinds."""

from __future__ import annotations

import csv
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fastroof
from benchmarks.accuracy.independent import judge, predict_bench_run, profile_of_served
from benchmarks.accuracy.published_rows import (
    BENCH_COLUMNS,
    BENCH_RUNS_FILE,
    BURST,
    BenchRun,
    read_bench_runs,
    shipped_bench_runs,
)
from benchmarks.accuracy.run_kinds import ADMISSION_LIMITED, HOST_BOUND, KINDS, kind_of_independent
from fastroof.config.paths import bench_data_root
from fastroof.engines import engine_names, load_engine
from fastroof.errors import TableError
from fastroof.evidence.validation import INDEPENDENT
from fastroof.plan import StepPlan

FILE = bench_data_root() / BENCH_RUNS_FILE


@pytest.fixture(scope="module")
def runs() -> dict[str, BenchRun]:
    return {run.row: run for run in read_bench_runs(FILE)}


@pytest.fixture(scope="module")
def burst(runs: dict[str, BenchRun]) -> BenchRun:
    return runs["gpustack-qwen3-235b-a22b-h100-386"]


def plan_of(run: BenchRun, tables: fastroof.Tables) -> StepPlan:
    layout = {"tp": run.tp, "ep": run.ep}
    profile = profile_of_served(run)
    return fastroof.compile_plan(
        run.model, tables.gpu, tables, **layout, engine=profile, max_num_seqs=2048, allow_modelled=True
    )


# ---- the file


def test_the_file_names_the_source_of_its_rows(runs: dict[str, BenchRun]) -> None:
    facts = tomllib.loads(FILE.with_suffix(".toml").read_text())
    with FILE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert facts["rows"] == len(rows) == len(runs)
    assert facts["fitted_to"] == "nothing"
    assert {column.name for column in BENCH_COLUMNS} - {"pp", "left_out"} <= set(rows[0])
    counts = Counter(run.dataset for run in runs.values())
    assert {name: part["rows"] for name, part in facts["datasets"].items()} == counts
    for run in runs.values():
        part = facts["datasets"][run.dataset]
        assert run.source.startswith(f"{part['url']}/blob/{part['commit']}/")
        assert part["licence"] == facts["licence"] == "Apache-2.0"


def test_the_rows_are_those_of_the_source(shared: Path, runs: dict[str, BenchRun]) -> None:
    with (shared / "ground_truth/public_serving_2026.csv").open(newline="") as file:
        given = list(csv.DictReader(file))
    assert {cell["id"] for cell in given} == set(runs)
    for cell in given:
        run = runs[cell["id"]]
        assert (run.gpu, run.engine, run.engine_version) == (
            cell["gpu"],
            cell["engine"],
            cell["engine_version"],
        )
        assert (run.model, run.tp, run.dp, run.ep) == (
            cell["preset"],
            *(int(cell[n]) for n in ("tp", "dp", "ep")),
        )
        assert (run.ttft_ms, run.tpot_ms) == (float(cell["ttft_ms"]), float(cell["tpot_ms"]))
        assert run.source == cell["url"]
        if cell["output_tokens_per_s"]:
            assert run.output_tokens_per_s == float(cell["output_tokens_per_s"])
        else:
            total = float(cell["total_tokens_per_s_per_gpu"]) * run.layout.world_size
            share = run.osl / (run.isl + run.osl)
            assert run.output_tokens_per_s == pytest.approx(total * share, rel=1e-5)


def test_no_profile_was_fitted_to_them(runs: dict[str, BenchRun]) -> None:
    names = {run.dataset for run in runs.values()}
    for engine in engine_names():
        assert not names & set(load_engine(engine).evidence.get("datasets", ()))


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"protocol": "open"}, "protocol is one of burst, closed-uniform, closed-equal, got 'open'"),
        ({"concurrency": "8"}, "closed loops have a concurrency and bursts none"),
        ({"protocol": "closed-equal"}, "closed loops have a concurrency and bursts none"),
        ({"protocol": "closed-uniform", "concurrency": "8"}, "drawn up to whole isl and osl"),
        ({"ttft_ms": "0"}, "column ttft_ms: found 0, need a number above 0"),
        ({"engine": "other"}, "engine 'other' is unknown"),
        ({"source": ""}, "column source: empty; need address of the page"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, cells: dict[str, str], words: str) -> None:
    with FILE.open(newline="") as file:
        first = next(csv.DictReader(file))
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(first))
        writer.writeheader()
        writer.writerow(first | cells)
    with pytest.raises(TableError, match=words):
        read_bench_runs(path)


def test_a_gpu_has_its_own_runs(tmp_path: Path, runs: dict[str, BenchRun]) -> None:
    for gpu in ("a100", "h100", "h200", "b200"):
        assert list(shipped_bench_runs(gpu)) == [run for run in runs.values() if run.gpu == gpu]
    assert shipped_bench_runs("l40s") == shipped_bench_runs("h100", tmp_path) == ()


# ---- protocols


def test_lengths_and_durations_are_those_of_the_pages(runs: dict[str, BenchRun]) -> None:
    with FILE.open(newline="") as file:
        durations = {row["row"]: float(row["duration_s"] or "nan") for row in csv.DictReader(file)}
    known = [run for run in runs.values() if not np.isnan(durations[run.row])]
    assert len(known) == 56
    for run in known:
        trace = run.trace()
        assert len(trace) == run.requests
        # output tokens of the drawn requests over the page's duration make the page's rate
        made = trace.output_tokens.sum() / durations[run.row]
        assert made == pytest.approx(run.output_tokens_per_s, rel=0.02), run.row
        if run.protocol == BURST:
            assert trace.input_tokens.mean() == pytest.approx(run.isl, abs=0.5 / run.requests + 1e-9)
            assert np.ptp(trace.output_tokens) <= 1


def test_bursts_have_no_clients_and_closed_loops_have(runs: dict[str, BenchRun]) -> None:
    for run in runs.values():
        trace = run.trace()
        assert trace.clients == (run.concurrency or None)
        assert not trace.arrival_s.any()


def test_a_run_has_the_limits_of_its_card_and_version(burst: BenchRun, h100: fastroof.Tables) -> None:
    run = burst
    plan = plan_of(run, h100)
    trace = run.trace()
    settings = run.settings(plan, trace)
    assert (settings.max_num_batched_tokens, settings.max_num_seqs) == (8192, 1024)
    wanted = replace(run, max_num_batched_tokens=2048, max_num_seqs=64).settings(plan, trace)
    assert (wanted.max_num_batched_tokens, wanted.max_num_seqs) == (2048, 64)
    whole = replace(run, engine="trtllm", engine_version="1.2.0rc1", chunked_prefill=1)
    assert whole.settings(plan, trace).chunked_prefill


# ---- predictions and kinds


def test_a_burst_waits_and_its_rate_is_that_of_its_outputs(burst: BenchRun, h100: fastroof.Tables) -> None:
    times = {time.quantity: time for time in judge([burst], h100, profile_of_served, Counter())}
    assert set(times) == {"tpot", "ttft", "throughput", "running"}
    assert {time.bench for time in times.values()} == {"gpustack"}
    assert times["throughput"].measured_ms == pytest.approx(1000.0 / 1127.26)
    # half the requests wait for more than half of all prompts
    assert times["ttft"].predicted_ms > 10_000.0
    for time in times.values():
        assert abs(time.error) < 0.5


def test_one_client_at_a_time_adds_up(runs: dict[str, BenchRun], h100: fastroof.Tables) -> None:
    run = runs["cookbook-MiniMax-M2.5-768"]
    plan = plan_of(run, h100)
    seen = predict_bench_run(run, plan)
    outputs = run.trace().output_tokens
    # one request after the other: seconds are those of its first tokens and of all others
    decode_ms = seen.tpot_ms * (outputs.sum() - len(outputs))
    seconds = (seen.ttft_ms * len(outputs) + decode_ms) / 1e3
    assert outputs.sum() / seconds == pytest.approx(seen.output_tokens_per_s, rel=0.05)


def test_kinds_are_those_of_the_source_and_of_measured_waiting(
    runs: dict[str, BenchRun], burst: BenchRun
) -> None:
    assert kind_of_independent(burst) == INDEPENDENT
    assert kind_of_independent(replace(burst, is_host_bound=1)) == HOST_BOUND
    closed = runs["cookbook-MiniMax-M2.5-820"]
    assert kind_of_independent(closed) == INDEPENDENT
    assert kind_of_independent(replace(closed, ttft_ms=1e6)) == ADMISSION_LIMITED
    assert {HOST_BOUND, ADMISSION_LIMITED, INDEPENDENT} <= set(KINDS)


def test_running_requests_are_those_of_littles_law(
    runs: dict[str, BenchRun], burst: BenchRun, h100: fastroof.Tables
) -> None:
    # an eighth of the requests a second are an eighth at once
    slower = replace(burst, output_tokens_per_s=burst.output_tokens_per_s / 8.0)
    assert slower.running == pytest.approx(burst.running / 8.0)
    one = runs["cookbook-MiniMax-M2.5-768"]
    assert 0.8 < one.running <= 1.0
    seen = predict_bench_run(one, plan_of(one, h100))
    assert seen.running == pytest.approx(one.running, rel=0.1)


def test_a_run_without_room_is_refused(burst: BenchRun, h100: fastroof.Tables) -> None:
    plan = fastroof.compile_plan("llama-3.1-70b", h100.gpu, h100, tp=2, engine="vllm-0.12", max_num_seqs=2048)
    long = replace(burst, model="llama-3.1-70b", isl=2e5)
    with pytest.raises(TableError, match="blocks never have room for its longest"):
        predict_bench_run(long, plan)
