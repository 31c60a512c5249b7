"""``fastroof bench``: workloads agree with their baselines, the command runs, its files are whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.bench import timing, workload
from fastroof.bench.lookups import LOOKUP_OPERATORS, lookup_points, lookup_workloads
from fastroof.bench.numpy_steps import NumpySteps, searched
from fastroof.bench.timing import check_agreement, measure, report_document, run_workloads, seconds_of
from fastroof.bench.workload import (
    AGREEMENT,
    Baseline,
    Setup,
    Workload,
    mixed_batch,
    new_setup,
    ragged_decodes,
)
from fastroof.bench.workloads import WORKLOADS, homogeneous_decode, import_seconds, sweep_best
from fastroof.cli.bench import NAMES
from fastroof.config.paths import bench_data_root
from fastroof.errors import FastroofError
from fastroof.operators.operator import METHODS
from tests.command_line import run
from tests.reference.shards import changed


@pytest.fixture(scope="module")
def setup(h100: fastroof.Tables) -> Setup:
    return new_setup("llama-3.1-8b", "h100", h100, quick=True)


run = partial(run, "bench")


def refused(*arguments: str) -> str:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("fastroof: error: ")
    assert err.count("\n") == 1
    return err


# -- workloads -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WORKLOADS if name not in ("command", "import")])
def test_workload_runs_and_agrees(setup: Setup, name: str) -> None:
    workload = WORKLOADS[name](setup)
    assert workload.name == name
    done = measure(workload, 2)
    assert len(done.rounds_s) == 2
    assert done.ns_per_unit > 0
    assert set(done.ratios) == {baseline.name for baseline in workload.baselines}


@pytest.mark.parametrize("name", ["decode", "prefill", "ragged-decode", "ragged-mixed", "sweep"])
def test_steps_are_compared_with_numpy(setup: Setup, name: str) -> None:
    rtol = {baseline.name: baseline.rtol for baseline in WORKLOADS[name](setup).baselines}
    assert rtol == {"stream": None, "NumPy": AGREEMENT}


def test_a_wrong_baseline_is_refused(setup: Setup) -> None:
    workload = homogeneous_decode(setup, 100)
    wrong = Baseline("wrong", lambda: np.ones(100), 100)
    with pytest.raises(FastroofError, match="fastroof and wrong differ at step"):
        measure(replace(workload, baselines=(wrong,)), 1)
    short = Baseline("short", lambda: np.ones(101), 101)
    with pytest.raises(FastroofError, match="different numbers of answers: 100 and 101"):
        check_agreement(replace(workload, baselines=(short,)), workload.run())


def test_a_baseline_of_nan_is_refused(setup: Setup) -> None:
    workload = homogeneous_decode(setup, 10)
    nothing = Baseline("nothing", lambda: np.full(10, np.nan), 10)
    with pytest.raises(FastroofError, match="nothing differ"):
        check_agreement(replace(workload, baselines=(nothing,)), workload.run())


def test_a_borrowed_head_shape_has_no_numpy_version(h100: fastroof.Tables) -> None:
    model = changed(fastroof.load_model("llama-3.1-8b"), num_q_heads=36, num_kv_heads=9)
    plan = fastroof.compile_plan(model, "h100", h100, engine="kernels")
    assert not NumpySteps.serves(plan, h100)
    borrowed = Setup(model, plan.gpu, h100, plan, 1, True)
    assert [baseline.name for baseline in WORKLOADS["decode"](borrowed).baselines] == ["stream"]


def test_reported_seconds_count(setup: Setup) -> None:
    assert seconds_of(Workload("w", "", "call", 1, lambda: 12.5, reports_seconds=True)) == (12.5, None)
    seconds, answers = seconds_of(Workload("w", "", "call", 1, lambda: 12.5))
    assert (seconds < 1.0, answers) == (True, 12.5)
    assert not sweep_best(setup).reports_seconds


def test_medians_and_rates() -> None:
    seconds = iter([9.0, 1.0, 2.0, 30.0])
    workload = Workload("w", "", "call", 2, lambda: next(seconds), 4.0, reports_seconds=True)
    done = measure(workload, 3)
    assert (done.first_s, done.rounds_s) == (9.0, (1.0, 2.0, 30.0))
    assert (done.ns_per_unit, done.units_per_s, done.bytes_per_s) == (1e9, 1.0, 4.0)


def test_an_import_is_timed_inside_its_process(setup: Setup) -> None:
    workload = import_seconds(setup)
    assert 0.0 < workload.run() < 5.0


@pytest.mark.parametrize("threads", [0, -1, True, 1.5])
def test_threads_are_whole_numbers(h100: fastroof.Tables, threads: Any) -> None:
    with pytest.raises(FastroofError, match="threads must be a whole number"):
        new_setup("llama-3.1-8b", "h100", h100, threads=threads)


# -- inputs --------------------------------------------------------------------------------------


def test_sizes_are_within_the_plan(setup: Setup) -> None:
    batch, kv_len = workload.decode_sizes(setup, 1000)
    assert (batch.dtype, kv_len.dtype) == (np.int32, np.int32)
    assert (batch.min() >= 1, batch.max() <= 512, kv_len.min() >= 2, kv_len.max() <= 65_536) == (True,) * 4
    new, context, chunks = workload.chunk_sizes(1000)
    assert (new * chunks).max() <= setup.plan.max_num_batched_tokens
    assert context.min() >= 0
    batch, kv_len = workload.sweep_axes(setup)
    assert (len(batch), len(kv_len)) == (32, 16)


def test_mixed_steps_hold_chunks_and_decodes() -> None:
    plain, mixed = ragged_decodes(50), mixed_batch(50)
    assert (plain.new_tokens == 1).all()
    chunks = np.add.reduceat(mixed.new_tokens > 1, mixed.offsets[:-1])
    assert set(chunks.tolist()) <= {1, 2}
    assert np.array_equal(plain.offsets, mixed.offsets)


def test_searched_is_linear_between_its_nodes() -> None:
    axis, value = np.array([1.0, 2.0, 4.0]), np.array([10.0, 20.0, 60.0])
    found = searched(axis, value, np.array([1.0, 1.5, 2.0, 3.0, 4.0]))
    assert found.tolist() == [10.0, 15.0, 20.0, 40.0, 60.0]


@pytest.mark.parametrize("operator", LOOKUP_OPERATORS)
def test_points_lie_in_the_measured_range(h100: fastroof.Tables, operator: str) -> None:
    if operator not in h100.measured.tables:
        pytest.skip(f"the H100 that ships has no table of {operator}")
    points = lookup_points(h100, operator, 500)
    found = h100.lookup(operator, **points)
    assert len(found.latency_us) == 500
    for name, sizes in points.items():
        if isinstance(sizes, np.ndarray):
            measured = h100.table(operator).columns[name]
            assert measured.min() <= sizes.min() <= sizes.max() <= measured.max()


def test_every_operator_and_method_is_looked_up(setup: Setup, h100: fastroof.Tables) -> None:
    workloads = list(lookup_workloads(setup, {"one": h100}))
    measured = [operator for operator in LOOKUP_OPERATORS if operator in h100.measured.tables]
    expected = [f"{operator} {method}" for operator in measured for method in METHODS]
    assert [workload.name for workload in workloads] == expected
    assert all(len(workload.run()) == workload.count for workload in workloads)
    several = lookup_workloads(setup, {"one": h100, "two": h100})
    assert next(several).name == "one gemm roofline"


# -- stream loops --------------------------------------------------------------------------------


def test_streams_touch_every_byte() -> None:
    a, b = np.arange(1, 6, dtype=np.int32), np.arange(10, 15, dtype=np.int32)
    out = np.empty(5)
    workload.stream_decodes(a, b, out)
    assert out.tolist() == (a + b).tolist()
    workload.stream_prefills(a, b, b, out)
    assert out.tolist() == (a + 2 * b).tolist()
    workload.stream_out(7.0, out)
    assert out.tolist() == [7.0] * 5
    steps, mfu, origin = np.empty(2), np.empty(5), np.empty(5, np.uint8)
    workload.stream_requests(a, b, np.array([0, 2, 5]), steps)
    assert steps.tolist() == [(a + b)[:2].sum(), (a + b)[2:].sum()]
    workload.stream_lookups(a, a, b, out, mfu, origin)
    assert out.tolist() == mfu.tolist() == (2 * a + b).tolist()
    assert origin.tolist() == [1] * 5


# -- reports -------------------------------------------------------------------------------------


def test_machine_has_the_hardware_and_versions() -> None:
    machine = timing.this_machine()
    assert machine.cpu
    assert machine.cores >= 1
    assert set(machine.versions) == {"fastroof", "numba", "numpy", "python"}


@pytest.mark.parametrize(
    ("ns", "message"), [(0.36, "0.36 ns"), (12.34, "12.3 ns"), (1234.0, "1.23 us"), (2e9, "2.00 s")]
)
def test_times_in_words(ns: float, message: str) -> None:
    assert timing.time_of_ns(ns) == message


def test_rates_and_shares_in_words() -> None:
    assert [timing.rate_of(r) for r in (0.5, 999.0, 2.5e9)] == ["0.50 /s", "999 /s", "2.50 G/s"]
    assert [timing.share_of(s) for s in (1.2, 0.0995, 0.004)] == ["120 %", "10 %", "0.4 %"]


def test_workloads_are_built_one_at_a_time(setup: Setup) -> None:
    lines: list[str] = []

    def each() -> Iterator[Workload]:
        for name in ("first", "second"):
            assert len(lines) == (name == "second")
            yield Workload(name, "", "call", 1, lambda: None)

    report = run_workloads(setup, each(), 1, progress=lines.append)
    assert lines == ["first", "second"]
    assert [one["name"] for one in report_document(report)["results"]] == lines
    with pytest.raises(FastroofError, match="rounds must be a whole number"):
        run_workloads(setup, each(), 0)


def test_a_report_that_fails_prints_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise FastroofError("the first workload fails")

    with monkeypatch.context() as patched:
        patched.setattr("fastroof.bench.timing.run_workloads", fails)
        assert "the first workload fails" in refused("scalar", "--quick", "--json")


# -- the command ---------------------------------------------------------------------------------


def test_the_command_knows_every_workload() -> None:
    assert tuple(WORKLOADS) == NAMES
    code, out, _ = run("--help")
    assert code == 0
    assert all(name in out for name in (*NAMES, "lookup"))


def test_command_prints_machine_and_table() -> None:
    code, out, err = run("decode", "--quick", "--repeat", "1")
    assert (code, err) == (0, "")
    for word in ("machine", "load", "versions", "numba", "of stream", "x NumPy", "first call ms"):
        assert word in out


@pytest.mark.slow
def test_command_prints_json_as_all_others_do() -> None:
    code, out, err = run("decode", "scalar", "--quick", "--repeat", "2", "--threads", "2", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["settings"] == {
        "model": "llama-3.1-8b", "gpu": "h100", "threads": 2, "rounds": 2, "quick": True,
    }  # fmt: skip
    assert [one["name"] for one in document["results"]] == ["decode", "scalar"]
    assert set(document["results"][0]["times_as_fast_as"]) == {"stream", "NumPy"}
    explained = run("--help-all")[1]
    keys = {*document, *document["machine"], *document["settings"], *document["results"][0]}
    assert all(key in explained for key in keys)
    assert "--json prints to standard output and takes no file: --json > a.json" in refused(
        "--json", "a.json"
    )


@pytest.mark.slow
def test_command_looks_every_table_up(h100: fastroof.Tables) -> None:
    code, out, err = run("lookup", "--quick", "--repeat", "1")
    assert (code, err) == (0, "")
    measured = [operator for operator in LOOKUP_OPERATORS if operator in h100.measured.tables]
    assert all(f"{operator} " in out for operator in measured)
    # of every source that has it
    tables = sum(len(h100.candidates(operator)) for operator in measured)
    assert out.count("random points") == tables * len(METHODS)


@pytest.mark.slow
def test_sweeps_take_the_tables_that_were_given(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(bench_data_root() / "h100", folder)
    code, out, err = run("sweep-best", "--quick", "--repeat", "1", "--tables", str(folder))
    assert (code, err) == (0, "")
    assert "best batch kept" in out
    for gemm in folder.glob("*/gemm.parquet"):
        gemm.unlink()
    assert "gemm" in refused("sweep-best", "--quick", "--repeat", "1", "--tables", str(folder))


def test_unknown_workload_is_refused() -> None:
    assert "unknown workload 'decoed': use decode, prefill" in refused("decoed")


def test_wrong_numbers_are_refused() -> None:
    assert "threads must be a whole number of at least 1, got 0" in refused(
        "scalar", "--quick", "--threads", "0"
    )
    assert "rounds must be a whole number of at least 1, got 0" in refused(
        "scalar", "--quick", "--repeat", "0"
    )


def test_a_gpu_without_tables_is_refused() -> None:
    assert "mi300x has no measured tables" in refused("decode", "--gpu", "mi300x")
