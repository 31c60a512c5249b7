"""Plans served over Arrow Flight: answers, errors, limits, tokens and TLS."""

from __future__ import annotations

import json
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import fastroof
from fastroof.backends.serve import flight_example
from fastroof.backends.serve.address import is_loopback
from fastroof.backends.serve.flight import FlightServer, serve_flight
from fastroof.backends.serve.flight_client import FlightSteps
from fastroof.backends.serve.flight_steps import TIMES, TIMES_AND_ERRORS, batch_steps, step_kind
from fastroof.backends.serve.limits import ServeLimits
from fastroof.errors import BackendError, BatchError, PlanRangeError

flight = pytest.importorskip("pyarrow.flight")

SMALL = "llama-3.1-8b"


@pytest.fixture(scope="module")
def plans(h100: fastroof.Tables) -> dict[str, fastroof.StepPlan]:
    return {
        SMALL: fastroof.compile_plan(SMALL, "h100", h100, engine="kernels"),
        "two": fastroof.compile_plan("qwen2.5-7b", "h100", h100, tp=2, engine="kernels"),
    }


@pytest.fixture(scope="module")
def server(plans: dict[str, fastroof.StepPlan]) -> Iterator[FlightServer]:
    with FlightServer(plans) as running:
        yield running


@pytest.fixture
def steps(server: FlightServer) -> Iterator[FlightSteps]:
    with FlightSteps(f"grpc://127.0.0.1:{server.port}") as client:
        yield client


@pytest.fixture
def client(server: FlightServer) -> Iterator[Any]:
    with flight.connect(f"grpc://127.0.0.1:{server.port}") as connected:
        yield connected


def ragged(rng: np.random.Generator, num_steps: int) -> fastroof.StepBatch:
    counts = rng.integers(0, 9, num_steps)
    total = int(counts.sum())
    new = np.where(rng.random(total) < 0.7, 1, rng.integers(1, 512, total))
    return fastroof.StepBatch(new, rng.integers(0, 9000, total), np.r_[0, np.cumsum(counts)])


def exchange(client: Any, batches: list[Any], plan: str = SMALL, options: Any = None) -> list[Any]:
    """Send record batches on one stream; the answers."""
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(plan), options)
    answers = []
    try:
        writer.begin(batches[0].schema)
        for batch in batches:
            writer.write_batch(batch)
            answers.append(reader.read_chunk())
        writer.done_writing()
        with pytest.raises(StopIteration):
            reader.read_chunk()
    finally:
        reader.cancel()
        with suppress(pa.ArrowException):
            writer.close()
    return answers


def decodes(batch_size: Any, kv_len: Any, of: Any = None) -> Any:
    return pa.record_batch({"batch_size": pa.array(batch_size, of), "kv_len": pa.array(kv_len, of)})


@pytest.mark.parametrize("dtypes", [("i4", "i4"), ("i8", "i8"), ("i4", "i8"), ("u2", "i8")])
def test_decodes_come_back_to_the_bit(steps: FlightSteps, plans: Any, dtypes: tuple[str, str]) -> None:
    rng = np.random.default_rng(1)
    batch, kv = rng.integers(1, 300, (40, 1)).astype(dtypes[0]), rng.integers(1, 30000, 700).astype(dtypes[1])
    for name, plan in plans.items():
        assert (steps.decode_us(name, batch, kv) == plan.decode_us(batch, kv)).all()
    one = steps.decode_us("two", 3, 999)
    assert isinstance(one, float)
    assert one == plans["two"].decode_us(3, 999)
    assert steps.decode_us("two", [], []).shape == (0,)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ragged_steps_come_back_to_the_bit(steps: FlightSteps, plans: Any, dtype: Any) -> None:
    batch = ragged(np.random.default_rng(2), 5000)
    batch = fastroof.StepBatch(batch.new_tokens.astype(dtype), batch.context_len.astype(dtype), batch.offsets)
    for name, plan in plans.items():
        assert (steps.step_us(name, batch) == plan.step_us(batch)).all()
    assert steps.step_us("two", fastroof.StepBatch([], [], [0])).shape == (0,)


