"""``PlanClient`` and ``POST /steps``: arrays of steps over HTTP, their errors, limits, tokens and sockets."""

from __future__ import annotations

import http.client
import os
import random
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import fastroof
from fastroof.backends.serve.arrow_steps import ARROW_TYPE
from fastroof.backends.serve.client import PlanClient
from fastroof.backends.serve.limits import ServeLimits, is_loopback
from fastroof.errors import BackendError, BatchError, PlanRangeError
from tests.backends.serve.test_arrow_steps import decodes, requests, stream
from tests.fuzz.mutators import mutated_bytes

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from fastroof.backends.serve.http_server import HttpServer
from tests.backends.serve.test_http import metric
from tests.http_replies import send
from tests.reference.waiting import until

SMALL = "llama-3.1-8b"
ARROW = {"Content-Type": ARROW_TYPE}


@pytest.fixture(scope="module")
def plans(h100: fastroof.Tables) -> dict[str, fastroof.StepPlan]:
    return {
        SMALL: fastroof.compile_plan(SMALL, "h100", h100, engine="kernels"),
        "two": fastroof.compile_plan("qwen2.5-7b", "h100", h100, tp=2, engine="kernels"),
    }


@pytest.fixture(scope="module")
def server(plans: dict[str, fastroof.StepPlan]) -> Iterator[HttpServer]:
    with HttpServer(plans) as running:
        yield running


def url(server: HttpServer, scheme: str = "http", host: str = "127.0.0.1") -> str:
    return f"{scheme}://{host}:{server.port}"


@pytest.fixture
def client(server: HttpServer) -> Iterator[PlanClient]:
    with PlanClient(url(server)) as connected:
        yield connected


def ragged(rng: np.random.Generator, num_steps: int) -> fastroof.StepBatch:
    counts = rng.integers(0, 9, num_steps)
    total = int(counts.sum())
    new = np.where(rng.random(total) < 0.7, 1, rng.integers(1, 512, total))
    return fastroof.StepBatch(new, rng.integers(0, 9000, total), np.r_[0, np.cumsum(counts)])


@pytest.mark.parametrize("dtypes", [("i4", "i4"), ("i8", "i8"), ("i4", "i8"), ("u2", "i8")])
def test_decodes_come_back_to_the_bit(client: PlanClient, plans: Any, dtypes: tuple[str, str]) -> None:
    rng = np.random.default_rng(1)
    batch, kv = rng.integers(1, 300, (40, 1)).astype(dtypes[0]), rng.integers(1, 30000, 700).astype(dtypes[1])
    for number, (name, plan) in enumerate(plans.items()):
        assert (client.decode_us(batch, kv, name) == plan.decode_us(batch, kv)).all()
        assert (client.decode_us(batch, kv, number) == plan.decode_us(batch, kv)).all()
    one = client.decode_us(3, 999, "two")
    assert isinstance(one, float)
    assert one == plans["two"].decode_us(3, 999)
    assert client.decode_us([], [], "two").shape == (0,)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ragged_steps_come_back_to_the_bit(client: PlanClient, plans: Any, dtype: Any) -> None:
    batch = ragged(np.random.default_rng(2), 5000)
    batch = fastroof.StepBatch(batch.new_tokens.astype(dtype), batch.context_len.astype(dtype), batch.offsets)
    for name, plan in plans.items():
        assert (client.step_us(batch, name) == plan.step_us(batch)).all()
    assert client.step_us(fastroof.StepBatch([], [], [0]), "two").shape == (0,)
    assert client.step_us([[(100, 0), (1, 7)]], "two")[0] == plans["two"].step_scalar([100, 1], [0, 7])


def test_large_arrays_are_sent_in_parts(plans: Any) -> None:
    batch = ragged(np.random.default_rng(3), 900)
    limits = ServeLimits(max_steps=100, max_requests=60)
    with HttpServer(plans, limits=limits) as server, PlanClient(url(server)) as client:
        assert (client.step_us(batch, SMALL) == plans[SMALL].step_us(batch)).all()
        kv = np.arange(1, 1001)
        assert (client.decode_us(7, kv, SMALL) == plans[SMALL].decode_us(7, kv)).all()
        kv[750] = 0
        with pytest.raises(BatchError, match=r"position 50 \(counted from step 700\)"):
            client.decode_us(7, kv, SMALL)


