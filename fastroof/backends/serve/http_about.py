"""What an HTTP server says of itself: its OpenAPI document, and counts in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from fastroof._version import __version__
from fastroof.backends.serve.arrow_steps import ARROW_TYPE
from fastroof.backends.serve.forms import FORMS, PROTOCOL, message_schemas
from fastroof.backends.serve.http_requests import JSON_TYPE
from fastroof.errors import FastroofError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastroof.backends.serve.http_requests import Calls
    from fastroof.plan import StepPlan

JSON_LINES: Final = "application/jsonl"
LINES_TYPES: Final = (JSON_LINES, "application/x-ndjson", "application/x-jsonlines")
"""Content types of a body with a message a line."""

METRICS_TYPE: Final = CONTENT_TYPE_LATEST
ARROW_FORM: Final = "arrow"
"""The form of an Arrow stream of steps, as messages are counted by theirs."""

_SECONDS: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    10,
    60,
)
_OUTCOMES: Final = ("answered", "refused", "failed")


class ServeMetrics:
    """Counts of one server, in a registry of its own.

    Messages by form and outcome (answered; refused: the message is wrong; failed: a fault of the server),
    seconds of computing by form, steps, what was turned away by status before it became a message, calls that
    were abandoned or timed out, calls and connections now, and what is served.
    """

    def __init__(
        self,
        plans: Mapping[str, StepPlan],
        calls: Calls,
        connections: Callable[[], float],
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self._messages = Counter(
            "fastroof_messages", "Messages by form and outcome.", ("form", "outcome"), registry=registry
        )
        self._seconds = Histogram(
            "fastroof_message_seconds",
            "Seconds to answer a message.",
            ("form",),
            registry=registry,
            buckets=_SECONDS,
        )
        self._steps = Counter("fastroof_steps", "Steps that were timed.", registry=registry)
        self._turned_away = Counter(
            "fastroof_turned_away",
            "Requests that were refused before they became messages, by status.",
            ("status",),
            registry=registry,
        )
        for form in ("none", ARROW_FORM, *(form.name for form in FORMS)):
            self._seconds.labels(form)
            for outcome in _OUTCOMES:
                self._messages.labels(form, outcome)
        for name, words, now in (
            (
                "fastroof_calls",
                "Calls that are being answered, or whose work goes on.",
                lambda: calls.running,
            ),
            ("fastroof_connections", "Open connections.", connections),
            ("fastroof_draining", "1 once the server is stopping.", lambda: calls.is_draining),
        ):
            Gauge(name, words, registry=registry).set_function(now)
        registry.register(_Ended(calls))
        built = Gauge("fastroof_build_info", "What serves.", ("version", "protocol"), registry=registry)
        built.labels(__version__, str(PROTOCOL)).set(1)
        plan_info = Gauge(
            "fastroof_plan_info", "What is served.", ("plan", "model", "gpu", "tp"), registry=registry
        )
        for name, plan in plans.items():
            described = plan.describe()
            plan_info.labels(name, *(str(described[what]) for what in ("model", "gpu", "tp"))).set(1)

    def count(self, form: str, error: Exception | None, num_steps: int, seconds: float) -> None:
        """Count a message, its steps and how long it took to answer."""
        outcome = "answered" if error is None else "refused" if isinstance(error, FastroofError) else "failed"
        self._messages.labels(form, outcome).inc()
        self._seconds.labels(form).observe(seconds)
        self._steps.inc(num_steps)

    def turn_away(self, status: int) -> None:
        """Count a request that did not become a message."""
        self._turned_away.labels(str(status)).inc()

    def text(self) -> bytes:
        """Return all counts."""
        return generate_latest(self._registry)


class _Ended(Collector):
    """Calls that ended early."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield both counts."""
        for name, words, count in (
            ("abandoned", "Calls whose client left before their answer.", self._calls.abandoned),
            ("timed_out", "Calls that took longer than the limit.", self._calls.timed_out),
        ):
            yield CounterMetricFamily(f"fastroof_{name}_calls", words, value=count)


