"""Connections that are held and say nothing, beside clients that ask: over Flight and over HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof.backends.serve import flight_guard, flight_service
from fastroof.backends.serve.connections import (
    CONNECTIONS_A_CALL,
    PEER_CONNECTIONS_A_CALL,
    Connections,
    Standing,
    peer_of,
)
from fastroof.backends.serve.json_lines import answer_line
from fastroof.backends.serve.limits import ServeLimits
from fastroof.errors import BackendError

pa = pytest.importorskip("pyarrow")
flight = pytest.importorskip("pyarrow.flight")
pytest.importorskip("uvicorn")

from fastroof.backends.serve.flight import FlightServer  # noqa: E402
from fastroof.backends.serve.flight_client import FlightSteps  # noqa: E402
from fastroof.backends.serve.flight_frames import PREFACE  # noqa: E402
from fastroof.backends.serve.http_server import HttpServer  # noqa: E402

SILENT = 300
LIMITS = ServeLimits(max_calls=8)
TOKEN = "sesame"
BOUND_S = 5.0
SETTINGS = struct.pack(">BHBBI", 0, 0, 4, 0, 0)
DATA, HEADERS, CONTINUATION = 0, 1, 9
END_STREAM, END_HEADERS = 1, 4


@pytest.fixture(scope="module")
def plan(h100: fastroof.Tables) -> fastroof.StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, max_tokens=2048, max_seqs=64, engine="kernels")


def ask_flight(port: int) -> float:
    with FlightSteps(f"grpc://127.0.0.1:{port}", token=TOKEN) as steps:
        return float(steps.decode_us("eight", 7, 700))


def ask_http(port: int) -> float:
    return asked_http(http.client.HTTPConnection("127.0.0.1", port, timeout=BOUND_S))


def asked_http(client: http.client.HTTPConnection) -> float:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    try:
        client.request("POST", "/message", json.dumps({"batch_size": 7, "kv_len": 700}), headers)
        return float(json.load(client.getresponse())["latency_us"][0])
    finally:
        client.close()


SERVERS: dict[str, tuple[Any, Callable[[int], float]]] = {
    "flight": (FlightServer, ask_flight),
    "http": (HttpServer, ask_http),
}
SAID = {
    ("flight", "nothing"): b"",
    ("flight", "how it begins"): PREFACE + SETTINGS,
    ("flight", "what is refused"): b"GET / HTTP/1.1\r\n\r\n",
    ("http", "nothing"): b"",
    ("http", "how it begins"): b"POST /message HTTP/1.1\r\nHost: localhost\r\n",
    ("http", "what is refused"): b"GET /describe HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@contextmanager
def sockets(port: int, peer: str, count: int, said: bytes) -> Iterator[list[socket.socket]]:
    """Connections of one address that say something, and then nothing more."""
    with ExitStack() as open_ones:
        held = []
        for _ in range(count):
            try:
                one = socket.create_connection(("127.0.0.1", port), 10, source_address=(peer, 0))
            except OSError as error:
                if not held and peer != "127.0.0.1":
                    pytest.skip(f"this machine has no address {peer}: {error}")
                raise
            held.append(open_ones.enter_context(one))
            with suppress(OSError):
                one.sendall(said)
        yield held


def answered_within(ask: Callable[[int], float], port: int, bound_s: float) -> float | None:
    """What a client hears that tries again where it is turned away."""
    until = time.monotonic() + bound_s
    while time.monotonic() < until:
        with suppress(BackendError, OSError, http.client.HTTPException):
            return ask(port)
        time.sleep(0.02)
    return None


def is_closed(one: socket.socket, within_s: float) -> bool:
    one.settimeout(within_s)
    try:
        while one.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.0.0.2"])
@pytest.mark.parametrize(("kind", "words"), SAID)
def test_silent_connections_keep_no_client_out(
    plan: fastroof.StepPlan, kind: str, words: str, peer: str
) -> None:
    serve, ask = SERVERS[kind]
    with (
        serve({"eight": plan}, token=TOKEN, limits=LIMITS) as server,
        sockets(server.port, peer, SILENT, SAID[kind, words]) as held,
    ):
        for _ in range(3):
            assert answered_within(ask, server.port, BOUND_S) == plan.decode_us(7, 700)
        # no peer holds more than its share: those that came first have gone
        assert all(is_closed(one, 5.0) for one in held[: SILENT - PEER_CONNECTIONS_A_CALL * 8])


@pytest.mark.parametrize("kind", SERVERS)
def test_silent_connections_keep_no_client_of_tls_out(
    plan: fastroof.StepPlan, certificate: tuple[Path, Path], kind: str
) -> None:
    cert, key = certificate
    serve, _ = SERVERS[kind]

    def ask(port: int) -> float:
        if kind == "flight":
            with FlightSteps(f"grpc+tls://localhost:{port}", token=TOKEN, tls_root=cert) as steps:
                return float(steps.decode_us("eight", 7, 700))
        context = ssl.create_default_context(cafile=cert)
        client = http.client.HTTPSConnection("localhost", port, timeout=BOUND_S, context=context)
        return asked_http(client)

    with (
        serve({"eight": plan}, token=TOKEN, limits=LIMITS, tls_cert=cert, tls_key=key) as server,
        sockets(server.port, "127.0.0.1", SILENT, b"") as held,
    ):
        assert answered_within(ask, server.port, 2 * BOUND_S) == plan.decode_us(7, 700)
        assert all(is_closed(one, 5.0) for one in held[: SILENT - PEER_CONNECTIONS_A_CALL * 8])


@pytest.mark.parametrize("kind", SERVERS)
def test_a_client_that_was_let_in_stays_while_others_come(plan: fastroof.StepPlan, kind: str) -> None:
    """One connection, kept from before the flood to after it."""
    with serve_and_keep(kind, plan) as (server, ask_again):
        assert ask_again() == plan.decode_us(7, 700)
        with sockets(server.port, "127.0.0.1", SILENT, b""):
            assert ask_again() == plan.decode_us(7, 700)
        assert ask_again() == plan.decode_us(7, 700)


@contextmanager
def serve_and_keep(kind: str, plan: fastroof.StepPlan) -> Iterator[tuple[Any, Callable[[], float]]]:
    serve, _ = SERVERS[kind]
    with serve({"eight": plan}, token=TOKEN, limits=LIMITS) as server:
        if kind == "flight":
            with FlightSteps(f"grpc://127.0.0.1:{server.port}", token=TOKEN) as steps:
                yield server, lambda: float(steps.decode_us("eight", 7, 700))
            return
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=BOUND_S)
        client.connect()
        kept = client.sock
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}

        def ask() -> float:
            client.request("POST", "/message", json.dumps({"batch_size": 7, "kv_len": 700}), headers)
            answer = float(json.load(client.getresponse())["latency_us"][0])
            assert client.sock is kept
            return answer

        yield server, ask
        client.close()


@pytest.mark.parametrize("said", [b"", PREFACE[:9], PREFACE + SETTINGS])
def test_who_asks_nothing_over_flight_is_let_go(
    plan: fastroof.StepPlan, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(flight_guard, "FIRST_S", 0.3)
    with (
        FlightServer({"eight": plan}, token=TOKEN) as server,
        FlightSteps(f"grpc://127.0.0.1:{server.port}", token=TOKEN) as steps,
        sockets(server.port, "127.0.0.1", 1, said) as [silent],
    ):
        assert steps.decode_us("eight", 7, 700) == plan.decode_us(7, 700)
        stream = next(iter(steps._streams))
        assert is_closed(silent, 5.0)
        time.sleep(1.5)  # longer than who asks nothing may stay
        assert steps.decode_us("eight", 7, 700) == plan.decode_us(7, 700)
        assert next(iter(steps._streams)) is stream


def test_who_has_asked_is_waited_for(plan: fastroof.StepPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first question may take long to answer; one that is refused gains no time."""
    monkeypatch.setattr(flight_guard, "FIRST_S", 0.3)

    def slowly(*given: Any) -> bytes:
        time.sleep(2.5)
        return answer_line(*given)

    monkeypatch.setattr(flight_service, "answer_line", slowly)
    asked = flight.Action("message", b'{"batch_size": 7, "kv_len": 700}')
    right = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
    with FlightServer({"eight": plan}, token=TOKEN) as server:
        location = f"grpc://127.0.0.1:{server.port}"
        with flight.connect(location) as client:
            [reply] = client.do_action(asked, right)
            assert json.loads(reply.body.to_pybytes())["latency_us"] == [plan.decode_us(7, 700)]
        with flight.connect(location) as client:
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(client.do_action(asked))
            until = time.monotonic() + 10
            while len(server._guard._connections) and time.monotonic() < until:
                time.sleep(0.02)
            assert len(server._guard._connections) == 0
            [reply] = client.do_action(asked, right)  # it connects again


