"""Stopping work early: at a time limit, or because its caller no longer waits.

The caller creates a :class:`Stop` and runs the work within ``with stop.watched():``. Long-running code calls
:func:`check_stopped` regularly; compiled loops read :func:`stop_flag`, which another thread sets. The stop is
a context variable, so no function between a server and a loop has to pass it on. Threads that the work starts
run in a copy of its context.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Timer

import numpy as np

from fastroof.arrays import Longs
from fastroof.errors import StoppedError

_CURRENT: ContextVar[Stop | None] = ContextVar("fastroof_stop", default=None)


class Stop:
    """A request to stop one piece of work; the first reason counts."""

    def __init__(self, limit_s: float | None = None, words: str = "it took too long") -> None:
        self.flag: Longs = np.zeros(1, np.int64)
        self.reason = ""
        self.is_late = False
        self._words = words
        self._until_s = None if limit_s is None else time.monotonic() + limit_s
        self._timer: Timer | None = None

    def set(self, reason: str) -> None:
        """Request the stop, from any thread."""
        if not self.reason:
            self.reason = reason
            self.flag[0] = 1

    def check(self) -> None:
        """Raise if the stop was requested or the time limit is over."""
        if self._until_s is not None and time.monotonic() >= self._until_s:
            self._end_late()
        if self.reason:
            raise StoppedError(self.reason)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run the work of a block under this stop."""
        before = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(before)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def watched_flag(self) -> Longs:
        """Return the flag for a loop; a timer sets it at the time limit."""
        self.check()
        if self._until_s is not None and self._timer is None:
            self._timer = Timer(self._until_s - time.monotonic(), self._end_late)
            self._timer.daemon = True
            self._timer.start()
        return self.flag

    def _end_late(self) -> None:
        if not self.reason:
            self.is_late = True
            self.set(self._words)


def check_stopped() -> None:
    """Raise if the current work was stopped."""
    stop = _CURRENT.get()
    if stop is not None:
        stop.check()


def stop_flag() -> Longs:
    """Return the flag that tells a compiled loop to stop; see :func:`check_stopped`."""
    stop = _CURRENT.get()
    return np.zeros(1, np.int64) if stop is None else stop.watched_flag()
