"""The process of a server with many clients: what it compiles first, its memory, signals that end it."""

from __future__ import annotations

import ctypes
import select
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any

import numpy as np

from fastroof.errors import BackendError
from fastroof.run import StepBatch

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = ["compile_loops", "stop_signals", "use_few_arenas"]

_M_ARENA_MAX, _ARENAS = -8, 2  # of malloc.h


def use_few_arenas() -> None:
    """Have threads share glibc's heaps: one for each of dozens would keep growing by what others left."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)


@contextmanager
def stop_signals() -> Iterator[Callable[[float], bool]]:
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