def test_only_an_answer_to_who_may_ask_lets_in(plan: fastroof.StepPlan) -> None:
    """Whatever is called without the token, over Flight, the connection has shown nothing."""
    with FlightServer({"eight": plan}, token=TOKEN) as server:

        def standings() -> list[Standing]:
            return [each.standing for each in server._guard._connections._held]

        calls: list[Callable[[Any, Any], Any]] = [
            lambda client, with_token: list(client.do_action(flight.Action("health", b""), with_token)),
            lambda client, with_token: list(client.list_actions(with_token)),
            lambda client, with_token: list(client.list_flights(options=with_token)),
            lambda client, with_token: client.get_schema(path, with_token),
            lambda client, with_token: client.get_flight_info(path, with_token),
            lambda client, with_token: exchanged(client, with_token),
        ]
        refused: list[Callable[[Any, Any], Any]] = [
            lambda client, with_token: client.do_get(flight.Ticket(b"x"), with_token).read_all(),
            lambda client, with_token: client.do_put(path, pa.schema([]), with_token)[0].close(),
            lambda client, with_token: client.authenticate_basic_token("me", TOKEN),
        ]
        path = flight.FlightDescriptor.for_path("eight")
        right = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
        wrong = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer sesam")])
        for call in [*calls, *refused]:
            with flight.connect(f"grpc://127.0.0.1:{server.port}") as client:
                with pytest.raises((pa.ArrowException, OSError)):
                    call(client, wrong)
                assert Standing.LET_IN not in standings()
            until = time.monotonic() + 10
            while standings() and time.monotonic() < until:
                time.sleep(0.005)
        for call in calls:
            with flight.connect(f"grpc://127.0.0.1:{server.port}") as client:
                call(client, right)
                assert Standing.LET_IN in standings()


