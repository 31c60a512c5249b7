"""What a route to a server is to ``soak_serve``: how clients connect, what they send wrong, how they leave.

A route is one class with the methods of :class:`Route`, in a file of its own, and one line in ``ROUTES`` of
``soak_serve``.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from fastroof.errors import BackendError

PLANS = ("llama-3.1-8b", "llama-3.1-70b,tp=4,dtype=fp8")
MAX_STEPS = 300_000
LIMITS = ("--max-steps", str(MAX_STEPS), "--max-message-bytes", str(2**24))
REPLY_S = 60
SILENT = 300
"""Connections that say nothing, beside those of clients of a server that they share."""


class Message(NamedTuple):
    """A good request: two arrays of decode steps or three of ragged steps, and the times it must get."""

    plan: int
    arrays: tuple[Any, ...]
    expected_us: Any


Sent = Message | str  # a good request, or the name of a kind of bad one
Got = Any  # times, or a FastroofError


class Connection(Protocol):
    """A client's connection; one thread uses it."""

    server_pid: int
    bad_kinds: tuple[str, ...]

    def exchange(self, sent: Sequence[Sent], rng: random.Random) -> list[Got]:
        """One reply for each that is sent, in order; the last is a good one."""

    def close(self) -> None: ...


class Route(Protocol):
    """How clients reach servers."""

    shares_a_server: bool

    def start(self) -> Any:
        """Start what clients share, in the process of the driver; what it returns is pickled for them."""

    def connect(self, started: Any, client: int, options: Sequence[str] = ()) -> Connection:
        """Connect; ``options`` are more of the server's command line, where it is the client's own."""

    def leave(self, started: Any, messages: Sequence[Message], rng: random.Random) -> int:
        """Connect, send and go in the middle of it, in some rude way; how many good replies were lost."""

    def stop(self, started: Any) -> None: ...


_servers: dict[int, subprocess.Popen[str]] = {}


def start_server(option: str, max_calls: int) -> tuple[int, int]:
    """Start a server of this machine that all clients share; its port and its process."""
    address = (option, "127.0.0.1:0", "--max-calls", str(max_calls))
    command = [sys.executable, "-m", "fastroof", "serve", *PLANS, *address, *LIMITS]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    said = server.stdout.readline()
    found = re.search(r":([0-9]+):", said)
    if found is None:
        raise BackendError(f"the server says {said!r}")
    _servers[server.pid] = server
    return int(found[1]), server.pid


_silent: dict[int, list[socket.socket]] = {}


def hold_silent(port: int, said: bytes) -> None:
    """Hold connections that say no more than this, in the place of those that were held before."""
    for each in _silent.pop(port, []):
        each.close()
    held = _silent[port] = []
    for _ in range(SILENT):
        one = socket.create_connection(("127.0.0.1", port), REPLY_S)
        held.append(one)
        with suppress(ConnectionError):
            one.sendall(said)


def stop_server(pid: int) -> None:
    """Drain it; what it leaves with is not 0 where it died before."""
    server = _servers.pop(pid)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    if server.wait(REPLY_S) != 0:
        raise SystemExit(f"the server ended with {server.returncode}")
