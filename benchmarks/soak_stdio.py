"""What ``soak_serve`` sends to ``fastroof serve --stdio``: lines, good and bad."""

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
from fastroof.errors import BackendError


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
    """``fastroof serve --stdio``: a server a client."""

    shares_a_server = False

    def start(self) -> None:
        return None

    def connect(self, started: Any, client: int, options: Sequence[str] = ()) -> Connection:
        return LineConnection(options)

    def leave(self, started: Any, messages: Sequence[Message], rng: random.Random) -> int:
        """End the input in a line, stop the server with requests on their way, or stop reading."""
        server = _server(LIMITS)
        to_server, from_server = _pipes(server)
        lines = [message_line(message, number) + b"\n" for number, message in enumerate(messages)]
        sent = b"".join(lines)
        way = rng.choice(("end in a line", "signal", "stop reading"))
        to_server.write(lines[0] if way == "signal" else b"")
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
            to_server.write(sent + lines[0][: rng.randrange(1, len(lines[0]) - 1)])
            to_server.close()
        lost += self._differing(from_server, messages)
        from_server.read()
        return lost + int(server.wait(REPLY_S) != 0)

    @staticmethod
    def _differing(from_server: Any, messages: Sequence[Message]) -> int:
        lost = 0
        for number, message in enumerate(messages):
            line = from_server.readline()
            if not line:
                return lost + len(messages) - number
            reply = json.loads(line)
            lost += (reply["id"], reply.get("latency_us")) != (number, message.expected_us.tolist())
        return lost

    def stop(self, started: None) -> None:
        return None