def exchanged(client: Any, options: Any) -> Any:
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("eight"), options)
    try:
        batch = pa.record_batch({"batch_size": [1], "kv_len": [2]})
        writer.begin(batch.schema)
        writer.write_batch(batch)
        return reader.read_chunk()
    finally:
        with suppress(pa.ArrowException):
            writer.close()


class Place(NamedTuple):
    number: int
    peer: str
    standing: Standing


@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(Standing), st.booleans()), min_size=10, max_size=80
    ),
)
def test_who_gives_way(max_calls: int, came: list[tuple[str, Standing, bool]]) -> None:
    """Never more than there may be; whoever was let in stays; who goes has the least standing of its peer."""
    held: Connections[Place] = Connections(max_calls)
    there: list[Place] = []
    for number, (peer, standing, leaves) in enumerate(came):
        new = Place(number, peer, standing)
        before = list(there)
        gone = held.admit(new)
        there.append(new)
        if gone is not None:
            there.remove(gone)
            rivals = [each for each in before if each.peer == gone.peer]
            if gone is new:
                assert all(each.standing == Standing.LET_IN for each in rivals or before)
            else:
                assert gone.standing < Standing.LET_IN
                assert gone == min(rivals, key=lambda each: (each.standing, each.number))
        else:
            assert len(before) < CONNECTIONS_A_CALL * max_calls
        assert len(held) == len(there) <= CONNECTIONS_A_CALL * max_calls
        for each in "ab":
            assert sum(one.peer == each for one in there) <= PEER_CONNECTIONS_A_CALL * max_calls
        if leaves:
            held.forget(there.pop(0))
            held.forget(new if new not in there else there.pop())
    for one in there:
        held.forget(one)
    assert len(held) == 0
    assert not held._of_peer


