"""Results as Arrow tables, and what takes them as they are."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

import fastroof
import fastroof.sweep
from fastroof import FastroofError, StepBatch, StepPlan, Tables
from fastroof.arrow import ArrowResult
from fastroof.columns import ORIGINS
from fastroof.serving import estimate, estimate_disaggregated

BATCH = StepBatch.from_requests([[(512, 0), (1, 4000)], [], [(1, 9)] * 3])
STEP = [(512, 100), (1, 4000)]


@pytest.fixture(scope="module")
def plan(h100: Tables) -> StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, tp=2, engine="kernels")


@pytest.fixture(
    params=[
        "lookup",
        "lookup with error",
        "wide lookup",
        "one lookup",
        "run",
        "run with error",
        "explain",
        "estimate",
        "estimates with error",
        "disaggregated",
    ]
)
def result(request: pytest.FixtureRequest, plan: StepPlan, h100: Tables) -> ArrowResult:
    wide = {"m": np.arange(1, 7).reshape(2, 3), "n": 6144, "k": 4096}
    make = {
        "lookup": lambda: h100.lookup("gemm", m=[64, 100, 100_000], n=6144, k=4096),
        "lookup with error": lambda: h100.lookup("gemm", m=[64, 100], n=6144, k=4096, with_error=True),
        "wide lookup": lambda: h100.lookup("gemm", **wide),
        "one lookup": lambda: h100.lookup("allreduce", num_gpus=2, message_bytes=4096),
        "run": lambda: plan.run(BATCH),
        "run with error": lambda: plan.run(BATCH, with_error=True),
        "explain": lambda: plan.explain(STEP),
        "estimate": lambda: estimate(plan, 1000, 200, 8),
        "estimates with error": lambda: estimate(plan, 1000, [1, 200], [[8], [64]], with_error=True),
        "disaggregated": lambda: estimate_disaggregated(plan, plan, 1000, 200, [8, 64]),
    }
    return make[request.param]()


def test_a_table_holds_every_answer_in_order(result: ArrowResult) -> None:
    table = result.to_arrow()
    assert table.column_names == [column.name for column in result.arrow_columns] == list(result.columns())
    for name, values in result.columns().items():
        if name in result.arrow_names:
            assert name == "origin"
            assert table[name].to_pylist() == [ORIGINS[code] for code in np.ravel(values)]
        elif values is None:
            assert table[name].null_count == table.num_rows > 0
        else:
            expected = [None if value != value else value for value in np.ravel(values).tolist()]
            assert table[name].to_pylist() == expected


def test_a_table_has_units_and_provenance(result: ArrowResult, h100: Tables) -> None:
    schema = result.to_arrow().schema
    assert schema.metadata[b"fastroof.version"].decode() == fastroof.__version__
    assert schema.metadata[b"fastroof.tables_hash"].decode() == h100.content_hash
    assert schema.metadata[b"fastroof.gpu"] == b"h100"
    for field in schema:
        assert field.metadata[b"meaning"]
        for unit in ("us", "ms"):
            assert (field.metadata[b"unit"].decode() == unit) == field.name.endswith(f"_{unit}")


def test_arrow_takes_a_result_as_it_is(result: ArrowResult) -> None:
    assert pa.table(result).equals(result.to_arrow(), check_metadata=True)
    narrow = pa.schema(
        [(f.name, "float32" if f.type == "float64" else f.type) for f in pa.table(result).schema]
    )
    assert pa.table(result, schema=narrow).schema.types == narrow.types


def test_polars_takes_a_result_as_it_is(result: ArrowResult) -> None:
    polars = pytest.importorskip("polars")
    assert polars.DataFrame(result).to_dicts() == result.to_arrow().to_pylist()


def test_pandas_takes_a_result_as_it_is(result: ArrowResult) -> None:
    pandas = pytest.importorskip("pandas", minversion="3")
    frame = pandas.DataFrame.from_arrow(result)
    assert pa.Table.from_pandas(frame, preserve_index=False).num_rows == result.to_arrow().num_rows
    assert list(frame) == result.to_arrow().column_names


def test_frames_in_one_call_hold_the_tables_values(
    result: ArrowResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = result.to_arrow()
    pandas = pytest.importorskip("pandas")
    pandas.testing.assert_frame_equal(result.to_pandas(), table.to_pandas())
    assert list(result.to_pandas()) == table.column_names
    polars = SimpleNamespace(from_arrow=lambda given: ("frame", given))
    monkeypatch.setitem(sys.modules, "polars", polars)
    name, given = result.to_polars()
    assert name == "frame"
    assert given.equals(table, check_metadata=True)


def test_polars_frame_in_one_call(result: ArrowResult) -> None:
    polars = pytest.importorskip("polars")
    frame = result.to_polars()
    assert isinstance(frame, polars.DataFrame)
    assert frame.to_dicts() == result.to_arrow().to_pylist()


def test_requests_of_a_simulation_are_rows_too(plan: StepPlan) -> None:
    simulation = fastroof.simulate(plan, fastroof.Trace([0.0, 0.1], [1000, 2000], [100, 1]))
    assert simulation.to_arrow() is simulation.requests
    assert pa.table(simulation).equals(simulation.requests, check_metadata=True)
    pandas = pytest.importorskip("pandas")
    pandas.testing.assert_frame_equal(simulation.to_pandas(), simulation.requests.to_pandas())


@pytest.fixture(scope="module")
def other_answers(plan: StepPlan) -> tuple[ArrowResult, ...]:
    """A simulation, and a choice of deployments."""
    return (
        fastroof.simulate(plan, fastroof.Trace([0.0], [1000], [100])),
        fastroof.sweep.best_deployments(
            {"models": ["llama-3.1-8b"], "tp": [1], "isl": 1000, "osl": 100, "clients": [1]}
        ),
    )


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_missing_package_is_named_with_what_installs_it(
    result: ArrowResult, other_answers: tuple[ArrowResult, ...], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for rows in (result, *other_answers):
        with pytest.raises(FastroofError, match=rf"to_{package} needs {package}.*: pip install {package}; "):
            getattr(rows, f"to_{package}")()


def test_duckdb_takes_a_result_as_it_is(result: ArrowResult) -> None:
    duckdb = pytest.importorskip("duckdb")
    rows = duckdb.sql("select * from result").fetchall()
    assert rows == [tuple(row.values()) for row in result.to_arrow().to_pylist()]


def test_results_pickle_and_stay_as_they_are(result: ArrowResult) -> None:
    twin = pickle.loads(pickle.dumps(result))
    assert twin.to_arrow().equals(result.to_arrow(), check_metadata=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.origin = None  # type: ignore[attr-defined]


def test_one_relative_error_of_the_answers_shape(plan: StepPlan, h100: Tables) -> None:
    sizes = {"m": np.arange(1, 7).reshape(2, 3), "n": 6144, "k": 4096}
    found = h100.lookup("gemm", **sizes, with_error=True)
    assert found.relative_error is not None
    assert found.relative_error.shape == found.latency_us.shape == (2, 3)
    times = plan.run(BATCH, with_error=True)
    assert times.relative_error is not None
    assert times.relative_error.shape == times.latency_us.shape
    step = StepBatch.from_requests([STEP])
    explained = plan.explain(STEP, with_error=True)
    assert isinstance(explained.relative_error, float)
    assert explained.relative_error == plan.step_error(step)[0] > 0.0
    assert plan.explain([], with_error=True).relative_error == 0.0
    for unasked in (h100.lookup("gemm", **sizes), plan.run(step), plan.explain(STEP), plan.explain([])):
        assert unasked.relative_error is None


def test_no_answer_is_a_table_of_no_rows(plan: StepPlan, h100: Tables) -> None:
    empty = StepBatch.from_requests([])
    for result in (h100.lookup("gemm", m=[], n=1, k=1), plan.run(empty), plan.explain([])):
        table = result.to_arrow()
        assert table.num_rows == 0
        assert table.column_names == [column.name for column in result.arrow_columns]


def test_importing_fastroof_loads_no_arrow() -> None:
    code = "import sys, fastroof, fastroof.arrow; print('pyarrow' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