def test_standard_errors_come_on_request(client: PlanClient, plans: Any) -> None:
    plan = plans["two"]
    found = client.decode_with_errors([[1, 64], [7, 9]], [4096, 99], "two")
    assert np.array_equal(found.latency_us, plan.decode_us([[1, 64], [7, 9]], [4096, 99]))
    assert np.array_equal(found.relative_error, plan.decode_error([[1, 64], [7, 9]], [4096, 99]))
    assert client.decode_with_errors(3, 50, "two").relative_error == [plan.decode_error(3, 50)]
    batch = fastroof.StepBatch.from_requests([[(100, 0), (1, 4095)], [], [(1, 9)] * 8])
    found = client.step_with_errors(batch, "two")
    assert np.array_equal(found.latency_us, plan.step_us(batch))
    assert np.array_equal(found.relative_error, plan.step_error(batch), equal_nan=True)
    assert client.step_with_errors([], "two").latency_us.size == 0
    with pytest.raises(BatchError, match="must be at least 1, got 0 at position 1"):
        client.decode_with_errors([1, 0], 9, "two")


def test_steps_with_errors_are_sent_in_parts_that_a_server_takes(plans: Any) -> None:
    limits = ServeLimits(max_detailed_steps=5, max_detailed_requests=6)
    plan, batches = plans[SMALL], np.arange(1, 18)
    with HttpServer({SMALL: plan}, limits=limits) as server, PlanClient(url(server)) as client:
        found = client.decode_with_errors(batches, 100)
        assert np.array_equal(found.relative_error, plan.decode_error(batches, 100))
        batch = fastroof.StepBatch.from_requests([[(1, 50)] * count for count in (1, 5, 6, 2, 2, 2, 2)])
        assert np.array_equal(client.step_with_errors(batch).latency_us, plan.step_us(batch))
        reply = send(server, "POST", "/steps?errors=true", stream(decodes([1] * 6, [9] * 6)), ARROW)
        assert (reply.status, "6 steps are more than the 5" in reply.read["message"]) == (400, True)


def test_a_client_gets_more_than_times(client: PlanClient, plans: Any) -> None:
    assert client.plan_names == list(plans)
    assert client.description["fastroof"] == fastroof.__version__
    reply = client.ask({"plan": "two", "memory": True})
    assert reply["memory"]["max_kv_tokens"] == plans["two"].memory.max_kv_tokens
    assert "id" not in reply
    with pytest.raises(BackendError, match="has no key 'forecast'"):
        client.ask({"forecast": 1})


def test_the_client_raises_the_servers_error_and_goes_on(client: PlanClient, plans: Any) -> None:
    for call, error, message in (
        (lambda: client.decode_us(1, 1, "nine"), BackendError, r"no plan 'nine' is served; .* 1 two$"),
        (lambda: client.decode_us(1, 1, 7), BackendError, "no plan 7 is served"),
        (lambda: client.decode_us(1, 1), BackendError, "which of 2 plans"),
        (lambda: client.decode_us(9999, 1, "two"), PlanRangeError, "compile_plan"),
        (lambda: client.decode_us(64, 1.5, "two"), BatchError, "must hold integers"),
        (lambda: client.decode_us(1, 2**40, "two"), BatchError, "at most"),
        (lambda: client.decode_us([1, 2], [1, 2, 3], "two"), BatchError, "do not broadcast"),
        (lambda: client.step_us([[(1, 0)], [(0, 0)]], "two"), BatchError, "in request 0 of step 1"),
    ):
        with pytest.raises(error, match=message):
            call()
        assert client.decode_us(1, 1, "two") == plans["two"].decode_us(1, 1)


# Requests without the client