# OpenAPI

_ERRORS: Final = {
    400: "The message is wrong.",
    401: "The token is missing or wrong.",
    408: "The body came too slowly.",
    413: "The body, or a line of it, is too long.",
    415: "The content type is not one that is accepted here.",
    500: "A fault of the server.",
    503: "Too many calls are running, the call took too long, or the server is stopping.",
}


def _content(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {kind: {"schema": schema}}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def openapi_document(needs_token: bool) -> dict[str, Any]:
    """Return the interface of a server as an OpenAPI 3.1 document."""
    errors = {
        str(status): {"description": words, **_content(JSON_TYPE, _ref("error"))}
        for status, words in _ERRORS.items()
        if needs_token or status != 401
    }
    turned_away = {status: error for status, error in errors.items() if status == "401"}
    line: dict[str, Any] = {
        "type": "string",
        "description": "a message a line; answered line by line, wrong ones too",
    }
    messages = {"oneOf": [_ref(form.name) for form in FORMS]}
    # not oneOf: a reply of times is the same to several forms
    replies = {"anyOf": [_ref(f"{form.name}_reply") for form in FORMS]}

    def gets(words: str, kind: str, schema: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        return {
            "get": {
                "summary": words,
                "responses": {"200": {"description": words, **_content(kind, schema)}, **more},
            }
        }

    counts = {
        "calls": "calls that are being answered, or whose work goes on",
        "abandoned": "calls whose client left before their answer, since the start",
        "timed_out": "calls that took longer than the limit, since the start",
    }
    health = {
        "type": "object",
        "properties": {
            "status": {"enum": ["ok", "draining"]},
            **{
                name: {"type": "integer", "minimum": 0, "description": words}
                for name, words in counts.items()
            },
        },
        "required": ["status", *counts],
        "additionalProperties": False,
    }
    draining = {"503": {"description": "The server is stopping.", **_content(JSON_TYPE, health)}}
    paths = {
        "/message": {
            "post": {
                "summary": "Answer a message, or one per line.",
                "requestBody": {
                    "required": True,
                    "content": {JSON_TYPE: {"schema": messages}, JSON_LINES: {"schema": line}},
                },
                "responses": {
                    "200": {
                        "description": "The reply, or one per line.",
                        "content": {JSON_TYPE: {"schema": replies}, JSON_LINES: {"schema": line}},
                    },
                    **errors,
                },
            }
        },
        "/steps": {
            "post": {
                "summary": "Time the steps of an Arrow IPC stream.",
                "description": "Record batches, uncompressed, of batch_size and kv_len (int32 or int64), or "
                "of new_tokens and context_len (lists of them), one step per row. The reply is one batch of "
                "latency_us (float64, microseconds), and of relative_error if asked for.",
                "parameters": [
                    {
                        "name": "plan",
                        "in": "query",
                        "description": "name or number of a plan; optional if one is served",
                        "schema": {"type": "string"},
                    },
                    {
                        "name": "errors",
                        "in": "query",
                        "description": "standard errors as well",
                        "schema": {"enum": ["true", "false"]},
                    },
                ],
                "requestBody": {"required": True, "content": {ARROW_TYPE: {}}},
                "responses": {
                    "200": {"description": "The times.", "content": {ARROW_TYPE: {}}},
                    **errors,
                },
            }
        },
        "/describe": gets("What is served.", JSON_TYPE, _ref("describe_reply"), turned_away),
        "/healthz": gets("Whether calls are taken.", JSON_TYPE, health, draining),
        "/metrics": gets("Counts, for Prometheus.", "text/plain", {"type": "string"}, turned_away),
        "/openapi.json": gets("This document.", JSON_TYPE, {"type": "object"}, turned_away),
    }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "fastroof",
            "version": __version__,
            "description": "How long LLM inference steps take on a GPU, from measured kernels.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": message_schemas()},
    }
    if needs_token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
        document["paths"]["/healthz"]["get"]["security"] = []
    return document
