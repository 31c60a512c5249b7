"""What an HTTP server says of itself: its OpenAPI document, and counts in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

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
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from fastroof._version import __version__
from fastroof.backends.serve.arrow_steps import ARROW_TYPE
from fastroof.backends.serve.http_calls import JSON_TYPE
from fastroof.backends.serve.messages import MESSAGES, PROTOCOL
from fastroof.errors import FastroofError

if TYPE_CHECKING:
    from fastroof.backends.serve.http_calls import Calls
    from fastroof.plan import StepPlan

JSON_LINES: Final = "application/jsonl"
LINES_TYPES: Final = (JSON_LINES, "application/x-ndjson", "application/x-jsonlines")
"""Content types of a body with a message a line."""

METRICS_TYPE: Final = CONTENT_TYPE_LATEST
ARROW_KIND: Final = "arrow"
"""The kind of an Arrow stream of steps, as messages are counted by theirs."""

_SECONDS: Final = (0.0001, 0.001, 0.01, 0.1, 1, 10, 60)
_OUTCOMES: Final = ("answered", "refused", "failed")


class ServeMetrics(Collector):
    """Counts of one server, in a registry of its own.

    Messages by kind and outcome (answered; refused: the message is wrong; failed: a fault of the server),
    seconds of computing by kind, steps, what was turned away by status before it became a message, calls that
    were abandoned or timed out, calls now, and what is served.
    """

    def __init__(self, plans: Mapping[str, StepPlan], calls: Calls) -> None:
        self._calls = calls
        self._registry = registry = CollectorRegistry()
        registry.register(self)
        self._messages = Counter(
            "fastroof_messages", "Messages by kind and outcome.", ("form", "outcome"), registry=registry
        )
        self._seconds = Histogram(
            "fastroof_message_seconds", "Seconds to answer a message.", ("form",), registry=registry,
            buckets=_SECONDS,
        )  # fmt: skip
        self._steps = Counter("fastroof_steps", "Steps that were timed.", registry=registry)
        self._turned_away = Counter(
            "fastroof_turned_away",
            "Requests that were refused before they became messages, by status.",
            ("status",),
            registry=registry,
        )
        for kind in ("none", ARROW_KIND, *(message.kind for message in MESSAGES)):
            self._seconds.labels(kind)
            for outcome in _OUTCOMES:
                self._messages.labels(kind, outcome)
        running = Gauge("fastroof_calls", "Calls being answered, or whose work goes on.", registry=registry)
        running.set_function(lambda: calls.running)
        built = Gauge("fastroof_build_info", "What serves.", ("version", "protocol"), registry=registry)
        built.labels(__version__, str(PROTOCOL)).set(1)
        labels = ("plan", "model", "gpu", "tp")
        plan_info = Gauge("fastroof_plan_info", "What is served.", labels, registry=registry)
        for name, plan in plans.items():
            described = plan.describe()
            plan_info.labels(name, *(str(described[what]) for what in labels[1:])).set(1)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield counts of calls that ended early."""
        for name, words, count in (
            ("abandoned", "Calls whose client left before their answer.", self._calls.abandoned),
            ("timed_out", "Calls that took longer than the limit.", self._calls.timed_out),
        ):
            yield CounterMetricFamily(f"fastroof_{name}_calls", words, value=count)

    def count(self, kind: str, error: Exception | None, num_steps: int, seconds: float) -> None:
        """Count a message, its steps and how long it took to answer."""
        outcome = "answered" if error is None else "refused" if isinstance(error, FastroofError) else "failed"
        self._messages.labels(kind, outcome).inc()
        self._seconds.labels(kind).observe(seconds)
        self._steps.inc(num_steps)

    def turn_away(self, status: int) -> None:
        """Count a request that did not become a message."""
        self._turned_away.labels(str(status)).inc()

    def text(self) -> bytes:
        """Return all counts."""
        return generate_latest(self._registry)


class Reply(BaseModel):
    """The reply to a message: what its kind asks for, as Python's own answers name it."""

    id: str | int | None