def test_a_stream_is_answered_by_one_batch_of_times(server: HttpServer, plans: Any) -> None:
    batch = decodes([1, 64, 7], [100, 4096, 9])
    for query, columns in (
        ("plan=two", ["latency_us"]),
        ("errors=true&plan=1", ["latency_us", "relative_error"]),
    ):
        for body in (stream(batch), stream(batch[:1], batch[1:])):
            reply = send(server, "POST", f"/steps?{query}", body, ARROW)
            assert (reply.status, reply.headers["content-type"]) == (200, ARROW_TYPE)
            table = pa.ipc.open_stream(reply.body).read_all()
            assert table.column_names == columns
            expected = plans["two"].decode_us([1, 64, 7], [100, 4096, 9])
            assert table["latency_us"].to_numpy().tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("path", "body", "kind", "status", "message"),
    [
        ("/steps", stream(decodes([1], [1])), ARROW_TYPE, 400, "which of 2 plans"),
        ("/steps?plan=nine", stream(decodes([1], [1])), ARROW_TYPE, 400, "no plan 'nine'"),
        ("/steps?plan=0&plan=1", stream(decodes([1], [1])), ARROW_TYPE, 400, "once each"),
        ("/steps?plan=0&stages=true", stream(decodes([1], [1])), ARROW_TYPE, 400, "a query may have"),
        ("/steps?plan=0&errors=1", stream(decodes([1], [1])), ARROW_TYPE, 400, "true or false"),
        ("/steps?plan=0", b"", ARROW_TYPE, 400, "empty body"),
        ("/steps?plan=0", b'{"batch_size": 1}', ARROW_TYPE, 400, "not a valid Arrow IPC stream"),
        ("/steps?plan=0", stream(pa.record_batch({"a": [1]})), ARROW_TYPE, 400, "the columns must be"),
        (
            "/steps?plan=0",
            stream(decodes([1] * 999, [1] * 999), compression="zstd"),
            ARROW_TYPE,
            400,
            "compressed record batches",
        ),
        ("/steps?plan=0", stream(requests([[1], [0]], [[0], [0]])), ARROW_TYPE, 400, "request 0 of step 1"),
        ("/steps?plan=0", stream(decodes([1], [1])), "application/json", 415, ARROW_TYPE),
        ("/steps?plan=0", stream(decodes([1], [1])), "text/plain", 415, ARROW_TYPE),
        ("/message", stream(decodes([1], [1])), ARROW_TYPE, 415, "/steps takes"),
    ],
)
def test_a_refusal_has_its_reason(
    server: HttpServer, path: str, body: bytes, kind: str, status: int, message: str
) -> None:
    reply = send(server, "POST", path, body, {"Content-Type": kind})
    assert (reply.status, reply.headers["content-type"]) == (status, "application/json")
    assert message in reply.read["message"]
    assert reply.read["id"] is None


def test_bodies_are_bounded_before_they_are_read(plans: Any) -> None:
    limits = ServeLimits(max_message_bytes=2**16, max_steps=1000)
    with HttpServer({SMALL: plans[SMALL]}, limits=limits) as server:
        long = stream(decodes([1] * 5000, [1] * 5000))
        assert send(server, "POST", "/steps", long, ARROW).status == 413
        assert send(server, "POST", "/steps", iter([long[:40_000], long[40_000:]]), ARROW).status == 413
        reply = send(server, "POST", "/steps", stream(decodes([1] * 1001, [1] * 1001)), ARROW)
        assert (reply.status, "1001 steps are more than the 1000" in reply.read["message"]) == (400, True)
        pieces = stream(decodes([1, 2], [3, 4]))
        reply = send(
            server, "POST", "/steps", iter([pieces[at : at + 1] for at in range(len(pieces))]), ARROW
        )
        assert reply.status == 200
        assert metric(server, "fastroof_messages_total", form="arrow", outcome="answered") == 1
        assert metric(server, "fastroof_messages_total", form="arrow", outcome="refused") == 1
        assert metric(server, "fastroof_steps_total") == 2


def test_a_fault_of_the_server_is_named(plans: Any, capfd: pytest.CaptureFixture[str]) -> None:
    class Broken:
        stages = ()

        def __getattr__(self, name: str) -> Any:
            return getattr(plans[SMALL], name)

        def decode_us(self, batch_size: Any, kv_len: Any) -> Any:
            if np.size(batch_size) > 1:
                raise RuntimeError("out of order")
            return plans[SMALL].decode_us(batch_size, kv_len)

    with HttpServer({"broken": Broken()}) as server, PlanClient(url(server)) as client:  # type: ignore[dict-item]
        with pytest.raises(BackendError, match="the server failed on this message: RuntimeError"):
            client.decode_us([1, 2], 3)
        assert client.decode_us(1, 3) == plans[SMALL].decode_us(1, 3)
    assert "out of order" in capfd.readouterr().err


# Tokens, sockets, connections


def test_tokens(plans: Any) -> None:
    with HttpServer(plans, token="open sesame") as server:
        for token in (None, "", "open", "open sesame!", "OPEN SESAME"):
            with pytest.raises(BackendError, match="the token is missing or wrong"):
                PlanClient(url(server), token=token)
        with PlanClient(url(server), token="open sesame") as client:
            assert client.decode_us(1, 1, "two") == plans["two"].decode_us(1, 1)
        assert send(server, "POST", "/steps?plan=0", stream(decodes([1], [1])), ARROW).status == 401


