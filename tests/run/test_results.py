"""Step times as an Arrow table."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from fastroof import StepBatch, compile_plan
from fastroof.columns import ORIGINS
from fastroof.run.batch import STEP_COLUMNS, step_table


@pytest.fixture(scope="module")
def plan(h100):
    return compile_plan("llama-3.1-8b", "h100", h100, tp=2, engine="kernels")


def test_a_row_a_step_with_every_part(plan):
    batch = StepBatch.from_requests([[(512, 0), (1, 4000)], [], [(1, 9)] * 3])
    times = plan.run(batch)
    table = step_table(plan, batch, times)
    assert table.column_names == [c.name for c in STEP_COLUMNS]
    assert table["num_requests"].to_pylist() == [2, 0, 3]
    assert table["num_tokens"].to_pylist() == [513, 0, 3]
    np.testing.assert_array_equal(table["latency_us"].to_numpy(), times.latency_us)
    for name, part in times.components._asdict().items():
        np.testing.assert_array_equal(table[name].to_numpy(), part)
    assert table["origin"].to_pylist() == [ORIGINS[i] for i in times.origin]


def test_errors_are_a_column_on_request(plan):
    batch = StepBatch.from_requests([[(512, 0), (1, 4000)], [(1, 9)] * 3])
    table = step_table(plan, batch, plan.run(batch, with_error=True))
    assert table.column_names == [*(c.name for c in STEP_COLUMNS), "relative_error"]
    assert table["relative_error"].to_pylist() == plan.step_error(batch).tolist()


def test_a_file_has_its_provenance(plan, h100, tmp_path):
    batch = StepBatch.from_requests([[(1, 9)]])
    pq.write_table(step_table(plan, batch, plan.run(batch)), tmp_path / "steps.parquet")
    schema = pq.read_schema(tmp_path / "steps.parquet")
    assert schema.metadata[b"fastroof.tables_hash"].decode() == h100.content_hash
    assert schema.metadata[b"fastroof.version"].decode() == plan.version
    assert schema.metadata[b"fastroof.tp"] == b"2"
    assert schema.field("latency_us").metadata[b"unit"] == b"us"
