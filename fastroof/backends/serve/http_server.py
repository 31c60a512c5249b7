"""Plans served over HTTP.

``POST /message`` takes one message of JSON (``application/json``) and answers what its line would be answered
with, or many, one per line (``application/jsonl``), and answers them line by line. ``POST /steps?plan=NAME``
takes steps as an Arrow IPC stream (:mod:`fastroof.backends.serve.arrow_steps`) and answers with their times
as another; ``errors=true`` adds standard errors. ``GET /describe``, ``/openapi.json``, ``/metrics`` and
``/healthz`` report what is served, how to ask, counts, and whether calls are taken.

An error is ``{"id": null, "error": ..., "message": ...}`` with a status: 400 for a wrong message, 401 without
the token, 404, 405, 408 for a body that is too slow, 413 for one too long, 415 for another content type, 421
for another host's name, 500 for a fault of the server, 503 if too many calls are running, a call took longer
than its limit or the server is stopping. At its time limit a stream of lines ends: the line being answered
gets an error, the ones after it get no reply.

No page of another origin can ask: for these content types a browser asks first, which nobody answers, and
without a token the host must be one of this machine's names.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.errors import BackendError, FastroofError, StoppedError

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
    from uvicorn.server import ServerState

    from fastroof.backends.serve.http_about import (
        ARROW_FORM,
        JSON_LINES,
        LINES_TYPES,
        METRICS_TYPE,
        ServeMetrics,
        openapi_document,
    )
except ModuleNotFoundError as error:
    raise BackendError(f"serving over HTTP needs {error.name}: pip install 'fastroof[http]'") from None

from fastroof.backends.serve.answer import ServedPlans, as_refusal
from fastroof.backends.serve.arrow_steps import ARROW_TYPE, read_steps, write_times
from fastroof.backends.serve.http_listener import DRAIN_S, HttpListener, serve_until_stopped
from fastroof.backends.serve.http_requests import (
    JSON_TYPE,
    LET_IN,
    LOCAL_HOSTS,
    Bodies,
    Call,
    Calls,
    Refused,
    Workers,
    check_host,
    content_type,
    read_body,
    refusal,
)
from fastroof.backends.serve.limits import ServeLimits, is_loopback, listening_socket, tls_context
from fastroof.backends.serve.messages import answer_text, error_reply, write_reply
from fastroof.checks import shown
from fastroof.run import StepBatch
from fastroof.stopping import check_stopped

if TYPE_CHECKING:
    from collections.abc import Generator

    from fastroof.plan import StepPlan

REPLY_BYTES: Final = 2**18  # of replies to lines that are made before they are sent
STOPPED: Final = 503  # status of a message whose work was ended


class HttpServer(HttpListener):
    """An HTTP server of plans, listening from when it is made to when it is drained.

    Parameters
    ----------
    plans : mapping of str to StepPlan
        By the name that clients ask for.
    host, port : str, int
        Where to listen; port 0 picks one.
    token : str, optional
        What clients have to send; required beyond this machine.
    tls_cert, tls_key : Path, optional
        PEM files of a certificate chain and its key; required beyond this machine.
    limits : ServeLimits
        What is refused.

    Raises
    ------
    BackendError
        If there are no plans or too many, or the address, token or certificate is invalid.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.backends.serve.client import PlanClient
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"))
    >>> with HttpServer({"small": plan}) as server, PlanClient(f"http://127.0.0.1:{server.port}") as client:
    ...     client.decode_us(64, 4096) == plan.decode_us(64, 4096)
    True
    """

    def __init__(
        self,
        plans: Mapping[str, StepPlan],
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
        limits: ServeLimits | None = None,
    ) -> None:
        limits = limits or ServeLimits()
        served = ServedPlans(plans, limits)
        tls = tls_context(tls_cert, tls_key)
        for plan in plans.values():
            _compile_loops(plan)
        listener = listening_socket(host, port, token, tls is not None)
        is_open = token is None and is_loopback(host, port)
        hosts = LOCAL_HOSTS | {host.lower()} if is_open else None
        state = ServerState()
        app = PlanApp(plans, served, token, hosts, lambda: len(state.connections))
        super().__init__(app, listener, limits.max_calls, tls, state)


def _compile_loops(plan: StepPlan) -> None:
    """Run the loops once for each width of integers, so that no client waits for a compiler."""
    one = np.ones(1, np.int64)
    for width in (np.int32, np.int64):
        plan.decode_us(one.astype(width), one.astype(width))
        plan.step_us(StepBatch(one.astype(width), one.astype(width), np.array([0, 1])))
    plan.decode_us(one.astype(np.int32), one)


def serve_http(
    plans: Mapping[str, StepPlan],
    host: str,
    port: int,
    *,
    token: str | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    limits: ServeLimits = ServeLimits(),  # noqa: B008 - it is frozen
    ready: Callable[[int], None] | None = None,
    drain_timeout_s: float = DRAIN_S,
) -> None:
    """Serve plans over HTTP until SIGTERM or SIGINT, then finish the calls in flight.

    A second signal cuts them off.

    Parameters
    ----------
    plans, host, port, token, tls_cert, tls_key, limits
        As for :class:`HttpServer`.
    ready : callable, optional
        Called with the port once it listens.
    drain_timeout_s : float
        Seconds that calls have to end in.

    Raises
    ------
    BackendError
        As :class:`HttpServer`; or outside of a program's main thread, the only one to get signals.
    """
    serve_until_stopped(
        lambda: HttpServer(plans, host, port, token=token, tls_cert=tls_cert, tls_key=tls_key, limits=limits),
        ready,
        drain_timeout_s,
    )


class PlanApp:
    """The application: routes, who may ask, and what is counted."""

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
                Route("/steps", self._guarded(self._steps), methods=["POST"]),
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
        words = (
            f"{what} is not served: POST /message, /steps; GET /describe, /healthz, /metrics, /openapi.json"
        )
        return refusal(error.status_code, words, dict(error.headers or {}))

    # What is asked

    async def _message(self, request: Request) -> Response:
        kind = content_type(request)
        if kind != JSON_TYPE and kind not in LINES_TYPES:
            words = f"a message is {JSON_TYPE}, or {JSON_LINES} with one per line; /steps takes {ARROW_TYPE}"
            raise Refused(415, f"{words}; got {shown(kind)}")
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
        num_steps = len(answered.reply.get("latency_us", ()))
        self._metrics.count(answered.form, answered.error, num_steps, time.perf_counter() - began)
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

    async def _steps(self, request: Request) -> Response:
        kind = content_type(request)
        if kind != ARROW_TYPE:
            raise Refused(415, f"steps are {ARROW_TYPE}; /message takes {JSON_TYPE}; got {shown(kind)}")
        self.calls.check()
        body = await read_body(request, self._served.limits.max_message_bytes, self._bodies)
        call = self.calls.take(request)
        try:
            parameters = request.query_params.multi_items()
            status, reply, media_type = await call.run(self._workers, self._times, parameters, body)
        finally:
            call.end()
        return Response(reply, status, media_type=media_type)

    def _times(self, parameters: list[tuple[str, str]], body: bytes) -> tuple[int, bytes, str]:
        """Answer an Arrow stream of steps; an error is answered in JSON."""
        began = time.perf_counter()
        error, num_steps = None, 0
        try:
            check_stopped()
            plan, errors = _asked(self._served, parameters)
            self._served.plan(plan)
            steps = read_steps(body, self._served.limits)
            check_stopped()
            if errors:
                reply = write_times(*self._served.with_errors(plan, steps))
            else:
                reply = write_times(steps.times_us(self._served.plan(plan)))
            num_steps = steps.num_steps
            return 200, reply, ARROW_TYPE
        except Exception as raised:
            error = raised
            return _status(error), write_reply(error_reply(as_refusal(error))), JSON_TYPE
        finally:
            self._metrics.count(ARROW_FORM, error, num_steps, time.perf_counter() - began)

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


def _asked(served: ServedPlans, parameters: list[tuple[str, str]]) -> tuple[str | int, bool]:
    """Return which plan a query names, and whether it asks for standard errors."""
    given = dict(parameters)
    if len(given) < len(parameters) or not given.keys() <= {"plan", "errors"}:
        raise BackendError(
            "a query may have plan=NAME and errors=true, once each; got "
            f"{shown([name for name, _ in parameters])}"
        )
    errors = given.get("errors", "false")
    if errors not in ("true", "false"):
        raise BackendError(f"errors must be true or false, got {shown(errors)}")
    plan = given.get("plan")
    if plan is None:
        return served.only_plan(), errors == "true"
    is_number = plan not in served.names and plan.isascii() and plan.isdigit() and len(plan) < 9
    return int(plan) if is_number else plan, errors == "true"


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
