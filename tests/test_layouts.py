"""Every entry point that takes arrays answers alike whatever their layout: strides, order, width, alignment.

Bounds checks cannot see a loop that ignores strides: it reads its own buffer, and times other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof.backends.serve.client import PlanClient
from fastroof.simulation import load_trace
from tests.reference.layouts import LAYOUTS

CONTEXT: Final = 5000


@dataclass(frozen=True, repr=False)
class Targets:
    """Where sizes go: a plan, tables, and a server of the plan."""

    plan: fastroof.StepPlan
    tables: fastroof.Tables
    server: PlanClient


@pytest.fixture(scope="module")
def targets(h100: fastroof.Tables, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Targets]:
    plan = fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=512, max_num_seqs=64, engine="kernels"
    )
    pytest.importorskip("uvicorn")
    from fastroof.backends.serve.http_server import HttpServer

    with HttpServer({"eight": plan}) as server, PlanClient(f"http://127.0.0.1:{server.port}") as client:
        yield Targets(plan, h100, client)


def batch(*sizes: Any) -> fastroof.StepBatch:
    new, context = sizes
    return fastroof.StepBatch(new, context, np.array([0, len(new)]))


def trace_rows(new: Any, length: Any) -> list[Any]:
    """A workload of arrays, as its requests."""
    columns = {"arrival_s": length, "input_tokens": new, "output_tokens": new}
    table = load_trace(columns).table() if len(new) else None
    return [] if table is None else [row for column in table.columns for row in column.to_pylist()]


# Each takes arrays (of 1 to 16, and of 1 to CONTEXT), of any layout.
ENTRY_POINTS: Final[dict[str, Callable[[Targets, Any, Any], Any]]] = {
    "decode_us": lambda a, few, many: a.plan.decode_us(few, many),
    "decode_us in threads": lambda a, few, many: a.plan.decode_us(few, many, threads=2),
    "prefill_us": lambda a, few, many: a.plan.prefill_us(few, many, few),
    "verify_us": lambda a, few, many: a.plan.verify_us(few, many, few),
    "decode_error": lambda a, few, many: a.plan.decode_error(few, many),
    "step_us": lambda a, few, many: a.plan.step_us(batch(few, many)),
    "run": lambda a, few, many: a.plan.run(batch(few, many)).latency_us,
    "step_error": lambda a, few, many: a.plan.step_error(batch(few, many)) if len(few) else [],
    "stage_times_us": lambda a, few, many: a.plan.stage_times_us(batch(few, many)),
    "step_scalar": lambda a, few, many: [a.plan.step_scalar(few, many)],
    "pipeline_us": lambda a, few, many: [a.plan.pipeline_us(batch(few, many))],
    "from_requests": lambda a, few, many: a.plan.step_us(
        fastroof.StepBatch.from_requests([np.stack([few, many], axis=1)])
    ),
    "offsets": lambda a, few, many: a.plan.step_us(
        fastroof.StepBatch([1] * int(np.sum(few)), [9] * int(np.sum(few)), as_offsets(few))
    ),
    "memory.kv_bytes": lambda a, few, many: a.plan.memory.kv_bytes(many),
    "memory.max_sequences": lambda a, few, many: a.plan.memory.max_sequences(many),
    "lookup gemm": lambda a, few, many: a.tables.lookup("gemm", m=few, n=many, k=4096).latency_us,
    "lookup decode": lambda a, few, many: (
        a.tables.lookup(
            "attention_decode", num_q_heads=32, num_kv_heads=8, head_dim=128, batch_size=few, kv_len=many
        ).latency_us
    ),
    "lookup with errors": lambda a, few, many: (
        a.tables.lookup("gemm", m=few, n=many, k=4096, with_error=True).relative_error
    ),
    "server decode_us": lambda a, few, many: a.server.decode_us(few, many),
    "server step_us": lambda a, few, many: a.server.step_us(batch(few, many)),
    "server with errors": lambda a, few, many: a.server.decode_with_errors(few, many)[1] if len(few) else [],
    "trace": lambda a, few, many: trace_rows(few, np.sort(many)),
}


def as_offsets(counts: Any) -> Any:
    """Offsets in the layout of what they are made of."""
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(counts.dtype)
    return next(
        (lay(offsets) for lay in LAYOUTS.values() if lay(offsets).flags == counts.flags), offsets[::-1][::-1]
    )


SIZES = st.lists(st.tuples(st.integers(1, 16), st.integers(16, CONTEXT)), max_size=16)
DTYPES: Final = (np.int64, np.int32, np.int16, np.uint64, np.uint16)


@pytest.mark.parametrize("name", ENTRY_POINTS)
@given(sizes=SIZES, layout=st.sampled_from([*LAYOUTS]), dtype=st.sampled_from(DTYPES))
def test_layout_and_width_change_no_answer(
    targets: Targets, name: str, sizes: list[tuple[int, int]], layout: str, dtype: Any
) -> None:
    call = ENTRY_POINTS[name]
    few, many = np.array(sizes, np.int64).reshape(-1, 2).T
    expected = list(call(targets, few.copy(), many.copy()))
    laid = [LAYOUTS[layout](values.astype(dtype)) for values in (few, many)]
    assert [values.tolist() for values in laid] == [few.tolist(), many.tolist()]
    assert list(call(targets, *laid)) == expected


@given(sizes=st.lists(st.tuples(st.integers(1, 16), st.integers(16, CONTEXT)), min_size=4, max_size=4))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_table_of_sizes_is_answered_in_its_shape(targets: Targets, layout: str, sizes: Any) -> None:
    few, many = (np.array(column).reshape(2, 2) for column in zip(*sizes, strict=True))
    for call in (targets.plan.decode_us, targets.plan.decode_error):
        expected = call(few.ravel(), many.ravel()).reshape(2, 2).tolist()
        assert call(LAYOUTS[layout](few), LAYOUTS[layout](many)).tolist() == expected
        assert call(few.T, many.T).T.tolist() == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_times_are_written_to_is_filled_or_refused(targets: Targets, layout: str) -> None:
    few, many = np.array([1, 8, 64, 3]), np.array([100, 2000, 4096, 17])
    expected = targets.plan.decode_us(few, many)
    out = LAYOUTS[layout](np.zeros(4))
    before = out.base.copy() if isinstance(out.base, np.ndarray) else None
    if out.dtype.isnative and out.flags.c_contiguous and out.flags.writeable:
        assert targets.plan.decode_us(few, many, out=out) is out
        assert out.tolist() == expected.tolist()
        out[:] = 0
    else:
        with pytest.raises(fastroof.BatchError, match=r"out must be a writeable, C-contiguous float64 array"):
            targets.plan.decode_us(few, many, out=out)
        assert out.tolist() == [0.0] * 4
    if before is not None:
        assert (out.base == before).all(), "wrote outside the given array"