class Times(Reply):
    """Times of steps, and what else was asked for."""

    model_config = ConfigDict(extra="forbid")
    latency_us: list[float] = Field(description="microseconds a step")
    relative_error: list[float | None] = Field([], description="one standard error over the time of each")
    stage_us: list[list[float | None]] = Field([], description="per step: each pipeline stage's time")


class Error(Reply):
    """The reply to a message that is refused."""

    model_config = ConfigDict(extra="forbid")
    error: str = Field(description="its kind")
    message: str


class Health(BaseModel):
    """Calls now, and those that ended early since the start."""

    status: Literal["ok"]
    calls: int
    abandoned: int
    timed_out: int


_ERRORS: Final = {
    400: "The message is wrong.",
    401: "The token is missing or wrong.",
    408: "The body came too slowly.",
    413: "The body, or a line of it, is too long.",
    415: "The content type is not one that is accepted here.",
    500: "A fault of the server.",
    503: "Too many calls are running, or the call took too long.",
}


def openapi_document(needs_token: bool) -> dict[str, Any]:
    """Return the interface of a server as an OpenAPI 3.1 document, made from its models."""
    models: Any = (*MESSAGES, Reply, Times, Error, Health)
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )

    def response(words: str, *content: tuple[str, Any]) -> dict[str, Any]:
        return {"description": words, "content": {kind: {"schema": schema} for kind, schema in content}}

    def ref(model: type[BaseModel]) -> dict[str, str]:
        return {"$ref": f"#/components/schemas/{model.__name__}"}

    errors = {
        str(status): response(words, (JSON_TYPE, ref(Error)))
        for status, words in _ERRORS.items()
        if needs_token or status != 401
    }
    refused = {status: error for status, error in errors.items() if status == "401"}

    def get(words: str, kind: str, schema: Any) -> dict[str, Any]:
        return {"get": {"summary": words, "responses": {"200": response(words, (kind, schema)), **refused}}}

    def post(words: str, body: dict[str, Any], answer: dict[str, Any], **more: Any) -> dict[str, Any]:
        asked = {"required": True, "content": body}
        return {
            "post": {"summary": words, "requestBody": asked, "responses": {"200": answer, **errors}, **more}
        }

    lines = {"type": "string", "description": "a message a line; answered line by line, wrong ones too"}
    kinds = {"oneOf": [ref(message) for message in MESSAGES]}
    replies = {"anyOf": [ref(Times), ref(Reply)]}
    query = [
        {"name": name, "in": "query", "description": words, "schema": schema}
        for name, words, schema in (
            ("plan", "name or number of a plan; optional if one is served", {"type": "string"}),
            ("errors", "standard errors as well", {"enum": ["true", "false"]}),
        )
    ]
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "fastroof",
            "version": __version__,
            "description": "How long LLM inference steps take on a GPU, from measured kernels.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {
            "/message": post(
                "Answer a message, or one per line.",
                {JSON_TYPE: {"schema": kinds}, JSON_LINES: {"schema": lines}},
                response("The reply, or one per line.", (JSON_TYPE, replies), (JSON_LINES, lines)),
            ),
            "/steps": post(
                "Time the steps of an Arrow IPC stream.",
                {ARROW_TYPE: {}},
                response("The times.", (ARROW_TYPE, {})),
                description="Record batches, uncompressed, of batch_size and kv_len (int32 or int64), or of "
                "new_tokens and context_len (lists of them), one step per row. The reply is one batch of "
                "latency_us (float64, microseconds), and of relative_error if asked for.",
                parameters=query,
            ),
            "/describe": get("What is served.", JSON_TYPE, ref(Reply)),
            "/healthz": get("That calls are taken.", JSON_TYPE, ref(Health)),
            "/metrics": get("Counts, for Prometheus.", "text/plain", {"type": "string"}),
            "/openapi.json": get("This document.", JSON_TYPE, {"type": "object"}),
        },
        "components": {"schemas": schemas["$defs"]},
    }
    if needs_token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
        document["paths"]["/healthz"]["get"]["security"] = []
    return document
