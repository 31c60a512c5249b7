"""Plans served over HTTP, by uvicorn and Starlette.

``POST /message`` takes one message of JSON (``application/json``) and answers what its line would be answered
with, or many, one per line (``application/jsonl``), and answers them line by line. ``POST /steps?plan=NAME``
takes steps as an Arrow IPC stream (:mod:`fastroof.backends.serve.arrow_steps`) and answers with their times
as another; ``errors=true`` adds standard errors. ``GET /describe``, ``/openapi.json``, ``/metrics`` and
``/healthz`` report what is served, how to ask, counts, and that calls are taken.

An error is ``{"id": null, "error": ..., "message": ...}`` with a status: 400 for a wrong message, 401 without
the token, 404, 405, 408 for a body that takes longer than a call may, 413 for one too long, 415 for another
content type, 421 for another host's name, 500 for a fault of the server, 503 if too many calls are running or
a call took longer than its limit. At its time limit a stream of lines ends: the line being answered gets an
error, the ones after it get no reply.

No page of another origin can ask: for these content types a browser asks first, which nobody answers, and
without a token the host must be one of this machine's names.
"""

from __future__ import annotations

import hmac
import json
import re
import time
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from fastroof.errors import BackendError

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from fastroof.backends.serve.http_about import (
        ARROW_KIND,
        JSON_LINES,
        LINES_TYPES,
        METRICS_TYPE,
        ServeMetrics,
        openapi_document,
    )
    from fastroof.backends.serve.http_calls import (
        JSON_TYPE,
        LOCAL_HOSTS,
        Calls,
        Endpoint,
        Refused,
        check_host,
        content_type,
        fixed,
        guarded,
        not_routed,
        status_of,
    )
    from fastroof.backends.serve.http_listener import DRAIN_S, HttpListener, serve_until_stopped
except ModuleNotFoundError as error:
    raise BackendError(f"serving over HTTP needs {error.name}: pip install 'fastroof[http]'") from None

from fastroof.backends.serve.answers import ServedPlans, answer_text, as_refusal, error_reply, write_reply
from fastroof.backends.serve.arrow_steps import ARROW_TYPE, read_steps, write_times
from fastroof.backends.serve.limits import UNIX, ServeLimits, listening_socket
from fastroof.checks import shown
from fastroof.run import StepBatch
from fastroof.stopping import check_stopped

if TYPE_CHECKING:
    from fastroof.plan import StepPlan


