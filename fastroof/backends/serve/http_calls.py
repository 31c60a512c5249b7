"""Calls over HTTP, of any application: who may ask, and their limits on bodies, number and time.

A call is counted from the head of its request until its answer is sent and its work has ended, or until its
time is over: work that does not notice the end of its time is left to itself, so that it holds up neither
other calls nor the end of the server.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from fastroof.backends.serve.answers import as_refusal, error_reply, write_reply
from fastroof.backends.serve.limits import call_stop
from fastroof.checks import shown
from fastroof.errors import BackendError, FastroofError, StoppedError

JSON_TYPE: Final = "application/json"
LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names of this machine that no name server answers for."""

GRACE_S: Final = 2.0
"""Seconds after a call's end in which its work may still send an error with the message's id."""

Endpoint = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


class Refused(Exception):
    """A request that is refused before it is answered."""

    def __init__(self, status: int, words: str, **headers: str) -> None:
        self.status, self.words, self.headers = status, words, headers


def refusal(status: int, error: str | FastroofError, headers: dict[str, str] | None = None) -> Response:
    """Answer with an error in the form of all of them."""
    raised = error if isinstance(error, FastroofError) else BackendError(error)
    return Response(write_reply(error_reply(raised)), status, headers, media_type=JSON_TYPE)


def status_of(error: Exception | None) -> int:
    """Return the status of an answer: 200, 503 if its work was ended, 400, or 500 for a fault."""
    if error is None:
        return 200
    if isinstance(error, StoppedError):
        return 503
    return 400 if isinstance(error, FastroofError) else 500


def guarded(
    endpoint: Endpoint,
    check: Callable[[Request], None],
    turned_away: Callable[[int], None] = lambda status: None,
    headers: dict[str, str] | None = None,
) -> Endpoint:
    """Return an endpoint that checks each request first, and answers whatever is raised."""

    async def answered(request: Request) -> Response:
        try:
            check(request)
            response = await endpoint(request)
        except Refused as refused:
            turned_away(refused.status)
            response = refusal(refused.status, refused.words, refused.headers)
        except ClientDisconnect:
            response = Response(status_code=400)  # nobody reads it
        except Exception as error:
            response = refusal(status_of(error), as_refusal(error))
        response.headers.update(headers or {})
        return response

    return answered


def fixed(content: bytes, media_type: str) -> Endpoint:
    """Return an endpoint that answers every request with the same content."""

    async def answered(request: Request) -> Response:
        return Response(content, media_type=media_type)

    return answered


def not_routed(
    served: str,
    turned_away: Callable[[int], None] = lambda status: None,
    headers: dict[str, str] | None = None,
) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return the handler of requests that no route takes, whose error lists what is ``served``."""

    async def answered(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        turned_away(error.status_code)
        words = f"{request.method} {shown(request.url.path, 80)} is not served{served}"
        return refusal(error.status_code, words, {**(error.headers or {}), **(headers or {})})

    return answered


def check_host(request: Request, hosts: frozenset[str], otherwise: str) -> None:
    """Refuse other ``Host`` names with status 421: a page of another site whose name means this machine."""
    host = request.headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if name.strip("[]").lower() not in hosts:
        raise Refused(421, f"the host must be one of {', '.join(sorted(hosts))}: {otherwise}")


def content_type(request: Request) -> str:
    """Return the content type of a request, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


class Calls:
    """Counts calls, and refuses those that are too many.

    ``running`` counts calls until their answer is sent and their work has ended; ``abandoned`` and
    ``timed_out`` those that ended early since the start. ``most_bytes`` bounds all bodies together.
    """

    def __init__(self, most: int, limit_s: int, most_bytes: int, words: str = "calls") -> None:
        self._most = most
        self._words = words
        self.limit_s = limit_s
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self.running = self.abandoned = self.timed_out = 0

    def take(self, request: Request) -> Call:
        """Count a call; the caller must ``end`` it."""
        if self.running >= self._most:
            words = f"{self.running} {self._words} are running, the maximum: try again later"
            raise Refused(503, words, **{"Retry-After": "1", "Connection": "close"})
        self.running += 1
        return Call(self, request)


class Call:
    """One call: its body, then its work in threads, one piece after the other, under one stop."""

    def __init__(self, calls: Calls, request: Request) -> None:
        self._calls, self._request = calls, request
        self._stop = call_stop(calls.limit_s)
        self._until_s = asyncio.get_running_loop().time() + calls.limit_s
        self._held_bytes = 0
        self._work: asyncio.Future[Any] | None = None
        self._left: asyncio.Future[None] | None = None
        self._is_counted = True

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    async def body(self, most_bytes: int) -> bytes:
        """Read the body, if it is neither too long (status 413) nor slower than the call's time (408)."""
        parts: list[bytes] = []
        try:
            async with asyncio.timeout_at(self._until_s):
                async for part in self._request.stream():
                    parts.append(part)
                    self._held_bytes += len(part)
                    self._calls.held_bytes += len(part)
                    if self._held_bytes > most_bytes:
                        words = f"a message is longer than {most_bytes} bytes: send several"
                        raise Refused(413, words, Connection="close")
                    if self._calls.held_bytes > self._calls.most_bytes:
                        words = "other messages take all memory for bodies: try again later"
                        raise Refused(503, words, **{"Retry-After": "1", "Connection": "close"})
        except TimeoutError:
            words = f"the body took longer than the {self._calls.limit_s} s of a call (max_call_s)"
            raise Refused(408, words, Connection="close") from None
        return b"".join(parts)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Do a piece of the work in a thread; raise if the client leaves, or when the time is over."""

        def watched() -> T:
            with self._stop.watched():
                return function(*arguments)

        loop = asyncio.get_running_loop()
        if self._left is None:
            self._left = asyncio.ensure_future(_disconnect(self._request))
        self._work = work = _in_thread(watched)
        waited: set[asyncio.Future[Any]] = {work, self._left}
        try:
            await asyncio.wait(
                waited, timeout=self._until_s + GRACE_S - loop.time(), return_when=asyncio.FIRST_COMPLETED
            )
            if work.done():
                return work.result()
            if self._left.done():
                self._calls.abandoned += 1
                raise ClientDisconnect
            self._stop.check()
            raise AssertionError("a call has ended before its time")
        finally:
            if not work.done():
                self._stop.set("nobody waits for the answer any more")

    def end(self) -> None:
        """Count it no longer, once its work has ended too, or its time is over."""
        if self._left is not None:
            self._left.cancel()
        loop = asyncio.get_running_loop()
        if self._work is None or self._work.done() or loop.time() >= self._until_s + GRACE_S:
            self._gone()
        else:
            self._work.add_done_callback(self._gone)
            loop.call_at(self._until_s + GRACE_S, self._gone)

    def _gone(self, work: asyncio.Future[Any] | None = None) -> None:
        if work is not None and not work.cancelled():
            work.exception()  # retrieved, or asyncio logs it
        if not self._is_counted:
            return
        self._is_counted = False
        is_late = self._stop.is_late or asyncio.get_running_loop().time() >= self._until_s
        self._calls.running -= 1
        self._calls.held_bytes -= self._held_bytes
        self._calls.timed_out += is_late


def _in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Call a function in a thread that keeps no process from ending; the future has what comes of it."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        finish: Callable[[Any], None] = result.set_result
        try:
            outcome: Any = function()
        except BaseException as error:
            finish, outcome = result.set_exception, error
        with suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(lambda: None if result.done() else finish(outcome))

    threading.Thread(target=work, name="fastroof-http", daemon=True).start()
    return result


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