def test_a_unix_socket_needs_no_token_and_is_its_users(plans: Any, tmp_path: Path) -> None:
    path = tmp_path / "fastroof.sock"
    with HttpServer(plans, f"unix:{path}") as server, PlanClient(f"unix:{path}") as client:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert server.port == 0
        kv = np.arange(1, 1001)
        assert (client.decode_us(7, kv, SMALL) == plans[SMALL].decode_us(7, kv)).all()
        with pytest.raises(BackendError, match="cannot listen on"):
            HttpServer(plans, f"unix:{path}")
    assert not path.exists()
    with pytest.raises(BackendError, match="the request failed"):
        PlanClient(f"unix:{path}")
    with socket.socket(socket.AF_UNIX) as dead:  # left behind by a server that was killed
        dead.bind(str(path))
    with HttpServer(plans, f"unix:{path}"), PlanClient(f"unix:{path}") as client:
        assert client.plan_names == list(plans)
    path.write_text("a file that is not a socket is left alone")
    with pytest.raises(BackendError, match="cannot listen on"):
        HttpServer(plans, f"unix:{path}")
    assert path.read_text()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_machines_need_a_token(plans: Any, host: str) -> None:
    with pytest.raises(BackendError, match="other machines: listening there needs a token"):
        HttpServer(plans, host)


def test_every_address_is_served_with_a_token(plans: Any) -> None:
    with HttpServer(plans, "0.0.0.0", token="secret") as server:
        with PlanClient(url(server), token="secret") as client:
            assert client.decode_us(64, 4096, SMALL) == plans[SMALL].decode_us(64, 4096)
        with pytest.raises(BackendError, match="the token is missing or wrong"):
            PlanClient(url(server), token="guess")


def test_addresses_and_tokens_that_are_invalid(plans: Any, tmp_path: Path, server: Any) -> None:
    for given, message in (
        ({"host": ""}, "a host to listen on is needed"),
        ({"host": "no.such.host.invalid"}, "no address belongs to"),
        ({"port": 70000}, "from 0 to 65535"),
        ({"port": server.port}, "cannot listen on"),
        ({"host": f"unix:{tmp_path}/none/x.sock"}, "cannot listen on"),
        ({"token": ""}, "not empty"),
        ({"token": "line\nbreak"}, "printable ASCII"),
    ):
        with pytest.raises(BackendError, match=message):
            HttpServer(plans, **given)
    assert is_loopback("localhost")
    for location, message in (
        ("grpc://127.0.0.1:1", "a URL like"),
        ("http://127.0.0.1:1", "refused"),
        ("http://127.0.0.1:x", "cannot connect"),
    ):
        with pytest.raises(BackendError, match=message):
            PlanClient(location)
    with pytest.raises(BackendError, match="use https"):
        PlanClient("http://192.0.2.1:8080", token="secret")
    with pytest.raises(BackendError, match="cannot connect"):
        PlanClient("https://192.0.2.1:8080", tls_root=tmp_path / "none.pem")


@pytest.mark.parametrize("plans_served", [{}, {str(i): None for i in range(65)}])
def test_no_plans_or_too_many(plans_served: Any) -> None:
    with pytest.raises(BackendError, match=r"no plan to serve|65 plans are more"):
        HttpServer(plans_served)