class HttpServer(HttpListener):
    """An HTTP server of plans, listening from when it is made to when it is drained.

    Parameters
    ----------
    plans : mapping of str to StepPlan
        By the name that clients ask for.
    host, port : str, int
        Where to listen: a name or address and a port, of which 0 picks one, or ``unix:PATH``.
    token : str, optional
        What clients have to send; required beyond this machine.
    limits : ServeLimits
        What is refused.

    Raises
    ------
    BackendError
        If there are no plans or too many, or the address or token is invalid.

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
        limits: ServeLimits | None = None,
    ) -> None:
        limits = limits or ServeLimits()
        served = ServedPlans(plans, limits)
        for plan in plans.values():
            _compile_loops(plan)
        listener = listening_socket(host, port, token)
        is_open = token is None and not host.startswith(UNIX)
        app = PlanApp(served, token, LOCAL_HOSTS | {host.lower()} if is_open else None)
        super().__init__(app.asgi, listener, limits.max_calls)


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
    limits: ServeLimits | None = None,
    ready: Callable[[int], None] = lambda port: None,
    drain_timeout_s: float = DRAIN_S,
) -> None:
    """Serve plans over HTTP until SIGTERM or SIGINT, then finish the calls in flight.

    A second signal cuts them off.

    Parameters
    ----------
    plans, host, port, token, limits
        As for :class:`HttpServer`.
    ready : callable
        Called with the port once it listens.
    drain_timeout_s : float
        Seconds that calls have to end in.

    Raises
    ------
    BackendError
        As :class:`HttpServer`; or outside of a program's main thread, the only one to get signals.
    """
    serve_until_stopped(
        lambda: HttpServer(plans, host, port, token=token, limits=limits),
        lambda server: ready(server.port),
        drain_timeout_s,
    )


class PlanApp:
    """The application: routes, who may ask, and what is counted."""

    def __init__(self, served: ServedPlans, token: str | None, hosts: frozenset[str] | None) -> None:
        self._served = served
        self._limits = limits = served.limits
        self._token = None if token is None else f"Bearer {token}".encode()
        self._hosts = hosts
        most_bytes = max(limits.max_message_bytes, limits.max_calls * limits.json_bytes)
        self._calls = Calls(limits.max_calls, limits.max_call_s, most_bytes)
        self._metrics = ServeMetrics(served.by_name, self._calls)
        openapi = json.dumps(openapi_document(token is not None)).encode()
        posts = {"/message": self._message, "/steps": self._steps}
        gets = {
            "/describe": self._describe,
            "/metrics": self._show_metrics,
            "/openapi.json": fixed(openapi, JSON_TYPE),
        }
        served_words = ": POST /message, /steps; GET /describe, /healthz, /metrics, /openapi.json"
        self.asgi = Starlette(
            routes=[
                *(Route(path, self._guarded(endpoint), methods=["POST"]) for path, endpoint in posts.items()),
                *(Route(path, self._guarded(endpoint)) for path, endpoint in gets.items()),
                Route("/healthz", self._health),
            ],
            exception_handlers={HTTPException: not_routed(served_words, self._metrics.turn_away)},
        )

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        return guarded(endpoint, self._check_origin, self._metrics.turn_away)

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

    async def _message(self, request: Request) -> Response:
        kind = content_type(request)
        has_lines = kind in LINES_TYPES
        if kind != JSON_TYPE and not has_lines:
            words = f"a message is {JSON_TYPE}, or {JSON_LINES} with one per line; /steps takes {ARROW_TYPE}"
            raise Refused(415, f"{words}; got {shown(kind)}")
        with self._calls.take(request) as call:
            body = await call.body(self._limits.max_message_bytes if has_lines else self._limits.json_bytes)
            status, reply = await call.run(self._answer_lines if has_lines else self._answer, body)
        return Response(reply, status, media_type=JSON_LINES if has_lines else JSON_TYPE)

    def _answer(self, text: bytes) -> tuple[int, bytes]:
        began = time.perf_counter()
        answered = answer_text(self._served, text)
        num_steps = len(answered.reply.get("latency_us", ()))
        self._metrics.count(answered.kind, answered.error, num_steps, time.perf_counter() - began)
        return status_of(answered.error), write_reply(answered.reply)

    def _answer_lines(self, body: bytes) -> tuple[int, bytes]:
        """Answer lines up to their end, that of their time, or the longest reply."""
        replies = bytearray()
        for line in BytesIO(body):
            if not line.strip():
                continue
            status, reply = self._answer(line.rstrip(b"\n"))
            replies += reply + b"\n"
            if status == 503:
                break
            if len(replies) > self._limits.max_message_bytes:
                words = (
                    f"the replies are longer than {self._limits.max_message_bytes} bytes: send fewer lines"
                )
                replies += write_reply(error_reply(BackendError(words))) + b"\n"
                break
        return 200, bytes(replies)

    async def _steps(self, request: Request) -> Response:
        kind = content_type(request)
        if kind != ARROW_TYPE:
            raise Refused(415, f"steps are {ARROW_TYPE}; /message takes {JSON_TYPE}; got {shown(kind)}")
        with self._calls.take(request) as call:
            body = await call.body(self._limits.max_message_bytes)
            asked = request.query_params.multi_items()
            status, reply, media_type = await call.run(self._times, asked, body)
            return Response(reply, status, media_type=media_type)

    def _times(self, asked: list[tuple[str, str]], body: bytes) -> tuple[int, bytes, str]:
        """Answer an Arrow stream of steps; an error is answered in JSON."""
        began = time.perf_counter()
        error, num_steps = None, 0
        try:
            check_stopped()
            given = _asked(self._served, asked)
            steps = read_steps(body, self._limits).model_copy(update=given)
            check_stopped()
            num_steps = steps.num_steps
            return 200, write_times(**self._served.times(steps)), ARROW_TYPE
        except Exception as raised:
            error, num_steps = raised, 0
            return status_of(error), write_reply(error_reply(as_refusal(error))), JSON_TYPE
        finally:
            self._metrics.count(ARROW_KIND, error, num_steps, time.perf_counter() - began)

    async def _describe(self, request: Request) -> Response:
        status, reply = self._answer(b'{"describe": true}')
        return Response(reply, status, media_type=JSON_TYPE)

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=METRICS_TYPE)

    async def _health(self, request: Request) -> Response:
        calls = self._calls
        state = {
            "status": "ok",
            "calls": calls.running,
            "abandoned": calls.abandoned,
            "timed_out": calls.timed_out,
        }
        return Response(json.dumps(state), media_type=JSON_TYPE)


def _asked(served: ServedPlans, parameters: list[tuple[str, str]]) -> dict[str, Any]:
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
    is_number = plan is not None and plan not in served.by_name and re.fullmatch("[0-9]{1,8}", plan)
    which = int(plan) if plan is not None and is_number else plan
    served.plan(which)
    return {"plan": which, "errors": errors == "true"}
