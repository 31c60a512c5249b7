"""Threads that answer while the event loop serves; they never keep a process from ending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

__all__ = ["Workers"]

T = TypeVar("T")


class Workers:
    """So many threads at most, started as they are needed.

    A pool of :mod:`concurrent.futures` would have its process wait for a long simulation before it ends.

    Parameters
    ----------
    most : int
        Threads.

    Examples
    --------
    >>> workers = Workers(2)
    >>> async def three():
    ...     return await workers.start(lambda: 1 + 2)
    >>> asyncio.run(three())
    3
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._started = 0
        self._waiting = 0
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def start(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Call a function in a thread; the future has what it returns or raises."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def told(value: T | None, error: BaseException | None) -> None:
            self._waiting -= 1
            if result.done():
                return  # nobody waits any more
            if error is None:
                result.set_result(value)  # type: ignore[arg-type]
            else:
                result.set_exception(error)

        def task() -> None:
            try:
                value, error = function(), None
            except BaseException as raised:
                value, error = None, raised
            with suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(told, value, error)

        self._waiting += 1
        if self._waiting > self._started < self._most:
            self._started += 1
            Thread(target=self._work, name="fastroof-http", daemon=True).start()
        self._tasks.put(task)
        return result

    def _work(self) -> None:
        while True:
            self._tasks.get()()
