"""Requests over HTTP: what is refused before it is answered, and calls, from the last byte of the body on.

A call is counted from when its body has been read until its answer is sent and its work has ended. Work ends
early at the time limit, and soon after its client has left.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from fastroof.backends.serve.limits import call_stop
from fastroof.backends.serve.messages import error_reply, write_reply
from fastroof.errors import BackendError, FastroofError

JSON_TYPE: Final = "application/json"
LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names of this machine that no name server answers for."""

# what the state of a request has, to tell its connection something
LET_IN: Final = "let_in"  # its client may ask
ASKS: Final = "asks"  # the head of a request is there, its body is not
CUT: Final = "cut"  # closes it

CHUNK_S: Final = 10.0  # longest wait for the next part of a body
BODY_BYTES_PER_S: Final = 2**14  # slowest body, over every CHUNK_S
_SHORT_BYTES: Final = 2**12

T = TypeVar("T")
_HEAD_END: Final = re.compile(rb"\n\r?\n")
_AGAIN: Final = {"Retry-After": "1", "Connection": "close"}


class Refused(Exception):
    """A request that is refused before it becomes a call."""

    def __init__(self, status: int, words: str, **headers: str) -> None:
        self.status, self.words, self.headers = status, words, headers


def refusal(status: int, error: str | FastroofError, headers: dict[str, str] | None = None) -> Response:
    """Answer with an error in the form of all of them."""
    raised = error if isinstance(error, FastroofError) else BackendError(error)
    return Response(write_reply(error_reply(raised)), status, headers, media_type=JSON_TYPE)


def framing_fault(data: bytes) -> str:
    r"""Return why the length of a request is ambiguous; empty if it is not, or if its head is incomplete.

    If a proxy and a server read such a head differently, the rest of a body counts as another client's
    request (request smuggling). h11 accepts ``Transfer-Encoding`` together with ``Content-Length``, and
    repeated equal lengths, as RFC 9112 permits.

    >>> framing_fault(b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n")
    'Content-Length and Transfer-Encoding together'
    >>> framing_fault(b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n")
    ''
    """
    end = _HEAD_END.search(data)
    if end is None:
        return ""
    first, *lines = data[: end.start()].split(b"\n")
    names = [line.partition(b":")[0].strip().lower() for line in lines]
    lengths, codings = names.count(b"content-length"), names.count(b"transfer-encoding")
    if lengths and codings:
        return "Content-Length and Transfer-Encoding together"
    if lengths > 1 or codings > 1:
        return "Content-Length or Transfer-Encoding twice"
    for name, line in zip(names, lines, strict=True):
        if name == b"content-length" and b"," in line:
            return "Content-Length of several values"
        if line[:1] in b" \t" and line.strip():
            return "a header of several lines"
    if codings and first.rstrip().endswith(b"HTTP/1.0"):
        return "Transfer-Encoding in HTTP/1.0"
    return ""


def check_host(request: Request, hosts: frozenset[str], otherwise: str) -> None:
    """Refuse other ``Host`` names with status 421: a page of another site whose name means this machine."""
    host = request.headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if name.strip("[]").lower() not in hosts:
        raise Refused(421, f"the host must be one of {', '.join(sorted(hosts))}: {otherwise}")


def content_type(request: Request) -> str:
    """Return the content type of a request, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


# Bodies


class Bodies:
    """Bodies that are being read, bounded together: beyond the bound the largest is dropped."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: dict[Request, int] = {}

    def hold(self, request: Request, num_bytes: int) -> None:
        """Note how much of a body has arrived."""
        self._held[request] = num_bytes
        if sum(self._held.values()) > self._most_bytes:
            largest = max(self._held, key=lambda each: self._held[each])
            self.leave(largest)
            largest.scope["state"][CUT]()

    def leave(self, request: Request) -> None:
        """Forget a body that is complete, or never will be."""
        self._held.pop(request, None)


async def read_body(request: Request, most_bytes: int, bodies: Bodies) -> bytes:
    """Read a body that is neither too long (status 413) nor too slow (408).

    Meanwhile its connection has asked, and no more: if there are too many, it may have to give way.
    """
    words = f"a message is longer than {most_bytes} bytes: send several"
    length = request.headers.get("content-length", "")
    if length.isdigit() and (len(length) > 18 or int(length) > most_bytes):
        raise Refused(413, words, Connection="close")
    request.scope["state"][ASKS]()
    try:
        body = await _whole_body(request, most_bytes, bodies, words)
    finally:
        bodies.leave(request)
    request.scope["state"][LET_IN]()
    return body


async def _whole_body(request: Request, most_bytes: int, bodies: Bodies, words: str) -> bytes:
    parts: list[bytes] = []
    short = bytearray()  # parts that are too short to keep each by itself
    num_bytes, since_bytes, since_s = 0, 0, time.monotonic()
    more = True
    while more:
        try:
            async with asyncio.timeout(CHUNK_S):
                message = await request.receive()
        except TimeoutError:
            raise Refused(408, f"nothing of the body came for {CHUNK_S:g} s", Connection="close") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        num_bytes += len(part)
        if num_bytes > most_bytes:
            raise Refused(413, words, Connection="close")
        if len(part) < _SHORT_BYTES:
            short += part
        if len(part) >= _SHORT_BYTES or len(short) >= _SHORT_BYTES or not more:
            parts.append(bytes(short))
            short.clear()
        if len(part) >= _SHORT_BYTES:
            parts.append(part)
        bodies.hold(request, num_bytes)
        passed_s = time.monotonic() - since_s
        if passed_s > CHUNK_S:
            # in every interval, so that a fast beginning does not make up for a slow rest
            if num_bytes - since_bytes < passed_s * BODY_BYTES_PER_S:
                raise Refused(408, f"the body is slower than {BODY_BYTES_PER_S} bytes/s", Connection="close")
            since_s, since_bytes = time.monotonic(), num_bytes
    return b"".join(parts)


# Calls


class Workers:
    """Threads that answer while the event loop serves, started as they are needed.

    They never keep a process from ending; a pool of :mod:`concurrent.futures` would wait for a long
    simulation.
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

        def finish(value: T | None, error: BaseException | None) -> None:
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
                loop.call_soon_threadsafe(finish, value, error)

        self._waiting += 1
        if self._waiting > self._started < self._most:
            self._started += 1
            Thread(target=self._work, name="fastroof-http", daemon=True).start()
        self._tasks.put(task)
        return result

    def _work(self) -> None:
        while True:
            self._tasks.get()()


class Calls:
    """Counts calls, and refuses those that are too many.

    ``running`` counts calls until their answer is sent and their work has ended; ``abandoned`` and
    ``timed_out`` those that ended early since the start. While ``is_draining``, new calls are refused.
    """

    def __init__(self, max_calls: int, limit_s: int, words: str = "calls") -> None:
        self._max_calls = max_calls
        self._words = words
        self.limit_s = limit_s
        self.running = self.abandoned = self.timed_out = 0
        self.is_draining = False

    def check(self) -> None:
        """Refuse a call with status 503 if there are too many, also before its body is read."""
        if self.is_draining:
            raise Refused(503, f"the server is stopping: no new {self._words} are taken", **_AGAIN)
        if self.running >= self._max_calls:
            raise Refused(
                503, f"{self.running} {self._words} are running, the maximum: try again later", **_AGAIN
            )

    def take(self, request: Request) -> Call:
        """Count a call whose body has been read; the caller must ``end`` it."""
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
        """Do a piece of the work in a thread; if the client leaves, end it and raise ClientDisconnect."""

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