def test_large_arrays_are_sent_in_parts(plans: Any) -> None:
    batch = ragged(np.random.default_rng(3), 900)
    limits = ServeLimits(max_steps=100, max_requests=60)
    with (
        FlightServer(plans, limits=limits) as server,
        FlightSteps(f"grpc://127.0.0.1:{server.port}") as steps,
    ):
        assert (steps.step_us(SMALL, batch) == plans[SMALL].step_us(batch)).all()
        kv = np.arange(1, 1001)
        assert (steps.decode_us(SMALL, 7, kv) == plans[SMALL].decode_us(7, kv)).all()
        kv[750] = 0
        with pytest.raises(BatchError, match=r"position 50 \(counted from step 700\)"):
            steps.decode_us(SMALL, 7, kv)


@pytest.mark.parametrize("lists", [pa.list_, pa.large_list])
@pytest.mark.parametrize("integers", [pa.int32(), pa.int64()])
def test_lists_of_any_kind_and_their_slices(client: Any, plans: Any, lists: Any, integers: Any) -> None:
    new, context = [[2048, 1], [], [1], [5, 6, 7]], [[0, 4095], [], [10], [0, 0, 1]]
    of = lists(integers)
    batch = pa.record_batch({"context_len": pa.array(context, of), "new_tokens": pa.array(new, of)})
    requests = [list(zip(n, c, strict=True)) for n, c in zip(new, context, strict=True)]
    expected = plans[SMALL].step_us(fastroof.StepBatch.from_requests(requests))
    whole, part, empty = exchange(client, [batch, batch.slice(2, 2), batch.slice(0, 0)])
    assert whole.data.schema == TIMES
    assert whole.data.column(0).to_numpy().tolist() == expected.tolist()
    assert part.data.column(0).to_numpy().tolist() == expected[2:].tolist()
    assert empty.data.num_rows == 0
    assert empty.app_metadata is None
    # slices as they lie in memory, which no writer would send
    assert (batch_steps("ragged", batch.slice(2), ServeLimits()).times_us(plans[SMALL]) == expected[2:]).all()


def test_columns_are_read_where_they_lie(plans: Any) -> None:
    batch = ragged(np.random.default_rng(4), 1000)
    repeated = [np.tile(values, 100) for values in (batch.new_tokens, batch.context_len)]
    offsets = np.r_[0, np.cumsum(np.tile(np.diff(batch.offsets), 100))]
    columns = [pa.LargeListArray.from_arrays(offsets, pa.array(values)) for values in repeated]
    message = pa.record_batch(columns, names=["new_tokens", "context_len"]).slice(10)
    batch_steps("ragged", message, ServeLimits()).times_us(plans[SMALL])
    tracemalloc.start()
    times = batch_steps("ragged", message, ServeLimits()).times_us(plans[SMALL])
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4 * times.nbytes < repeated[0].nbytes


def test_unaligned_columns(plans: Any) -> None:
    raw = np.zeros(8 * 9 + 4, np.uint8)
    raw[4:].view(np.int64)[:] = np.arange(1, 10)
    values = pa.Array.from_buffers(pa.int64(), 9, [None, pa.py_buffer(raw)[4:]])
    lists = pa.ListArray.from_arrays(pa.array([0, 4, 9], pa.int32()), values)
    assert not values.to_numpy().flags.aligned
    decode = decodes(values, values)
    assert (
        batch_steps("decode", decode, ServeLimits()).times_us(plans[SMALL])
        == plans[SMALL].decode_us(np.arange(1, 10), np.arange(1, 10))
    ).all()
    steps = pa.record_batch({"new_tokens": lists, "context_len": lists})
    same = fastroof.StepBatch(np.arange(1, 10), np.arange(1, 10), [0, 4, 9])
    assert (
        batch_steps("ragged", steps, ServeLimits()).times_us(plans[SMALL]) == plans[SMALL].step_us(same)
    ).all()


