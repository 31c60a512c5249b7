"""Plans as a web application: the messages of :mod:`fastroof.backends.serve.json_lines`, posted.

``POST /message`` takes one message (``application/json``) and answers what its line would be answered with,
or many, one a line (``application/jsonl``), and answers them line by line. ``GET /describe``,
``/openapi.json``, ``/metrics`` and ``/healthz`` say what is served, how to ask, what was asked, and whether
calls are taken.

Whatever is refused gets ``{"id": null, "error": ..., "message": ...}`` and a status: 400 for a wrong
message, 401 without the token, 404, 405, 408 for a body that is too slow, 413 for one too long, 415 for
another content type, 421 for another host's name, 500 for a fault of the server, 503 where too many calls
run, a call took longer than its limit or the server is stopping. At its time limit a stream of lines ends:
the line that was in work has an error, those behind it have no reply.

A call is counted once its body is there, and as long as it costs anything: until its work has ended, which
it does soon after its client has left.

No page of another origin can ask: for JSON's content type a browser asks first, which nobody answers, and
where no token is needed the host must be one of this machine's names.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from fastroof.backends.serve.answer import ServedPlans, as_refusal
from fastroof.backends.serve.http_calls import Call, Calls
from fastroof.backends.serve.http_metrics import METRICS_TYPE, ServeMetrics
from fastroof.backends.serve.http_openapi import JSON_LINES, JSON_TYPE, LINES_TYPES, openapi_document
from fastroof.backends.serve.http_requests import (
    LET_IN,
    Bodies,
    Refused,
    check_host,
    content_type,
    read_body,
    refusal,
)
from fastroof.backends.serve.http_workers import Workers
from fastroof.backends.serve.messages import answer_text, write_reply
from fastroof.checks import shown
from fastroof.errors import FastroofError, StoppedError

if TYPE_CHECKING:
    from collections.abc import Generator

    from fastroof.plan import StepPlan

__all__ = ["PlanApp"]

REPLY_BYTES: Final = 2**18
"""Of replies to lines that are made before they are sent."""

STOPPED: Final = 503
"""Status of a message whose work was ended."""


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
        self.calls = calls = Calls(served.limits.max_calls, served.limits.max_call_s)
        self._metrics = ServeMetrics(plans, calls, connections)
        limits = served.limits
        self._workers = Workers(limits.max_calls)
        self._bodies = Bodies(max(limits.max_message_bytes, limits.max_calls * limits.json_bytes))
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
        self.calls.check()
        most_bytes = limits.json_bytes if kind == JSON_TYPE else limits.max_message_bytes
        body = await read_body(request, most_bytes, self._bodies)
        if kind == JSON_TYPE:
            return await self._answered(request, body)
        return _Lines(self.calls.take(request), self._workers, partial(self._some_replies, _lines(body)))

    async def _answered(self, request: Request, text: bytes) -> Response:
        call = self.calls.take(request)
        try:
            status, reply = await call.run(self._workers, self._answer, text)
        finally:
            call.end()
        return Response(reply, status, media_type=JSON_TYPE)

    def _answer(self, text: bytes) -> tuple[int, bytes]:
        began = time.perf_counter()
        answered = answer_text(self._served, text)
        self._metrics.count(answered, time.perf_counter() - began)
        return _status(answered.error), write_reply(answered.reply)

    def _some_replies(self, lines: Generator[bytes, None, None]) -> bytes:
        """Answer lines until there is something to send; nothing at their end, or that of their time."""
        replies = bytearray()
        for line in lines:
            status, reply = self._answer(line)
            replies += reply + b"\n"
            if status == STOPPED:
                lines.close()
            if len(replies) >= REPLY_BYTES:
                break
        return bytes(replies)

    async def _describe(self, request: Request) -> Response:
        return await self._answered(request, b'{"describe": true}')

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=METRICS_TYPE)

    async def _show_openapi(self, request: Request) -> Response:
        return Response(self._openapi, media_type=JSON_TYPE)

    async def _health(self, request: Request) -> Response:
        calls = self.calls
        state = {
            "status": "draining" if calls.is_draining else "ok",
            "calls": calls.running,
            "abandoned": calls.abandoned,
            "timed_out": calls.timed_out,
        }
        return Response(json.dumps(state), 503 if calls.is_draining else 200, media_type=JSON_TYPE)


class _Lines(Response):
    """Replies to lines, sent as they are made; whatever becomes of the client, the call ends."""

    def __init__(self, call: Call, workers: Workers, some_replies: Callable[[], bytes]) -> None:
        self._call, self._workers, self._some_replies = call, workers, some_replies
        super().__init__(media_type=JSON_LINES)
        del self.headers["content-length"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send them."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while replies := await self._call.run(self._workers, self._some_replies):
                await send({"type": "http.response.body", "body": replies, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except ClientDisconnect:
            return  # nobody reads it
        finally:
            self._call.end()


def _status(error: Exception | None) -> int:
    if error is None:
        return 200
    if isinstance(error, StoppedError):
        return STOPPED
    return 400 if isinstance(error, FastroofError) else 500


def _lines(body: bytes) -> Generator[bytes, None, None]:
    """Lines that are not blank, one after the other."""
    start = 0
    while start < len(body):
        end = body.find(b"\n", start)
        end = len(body) if end < 0 else end
        line = body[start:end]
        start = end + 1
        if line.strip():
            yield line
