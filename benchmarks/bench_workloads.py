"""Steps, plans, sweeps and lookups: the lines of the table, and what else is timed or held together."""

from __future__ import annotations

import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import cases
from benchmarks.baselines import python_decode_us
from benchmarks.conftest import Timed
from benchmarks.table import ROWS, Row, lines
from fastroof import compile_plan, run_sweep
from fastroof.bench.lookups import LOOKUP_OPERATORS, lookup_workloads
from fastroof.bench.numpy_steps import NumpySteps
from fastroof.bench.workload import Baseline, Setup, Workload, decode_sizes, ragged_decodes, sweep_axes
from fastroof.bench.workloads import WORKLOADS, homogeneous_decode, numpy_best, ragged
from fastroof.operators.operator import METHODS

LARGE = "FASTROOF_BENCH_LARGE"
"""Set to 1 to time 1e8 steps as well, which takes 3 GB."""

MOST_EXTRA_BYTES = 300e6


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(timed: Timed, setup: Setup, row: Row) -> None:
    try:
        workload = row.build(setup)
    except ImportError as missing:
        pytest.skip(f"{missing.name} is not installed")
    timed(workload)


def test_lines_are_markdown(setup: Setup) -> None:
    head, rule, scalar = lines(setup, 1, ["one-step"])
    assert head.count("|") == rule.count("|") == scalar.count("|") == 6
    assert scalar.startswith("| plan.step_us of one step of ")


def test_names_are_distinguishable() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.fixture(scope="module")
def lookups(setup: Setup) -> dict[str, Workload]:
    return {workload.name: workload for workload in lookup_workloads(setup, {"h100": setup.tables})}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("operator", LOOKUP_OPERATORS)
def test_lookups(timed: Timed, lookups: dict[str, Workload], operator: str, method: str) -> None:
    name = f"{operator} {method}"
    if name not in lookups:
        pytest.skip(f"the H100 tables that ship have no {operator}")
    timed(lookups[name])


def test_ragged_with_origins(timed: Timed, setup: Setup) -> None:
    """``plan.run``: components and origins too, against ``plan.step_us``."""
    batch = ragged_decodes(setup.size(100_000, 1_000))
    requests = len(batch.new_tokens)
    alone = Baseline("step_us", lambda: setup.plan.step_us(batch), requests, 0.0)
    timed(
        Workload(
            "run", "components and origins", "request", requests,
            lambda: setup.plan.run(batch).latency_us, baselines=(alone,),
        )
    )  # fmt: skip


