"""What ``soak_serve`` sends to ``fastroof serve --flight``, good and bad: one server for all clients."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

# gRPC would log, in the client, each reason for which the server hangs up
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import numpy as np
import pyarrow as pa
from pyarrow import flight

from benchmarks.soak_routes import (
    MAX_STEPS,
    REPLY_S,
    Connection,
    Got,
    Message,
    Sent,
    hold_silent,
    start_server,
    stop_server,
)
from fastroof import StepBatch
from fastroof.backends.serve.flight_client import FlightSteps
from fastroof.backends.serve.flight_frames import PREFACE
from fastroof.errors import BackendError, FastroofError

NAMES = ("llama-3.1-8b", "llama-3.1-70b-tp4-fp8")
MAX_CALLS = 512
"""Open streams are calls: a client keeps one for each plan and kind of array."""


class Started(NamedTuple):
    """A server, as its clients know it."""

    location: str
    pid: int


def _decodes(*sizes: Any) -> Any:
    return pa.record_batch([pa.array(size) for size in sizes], names=["batch_size", "kv_len"])


def _requests(new_tokens: Any, context_len: Any) -> Any:
    lists = [pa.array(each, pa.list_(pa.int64())) for each in (new_tokens, context_len)]
    return pa.record_batch(lists, names=["new_tokens", "context_len"])


BAD_BATCHES: dict[str, Callable[[random.Random], Any]] = {
    "other columns": lambda rng: pa.record_batch({"batch": pa.array([1]), "kv_len": pa.array([2])}),
    "floats": lambda rng: _decodes([1.0, float("nan")], [2.0, 3.0]),
    "nulls": lambda rng: _decodes([1, None], [2, 3]),
    "text": lambda rng: _decodes(["a"], ["b"]),
    "negative sizes": lambda rng: _decodes([64, -rng.randrange(1, 2**62)], [4096, 4096]),
    "a step too large": lambda rng: _decodes([64, 2**20], [4096, 4096]),
    "too many steps": lambda rng: _decodes([1] * (MAX_STEPS + 1), [9] * (MAX_STEPS + 1)),
    "lists of other lengths": lambda rng: _requests([[1, 2], [3]], [[0], [5, 6]]),
    "null lists": lambda rng: _requests([[1, 2], None], [[0, 9], [5]]),
    "no such request": lambda rng: _requests([[0]], [[7]]),
}


def _put(client: Any, rng: random.Random) -> None:
    writer, _ = client.do_put(flight.FlightDescriptor.for_path(NAMES[0]), _decodes([1], [1]).schema)
    writer.write_batch(_decodes([1], [1]))
    writer.close()


def _compressed(client: Any, rng: random.Random) -> None:
    batch = _decodes(np.zeros(2**18, np.int64), np.zeros(2**18, np.int64))
    options = pa.ipc.IpcWriteOptions(compression=rng.choice(["zstd", "lz4"]))
    _exchanged(client, NAMES[0], batch, options)


BAD_CALLS: dict[str, Callable[[Any, random.Random], Any]] = {
    "an unknown plan": lambda client, rng: _exchanged(client, "nine", _decodes([1], [1])),
    "an unknown action": lambda client, rng: list(client.do_action(flight.Action("stop", b""))),
    "a put": _put,
    "a get": lambda client, rng: client.do_get(flight.Ticket(b"1")).read_all(),
    "a compressed batch": _compressed,
    "a message too long": lambda client, rng: list(client.do_action(flight.Action("health", bytes(2**25)))),
}


def _exchanged(client: Any, plan: str, batch: Any, options: Any = None) -> Any:
    """Have one batch timed by a call of its own; what was refused is raised."""
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(plan))
    try:
        writer.begin(batch.schema, options=options)
        writer.write_batch(batch)
        answer = reader.read_chunk()
        if answer.app_metadata is not None:
            raise BackendError(answer.app_metadata.to_pybytes().decode())
        return answer.data.column(0).to_numpy()
    finally:
        reader.cancel()
        with suppress(pa.ArrowException):
            writer.close()


def _wrong_bytes(location: str, rng: random.Random) -> Got:
    """Speak no HTTP/2, or break off in the middle of it: the server hangs up."""
    port = int(location.rpartition(":")[2])
    said = rng.choice([b"", PREFACE]) + b"\xff" + rng.randbytes(rng.randrange(9, 5000))
    with socket.create_connection(("127.0.0.1", port), REPLY_S) as raw, suppress(ConnectionError):
        raw.sendall(said)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(2**16):
            pass
    return BackendError("hung up")


class FlightConnection:
    """Streams that are kept for good batches, and a connection of its own for each bad call."""

    bad_kinds = (*BAD_BATCHES, *BAD_CALLS, "bytes of another protocol")

    def __init__(self, started: Started) -> None:
        self._location = started.location
        self._steps = FlightSteps(started.location)
        self.server_pid = started.pid

    def exchange(self, sent: Sequence[Sent], rng: random.Random) -> list[Got]:
        return [self._good(one) if isinstance(one, Message) else self._bad(one, rng) for one in sent]

    def _good(self, message: Message) -> Got:
        try:
            if len(message.arrays) == 2:
                return self._steps.decode_us(NAMES[message.plan], *message.arrays)
            return self._steps.step_us(NAMES[message.plan], StepBatch(*message.arrays))
        except FastroofError as error:
            return error

    def _bad(self, kind: str, rng: random.Random) -> Got:
        if kind not in BAD_BATCHES and kind not in BAD_CALLS:
            return _wrong_bytes(self._location, rng)
        with flight.connect(self._location) as client:
            try:
                if kind in BAD_BATCHES:
                    return _exchanged(client, NAMES[0], BAD_BATCHES[kind](rng))
                return BAD_CALLS[kind](client, rng)
            except (FastroofError, pa.ArrowException, OSError, StopIteration) as error:
                return BackendError(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        self._steps.close()


class FlightRoute:
    """``fastroof serve --flight``: one server on a free port of this machine."""

    shares_a_server = True

    def start(self) -> Started:
        port, pid = start_server("--flight", MAX_CALLS)
        return Started(f"grpc://127.0.0.1:{port}", pid)

    def connect(self, started: Started, client: int, options: Sequence[str] = ()) -> Connection:
        return FlightConnection(started)

    def leave(self, started: Started, messages: Sequence[Message], rng: random.Random) -> int:
        """Have one good batch timed, then end the stream, the connection or the process in the middle."""
        hold_silent(int(started.location.rpartition(":")[2]), rng.choice([b"", PREFACE[:9], PREFACE]))
        with FlightSteps(started.location) as steps:
            decodes = [message for message in messages if len(message.arrays) == 2]
            lost = sum(
                steps.decode_us(NAMES[one.plan], *one.arrays).tobytes() != one.expected_us.tobytes()
                for one in decodes[:1]
            )
        client = flight.connect(started.location)
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(NAMES[0]))
        batch = _decodes(np.ones(50_000, np.int64), np.ones(50_000, np.int64))
        writer.begin(batch.schema)
        for _ in range(rng.randrange(1, 5)):
            writer.write_batch(batch)
        if rng.random() < 0.5:
            reader.cancel()
        with suppress(pa.ArrowException):
            writer.close()
        client.close()
        return lost

    def stop(self, started: Started) -> None:
        stop_server(started.pid)
