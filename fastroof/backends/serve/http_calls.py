"""Calls of an HTTP server: how many run, and what ends one before its answer is there.

A call is counted from when its body has been read until its answer is sent and its work has ended. Work ends
early at the time limit, and soon after its client has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request

from fastroof.backends.serve.http_requests import Refused
from fastroof.backends.serve.http_workers import Workers
from fastroof.backends.serve.limits import call_stop

__all__ = ["Call", "Calls"]

T = TypeVar("T")

_AGAIN: Final = {"Retry-After": "1", "Connection": "close"}


class Calls:
    """Counts calls, and refuses those that are too many.

    Parameters
    ----------
    max_calls : int
        Calls at once.
    limit_s : int
        Seconds that one may take.
    words : str
        What refusals call them: "calls" or "questions".

    Attributes
    ----------
    running : int
        Calls whose answer is not sent yet, or whose work has not ended yet.
    abandoned, timed_out : int
        How many were ended since the start because their client had left, and at the time limit.
    is_draining : bool
        Whether new calls are refused.
    """

    def __init__(self, max_calls: int, limit_s: int, words: str = "calls") -> None:
        self._max_calls = max_calls
        self._words = words
        self.limit_s = limit_s
        self.running = self.abandoned = self.timed_out = 0
        self.is_draining = False

    def check(self) -> None:
        """Refuse a call where it is certain that it would be, before its body is read.

        Raises
        ------
        Refused
            With status 503.
        """
        if self.is_draining:
            raise Refused(503, f"the server is stopping: no new {self._words} are taken", **_AGAIN)
        if self.running >= self._max_calls:
            raise Refused(
                503,
                f"{self.running} {self._words} are running, as many as may at once: try again later",
                **_AGAIN,
            )

    def take(self, request: Request) -> Call:
        """Count a call whose body has been read; ``end`` it, whatever comes of it.

        Raises
        ------
        Refused
            With status 503.
        """
        self.check()
        self.running += 1
        return Call(self, request)


class Call:
    """One call. Its work runs in threads of a pool, one piece after the other, under one stop."""

    def __init__(self, calls: Calls, request: Request) -> None:
        self._calls = calls
        self._stop = call_stop(calls.limit_s)
        self._left: asyncio.Future[None] = asyncio.ensure_future(_disconnect(request))
        self._work: asyncio.Future[Any] | None = None
        self._has_ended = False

    async def run(self, workers: Workers, function: Callable[..., T], *arguments: Any) -> T:
        """Do a piece of the work in a thread.

        Raises
        ------
        ClientDisconnect
            If the client leaves before it is done; then the work ends soon.
        """

        def watched() -> T:
            with self._stop.watched():
                return function(*arguments)

        work = self._work = workers.start(watched)
        try:
            await asyncio.wait({work, self._left}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            answer: T = work.result()
            return answer
        finally:
            # the client has left, or the server ends
            if not work.done():
                self._calls.abandoned += 1
                self._stop.set("nobody waits for the answer any more")

    def end(self) -> None:
        """Count it no longer, once its work has ended too."""
        if self._has_ended:
            return
        self._has_ended = True
        self._left.cancel()
        if self._work is None or self._work.done():
            self._gone()
        else:
            self._work.add_done_callback(self._gone)

    def _gone(self, work: asyncio.Future[Any] | None = None) -> None:
        self._calls.running -= 1
        self._calls.timed_out += self._stop.is_late
        if work is not None:
            with suppress(asyncio.CancelledError):
                work.exception()  # retrieved, or asyncio logs it


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
