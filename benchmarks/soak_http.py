"""What ``soak_serve`` sends to ``fastroof serve --http``, good and bad: one server for all clients."""

from __future__ import annotations

import http.client
import json
import random
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

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
from benchmarks.soak_stdio import BAD_LINES, message_line
from fastroof import StepBatch
from fastroof.backends.serve.arrow_steps import ARROW_TYPE, write_stream
from fastroof.backends.serve.client import PlanClient
from fastroof.backends.serve.limits import PEER_CONNECTIONS_A_CALL
from fastroof.errors import BackendError, FastroofError

MAX_CALLS = 64
STEPS_A_MESSAGE = 2**17
"""Steps of equal decodes that fit a message of JSON, however large their numbers."""

JSON = {"Content-Type": "application/json"}


class Started(NamedTuple):
    """A server, as its clients know it."""

    port: int
    pid: int


def _raw(said: Callable[[random.Random], bytes]) -> Callable[[int, random.Random], Got]:
    """Speak what is no request: the server says so, or hangs up."""

    def sent(port: int, rng: random.Random) -> Got:
        with socket.create_connection(("127.0.0.1", port), REPLY_S) as raw:
            heard = b""
            with suppress(OSError):  # it may have hung up
                raw.sendall(said(rng))
                raw.shutdown(socket.SHUT_WR)
                while part := raw.recv(2**16):
                    heard += part
        if heard.startswith(b"HTTP/1.1 2"):
            return heard
        return BackendError(f"refused: {heard[:20]!r}")

    return sent


def _asked(
    method: str, path: str, body: bytes, headers: dict[str, str]
) -> Callable[[int, random.Random], Got]:
    def sent(port: int, rng: random.Random) -> Got:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REPLY_S)
        try:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            text = reply.read()
            return BackendError(text.decode()) if reply.status >= 400 else text
        except ConnectionError as error:  # refused while the body was on its way
            return BackendError(str(error))
        finally:
            connection.close()

    return sent


BAD_REQUESTS: dict[str, Callable[[int, random.Random], Got]] = {
    "bytes of another protocol": _raw(
        lambda rng: b"\xff" + rng.randbytes(rng.randrange(9, 5000)) + b"\r\n\r\n"
    ),
    "a head cut short": _raw(lambda rng: b"POST /message HTTP/1.1\r\nHost: local"[: rng.randrange(1, 36)]),
    "a huge head": _raw(lambda rng: b"GET / HTTP/1.1\r\nX: " + b"x" * 2**17),
    "another path": _asked("GET", "/nothing", b"", {}),
    "another method": _asked("PUT", "/message", b"{}", JSON),
    "another content type": _asked("POST", "/message", b"{}", {"Content-Type": "text/plain"}),
    "another host": _asked("POST", "/message", b"{}", {**JSON, "Host": "fastroof.example"}),
}


class HttpConnection:
    """A connection that is kept for messages, and another for each request that is wrong."""

    bad_kinds = (*BAD_LINES, *BAD_REQUESTS)

    def __init__(self, started: Started) -> None:
        self._port = started.port
        self._kept = http.client.HTTPConnection("127.0.0.1", started.port, timeout=REPLY_S)
        self.server_pid = started.pid

    def exchange(self, sent: Sequence[Sent], rng: random.Random) -> list[Got]:
        return [self._good(one) if isinstance(one, Message) else self._bad(one, rng) for one in sent]

    def _good(self, message: Message) -> Got:
        arrays = message.arrays
        if len(arrays) != 2 or arrays[0].size <= STEPS_A_MESSAGE:
            return self._answered(message_line(message, 0))
        cuts = range(0, arrays[0].size, STEPS_A_MESSAGE)
        parts = [
            Message(message.plan, tuple(a[at : at + STEPS_A_MESSAGE] for a in arrays), None) for at in cuts
        ]
        return np.concatenate([self._answered(message_line(part, 0)) for part in parts])

    def _answered(self, body: bytes) -> Got:
        try:
            self._kept.request("POST", "/message", body, JSON)
            reply = self._kept.getresponse()
            answer = json.loads(reply.read())
        except (http.client.HTTPException, ConnectionError) as error:
            self._kept.close()  # refused while the body was on its way
            return BackendError(f"{type(error).__name__}: {error}")
        times = answer.get("latency_us")
        return BackendError(answer["message"]) if times is None else np.array(times, float)

    def _bad(self, kind: str, rng: random.Random) -> Got:
        return (
            self._answered(BAD_LINES[kind](rng)) if kind in BAD_LINES else BAD_REQUESTS[kind](self._port, rng)
        )

    def close(self) -> None:
        self._kept.close()


