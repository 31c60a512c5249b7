"""A Flight server that is told to stop, and one that is sent what it should not be."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import fastroof
from fastroof.backends.serve.answer import ServedPlans
from fastroof.backends.serve.connections import PEER_CONNECTIONS_A_CALL
from fastroof.backends.serve.flight import FlightServer, serve_flight
from fastroof.backends.serve.flight_calls import Calls
from fastroof.backends.serve.flight_client import FlightSteps
from fastroof.backends.serve.flight_frames import PREFACE
from fastroof.backends.serve.flight_service import PlanService
from fastroof.backends.serve.limits import ServeLimits
from fastroof.errors import BackendError
from tests.backends.serve.test_messages import MESSAGES

flight = pytest.importorskip("pyarrow.flight")

NAME = "llama-3.1-8b"
SERVER = f"""
import sys, fastroof
from fastroof.backends.serve.flight import serve_flight
plan = fastroof.compile_plan({NAME!r}, "h100", fastroof.load_tables("h100"))
serve_flight({{{NAME!r}: plan}}, "127.0.0.1", 0, drain_timeout_s=float(sys.argv[1]),
             ready=lambda port: print(port, flush=True))
"""


@pytest.fixture(scope="module")
def plan(h100: fastroof.Tables) -> fastroof.StepPlan:
    return fastroof.compile_plan(NAME, "h100", h100, engine="kernels")


@pytest.fixture
def start() -> Iterator[Callable[[float], tuple[subprocess.Popen[str], str]]]:
    """Start servers in processes of their own, by their drain timeout."""
    running = []

    def started(drain_timeout_s: float) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-c", SERVER, str(drain_timeout_s)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        running.append(process)
        assert process.stdout is not None
        return process, f"grpc://127.0.0.1:{int(process.stdout.readline())}"

    yield started
    for process in running:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def batch_of(kv_len: Any) -> Any:
    return pa.record_batch({"batch_size": np.ones_like(kv_len), "kv_len": kv_len})


def is_taken(client: Any) -> bool:
    """Whether a new call is answered."""
    try:
        client.get_flight_info(flight.FlightDescriptor.for_path(NAME))
    except flight.FlightUnavailableError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(start: Any, plan: fastroof.StepPlan, number: int) -> None:
    """A stream that is at work goes on to its end; new calls and connections are refused; exit 0."""
    process, location = start(30.0)
    kv_len = np.arange(1, 50_001)
    client = flight.connect(location)
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(NAME))
    writer.begin(batch_of(kv_len).schema)
    writer.write_batch(batch_of(kv_len))
    assert reader.read_chunk().data.num_rows == len(kv_len)
    process.send_signal(number)
    began = time.monotonic()
    # for longer than an idle stream would be left open, and until a busy machine has told the server
    while time.monotonic() < began + 1.5 or (time.monotonic() < began + 30.0 and is_taken(client)):
        writer.write_batch(batch_of(kv_len))
        assert (reader.read_chunk().data.column(0).to_numpy() == plan.decode_us(1, kv_len)).all()
    with pytest.raises(flight.FlightUnavailableError, match="the server is stopping"):
        client.get_flight_info(flight.FlightDescriptor.for_path(NAME))
    with pytest.raises(BackendError, match="refused"):
        FlightSteps(location)
    assert process.poll() is None
    writer.write_batch(batch_of(kv_len))
    writer.done_writing()
    assert (reader.read_chunk().data.column(0).to_numpy() == plan.decode_us(1, kv_len)).all()
    with pytest.raises(StopIteration):
        reader.read_chunk()
    writer.close()
    assert process.wait(10) == 0


@pytest.mark.slow
def test_an_idle_stream_is_not_waited_for(start: Any) -> None:
    process, location = start(60.0)
    with FlightSteps(location) as steps:
        steps.decode_us(NAME, 1, 1)
        began_s = time.monotonic()
        process.terminate()
        assert process.wait(20) == 0
        assert time.monotonic() - began_s < 10
        with pytest.raises(BackendError, match=r"."):
            steps.decode_us(NAME, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_draining_is_bounded(start: Any, signals: int) -> None:
    """A client that never stops asking is cut off after the timeout, or by a second signal."""
    process, location = start(1.5 if signals == 1 else 600.0)
    asked = Event()

    def ask() -> None:
        with suppress(BackendError), FlightSteps(location) as steps:
            while True:
                steps.decode_us(NAME, 1, 1)
                asked.set()

    thread = Thread(target=ask)
    thread.start()
    assert asked.wait(20)
    began_s = time.monotonic()
    process.terminate()
    if signals == 2:
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert 1.0 <= time.monotonic() - began_s < 10
    thread.join(10)
    assert not thread.is_alive()


def test_signals_need_the_main_thread(plan: fastroof.StepPlan) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(BackendError, match="main thread"):
        pool.submit(serve_flight, {NAME: plan}, "127.0.0.1", 0).result()


def _garbage(location: str, rng: random.Random) -> None:
    """Do one thing that no client should."""
    port = int(location.rpartition(":")[2])
    kind = rng.randrange(8)
    if kind < 3:
        first = b"" if kind == 0 else PREFACE
        frame = struct.pack(">BHBBI", 0, 4000, 0, 0, 1) + b"\0\xff\xff\xff\xff"
        with socket.create_connection(("127.0.0.1", port)) as raw, suppress(OSError):
            raw.sendall(first + (frame if kind == 2 else rng.randbytes(rng.randrange(1, 5000))))
            raw.settimeout(0.05)
            raw.recv(100)
        return
    schemas: list[Any] = [
        {"a": [1]},
        {"batch_size": [None], "kv_len": pa.array([1])},
        {"batch_size": pa.array([1, None]), "kv_len": pa.array([1, 2])},
        {"batch_size": pa.array([1] * 20_000), "kv_len": pa.array([1] * 20_000)},
        {"new_tokens": pa.array([[1], None]), "context_len": pa.array([[1], [2]])},
    ]
    batch = pa.record_batch(rng.choice(schemas))
    options = pa.ipc.IpcWriteOptions(compression="zstd" if kind == 3 else None)
    with flight.connect(location) as client:
        descriptor = flight.FlightDescriptor.for_path("nine" if kind == 4 else NAME)
        writer, reader = client.do_exchange(descriptor)
        with suppress(pa.ArrowException, StopIteration):
            writer.begin(batch.schema, options=options)
            writer.write_batch(batch)
            if kind > 5:
                reader.read_chunk()
        reader.cancel()
        with suppress(pa.ArrowException):
            writer.close()


KILLED = f"""
import sys
from pyarrow import flight, record_batch
writer, reader = flight.connect(sys.argv[1]).do_exchange(flight.FlightDescriptor.for_path({NAME!r}))
batch = record_batch({{"batch_size": [1] * 9000, "kv_len": [1] * 9000}})
writer.begin(batch.schema)
while True:
    writer.write_batch(batch)
    print(reader.read_chunk().data.num_rows, flush=True)