def test_a_peer_is_an_address_or_a_network_of_one_machine() -> None:
    assert peer_of(("::ffff:192.0.2.7", 1, 0, 0)) == "192.0.2.7"
    assert peer_of(("2001:db8:0:1:ffff::1", 1, 0, 0)) == peer_of(("2001:db8:0:1::2", 1, 0, 0))
    assert peer_of(("2001:db8:0:1::1", 1, 0, 0)) != peer_of(("2001:db8:0:2::1", 1, 0, 0))
    assert peer_of(("fe80::1%eth0", 1, 0, 2)) == "fe80::"
    assert peer_of("") == peer_of(None) == ""


def http2(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">BHBBI", 0, len(content), kind, flags, stream) + content


def call_headers(method: str = "DoAction") -> bytes:
    """What opens a call, as HTTP/2 writes it without tables."""
    words = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/arrow.flight.protocol.FlightService/{method}",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in words.items()
    )


def begun(streams: int, message_bytes: int) -> bytes:
    """What opens calls, each of which begins a message that never ends."""
    start = struct.pack(">BI", 0, message_bytes) + b"\x0a\x01"
    return b"".join(
        http2(HEADERS, END_HEADERS, stream, call_headers()) + http2(DATA, 0, stream, start)
        for stream in range(1, 2 * streams, 2)
    )


def test_long_messages_that_strangers_begin_keep_no_client_out(plan: fastroof.StepPlan) -> None:
    """As many bytes as may be under way are announced by who shows no token, and never sent."""
    limits = ServeLimits(max_calls=4, max_message_bytes=2**17)
    said = PREFACE + SETTINGS + begun(2, 2**17)
    with (
        FlightServer({"eight": plan}, token=TOKEN, limits=limits) as server,
        FlightSteps(f"grpc://127.0.0.1:{server.port}", token=TOKEN) as steps,
        sockets(server.port, "127.0.0.1", 2, said),
    ):
        until = time.monotonic() + 10
        while server._guard.under_way.message_bytes < 2**18 and time.monotonic() < until:
            time.sleep(0.01)
        assert server._guard.under_way.message_bytes >= 2**18
        batch = np.arange(1, 5001)
        assert (steps.decode_us("eight", 1, batch) == plan.decode_us(1, batch)).all()
        assert answered_within(ask_flight, server.port, BOUND_S) == plan.decode_us(7, 700)


PRETENCES = {
    "no call": lambda: http2(DATA, END_STREAM, 1),
    "half a head": lambda: http2(HEADERS, END_STREAM, 1, call_headers()[:40]),
    "half a head, and an end": lambda: http2(HEADERS, 0, 1, call_headers()[:40]) + http2(DATA, END_STREAM, 1),
    "another's end": lambda: http2(HEADERS, END_HEADERS, 5, call_headers()) + http2(DATA, END_STREAM, 3),
    "a number that has been": lambda: (
        http2(HEADERS, END_HEADERS, 5, call_headers())
        + http2(HEADERS, END_HEADERS | END_STREAM, 3, call_headers())
    ),
    "an even number": lambda: http2(HEADERS, END_HEADERS | END_STREAM, 4, call_headers()),
    "no head": lambda: http2(HEADERS, END_HEADERS | END_STREAM, 1, b"\xff" * 40),
    "an empty head": lambda: http2(HEADERS, END_HEADERS | END_STREAM, 1),
    "a head without a path": lambda: http2(HEADERS, END_HEADERS | END_STREAM, 1, call_headers()[:14]),
    "no message": lambda: http2(HEADERS, END_HEADERS | END_STREAM, 1, call_headers()),
    "no such call": lambda: http2(HEADERS, END_HEADERS | END_STREAM, 1, call_headers("Stop")),
    "no message to exchange": lambda: (
        http2(HEADERS, END_HEADERS, 1, call_headers("DoExchange")) + http2(DATA, END_STREAM, 1)
    ),
}


def test_who_pretends_to_ask_is_let_go(plan: fastroof.StepPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks like a question and gets no answer, as there is none, gains no time."""
    monkeypatch.setattr(flight_guard, "FIRST_S", 0.3)
    with FlightServer({"eight": plan}, token=TOKEN) as server, ExitStack() as there:
        held = {
            words: there.enter_context(sockets(server.port, "127.0.0.1", 1, PREFACE + SETTINGS + pretence()))[
                0
            ]
            for words, pretence in PRETENCES.items()
        }
        assert [words for words, one in held.items() if not is_closed(one, 5.0)] == []
        assert ask_flight(server.port) == plan.decode_us(7, 700)
