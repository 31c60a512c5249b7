"""The process of a server with many clients: what it compiles first, its memory, signals that end it."""

from __future__ import annotations

import ctypes
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import current_thread, main_thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from fastroof.errors import BackendError
from fastroof.run import StepBatch

if TYPE_CHECKING:
    from typing import Self

    from fastroof.plan import StepPlan

__all__ = ["DRAIN_S", "compile_loops", "serve_until_told", "wait_while"]

DRAIN_S: Final = 30.0
"""Seconds that calls have to end in, once a server is told to stop."""

_M_ARENA_MAX, _ARENAS = -8, 2  # of malloc.h


def _use_few_arenas() -> None:
    """Have threads share glibc's heaps: one for each of dozens would keep growing by what others left."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)


class DrainingServer(Protocol):
    """A server that listens while its block lasts."""

    port: int

    def __enter__(self) -> Self:
        """It listens already."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""

    def drain(self, timeout_s: float, pause: Callable[[float], bool] | None) -> bool:
        """Refuse new calls, finish those in flight, and stop."""


def serve_until_told(
    make: Callable[[], DrainingServer], ready: Callable[[int], None] | None, drain_timeout_s: float
) -> None:
    """Serve until SIGTERM or SIGINT, then finish the calls in flight; a second signal cuts them off.

    Parameters
    ----------
    make : callable
        Makes the server.
    ready : callable or None
        Called with the port once it listens.
    drain_timeout_s : float
        Seconds that calls have to end in.

    Raises
    ------
    BackendError
        Outside of a program's main thread, the only one to get signals.
    """
    _use_few_arenas()
    with _stop_signals() as arrived, make() as server:
        if ready is not None:
            ready(server.port)
        while not arrived(3600.0):
            pass
        server.drain(drain_timeout_s, arrived)


def wait_while(
    is_busy: Callable[[], bool], timeout_s: float, pause: Callable[[float], bool] | None = None
) -> None:
    """Wait while something is, so many seconds at most; ``pause`` waits, and ends it by True."""
    until = time.monotonic() + timeout_s
    hurried = False
    while not hurried and time.monotonic() < until and is_busy():
        hurried = (pause or _sleep)(0.02)


def _sleep(pause_s: float) -> bool:
    time.sleep(pause_s)
    return False


@contextmanager
def _stop_signals() -> Iterator[Callable[[float], bool]]:
    """Yield what waits for SIGTERM or SIGINT, some seconds at most, and tells whether one arrived.

    Raises
    ------
    BackendError
        Outside of a program's main thread, the only one to get signals.
    """
    if current_thread() is not main_thread():
        raise BackendError("signals reach the main thread only: call it there, or use the server's class")
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setblocking(False)

    def told(number: int, frame: Any) -> None:
        with suppress(BlockingIOError):
            there.send(b"!")

    def arrived(timeout_s: float) -> bool:
        if not select.select([here], [], [], timeout_s)[0]:
            return False
        here.recv(1)
        return True

    before = {number: signal.signal(number, told) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        here.close()
        there.close()


def compile_loops(plan: StepPlan) -> None:
    """Run the loops once for each width of integers, so that no client waits for a compiler."""
    one = np.ones(1, np.int64)
    for width in (np.int32, np.int64):
        plan.decode_us(one.astype(width), one.astype(width))
        plan.step_us(StepBatch(one.astype(width), one.astype(width), np.array([0, 1])))
    plan.decode_us(one.astype(np.int32), one)
