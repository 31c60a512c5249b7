"""What ``soak_serve`` sends to ``fastroof serve --stdio``: frames and lines, good and bad."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.soak_routes import LIMITS, MAX_STEPS, PLANS, REPLY_S, Connection, Got, Message, Sent
from fastroof.backends.serve import frames
from fastroof.backends.serve.client import StdioClient
from fastroof.errors import BackendError


def _parts(message: Message, number: int) -> list[bytes | memoryview]:
    kind = frames.DECODE if len(message.arrays) == 2 else frames.RAGGED
    return frames.request_frame(number, kind, message.plan, message.arrays)


def _frame(message: Message, number: int) -> bytes:
    return b"".join(_parts(message, number))


def _lie(at: int, value: int) -> Callable[[random.Random], bytes]:
    """A request whose header says something else from some byte on."""

    def written(rng: random.Random) -> bytes:
        data = bytearray(_decodes([64], [4096]))
        size = 8 if at >= 16 else 1
        data[at : at + size] = value.to_bytes(size, "little")
        return bytes(data)

    return written


def _decodes(batch_size: Any, kv_len: Any, plan: int | str = 0) -> bytes:
    arrays = [np.ascontiguousarray(a).view(np.int64) for a in (batch_size, kv_len)]
    return b"".join(frames.request_frame(1, frames.DECODE, plan, arrays))


def _too_long(rng: random.Random) -> bytes:
    start = frames.REQUEST_HEADER.pack(frames.REQUEST_MAGIC, 1, 1, 8, 0, 1, 2**25, 2**21, 0)
    return start + bytes(rng.randrange(2**20))


def _junk(rng: random.Random) -> bytes:
    return b"\0" + rng.randbytes(rng.randrange(48, 5000)).replace(b"\xf5", b"\0")


def _wrong_offsets(rng: random.Random) -> bytes:
    arrays = [np.ones(4, np.int64)] * 2 + [np.array([0, 3, 2, 4])]
    return b"".join(frames.request_frame(1, frames.RAGGED, 0, arrays))


BAD_FRAMES: dict[str, Callable[[random.Random], bytes]] = {
    "bytes that are no frame": _junk,
    "a frame cut short": lambda rng: _decodes([64] * 40, [4096] * 40)[: -rng.randrange(1, 60)],
    "a header cut short": lambda rng: _decodes([64], [4096])[: rng.randrange(8, 48)],
    "another version": _lie(8, 9),
    "an unknown kind": _lie(10, 77),
    "another width": _lie(11, 3),
    "a huge length": _lie(24, 2**62),
    "huge steps": _lie(32, 2**62),
    "too many steps": lambda rng: _decodes([1] * (MAX_STEPS + 1), [9] * (MAX_STEPS + 1)),
    "a message too long": _too_long,
    "an unknown plan": lambda rng: _decodes([64], [4096], "nine"),
    "negative sizes": lambda rng: _decodes([64, -rng.randrange(1, 2**62)], [4096, 4096]),
    "NaN": lambda rng: _decodes([np.nan, 1.0], [np.nan, 1.0]),
    "a step too large": lambda rng: _decodes([64, 2**20], [4096, 4096]),
    "wrong offsets": _wrong_offsets,
}


class FrameConnection:
    """Binary frames, on a pipe to a server of its own."""

    bad_kinds = tuple(BAD_FRAMES)

    def __init__(self, options: Sequence[str]) -> None:
        self._client = StdioClient(PLANS, options)
        self.server_pid = self._client.pid

    def exchange(self, sent: Sequence[Sent], rng: random.Random) -> list[Got]:
        for number, each in enumerate(sent):
            if isinstance(each, Message):
                self._client.send_bytes(*_parts(each, number))
            else:
                self._client.send_bytes(BAD_FRAMES[each](rng))
        replies = [self._client.receive_reply() for _ in sent]
        for number, (each, reply) in enumerate(zip(sent, replies, strict=True)):
            if isinstance(each, Message) and reply.request_id != number:
                raise BackendError(f"reply {reply.request_id} came in the place of {number}")
        return [reply.answer for reply in replies]

    def close(self) -> None:
        self._client.close()


def _bad_line(batch_size: str, kv_len: str, plan: str = "0") -> bytes:
    return f'{{"plan": {plan}, "batch_size": {batch_size}, "kv_len": {kv_len}}}'.encode()


BAD_LINES: dict[str, Callable[[random.Random], bytes]] = {
    "bytes that are no JSON": lambda rng: b"\0" + rng.randbytes(rng.randrange(5000)).replace(b"\n", b" "),
    "a line cut short": lambda rng: _bad_line("64", "4096")[: rng.randrange(1, 40)],
    "deep nesting": lambda rng: b"[" * rng.randrange(2000, 2**20),
    "a message too long": lambda rng: b" " * (2**23 + rng.randrange(1, 2**20)),
    "too many steps": lambda rng: _bad_line(str([1] * (MAX_STEPS + 1)), "9"),
    "an unknown plan": lambda rng: _bad_line("64", "4096", '"nine"'),
    "unknown names": lambda rng: b'{"plan": 0, "batch": 64, "kv_len": 4096}',
    "negative sizes": lambda rng: _bad_line("64", f"[4096, -{rng.randrange(1, 2**62)}]"),
    "NaN": lambda rng: _bad_line("64", "[4096, NaN]"),
    "huge numbers": lambda rng: _bad_line("64", "1" + "0" * rng.randrange(20, 10_000)),
    "wrong offsets": lambda rng: b'{"plan": 0, "new_tokens": [1], "context_len": [1], "offsets": [0, 2]}',
}


class LineConnection:
    """Lines of JSON, on a pipe to a server of its own."""

    bad_kinds = tuple(BAD_LINES)

    def __init__(self, options: Sequence[str]) -> None:
        self._server = _server(options)
        self.server_pid = self._server.pid

    def exchange(self, sent: Sequence[Sent], rng: random.Random) -> list[Got]:
        replies: list[Got] = []
        to_server, from_server = _pipes(self._server)
        for number, each in enumerate(sent):
            # one at a time: whoever sends on has to read meanwhile
            to_server.write(
                (message_line(each, number) if isinstance(each, Message) else BAD_LINES[each](rng)) + b"\n"
            )
            to_server.flush()
            reply = json.loads(from_server.readline())
            if isinstance(each, Message) and reply["id"] != number:
                raise BackendError(f"reply {reply['id']} came in the place of {number}")
            times = reply.get("latency_us")
            replies.append(BackendError(reply["message"]) if times is None else np.array(times, float))
        return replies

    def close(self) -> None:
        to_server, from_server = _pipes(self._server)
        to_server.close()
        self._server.wait()
        from_server.close()


def message_line(message: Message, number: int) -> bytes:
    names = ("batch_size", "kv_len") if len(message.arrays) == 2 else ("new_tokens", "context_len", "offsets")
    arrays = {name: array.tolist() for name, array in zip(names, message.arrays, strict=True)}
    return json.dumps({"id": number, "plan": message.plan, **arrays}).encode()


def _server(options: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fastroof", "serve", *PLANS, "--stdio", *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _pipes(server: subprocess.Popen[bytes]) -> tuple[Any, Any]:
    return server.stdin, server.stdout


class StdioRoute:
    """``fastroof serve --stdio``: a server a client; each fourth client speaks JSON."""

    shares_a_server = False

    def start(self) -> None:
        return None

    def connect(self, started: Any, client: int, options: Sequence[str] = ()) -> Connection:
        return LineConnection(options) if client % 4 == 3 else FrameConnection(options)

    def leave(self, started: Any, messages: Sequence[Message], rng: random.Random) -> int:
        """End the input in a frame, stop the server with requests on their way, or stop reading."""
        server = _server(LIMITS)
        to_server, from_server = _pipes(server)
        sent = b"".join(_frame(message, number) for number, message in enumerate(messages))
        way = rng.choice(("end in a frame", "signal", "stop reading"))
        to_server.write(_frame(messages[0], 0) if way == "signal" else b"")
        to_server.flush()
        if way == "stop reading":
            from_server.close()
            with contextlib.suppress(BrokenPipeError):  # the server may be gone before it has read all
                to_server.write(sent)
                to_server.flush()  # few messages fit a buffer: unsent, they would have no answer to end it
            return int(server.wait(REPLY_S) != 0)
        lost = 0
        if way == "signal":
            # past its start, so that the signal finds a server
            lost += self._differing(from_server, messages[:1])
            to_server.write(sent)
            to_server.flush()
            server.send_signal(signal.SIGTERM)
        else:
            to_server.write(sent + sent[: rng.randrange(1, len(_frame(messages[0], 0)))])
            to_server.close()
        lost += self._differing(from_server, messages)
        from_server.read()
        return lost + int(server.wait(REPLY_S) != 0)

    @staticmethod
    def _differing(from_server: Any, messages: Sequence[Message]) -> int:
        lost = 0
        for number, message in enumerate(messages):
            header = from_server.read(frames.REPLY_HEADER.size)
            if len(header) < frames.REPLY_HEADER.size:
                return lost + len(messages) - number
            *_, status, _, request_id, body_bytes, _ = frames.REPLY_HEADER.unpack(header)
            body = from_server.read(body_bytes)
            lost += (status, request_id, body) != (frames.TIMES, number, message.expected_us.tobytes())
        return lost

    def stop(self, started: None) -> None:
        return None


class FramesRoute(StdioRoute):
    """The same, where every client speaks frames."""

    def connect(self, started: Any, client: int, options: Sequence[str] = ()) -> Connection:
        return FrameConnection(options)


class LinesRoute(StdioRoute):
    """The same, where every client speaks JSON."""

    def connect(self, started: Any, client: int, options: Sequence[str] = ()) -> Connection:
        return LineConnection(options)
