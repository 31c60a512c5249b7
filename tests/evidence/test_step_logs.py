"""Step logs: what a scheduler that runs a step ahead logs comes back as the steps that took the time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fastroof
from benchmarks.accuracy.rows import shipped_steps
from benchmarks.accuracy.step_intervals import step_errors
from fastroof import StepBatch, StepPlan, Tables, compile_plan
from fastroof.config.paths import bench_data_root
from fastroof.engines import EngineProfile, engine_of_version
from fastroof.errors import FastroofError
from fastroof.evidence.own_fit import fit_own_runs
from fastroof.evidence.own_runs import OwnRuns, read_own_runs
from fastroof.evidence.steps.step_logs import COLUMNS, WINDOW_PHASE
from fastroof.evidence.validation import validate_own
from tests.command_line import good

BLOCKS = 41
CONTEXT = 40 * 16 + 8 - 1
"""Cached tokens of every request that fill 41 blocks, the last half."""

GIVEN = {"gpu": "h100", "version": "0.15.1", "model": "llama-3.1-8b", "tp": 1}


@pytest.fixture(scope="module")
def tables() -> Tables:
    return fastroof.load_tables("h100")


@pytest.fixture(scope="module")
def plan(tables: Tables) -> StepPlan:
    return compile_plan("llama-3.1-8b", "h100", tables, engine="vllm-0.15.1", max_num_batched_tokens=8192)


def arrivals(seed: int, steps: int) -> list[tuple[int, int, int]]:
    """Requests: step of their prompt, its new tokens, decodes after it."""
    random = np.random.default_rng(seed)
    at = np.flatnonzero(random.random(steps) < 0.2)
    return [(int(step), int(random.integers(2, 17)), int(random.integers(20, 60))) for step in at]


def batch_at(requests: list[tuple[int, int, int]], step: int) -> list[tuple[int, int]]:
    """What a step really computes."""
    chunks = [(new, CONTEXT) for start, new, _ in requests if start == step]
    decodes = [(1, CONTEXT) for start, _, count in requests if start < step <= start + count]
    return [*chunks, *decodes]


def log_of(requests: list[tuple[int, int, int]], steps: int, plan: StepPlan, slower: float) -> pa.Table:
    """The log of a scheduler that prepares step i + 1 while i runs, and waits for i - 1 before."""
    rows = []
    batches = [batch_at(requests, step) for step in range(steps)]
    took_us = slower * plan.step_us(StepBatch.from_requests(batches))
    start_ns = 5_000_000_000
    for step in range(steps):
        if step >= 2:
            start_ns += round(float(took_us[step - 2]) * 1000)
        else:
            start_ns += 1000
        chunks = [new for start, new, _ in requests if start == step]
        first = [1 for start, _, _ in requests if start + 1 == step]
        others = [1 for start, _, count in requests if start + 1 < step <= start + count]
        ending = [1 for start, _, count in requests if step == start + count + 1]
        running = len(chunks) + len(first) + len(others) + len(ending)
        rows.append(
            (step, start_ns, running, len(chunks) + len(first), len(others), sum(chunks) + len(first),
             9000, 9000 - BLOCKS * running)
        )  # fmt: skip
    return pa.table(
        {name: list(column) for name, column in zip(COLUMNS, zip(*rows, strict=True), strict=True)}
    )


def written(path: Path, table: pa.Table) -> Path:
    pq.write_table(table, path)
    return path


def read(path: Path, **given: object) -> OwnRuns:
    return read_own_runs((), None, {**GIVEN, **given}, steps=path)


@pytest.mark.parametrize("kept", [1.0, 0.4])
def test_times_are_of_the_steps_that_took_them(
    tmp_path: Path, tables: Tables, plan: StepPlan, kept: float
) -> None:
    log = log_of(arrivals(3, 600), 600, plan, slower=1.25)
    # early steps are of no request
    some = [row for row in range(40, 600) if kept == 1.0 or np.random.default_rng(row).random() < kept]
    own = read(written(tmp_path / "log.parquet", log.take(some)))
    of_phase = {
        phase: [s for s in own.steps if s.phase == phase] for phase in ("decode", "mixed", WINDOW_PHASE)
    }
    assert all(len(steps) > 5 for steps in of_phase.values())
    report = validate_own((), own.steps, tables)
    assert len(report.rows) == len(own.steps)
    for row in report.rows:
        if row.quantity != WINDOW_PHASE:
            assert row.error == pytest.approx(1 / 1.25 - 1, abs=1e-6), row.row
    windows = [row.error for row in report.rows if row.quantity == WINDOW_PHASE]
    assert np.mean(windows) == pytest.approx(1 / 1.25 - 1, abs=0.01)
    for step in of_phase["mixed"]:
        assert len(step.timed_together) == 1
        assert [new for new, _ in step.requests if new > 1]
        assert all(new == 1 for new, _ in step.timed_together[0])


def test_steps_timed_together_are_not_fitted(tmp_path: Path, tables: Tables, plan: StepPlan) -> None:
    log = log_of(arrivals(5, 300), 300, plan, slower=1.1).slice(40)
    fitted = fit_own_runs(read(written(tmp_path / "log.parquet", log)), tables)
    assert {step.phase for step in fitted.steps} == {"decode"}


def test_workloads_are_logs_of_their_own(tmp_path: Path, plan: StepPlan) -> None:
    logs = [log_of(arrivals(seed, 200), 200, plan, slower=1.0).slice(40) for seed in (1, 2)]
    both = pa.concat_tables(
        log.append_column("workload", pa.array([name] * len(log)))
        for name, log in zip("ab", logs, strict=True)
    )
    steps = read(written(tmp_path / "both.parquet", both)).steps
    alone = [read(written(tmp_path / "one.parquet", log)).steps for log in logs]
    assert [s.latency_us for s in steps] == [s.latency_us for one in alone for s in one]
    assert {s.dataset for s in steps} == {"step log a", "step log b"}


def test_the_command_names_what_it_needs(tmp_path: Path, plan: StepPlan) -> None:
    path = written(tmp_path / "log.parquet", log_of(arrivals(7, 200), 200, plan, slower=1.0).slice(40))
    with pytest.raises(FastroofError, match="--engine-args"):
        read_own_runs((), None, {"gpu": "h100"}, steps=path)
    given = ["--gpu", "h100", "--model", "llama-3.1-8b", "--engine-version", "0.15.1"]
    run = good("validate", "--steps", str(path), *given)
    assert "60 steps" in run
    for version in ("0.12.0", "0.13.0"):
        with pytest.raises(FastroofError, match="asynchronous"):
            read(path, version=version)


@pytest.mark.parametrize(
    ("column", "value", "match"),
    [
        ("step.ts_start_ns", 0, "later"),
        ("step.id", -1, "whole number"),
        ("queue.running_depth", 0, "running requests"),
        ("batch.prefill_tokens", 2**31, "whole number"),
        ("kv.blocks_free_gpu", 9001, "blocks free"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, plan: StepPlan, column: str, value: int, match: str) -> None:
    log = log_of(arrivals(3, 60), 60, plan, slower=1.0).slice(40)
    values = log[column].to_pylist()
    values[10] = value
    at = log.schema.get_field_index(column)
    path = written(tmp_path / "log.parquet", log.set_column(at, column, pa.array(values, pa.int64())))
    with pytest.raises(FastroofError, match=match):
        read(path)


def test_a_log_without_a_column_or_neighbours_is_refused(tmp_path: Path, plan: StepPlan) -> None:
    log = log_of(arrivals(3, 60), 60, plan, slower=1.0).slice(40)
    with pytest.raises(FastroofError, match=r"no column queue\.running_depth"):
        read(written(tmp_path / "log.parquet", log.drop_columns(["queue.running_depth"])))
    with pytest.raises(FastroofError, match="follow each other"):
        read(written(tmp_path / "log.parquet", log.take([0])))


@pytest.mark.parametrize("workload", ["general", "codegen"])
def test_a_short_prompt_with_decodes_costs_one_attention_call(tables: Tables, workload: str) -> None:
    """Prompts whose prefix is cached: two calls of attention make steps with them too slow, and only them."""
    kernels = engine_of_version("vllm", "0.15.1").kernels_alone()
    two_calls = replace(kernels, kernels=replace(kernels.kernels, one_attention_call=()))
    steps = [step for step in shipped_steps("h100") if step.dataset == f"vllm-0.15-steps {workload}"]

    def more(profile: EngineProfile) -> float:
        """Median error of steps with a prompt less that of decode steps."""
        times = validate_own((), steps, tables, engine=profile).rows
        by = {phase: [row.error for row in times if row.quantity == phase] for phase in ("mixed", "decode")}
        return float(np.median(by["mixed"]) - np.median(by["decode"]))

    assert abs(more(kernels)) < more(two_calls)


def test_shipped_steps_are_classified_and_near(tables: Tables) -> None:
    folder = bench_data_root() / "h100/serving/step_logs"
    assert sorted(path.suffix for path in folder.iterdir()) == [".parquet", ".toml"]
    groups = step_errors([s for s in shipped_steps("h100") if s.dataset.startswith("vllm-0.15")], tables)
    assert len(groups) == 6
    by = {(group.dataset.split()[-1], group.phase): group for group in groups}
    for workload, singles in (("general", 450), ("codegen", 561)):
        assert by[workload, "decode"].steps == singles
        for phase in ("decode", "mixed", WINDOW_PHASE):
            group = by[workload, phase]
            assert group.median < 0.06, group
            assert group.held > 0.5, group
