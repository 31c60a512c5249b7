"""The OpenAPI document of an HTTP server of plans."""

from __future__ import annotations

from typing import Any, Final

from fastroof._version import __version__
from fastroof.backends.serve.message_forms import FORMS, message_schemas

__all__ = ["JSON_LINES", "JSON_TYPE", "LINES_TYPES", "openapi_document"]

JSON_TYPE: Final = "application/json"
JSON_LINES: Final = "application/jsonl"
LINES_TYPES: Final = (JSON_LINES, "application/x-ndjson", "application/x-jsonlines")
"""Content types of a body with a message a line."""

_ERRORS: Final = {
    400: "The message is wrong.",
    401: "The token is missing or wrong.",
    408: "The body came too slowly.",
    413: "The body, or a line of it, is too long.",
    415: "The body is said to be something else than JSON.",
    500: "A fault of the server.",
    503: "Too many calls are running, the call took too long, or the server is stopping.",
}


def _content(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {kind: {"schema": schema}}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def openapi_document(needs_token: bool) -> dict[str, Any]:
    """Return what a server speaks, as OpenAPI 3.1.

    Parameters
    ----------
    needs_token : bool
        Whether requests must carry one; ``/healthz`` never does.

    Returns
    -------
    dict
        Ready for JSON.

    Examples
    --------
    >>> sorted(openapi_document(needs_token=False)["paths"])
    ['/describe', '/healthz', '/message', '/metrics', '/openapi.json']
    """
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
                "summary": "Answer a message, or one a line.",
                "requestBody": {
                    "required": True,
                    "content": {JSON_TYPE: {"schema": messages}, JSON_LINES: {"schema": line}},
                },
                "responses": {
                    "200": {
                        "description": "The reply, or one a line.",
                        "content": {JSON_TYPE: {"schema": replies}, JSON_LINES: {"schema": line}},
                    },
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