WRONG_BATCHES = [
    (decodes([1, None], [5, 5]), "BatchError", "batch_size is null in step 1"),
    (decodes([1, 0], [5, 5]), "BatchError", "at least 1, got 0 at position 1"),
    (decodes([1, 2], [5, 2**40]), "BatchError", "kv_len must be at most"),
    (decodes([5000], [5]), "PlanRangeError", "5000 sequences"),
    (
        decodes([1] * 1001, [1] * 1001),
        "BackendError",
        "1001 steps in a batch are more than the limit of 1000",
    ),
]
WRONG_LISTS = [
    ([[1], None], [[0], []], "BatchError", "new_tokens is null in step 1"),
    ([[1], [], [2, None]], [[0], [], [0, 0]], "BatchError", "new_tokens is null in request 1 of step 2"),
    ([[1], [2, 3]], [[0], [0]], "BatchError", "step 1 has 2 requests in new_tokens, 1 in context_len"),
    ([[1], [0]], [[0], [0]], "BatchError", "got 0 in request 0 of step 1"),
    ([[1], [9000]], [[0], [0]], "PlanRangeError", "step 1 has 9000 tokens"),
    ([[1] * 2001], [[0] * 2001], "BackendError", "2001 requests in a batch"),
]


GOES_ON = flight.FlightCallOptions(headers=[(b"fastroof-errors", b"in-stream")])


def test_a_wrong_batch_ends_the_stream_of_a_client_that_asks_for_nothing_else(plans: Any) -> None:
    """Who only reads columns gets an error, and never an empty batch: after what was answered before."""
    with (
        FlightServer(plans, limits=ServeLimits(max_steps=1000, max_requests=2000)) as server,
        flight.connect(f"grpc://127.0.0.1:{server.port}") as client,
    ):
        of = pa.list_(pa.int64())
        wrong_lists = [
            (pa.record_batch({"new_tokens": pa.array(new, of), "context_len": pa.array(context, of)}), said)
            for new, context, _, said in WRONG_LISTS
        ]
        for path in ([SMALL], [SMALL, "errors"]):
            for batch, said in [*((batch, said) for batch, _, said in WRONG_BATCHES), *wrong_lists]:
                writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(*path))
                good = batch.slice(0, 0)
                writer.begin(batch.schema)
                writer.write_batch(good)
                assert reader.read_chunk().data.num_rows == 0
                writer.write_batch(batch)
                with pytest.raises((pa.ArrowException, OSError), match=said):
                    reader.read_chunk()
                with suppress(pa.ArrowException):
                    writer.close()
        # all at once, as a client does that writes first and reads then
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(SMALL))
        writer.begin(decodes([1], [1]).schema)
        for batch in (decodes([1, 2], [3, 4]), decodes([1, 0], [3, 4]), decodes([5], [6])):
            with suppress(pa.ArrowException):
                writer.write_batch(batch)
        with suppress(pa.ArrowException):
            writer.done_writing()
        with pytest.raises((pa.ArrowException, OSError), match="at least 1, got 0 at position 1"):
            reader.read_all()


