"""What a request over HTTP has to be before it is answered: for which host, how long, how slow."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from fastroof.backends.serve.http_openapi import JSON_TYPE
from fastroof.backends.serve.messages import error_reply, write_reply
from fastroof.errors import BackendError, FastroofError

__all__ = [
    "ASKS",
    "CUT",
    "JSON_TYPE",
    "LET_IN",
    "LOCAL_HOSTS",
    "Bodies",
    "Refused",
    "check_host",
    "content_type",
    "read_body",
    "refusal",
]

LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names of this machine that no name server answers for."""

LET_IN: Final = "let_in"
"""What the state of a request has for its connection to be told that its client may ask."""

ASKS: Final = "asks"
"""Likewise, called once the head of a request is there and its body is not."""

CUT: Final = "cut"
"""Likewise, closes the connection."""

CHUNK_S: Final = 10.0
"""Longest wait for the next part of a body."""

BODY_BYTES_PER_S: Final = 2**14
"""Slowest body that is waited for, over every :data:`CHUNK_S`."""


class Refused(Exception):
    """A request that does not become a question."""

    def __init__(self, status: int, words: str, **headers: str) -> None:
        self.status, self.words, self.headers = status, words, headers


def check_host(request: Request, hosts: frozenset[str], otherwise: str) -> None:
    """Refuse a ``Host`` that is none of some: a page of another origin whose name now means this machine.

    Raises
    ------
    Refused
        With status 421; ``otherwise`` says what other names take.
    """
    if _host_name(request.headers.get("host", "")) not in hosts:
        raise Refused(421, f"the host must be one of {', '.join(sorted(hosts))}: {otherwise}")


def _host_name(host: str) -> str:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.strip("[]").lower()


def content_type(request: Request) -> str:
    """Return what a body is said to be, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


class Bodies:
    """Bodies that are being read, bounded together: beyond the bound the largest is dropped.

    Parameters
    ----------
    most_bytes : int
        Bound of all of them.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: dict[Request, int] = {}

    def hold(self, request: Request, num_bytes: int) -> None:
        """Note how much has come of a body."""
        self._held[request] = num_bytes
        if sum(self._held.values()) > self._most_bytes:
            largest = max(self._held, key=lambda each: self._held[each])
            self.leave(largest)
            largest.scope["state"][CUT]()

    def leave(self, request: Request) -> None:
        """Forget a body that has come, or does not come any more."""
        self._held.pop(request, None)


async def read_body(request: Request, most_bytes: int, bodies: Bodies) -> bytes:
    """Read a body that is neither too long nor too slow.

    Meanwhile its connection has asked, and no more: where there are too many, it may have to give way.

    Raises
    ------
    Refused
        With status 413 or 408.
    """
    words = f"a message is longer than {most_bytes} bytes: send several"
    told = request.headers.get("content-length", "")
    if told.isdigit() and (len(told) > 18 or int(told) > most_bytes):
        raise Refused(413, words, Connection="close")
    request.scope["state"][ASKS]()
    try:
        body = await _whole_body(request, most_bytes, bodies, words)
    finally:
        bodies.leave(request)
    request.scope["state"][LET_IN]()
    return body


async def _whole_body(request: Request, most_bytes: int, bodies: Bodies, words: str) -> bytes:
    body = bytearray()
    since_s, since_bytes = time.monotonic(), 0
    parts = request.stream()
    while True:
        try:
            part = await asyncio.wait_for(anext(parts), CHUNK_S)
        except StopAsyncIteration:
            return bytes(body)
        except TimeoutError:
            raise Refused(408, f"nothing of the body came for {CHUNK_S:g} s", Connection="close") from None
        body += part
        if len(body) > most_bytes:
            raise Refused(413, words, Connection="close")
        bodies.hold(request, len(body))
        passed_s = time.monotonic() - since_s
        if passed_s > CHUNK_S:
            # of every such while, so that a fast beginning pays for nothing
            if len(body) - since_bytes < passed_s * BODY_BYTES_PER_S:
                raise Refused(408, f"the body is slower than {BODY_BYTES_PER_S} bytes/s", Connection="close")
            since_s, since_bytes = time.monotonic(), len(body)


def refusal(status: int, error: str | FastroofError, headers: dict[str, str] | None = None) -> Response:
    """Answer with an error in the form of all of them."""
    told = error if isinstance(error, FastroofError) else BackendError(error)
    return Response(write_reply(error_reply(told)), status, headers, media_type=JSON_TYPE)
