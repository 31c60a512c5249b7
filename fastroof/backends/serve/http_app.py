"""Plans as a web application: the messages of :mod:`fastroof.backends.serve.json_lines`, posted.

``POST /message`` takes one message (``application/json``) and answers what its line would be answered with,
or many, one a line (``application/jsonl``), and answers them line by line. ``GET /describe``,
``/openapi.json``, ``/metrics`` and ``/healthz`` say what is served, how to ask, what was asked, and whether
calls are taken.

Whatever is refused gets ``{"id": null, "error": ..., "message": ...}`` and a status: 400 for a wrong
message, 401 without the token, 404, 405, 408 for a body that is too slow, 413 for one too long, 415 for
another content type, 421 for another host's name, 500 for a fault of the server, 503 where too many calls run
or the server is stopping.

No page of another origin can ask: for JSON's content type a browser asks first, which nobody answers, and
where no token is needed the host must be one of this machine's names.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from fastroof.backends.serve.answer import ServedPlans, as_refusal
from fastroof.backends.serve.http_metrics import METRICS_TYPE, ServeMetrics
from fastroof.backends.serve.http_openapi import JSON_LINES, LINES_TYPES, openapi_document
from fastroof.backends.serve.http_requests import (
    JSON_TYPE,
    LET_IN,
    Refused,
    check_host,
    content_type,
    read_body,
    refusal,
)
from fastroof.backends.serve.http_workers import Workers
from fastroof.backends.serve.messages import Answered, answer_text, write_reply
from fastroof.checks import shown
from fastroof.errors import FastroofError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastroof.plan import StepPlan

__all__ = ["PlanApp"]

REPLY_BYTES: Final = 2**18
"""Of replies to lines that are made before they are sent."""


class PlanApp:
    """The application, and what it counts.

    Parameters
    ----------
    plans : mapping of str to StepPlan
        By name.
    served : ServedPlans
        The same within limits.
    token : str or None
        What requests have to show.
    hosts : frozenset of str, optional
        Names that a ``Host`` header may have; None takes any.
    connections : callable
        How many there are now.
    """

    def __init__(
        self,
        plans: Mapping[str, StepPlan],
        served: ServedPlans,
        token: str | None,
        hosts: frozenset[str] | None,
        connections: Callable[[], int],
    ) -> None:
        self._served = served
        self._token = None if token is None else f"Bearer {token}".encode()
        self._hosts = hosts
        self._openapi = json.dumps(openapi_document(token is not None)).encode()
        self._metrics = ServeMetrics(plans, lambda: self.running, connections, lambda: self.is_draining)
        self._workers = Workers(served.limits.max_calls)
        self.running = 0
        self.is_draining = False
        self.asgi = Starlette(
            routes=[
                Route("/message", self._guarded(self._message), methods=["POST"]),
                Route("/describe", self._guarded(self._describe)),
                Route("/metrics", self._guarded(self._show_metrics)),
                Route("/openapi.json", self._guarded(self._show_openapi)),
                Route("/healthz", self._health),
            ],
            exception_handlers={HTTPException: self._not_routed},
        )

    def _guarded(
        self, endpoint: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            try:
                self._check_origin(request)
                request.scope["state"][LET_IN]()
                return await endpoint(request)
            except Refused as refused:
                self._metrics.turn_away(refused.status)
                return refusal(refused.status, refused.words, refused.headers)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads it
            except Exception as error:
                return refusal(500, str(as_refusal(error)))

        return answered

    def _check_origin(self, request: Request) -> None:
        if self._hosts is not None:
            check_host(request, self._hosts, "other names need a token")
        if self._token is None:
            return
        given = request.headers.getlist("authorization")
        if len(given) != 1 or not hmac.compare_digest(given[0].encode("latin-1"), self._token):
            raise Refused(
                401,
                "the token is missing or wrong: send `Authorization: Bearer TOKEN`",
                **{"WWW-Authenticate": "Bearer"},
            )

    async def _not_routed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        self._metrics.turn_away(error.status_code)
        what = f"{request.method} {shown(request.url.path, 80)}"
        words = f"{what} is not served: POST /message; GET /describe, /healthz, /metrics, /openapi.json"
        return refusal(error.status_code, words, dict(error.headers or {}))

    # What is asked

    async def _message(self, request: Request) -> Response:
        kind = content_type(request)
        if kind != JSON_TYPE and kind not in LINES_TYPES:
            raise Refused(415, f"a message is {JSON_TYPE}, one a line {JSON_LINES}; got {shown(kind)}")
        limits = self._served.limits
        with self._call() as end:
            if kind == JSON_TYPE:
                text = await read_body(request, limits.json_bytes)
                answered = await self._workers.run(self._answer, text)
                error = answered.error
                status = 200 if error is None else 400 if isinstance(error, FastroofError) else 500
                end()
                return Response(write_reply(answered.reply), status, media_type=JSON_TYPE)
            body = await read_body(request, limits.max_message_bytes)
            # the call lasts until its last line is answered
            return _Lines(self._answered_lines(body), end, media_type=JSON_LINES)

    def _answer(self, text: bytes) -> Answered:
        began = time.perf_counter()
        answered = answer_text(self._served, text)
        self._metrics.count(answered, time.perf_counter() - began)
        return answered

    async def _answered_lines(self, body: bytes) -> AsyncIterator[bytes]:
        lines = _lines(body)
        while replies := await self._workers.run(self._some_replies, lines):
            yield replies

    def _some_replies(self, lines: Iterator[bytes]) -> bytes:
        """Answer lines until there is something to send; nothing at their end."""
        replies = bytearray()
        for line in lines:
            replies += write_reply(self._answer(line).reply) + b"\n"
            if len(replies) >= REPLY_BYTES:
                break
        return bytes(replies)

    async def _describe(self, request: Request) -> Response:
        with self._call() as end:
            answered = await self._workers.run(self._answer, b'{"describe": true}')
            end()
            return Response(write_reply(answered.reply), media_type=JSON_TYPE)

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=METRICS_TYPE)

    async def _show_openapi(self, request: Request) -> Response:
        return Response(self._openapi, media_type=JSON_TYPE)

    async def _health(self, request: Request) -> Response:
        state = {"status": "draining" if self.is_draining else "ok", "calls": self.running}
        return Response(json.dumps(state), 503 if self.is_draining else 200, media_type=JSON_TYPE)

    @contextmanager
    def _call(self) -> Iterator[Callable[[], None]]:
        """Count a call; it lasts until what this yields is called, or something is raised."""
        again = {"Retry-After": "1", "Connection": "close"}
        if self.is_draining:
            raise Refused(503, "the server is stopping: no new calls are taken", **again)
        if self.running >= self._served.limits.max_calls:
            raise Refused(
                503, f"{self.running} calls are running, as many as may at once: try again later", **again
            )
        self.running += 1
        has_ended = False

        def end() -> None:
            nonlocal has_ended
            if not has_ended:
                has_ended = True
                self.running -= 1

        try:
            yield end
        except BaseException:
            end()
            raise


class _Lines(StreamingResponse):
    """Replies to lines, sent as they are made; whatever becomes of the client, the call ends."""

    def __init__(self, content: AsyncIterator[bytes], end: Callable[[], None], media_type: str) -> None:
        super().__init__(content, media_type=media_type)
        self._end = end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def _lines(body: bytes) -> Iterator[bytes]:
    """Lines that are not blank, one after the other."""
    start = 0
    while start < len(body):
        end = body.find(b"\n", start)
        end = len(body) if end < 0 else end
        line = body[start:end]
        start = end + 1
        if line.strip():
            yield line