class HttpRoute:
    """``fastroof serve --http``: one server on a free port of this machine."""

    shares_a_server = True

    def start(self) -> Started:
        port, pid = start_server("--http", MAX_CALLS)
        return Started(port, pid)

    def connect(self, started: Started, client: int, options: Sequence[str] = ()) -> Connection:
        return HttpConnection(started)

    def leave(self, started: Started, messages: Sequence[Message], rng: random.Random) -> int:
        """Have one good message answered, then go in the middle of a head, a body or a reply."""
        hold_silent(started.port, rng.choice([b"", b"POST /mess", b"POST /message HTTP/1.1\r\n"]))
        kept = HttpConnection(started)
        (got,) = kept.exchange(messages[:1], rng)
        kept.close()
        lost = int(isinstance(got, Exception) or got.tobytes() != messages[0].expected_us.tobytes())
        body = b"\n".join(message_line(message, 0) for message in messages)
        head = (
            "POST /message HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/jsonl\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        held = [
            socket.create_connection(("127.0.0.1", started.port), REPLY_S)
            for _ in range(PEER_CONNECTIONS_A_CALL)
        ]
        with suppress(ConnectionError):
            held[0].sendall((head + body)[: rng.randrange(1, len(head) + len(body))])
            held[1].sendall(head + body)
            held[1].recv(rng.randrange(1, 2**12))
        for each in held:
            each.close()
        return lost

    def stop(self, started: Started) -> None:
        stop_server(started.pid)


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
BAD_BODIES: dict[str, Callable[[random.Random], bytes]] = {
    "bytes that are no stream": lambda rng: rng.randbytes(rng.randrange(5000)),
    "a stream cut short": lambda rng: write_stream(_decodes([1], [2]))[: rng.randrange(193, 400)],
    "a compressed batch": lambda rng: _compressed(rng.choice(["zstd", "lz4"])),
    "a body too long": lambda rng: bytes(2**25),
}


def _compressed(codec: str) -> bytes:
    batch, sink = _decodes(np.zeros(2**18, np.int64), np.zeros(2**18, np.int64)), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


class ArrowConnection:
    """A client that is kept for Arrow streams of steps, and a connection for each that is wrong."""

    bad_kinds = (*BAD_BATCHES, *BAD_BODIES)

    def __init__(self, started: Started) -> None:
        self._port = started.port
        self._client = PlanClient(f"http://127.0.0.1:{started.port}")
        self.server_pid = started.pid

    def exchange(self, sent: Sequence[Sent], rng: random.Random) -> list[Got]:
        return [self._good(one) if isinstance(one, Message) else self._bad(one, rng) for one in sent]

    def _good(self, message: Message) -> Got:
        try:
            if len(message.arrays) == 2:
                return self._client.decode_us(*message.arrays, message.plan)
            return self._client.step_us(StepBatch(*message.arrays), message.plan)
        except FastroofError as error:
            return error

    def _bad(self, kind: str, rng: random.Random) -> Got:
        body = write_stream(BAD_BATCHES[kind](rng)) if kind in BAD_BATCHES else BAD_BODIES[kind](rng)
        return _asked("POST", "/steps?plan=0", body, {"Content-Type": ARROW_TYPE})(self._port, rng)

    def close(self) -> None:
        self._client.close()


class ArrowRoute(HttpRoute):
    """The same server, asked by Arrow streams of steps."""

    def connect(self, started: Started, client: int, options: Sequence[str] = ()) -> Connection:
        return ArrowConnection(started)