def test_a_wrong_batch_is_answered_by_an_error_and_the_stream_goes_on(plans: Any) -> None:
    with (
        FlightServer(plans, limits=ServeLimits(max_steps=1000, max_requests=2000)) as server,
        flight.connect(f"grpc://127.0.0.1:{server.port}") as client,
    ):
        good = decodes([1, 64], [100, 4096])
        of = pa.list_(pa.int64())
        asked = [(batch, error, said, good) for batch, error, said in WRONG_BATCHES]
        fine = pa.record_batch({"new_tokens": pa.array([[1]], of), "context_len": pa.array([[9]], of)})
        for new, context, error, said in WRONG_LISTS:
            batch = pa.record_batch({"new_tokens": pa.array(new, of), "context_len": pa.array(context, of)})
            asked.append((batch, error, said, fine))
        for batch, error, said, right in asked:
            before, wrong, after = exchange(client, [right, batch, right], options=GOES_ON)
            told = json.loads(wrong.app_metadata.to_pybytes())
            assert told["error"] == error
            assert said in told["message"]
            assert wrong.data.num_rows == 0
            assert before.app_metadata is after.app_metadata is None
            expected = batch_steps(step_kind(right.schema), right, ServeLimits()).times_us(plans[SMALL])
            assert after.data.column(0).to_numpy().tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"batch_size": [1]}, "the columns must be"),
        ({"batch_size": [1], "kv_len": [1], "more": [1]}, "the columns must be"),
        ({"batch_size": [1.0], "kv_len": [1]}, "must hold int32 or int64, got double"),
        ({"batch_size": ["a"], "kv_len": [1]}, "got string"),
        ({"new_tokens": [1], "context_len": [[1]]}, "must hold lists, got int64"),
        ({"new_tokens": [[True]], "context_len": [[1]]}, "got list<item: bool>"),
        ({"new_tokens": [[[1]]], "context_len": [[1]]}, "got list<item: list"),
    ],
)
def test_other_columns_end_the_call(client: Any, columns: dict[str, Any], said: str) -> None:
    with pytest.raises(flight.FlightServerError, match=said):
        exchange(client, [pa.record_batch(columns)])
    assert len(exchange(client, [decodes([1], [1])])) == 1


def test_the_client_raises_what_the_server_says(steps: FlightSteps, plans: Any) -> None:
    with pytest.raises(BackendError, match=r"^no plan 'nine' is served; there are: 0 llama-3.1-8b, 1 two$"):
        steps.decode_us("nine", 1, 1)
    with pytest.raises(PlanRangeError, match="compile_plan"):
        steps.decode_us("two", 9999, 1)
    with pytest.raises(BatchError, match="in request 0 of step 1"):
        steps.step_us("two", fastroof.StepBatch([1, 0], [0, 0], [0, 1, 2]))
    with pytest.raises(BatchError, match="do not broadcast"):
        steps.decode_us("two", [1, 2], [1, 2, 3])
    assert steps.decode_us("two", 1, 1) == plans["two"].decode_us(1, 1)


def test_plans_are_described(steps: FlightSteps, client: Any, plans: Any) -> None:
    described = steps.plans()
    assert list(described) == list(plans)
    two = described["two"]
    assert (two["model"], two["gpu"], two["tp"], two["dtype"]) == ("qwen2.5-7b", "h100", "2", "bf16")
    assert two["tables_hash"] == plans["two"].tables_hash
    assert {"kv_dtype", "runtime", "max_tokens", "max_seqs", "version"} <= set(two)
    info = client.get_flight_info(flight.FlightDescriptor.for_command("two"))
    assert info.schema.equals(TIMES)
    assert info.schema.metadata[b"tp"] == b"2"
    assert client.get_schema(flight.FlightDescriptor.for_path("two")).schema.metadata == info.schema.metadata
    assert [action.type for action in client.list_actions()] == ["health", "message", "simulate"]
    health = steps.health()
    assert health["fastroof"] == fastroof.__version__
    assert [plan["name"] for plan in health["plans"]] == list(plans)
    assert health["draining"] is False


def test_calls_that_there_are_not(client: Any) -> None:
    for call in (
        lambda: list(client.do_action(flight.Action("stop", b""))),
        lambda: client.do_get(flight.Ticket(b"x")).read_all(),
        lambda: client.get_flight_info(flight.FlightDescriptor.for_path("a", "b")),
        lambda: client.get_schema(flight.FlightDescriptor.for_path("nine")),
        lambda: client.do_put(flight.FlightDescriptor.for_path(SMALL), TIMES)[0].close(),
    ):
        with pytest.raises(pa.ArrowException, match=r"there are: health|DoExchange|path must|is served"):
            call()