def test_a_connection_that_the_server_closed_is_opened_again(
    plans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HttpServer(plans) as server, PlanClient(url(server)) as client:
        connections = server._server.server_state.connections
        for connection in list(connections):
            connection.loop.call_soon_threadsafe(connection.transport.abort)
        until(lambda: not connections)
        assert client.decode_us(1, 1, "two") == plans["two"].decode_us(1, 1)
    with pytest.raises(BackendError, match="the request failed"):
        client.decode_us(1, 1, "two")


def test_calls_share_a_connection_and_a_forked_child_has_its_own(
    plans: Any, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connects: list[int] = []
    connect = http.client.HTTPConnection.connect
    monkeypatch.setattr(
        http.client.HTTPConnection, "connect", lambda self: (connects.append(os.getpid()), connect(self))
    )
    expected = [plans[SMALL].decode_us(64, 4096 + i) for i in range(5)]
    read, write = os.pipe()
    with PlanClient(url(server)) as client:

        def decode_times() -> list[float]:
            return [client.decode_us(64, 4096 + i, SMALL) for i in range(5)]

        with client._lock:  # as if a thread were calling
            child = os.fork()
            if not child:
                os.write(write, struct.pack("?i", decode_times() == expected, len(connects)))
                os._exit(0)
        assert decode_times() == expected
        assert struct.unpack("?i", os.read(read, 8)) == (True, 2)
        assert os.waitpid(child, 0)[1] == 0
        assert decode_times() == expected
    assert connects == [os.getpid()]
    os.close(read)
    os.close(write)


def test_an_invalid_reply_is_an_error(plans: Any) -> None:
    """Another program's server, a proxy without its server, or one that hangs up in the middle of a reply."""
    for raw, words in (
        (b"SSH-2.0\r\n", "the request failed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "the request failed"),
        (b"HTTP/1.1 200 OK\r\n\r\nx", "is not JSON"),
        (
            b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 6\r\n\r\n<html>",
            "a proxy before it, answered 502: b'<html>'",
        ),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\n[]", "answered 503"),
    ):
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def reply(listener: socket.socket = listener, raw: bytes = raw) -> None:
                for _ in range(2):
                    with suppress(OSError):
                        taken, _ = listener.accept()
                        with taken:
                            taken.recv(4096)
                            taken.sendall(raw)
                            taken.shutdown(socket.SHUT_WR)
                            taken.recv(65536)

            thread = threading.Thread(target=reply, daemon=True)
            thread.start()
            with pytest.raises(BackendError, match=words):
                PlanClient(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=5)


@pytest.mark.slow
def test_good_calls_among_bad_ones(plans: Any) -> None:
    """12 clients: what some of them do wrong, others do not notice, and nothing is left behind."""
    limits = ServeLimits(max_steps=10_000, max_message_bytes=2**18, max_calls=512)
    plan, stop = plans[SMALL], threading.Event()
    with HttpServer({SMALL: plan}, limits=limits) as server:

        def good(seed: int) -> int:
            rng = np.random.default_rng(seed)
            answered = 0
            with PlanClient(url(server)) as client:
                while not stop.is_set():
                    batch, kv = rng.integers(1, 200, 3000), rng.integers(1, 9000, 3000)
                    assert (client.decode_us(batch, kv) == plan.decode_us(batch, kv)).all()
                    steps = fastroof.StepBatch(batch, kv, np.arange(0, 3001, 3))
                    assert (client.step_us(steps) == plan.step_us(steps)).all()
                    answered += 2
            return answered

        def bad(seed: int) -> int:
            rng = random.Random(seed)
            bodies = [
                stream(decodes([1, 2], [3, 4])),
                stream(decodes([1] * 20_000, [1] * 20_000), compression="zstd"),
                stream(requests([[1], None], [[0], [0]])),
                stream(decodes([1, None], [3, 4])),
            ]
            done = 0
            while not stop.is_set():
                body = mutated_bytes(rng.choice(bodies), rng, bodies)
                head = f"POST /steps HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
                sent = head.encode() + f"Content-Type: {ARROW_TYPE}\r\n\r\n".encode() + body
                with socket.create_connection(("127.0.0.1", server.port), 10) as raw, suppress(OSError):
                    raw.sendall(sent[: rng.randrange(len(sent))] if rng.random() < 0.3 else sent)
                    raw.settimeout(0.05)
                    raw.recv(100)
                done += 1
            return done

        with ThreadPoolExecutor(12) as pool:
            working = [pool.submit(good if i < 6 else bad, i) for i in range(12)]
            time.sleep(2.0)
            stop.set()
            counts = [each.result() for each in working]
        assert min(counts) > 0
        until(lambda: send(server, "GET", "/healthz").read["calls"] == 0)


def test_more_calls_than_may_run_are_refused(plans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go = threading.Event()
    plan = plans[SMALL]

    class Slow:
        stages = ()

        def __getattr__(self, name: str) -> Any:
            return getattr(plan, name)

        def decode_us(self, batch_size: Any, kv_len: Any) -> Any:
            if np.size(batch_size) > 1:
                may_go.wait(30)
            return plan.decode_us(batch_size, kv_len)

    served = {"slow": Slow()}
    with (
        HttpServer(served, limits=ServeLimits(max_calls=1)) as server,  # type: ignore[arg-type]
        PlanClient(url(server)) as one,
        PlanClient(url(server)) as two,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(one.decode_us, [1, 2], 3)
        while not send(server, "GET", "/healthz").read["calls"]:
            time.sleep(0.001)
        with pytest.raises(BackendError, match="1 calls are running, the maximum"):
            two.decode_us(1, 1)
        may_go.set()
        assert (waiting.result() == plan.decode_us([1, 2], 3)).all()
        assert two.decode_us(1, 1) == plan.decode_us(1, 1)
