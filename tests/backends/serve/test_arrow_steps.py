"""Steps as Arrow IPC streams: what is read to the bit, and what is refused before it costs anything."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import fastroof
from fastroof.backends.serve import arrow_steps
from fastroof.backends.serve.arrow_steps import read_steps, read_times, write_stream, write_times
from fastroof.backends.serve.limits import ServeLimits
from fastroof.errors import BackendError, BatchError, PlanRangeError

SMALL = "llama-3.1-8b"
LIMITS = ServeLimits(max_steps=1000, max_requests=2000)


@pytest.fixture(scope="module")
def plan(h100: fastroof.Tables) -> fastroof.StepPlan:
    return fastroof.compile_plan(SMALL, "h100", h100, engine="kernels")


def decodes(batch_size: Any, kv_len: Any, of: Any = None) -> Any:
    return pa.record_batch({"batch_size": pa.array(batch_size, of), "kv_len": pa.array(kv_len, of)})


def requests(new: Any, context: Any, of: Any = pa.list_(pa.int64())) -> Any:  # noqa: B008 - a type
    return pa.record_batch({"context_len": pa.array(context, of), "new_tokens": pa.array(new, of)})


def stream(*batches: Any, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def times(plan: fastroof.StepPlan, body: bytes, limits: ServeLimits = LIMITS) -> Any:
    return read_steps(body, limits).times_us(plan)


@pytest.mark.parametrize("of", [pa.int32(), pa.int64()])
def test_decodes_in_one_batch_or_several(plan: fastroof.StepPlan, of: Any) -> None:
    batch = decodes(np.arange(1, 301), np.arange(301, 601), of)
    expected = plan.decode_us(np.arange(1, 301), np.arange(301, 601))
    assert (times(plan, stream(batch)) == expected).all()
    assert (times(plan, stream(batch[:7], batch[7:7], batch[7:200], batch[200:])) == expected).all()
    assert times(plan, stream(batch[:0])).shape == (0,)
    swapped = batch.select(["kv_len", "batch_size"])
    assert (times(plan, stream(swapped)) == expected).all()


@pytest.mark.parametrize("lists", [pa.list_, pa.large_list])
@pytest.mark.parametrize("integers", [pa.int32(), pa.int64()])
def test_lists_of_any_kind_and_in_several_batches(plan: fastroof.StepPlan, lists: Any, integers: Any) -> None:
    new, context = [[2048, 1], [], [1], [5, 6, 7]], [[0, 4095], [], [10], [0, 0, 1]]
    batch = requests(new, context, lists(integers))
    steps = [list(zip(n, c, strict=True)) for n, c in zip(new, context, strict=True)]
    expected = plan.step_us(fastroof.StepBatch.from_requests(steps))
    assert (times(plan, stream(batch)) == expected).all()
    assert (times(plan, stream(batch[:1], batch[1:1], batch[1:])) == expected).all()
    assert (times(plan, stream(batch[2:])) == expected[2:]).all()
    assert times(plan, stream(batch[:0])).shape == (0,)


def test_a_single_batch_is_read_where_it_lies(plan: fastroof.StepPlan) -> None:
    kv_len = np.arange(1, 200_001)
    body = stream(decodes(np.ones_like(kv_len), kv_len))
    limits = ServeLimits()
    times(plan, body, limits)
    tracemalloc.start()
    found = times(plan, body, limits)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 3 * found.nbytes
    assert np.shares_memory(read_steps(body, limits).kv_len, np.frombuffer(body, np.uint8))


def test_a_body_may_lie_anywhere_in_memory(plan: fastroof.StepPlan) -> None:
    for batch in (decodes([1, 2], [3, 4]), requests([[1], [5, 6]], [[9], [0, 1]])):
        body = stream(batch)
        for shift in range(8):
            moved = memoryview(bytearray(b"\0" * shift + body))[shift:]
            assert (times(plan, moved) == times(plan, body)).all()


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (decodes([1, None], [5, 5]), BatchError, "batch_size is null in step 1"),
        (decodes([1, 0], [5, 5]), BatchError, "at least 1, got 0 at position 1"),
        (decodes([1, 2], [5, 2**40]), BatchError, "kv_len must be at most"),
        (decodes([5000], [5]), PlanRangeError, "5000 sequences"),
        (decodes([1] * 1001, [1] * 1001), BackendError, "1001 steps are more than the 1000"),
        (requests([[1], None], [[0], []]), BatchError, "new_tokens is null in step 1"),
        (
            requests([[1], [], [2, None]], [[0], [], [0, 0]]),
            BatchError,
            "new_tokens is null in request 1 of step 2",
        ),
        (
            requests([[1], [2, 3]], [[0], [0]]),
            BatchError,
            "step 1 has 2 requests in new_tokens, 1 in context_len",
        ),
        (requests([[1], [0]], [[0], [0]]), BatchError, "got 0 in request 0 of step 1"),
        (requests([[1], [9000]], [[0], [0]]), PlanRangeError, "step 1 has 9000 tokens"),
        (requests([[1] * 2001], [[0] * 2001]), BackendError, "2001 requests are more than the 2000"),
    ],
)
def test_wrong_steps_are_named_also_in_later_batches(
    plan: fastroof.StepPlan, batch: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        times(plan, stream(batch))
    with pytest.raises(error, match=r"steps are more|" + message):
        times(plan, stream(*(batch[row : row + 1] for row in range(batch.num_rows))))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"batch_size": [1]}, "the columns must be"),
        ({"batch_size": [1], "kv_len": [1], "more": [1]}, "the columns must be"),
        ({"batch_size": [1.0], "kv_len": [1]}, "must hold int32 or int64, got double"),
        ({"batch_size": pa.array([1], pa.uint64()), "kv_len": [1]}, "got uint64"),
        ({"batch_size": ["a"], "kv_len": [1]}, "got string"),
        ({"batch_size": pa.array([1]).dictionary_encode(), "kv_len": [1]}, "got dictionary"),
        ({"batch_size": [{"a": 1}], "kv_len": [1]}, "got struct"),
        ({"batch_size": pa.nulls(1), "kv_len": [1]}, "got null"),
        ({"new_tokens": [1], "context_len": [[1]]}, "must hold lists, got int64"),
        ({"new_tokens": [[True]], "context_len": [[1]]}, "got list<item: bool>"),
        ({"new_tokens": [[[1]]], "context_len": [[1]]}, "got list<item: list"),
    ],
)
def test_other_columns_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        read_steps(stream(pa.record_batch(columns)), LIMITS)


def test_an_invalid_stream_is_refused() -> None:
    whole = stream(decodes([1, 2], [3, 4]))
    for body, message in (
        (b"", "empty body"),
        (b"x", "not a valid Arrow IPC stream"),
        (b"{}" * 50, "not a valid Arrow IPC stream"),
        (whole[:50], "not a valid Arrow IPC stream"),
        (whole[:-20], "not a valid Arrow IPC stream"),
        (struct.pack("<iI", -1, 2**31 - 8), "not a valid Arrow IPC stream"),
    ):
        with pytest.raises(BackendError, match=message):
            read_steps(body, LIMITS)
    schema, messages = decodes([1], [1]).schema, pa.ipc.MessageReader.open_stream(whole)
    first, second = messages.read_next_message(), messages.read_next_message()
    for order in ((second, first), (first, first)):
        sink = pa.BufferOutputStream()
        for message in order:
            message.serialize_to(sink)
        with pytest.raises(BackendError, match=r"must be a (schema|record batch), got a"):
            read_steps(bytes(sink.getvalue()), LIMITS)
    table = pa.table({"batch_size": [1], "kv_len": [1]}, schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(table)
    with pytest.raises(BackendError, match="not a valid Arrow IPC stream"):
        read_steps(bytes(sink.getvalue()), LIMITS)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_batches_are_refused_undecoded(codec: str) -> None:
    """A body of some kilobytes that would be a gigabyte: nothing of it is decompressed."""
    zeros = np.zeros(2**24, np.int64)
    body = stream(decodes(zeros, zeros), compression=codec)
    assert len(body) < 2**21
    before_bytes = pa.total_allocated_bytes()
    peak_bytes = pa.default_memory_pool().max_memory()
    with pytest.raises(BackendError, match="compressed record batches are not accepted"):
        read_steps(body, ServeLimits(max_steps=2**25))
    assert pa.total_allocated_bytes() <= before_bytes
    assert pa.default_memory_pool().max_memory() == peak_bytes
    good = stream(decodes([1, 2], [3, 4]), decodes([1] * 500, [3] * 500))
    hidden = good[:-8] + stream(decodes([1] * 500, [3] * 500), compression=codec)
    with pytest.raises(BackendError, match=r"must be a record batch|compressed"):
        read_steps(hidden, LIMITS)


def test_metadata_and_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    long = decodes([1], [1]).replace_schema_metadata({"a": "b" * 2**16})
    with pytest.raises(BackendError, match=r"bytes of metadata, more than 65536"):
        read_steps(stream(long), LIMITS)
    many = pa.record_batch({f"c{i}": [1] for i in range(5000)})
    with pytest.raises(BackendError, match=r"bytes of metadata, more than 65536"):
        read_steps(stream(many), LIMITS)
    monkeypatch.setattr(arrow_steps, "MAX_BATCHES", 3)
    one = decodes([1], [1])
    assert read_steps(stream(one, one, one), LIMITS).num_steps == 3
    with pytest.raises(BackendError, match="more than 3 record batches"):
        read_steps(stream(one, one, one, one), LIMITS)


def test_times_are_written_and_read_to_the_bit() -> None:
    latency_us, errors = np.array([1.5, 1 / 3, 0.0]), np.array([0.1, np.nan, 0.0])
    [found] = read_times(write_times(latency_us))
    assert found.tobytes() == latency_us.tobytes()
    found, relative = read_times(write_times(latency_us, errors))
    assert (found.tobytes(), relative.tobytes()) == (latency_us.tobytes(), errors.tobytes())
    [none] = read_times(write_times(np.zeros(0)))
    assert none.shape == (0,)
    assert pa.ipc.open_stream(write_times(latency_us)).schema == pa.schema(
        [pa.field("latency_us", pa.float64(), nullable=False)]
    )
    assert read_steps(write_stream(decodes([3], [4])), LIMITS).num_steps == 1