def test_calls_at_once_are_limited(plans: Any) -> None:
    with FlightServer(plans, limits=ServeLimits(max_calls=2)) as server:
        location = f"grpc://127.0.0.1:{server.port}"
        with FlightSteps(location) as one, FlightSteps(location) as two, FlightSteps(location) as three:
            one.decode_us(SMALL, 1, 1)
            two.decode_us(SMALL, 1, 1)
            with pytest.raises(BackendError, match="2 calls are running, as many as may at once"):
                three.decode_us(SMALL, 1, 1)
            one.close()
            until = time.monotonic() + 10
            while time.monotonic() < until:
                try:
                    assert three.decode_us(SMALL, 1, 1) == plans[SMALL].decode_us(1, 1)
                    return
                except BackendError:
                    time.sleep(0.01)
        pytest.fail("a call that has ended is still counted")


@pytest.mark.parametrize("plans_served", [{}, {str(i): None for i in range(65)}])
def test_no_plans_or_too_many(plans_served: Any) -> None:
    with pytest.raises(BackendError, match=r"no plan to serve|65 plans are more"):
        FlightServer(plans_served)


def test_tokens(plans: Any) -> None:
    with FlightServer(plans, token="open sesame") as server:
        location = f"grpc://127.0.0.1:{server.port}"
        for token in (None, "", "open", "open sesame!", "OPEN SESAME"):
            with pytest.raises(BackendError, match="the token is missing or wrong"):
                FlightSteps(location, token=token)
        with FlightSteps(location, token="open sesame") as steps:
            assert steps.decode_us(SMALL, 1, 1) == plans[SMALL].decode_us(1, 1)
        with flight.connect(location) as client:
            twice = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer open sesame")] * 2)
            for options in (None, twice):
                with pytest.raises(flight.FlightUnauthenticatedError):
                    exchange(client, [decodes([1], [1])], options=options)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_machines_need_a_token_and_tls(plans: Any, host: str, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with pytest.raises(BackendError, match="listening there needs a token and a TLS certificate and key"):
        serve_flight(plans, host, 0)
    with pytest.raises(BackendError, match="needs a TLS certificate and key;"):
        FlightServer(plans, host, token="secret")
    with pytest.raises(BackendError, match="needs a token;"):
        FlightServer(plans, host, tls_cert=cert, tls_key=key)


def test_addresses_tokens_and_certificates_that_will_not_do(plans: Any, tmp_path: Path, server: Any) -> None:
    (tmp_path / "not.pem").write_text("nothing")
    for given, said in (
        ({"host": ""}, "a host to listen on is needed"),
        ({"host": "no.such.host.invalid"}, "no address belongs to"),
        ({"port": 70000}, "from 0 to 65535"),
        ({"port": server.port}, "cannot be listened on"),
        ({"token": ""}, "not empty"),
        ({"token": "line\nbreak"}, "printable ASCII"),
        ({"tls_cert": tmp_path / "not.pem"}, "one of them is missing"),
        ({"tls_cert": tmp_path / "not.pem", "tls_key": tmp_path / "not.pem"}, "cannot be used"),
    ):
        with pytest.raises(BackendError, match=said):
            FlightServer(plans, **given)
    assert is_loopback("localhost")
    for location, said in (("http://127.0.0.1:1", "a location like"), ("grpc://127.0.0.1:1", "refused")):
        with pytest.raises(BackendError, match=said):
            FlightSteps(location)
    with pytest.raises(BackendError, match=r"use grpc\+tls"):
        FlightSteps("grpc://192.0.2.1:8815", token="secret")


def test_tls_on_every_address(plans: Any, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    rng = np.random.default_rng(5)
    with FlightServer(plans, "0.0.0.0", token="secret", tls_cert=cert, tls_key=key) as server:
        location = f"grpc+tls://localhost:{server.port}"
        batch, kv = rng.integers(1, 99, 400_000), rng.integers(1, 9999, 400_000)
        with FlightSteps(location, token="secret", tls_root=cert) as steps:
            assert (steps.decode_us(SMALL, batch, kv) == plans[SMALL].decode_us(batch, kv)).all()
        with pytest.raises(BackendError, match="the token is missing or wrong"):
            FlightSteps(location, token="guess", tls_root=cert)
        for unsafe, root in ((location, None), (f"grpc://localhost:{server.port}", cert)):
            with pytest.raises(BackendError, match=r"."):
                FlightSteps(unsafe, tls_root=root)
        with FlightSteps(location, token="secret", tls_root=cert) as steps:
            assert steps.decode_us(SMALL, 1, 1) == plans[SMALL].decode_us(1, 1)


@pytest.mark.parametrize("name", ["with spaces", "long" * 30])
def test_folders_for_temporary_files(plans: Any, tmp_path: Path, monkeypatch: Any, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with FlightServer(plans) as server, FlightSteps(f"grpc://127.0.0.1:{server.port}") as steps:
        assert steps.decode_us(SMALL, 1, 1) == plans[SMALL].decode_us(1, 1)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    flight_example.main()
    assert "within 20 ms" in capsys.readouterr().out


def test_standard_errors_come_as_a_column_where_they_are_asked_for(plans, steps, client):
    plan = plans["two"]
    found = steps.decode_with_errors("two", [[1, 64], [7, 9]], [4096, 99])
    assert np.array_equal(found.latency_us, plan.decode_us([[1, 64], [7, 9]], [4096, 99]))
    assert np.array_equal(found.relative_error, plan.decode_error([[1, 64], [7, 9]], [4096, 99]))
    assert steps.decode_with_errors("two", 3, 50).relative_error == [plan.decode_error(3, 50)]
    batch = fastroof.StepBatch.from_requests([[(100, 0), (1, 4095)], [], [(1, 9)] * 8])
    found = steps.step_with_errors("two", batch)
    assert np.array_equal(found.latency_us, plan.step_us(batch))
    assert np.array_equal(found.relative_error, plan.step_error(batch), equal_nan=True)
    with pytest.raises(BatchError, match="must be at least 1, got 0 at position 1"):
        steps.decode_with_errors("two", [1, 0], 9)
    assert steps.decode_us("two", 3, 50) == plan.decode_us(3, 50)
    for path, schema in ((["two"], TIMES), (["two", "errors"], TIMES_AND_ERRORS)):
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(*path))
        asked = pa.record_batch({"batch_size": [1], "kv_len": [9]})
        writer.begin(asked.schema)
        writer.write_batch(asked)
        assert reader.schema == schema
        writer.close()
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("two", "origins"))
    with suppress(pa.ArrowException):
        writer.begin(asked.schema)
        writer.done_writing()
    with pytest.raises(flight.FlightServerError, match="the name of a plan, or"):
        reader.read_chunk()


def test_steps_with_errors_are_sent_in_parts_that_a_server_takes(plans):
    limits = ServeLimits(max_detailed_steps=5, max_detailed_requests=6)
    plan, batches = plans[SMALL], np.arange(1, 18)
    with (
        FlightServer({SMALL: plan}, limits=limits) as server,
        FlightSteps(f"grpc://127.0.0.1:{server.port}") as steps,
    ):
        found = steps.decode_with_errors(SMALL, batches, 100)
        assert np.array_equal(found.relative_error, plan.decode_error(batches, 100))
        batch = fastroof.StepBatch.from_requests([[(1, 50)] * count for count in (1, 5, 6, 2, 2, 2, 2)])
        assert np.array_equal(steps.step_with_errors(SMALL, batch).latency_us, plan.step_us(batch))
