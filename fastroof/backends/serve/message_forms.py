"""What a message and its reply may hold, said once: answers are picked by it, and schemas made of it.

A message is an object with the members of one form, and may have those of the envelope beside them:
``plan``, ``v`` and ``id``. Types are those of JSON Schema, which OpenAPI 3.1 shares; whoever answers a
message checks values where it reads them, so that this costs a message one look-up.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any, Final, NamedTuple

__all__ = ["FORMS", "FORM_OF", "FORM_WORDS", "PROTOCOL", "Form", "message_schemas"]

PROTOCOL: Final = 1
"""Version of what is spoken; a member or form more is none, anything else said of one is."""

Schema = dict[str, Any]
Members = dict[str, Schema]


class Form(NamedTuple):
    """One kind of message.

    Attributes
    ----------
    name : str
        How schemas call it.
    words : str
        What it asks for.
    needs, may : dict of str to dict
        JSON Schemas of its members: those that tell it from other forms, and those it may have.
    answers : dict of str to dict
        Members of its reply that are always there.
    may_answer : dict of str to dict
        Members that are there if they were asked for.
    """

    name: str
    words: str
    needs: Members
    may: Members
    answers: Members
    may_answer: Members


def _integer(words: str, least: int = 1) -> Schema:
    return {"type": "integer", "minimum": least, "description": words}


def _list_of(items: Schema, words: str) -> Schema:
    return {"type": "array", "items": items, "description": words}


def _one_or_list(words: str, least: int = 1) -> Schema:
    integer = {"type": "integer", "minimum": least}
    return {"anyOf": [integer, {"type": "array", "items": integer}], "description": words}


_REQUEST: Final[Schema] = {
    "type": "array",
    "prefixItems": [{"type": "integer", "minimum": 1}, {"type": "integer", "minimum": 0}],
    "items": False,
    "minItems": 2,
    "description": "new_tokens and context_len of a request",
}
_STEP: Final = _list_of(_REQUEST, "requests of a step")
_TRUE: Final[Schema] = {"const": True}
_OBJECT: Final[Schema] = {"type": "object"}

_ENVELOPE: Final[Members] = {
    "id": {"type": ["string", "integer", "null"], "description": "comes back in the reply"},
    "v": {"const": PROTOCOL, "description": "version of the protocol; 1 where it is left out"},
    "plan": {
        "type": ["string", "integer", "null"],
        "description": "name or number of a plan; may be left out where one is served",
    },
}

_LATENCY: Final[Members] = {"latency_us": _list_of({"type": "number"}, "microseconds a step")}

FORMS: Final = (
    Form(
        "decode",
        "Times of steps of equal decodes.",
        {
            "batch_size": _one_or_list("requests a step; one number for all steps will do"),
            "kv_len": _one_or_list("tokens that each attends to, the new one among them"),
        },
        {},
        _LATENCY,
        {},
    ),
    Form(
        "requests",
        "Times of steps of any requests.",
        {"requests": _list_of(_STEP, "steps")},
        {},
        _LATENCY,
        {},
    ),
    Form(
        "ragged",
        "Times of steps of any requests, as the arrays of a StepBatch.",
        {
            "new_tokens": _list_of({"type": "integer", "minimum": 1}, "of each request, of all steps"),
            "context_len": _list_of({"type": "integer", "minimum": 0}, "of each request, of all steps"),
            "offsets": _list_of(
                {"type": "integer", "minimum": 0}, "where steps start among them, and the end"
            ),
        },
        {},
        _LATENCY,
        {},
    ),
    Form(
        "simulate",
        "An engine over time.",
        {"simulate": {**_OBJECT, "description": "see fastroof.backends.serve.simulations"}},
        {},
        {"summary": {**_OBJECT, "description": "percentiles, rates and counts"}},
        {"requests": {**_OBJECT, "description": "columns, a row a request"}},
    ),
    Form(
        "describe",
        "What is served.",
        {"describe": _TRUE},
        {},
        {
            "fastroof": {"type": "string", "description": "its version"},
            "protocol": _integer("the version that is spoken"),
            "plans": _list_of(_OBJECT, "plans in the order of their numbers"),
            "limits": {**_OBJECT, "description": "what a message may ask for at most"},
        },
        {},
    ),
)
"""Every form."""


def _member_sets(form: Form) -> list[frozenset[str]]:
    """Every set of members that a message of a form may have, but for its id."""
    extra = [*form.may, "plan", "v"]
    return [
        frozenset([*form.needs, *chosen])
        for count in range(len(extra) + 1)
        for chosen in combinations(extra, count)
    ]


FORM_OF: Final = {members: form for form in FORMS for members in _member_sets(form)}
"""The form of a message by its members, the id left out."""

FORM_WORDS: Final = " or ".join("{" + ", ".join(sorted(form.needs)) + "}" for form in FORMS)
"""What an object may hold, in words."""


def message_schemas() -> dict[str, Schema]:
    """Return JSON Schemas of every message and reply, as OpenAPI 3.1 takes them.

    Returns
    -------
    dict of str to dict
        ``decode`` and ``decode_reply`` and so on, and ``error``.

    Examples
    --------
    >>> schemas = message_schemas()
    >>> schemas["decode"]["required"], schemas["decode_reply"]["required"]
    (['batch_size', 'kv_len'], ['id', 'latency_us'])
    """
    schemas = {}
    for form in FORMS:
        schemas[form.name] = _schema(form.words, form.needs, form.may | _ENVELOPE)
        reply = _schema("Its reply.", {"id": _ENVELOPE["id"]} | form.answers, form.may_answer)
        schemas[f"{form.name}_reply"] = reply
    words = {"type": "string"}
    schemas["error"] = _schema(
        "What is said instead of an answer.",
        {"id": _ENVELOPE["id"], "error": words | {"description": "its kind"}, "message": words},
        {},
    )
    return schemas


def _schema(words: str, needs: Members, may: Members) -> Schema:
    return {
        "type": "object",
        "description": words,
        "properties": needs | may,
        "required": list(needs),
        "additionalProperties": False,
    }