@pytest.mark.parametrize("requests", [1, 4, 16, 64, 256, 1024, 4096])
def test_rows(timed: Timed, setup: Setup, requests: int) -> None:
    """Two million requests, so many a step on average: the time a request has to stay the same."""
    plan = compile_plan(
        setup.model, setup.gpu, setup.tables, max_num_batched_tokens=8192, max_num_seqs=8192, engine="kernels"
    )
    batch = ragged_decodes(max(1, setup.size(2_000_000, 10_000) // requests), requests)
    workload = ragged(replace(setup, plan=plan), batch, f"rows-{requests}", "decode")
    # more sequences than were measured are extrapolated, which the NumPy version cannot do
    timed(replace(workload, baselines=workload.baselines[:1]))


@pytest.mark.parametrize("steps", [1, 100, 10_000, 1_000_000, 10_000_000, 100_000_000])
def test_scaling(timed: Timed, benchmark: Any, setup: Setup, steps: int) -> None:
    """The time a step from one step to many, with the memory taken beyond inputs and output."""
    if steps > 10_000_000 and not os.environ.get(LARGE):
        pytest.skip(f"1e8 steps take 3 GB: {LARGE}=1 times them")
    steps = min(steps, setup.size(steps, 100_000))
    workload = homogeneous_decode(setup, steps, name=f"scaling-{steps}")
    workload = replace(workload, baselines=workload.baselines[:1])
    tracemalloc.start()
    workload.run()
    extra = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert extra < MOST_EXTRA_BYTES
    benchmark.extra_info["extra_bytes"] = extra
    calls = max(1, setup.size(10_000, 10) // steps)
    if calls > 1:
        once = workload.run
        again = lambda: [once() for _ in range(calls)]  # noqa: E731
        workload = replace(workload, count=steps * calls, run=again, baselines=())
    timed(workload)


def _strided(array: Any, _: Path) -> Any:
    wide = np.zeros((len(array), 2), array.dtype)
    wide[:, 0] = array
    return wide[:, 0]


def _read_only(array: Any, _: Path) -> Any:
    array.flags.writeable = False
    return array


def _mapped(array: Any, folder: Path) -> Any:
    path = folder / f"{len(list(folder.iterdir()))}.npy"
    np.save(path, array)
    return np.load(path, mmap_mode="r")


FORMS = {
    "int32": lambda a, _: a,
    "int64": lambda a, _: a.astype(np.int64),
    "uint32": lambda a, _: a.astype(np.uint32),
    "strided": _strided,
    "reversed": lambda a, _: np.ascontiguousarray(a[::-1])[::-1],
    "read-only": _read_only,
    "memory-mapped": _mapped,
    "Arrow": lambda a, _: pa.array(a),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(timed: Timed, setup: Setup, form: str, tmp_path: Path) -> None:
    """Any dtype, stride and owner of the sizes, against contiguous int32: the same bits."""
    count = setup.size(1_000_000, 10_000)
    sizes = decode_sizes(setup, count)
    out, native = np.empty(count), np.empty(count)
    given = [FORMS[form](size.copy(), tmp_path) for size in sizes]
    int32 = Baseline("contiguous int32", lambda: setup.plan.decode_us(*sizes, out=native), count, 0.0)
    timed(
        Workload(
            f"forms-{form}", form, "step", count, lambda: setup.plan.decode_us(*given, out=out),
            baselines=(int32,),
        )
    )  # fmt: skip


def test_plans(timed: Timed, benchmark: Any, setup: Setup) -> None:
    """The plans of a sweep, with the memory that they take."""
    workload = WORKLOADS["plans"](setup)
    tracemalloc.start()
    kept = workload.run()
    benchmark.extra_info["plan_bytes"] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    timed(replace(workload, run=lambda: len(workload.run())))


@pytest.mark.parametrize("name", ["scalar", "scalar-callable", "one-row", "one-step"])
def test_one_step_a_call(timed: Timed, setup: Setup, name: str) -> None:
    workload = WORKLOADS[name](setup)
    count = setup.size(50, 2)

    def plain() -> None:
        for _ in range(count):
            python_decode_us(setup.plan, setup.tables, 64, 4096)

    timed(replace(workload, baselines=(Baseline("lookups in Python", plain, count, None),)))


def test_scalars_are_the_plans_times(setup: Setup) -> None:
    plain = python_decode_us(setup.plan, setup.tables, 64, 4096)
    assert setup.plan.decode_us(64, 4096) == pytest.approx(plain, rel=1e-9)
    assert setup.plan.scalar(64, 4096) == setup.plan.decode_us(64, 4096)


@pytest.mark.parametrize("name", ["sweep", "ragged-mixed"])
def test_in_threads(timed: Timed, setup: Setup, name: str) -> None:
    timed(cases.in_threads(setup, name))


def test_best_batches_are_numpys(setup: Setup, tmp_path: Path) -> None:
    """What the two are timed at is one thing: the batch with most tokens a second within memory."""
    batch, kv_len = sweep_axes(setup)
    spec = {
        "models": [setup.model.name], "batch_size": batch.tolist(), "kv_len": kv_len.tolist(),
    }  # fmt: skip
    run_sweep(spec, tmp_path / "best.parquet")
    plan = compile_plan(
        setup.model, setup.gpu, setup.tables, max_num_batched_tokens=512, max_num_seqs=512, engine="kernels"
    )
    (best,) = numpy_best([plan], [NumpySteps(plan, setup.tables)], batch, kv_len)
    found = pq.read_table(tmp_path / "best.parquet")["batch_size"].to_numpy()
    np.testing.assert_array_equal(found, batch[best])


def test_threads_write_the_same_rows(setup: Setup, tmp_path: Path) -> None:
    spec = {
        "models": [setup.model.name],
        "tp": [1, 2],
        "batch_size": list(range(1, 65)),
        "kv_len": [512, 777],
    }
    for threads in (1, cases.THREADS):
        run_sweep(spec, tmp_path / f"{threads}.parquet", threads=threads)
    one, several = (pq.read_table(tmp_path / f"{threads}.parquet") for threads in (1, cases.THREADS))
    assert one.equals(several)