"""


@pytest.mark.slow
def test_good_calls_beside_bad_ones(plan: fastroof.StepPlan) -> None:
    """16 clients: what some of them do wrong, others do not notice, and nothing is left behind."""
    limits = ServeLimits(max_steps=10_000, max_message_bytes=2**18)
    stop = Event()
    with FlightServer({NAME: plan}, limits=limits) as server:
        location = f"grpc://127.0.0.1:{server.port}"

        def good(seed: int) -> int:
            rng = np.random.default_rng(seed)
            answered = 0
            with FlightSteps(location) as steps:
                while not stop.is_set():
                    batch, kv = rng.integers(1, 200, 3000), rng.integers(1, 9000, 3000)
                    assert (steps.decode_us(NAME, batch, kv) == plan.decode_us(batch, kv)).all()
                    offsets = np.arange(0, 3001, 3)
                    ragged = fastroof.StepBatch(batch, kv, offsets)
                    assert (steps.step_us(NAME, ragged) == plan.step_us(ragged)).all()
                    answered += 2
            return answered

        def bad(seed: int) -> int:
            rng = random.Random(seed)
            done = 0
            while not stop.is_set():
                _garbage(location, rng)
                done += 1
            return done

        with ThreadPoolExecutor(16) as pool:
            working = [pool.submit(good if i < 8 else bad, i) for i in range(16)]
            killed = subprocess.Popen([sys.executable, "-c", KILLED, location], stdout=subprocess.PIPE)
            assert killed.stdout is not None
            assert killed.stdout.readline() == b"9000\n"
            killed.kill()
            killed.wait()
            killed.stdout.close()
            time.sleep(2.0)
            stop.set()
            counts = [each.result() for each in working]
        assert min(counts) > 0
        until = time.monotonic() + 10
        with FlightSteps(location) as steps:
            while steps.health()["calls"] > 1 and time.monotonic() < until:
                time.sleep(0.05)
            assert steps.health()["calls"] == 1  # this one


def _recorded(location: str, ask: Callable[[Any], None]) -> bytes:
    """All that a client sends that asks something."""
    sent: list[bytes] = []

    def pass_on(source: socket.socket, sink: socket.socket, kept: list[bytes]) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                kept.append(data)
                sink.sendall(data)

    port = int(location.rpartition(":")[2])
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(("127.0.0.1", port)) as server,
        ThreadPoolExecutor(3) as pool,
    ):
        accepted = pool.submit(lambda: listener.accept()[0])
        with flight.connect(f"grpc://127.0.0.1:{listener.getsockname()[1]}") as client:
            exchanged = pool.submit(ask, client)
            with accepted.result() as near:
                pool.submit(pass_on, near, server, sent)
                back = pool.submit(pass_on, server, near, [])
                exchanged.result()
                client.close()
                server.shutdown(socket.SHUT_RDWR)
                back.result()
    return b"".join(sent)


def _exchange_once(client: Any, batch: Any, *more: str) -> None:
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(NAME, *more))
    writer.begin(batch.schema)
    writer.write_batch(batch)
    assert reader.read_chunk().data.num_rows == batch.num_rows
    writer.done_writing()
    writer.close()


@pytest.mark.slow
def test_sessions_with_wrong_bytes(start: Any, plan: fastroof.StepPlan) -> None:
    """Some bytes of good sessions changed, of every call and message: the server goes on."""
    process, location = start(30.0)
    lists = pa.array([[1], [2, 3], []], pa.list_(pa.int32()))
    batches = [batch_of(np.arange(1, 9)), pa.record_batch({"new_tokens": lists, "context_len": lists})]
    asks: list[Callable[[Any], Any]] = [
        lambda client, batch=batch, more=more: _exchange_once(client, batch, *more)
        for batch in batches
        for more in ((), ("errors",))
    ]
    messages = [json.dumps({"id": 7, "plan": NAME, **message}).encode() for message in MESSAGES.values()]
    asks += [
        lambda client, body=body: list(client.do_action(flight.Action("message", body))) for body in messages
    ]
    asks += [
        lambda client: list(client.list_flights()),
        lambda client: client.get_schema(flight.FlightDescriptor.for_path(NAME)),
        lambda client: list(client.do_action(flight.Action("health", b""))),
    ]
    sessions = [_recorded(location, ask) for ask in asks]
    port = int(location.rpartition(":")[2])
    rng = random.Random(7)
    for number in range(40 * len(sessions)):
        session = bytearray(sessions[number % len(sessions)])
        for _ in range(rng.choice([1, 1, 2, 5])):
            session[rng.randrange(len(PREFACE), len(session))] = rng.choice(
                [0, 1, 127, 255, rng.randrange(256)]
            )
        with socket.create_connection(("127.0.0.1", port)) as raw, suppress(OSError):
            raw.sendall(session)
            raw.settimeout(0.004)
            while raw.recv(2**16):
                pass
    assert process.poll() is None
    with FlightSteps(location) as steps:
        assert steps.decode_us(NAME, 7, 777) == plan.decode_us(7, 777)


@pytest.mark.slow
def test_memory_is_not_taken_for_what_is_refused(start: Any) -> None:
    """Messages that are too long are refused by their length, compressed ones by what they say."""
    process, location = start(30.0)
    before_bytes = resident_bytes(process.pid)

    def act(body_bytes: int) -> None:
        with flight.connect(location) as client:
            list(client.do_action(flight.Action("health", bytes(body_bytes))))

    def send_compressed() -> None:
        with flight.connect(location) as client:
            writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(NAME))
            batch = batch_of(np.zeros(2**23, np.int64))
            writer.begin(batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd"))
            try:
                writer.write_batch(batch)
                reader.read_chunk()
            finally:
                with suppress(pa.ArrowException):
                    writer.close()

    for _ in range(3):  # older gRPC does not tell its caller why a server hung up
        with pytest.raises(
            flight.FlightUnavailableError, match=r"longer than the 268435456 that are read|Socket closed"
        ):
            act(2**29)
        with pytest.raises(
            flight.FlightUnavailableError, match=r"only the body of a record batch|Socket closed"
        ):
            act(2**27)
        with pytest.raises(
            flight.FlightUnavailableError, match=r"compressed record batches are not taken|Socket closed"
        ):
            send_compressed()
    assert resident_bytes(process.pid) - before_bytes < 2**26
    with FlightSteps(location) as steps:
        assert steps.decode_us(NAME, 1, 1) > 0


def test_calls_are_counted() -> None:
    calls = Calls(1)
    calls.start()
    with pytest.raises(flight.FlightUnavailableError, match="try again later"):
        calls.start()
    calls.end()
    calls.drain()
    with pytest.raises(flight.FlightUnavailableError, match="stopping"):
        calls.start()
    with calls:
        assert calls.idle_s() == 0.0


def test_connections_are_limited(plan: fastroof.StepPlan) -> None:
    """Those that were let in keep others out only up to a number, and only while they are there."""
    with FlightServer({NAME: plan}, limits=ServeLimits(max_calls=2)) as server, ExitStack() as there:
        location = f"grpc://127.0.0.1:{server.port}"
        for number in range(PEER_CONNECTIONS_A_CALL * 2):
            # of different names, so that gRPC makes a connection for each
            own = [("fastroof.client", number)]
            client = there.enter_context(flight.connect(location, generic_options=own))
            list(client.do_action(flight.Action("health", b"")))
        with socket.create_connection(("127.0.0.1", server.port), 10) as one_more:
            assert one_more.recv(1) == b""
        there.close()
        until = time.monotonic() + 10
        while time.monotonic() < until:
            with suppress(BackendError), FlightSteps(location) as steps:
                assert steps.decode_us(NAME, 1, 1) == plan.decode_us(1, 1)
                return
    pytest.fail("connections that have ended are still counted")


def test_grpc_alone_reads_any_length(plan: fastroof.StepPlan) -> None:
    """What the guard is for: without it, a message is read whatever its length, before any token is asked."""
    served = ServedPlans({NAME: plan}, ServeLimits(max_message_bytes=2**20))
    bare = PlanService("grpc://127.0.0.1:0", {NAME: plan}, served, Calls(1), "token")
    with (
        bare,
        flight.connect(f"grpc://127.0.0.1:{bare.port}") as client,
        pytest.raises(flight.FlightUnauthenticatedError),
    ):
        list(client.do_action(flight.Action("health", bytes(2**26))))
