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


def _schema(words: str, needs: Members, may: Members) -> Schema:
    return {
        "type": "object",
        "description": words,
        "properties": needs | may,
        "required": list(needs),
        "additionalProperties": False,
    }


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

_NUMBER: Final[Schema] = {"type": "number"}
_NUMBER_OR_NULL: Final[Schema] = {"type": ["number", "null"]}
_FLAG: Final[Schema] = {"type": "boolean"}
_TOKENS: Final[Schema] = {"type": "integer", "minimum": 1}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}

_ERRORS: Final[Members] = {"errors": {**_FLAG, "description": "standard errors as well"}}
_STAGES: Final[Members] = {"stages": {**_FLAG, "description": "times in each pipeline stage as well"}}
_LATENCY: Final[Members] = {"latency_us": _list_of(_NUMBER, "microseconds a step")}
_RELATIVE: Final[Members] = {
    "relative_error": _list_of(_NUMBER_OR_NULL, "one standard error over the time of each step")
}
_STAGE_US: Final[Members] = {
    "stage_us": _list_of(
        {"type": "array", "items": _NUMBER_OR_NULL}, "a list a step: microseconds in each pipeline stage"
    )
}
_DETAILS: Final = _ERRORS | _STAGES, _LATENCY, _RELATIVE | _STAGE_US
_PER_REQUEST: Final = "of each request, of all steps"
_CHUNK: Final[Members] = {
    "context_len": _one_or_list("tokens in the cache before them, 0 if left out", 0),
    "batch_size": _one_or_list("chunks a step, 1 if left out"),
}

_OPERATOR: Final[Schema] = _schema(
    "An operator's part of a step.",
    {
        "name": {"type": "string"},
        "role": {"type": "string"},
        "calls": {"type": "integer"},
        "total_us": {**_NUMBER, "description": "time of all calls"},
        "flops": {**_NUMBER, "description": "of all calls, on one GPU"},
        "moved_bytes": {**_NUMBER, "description": "compulsory bytes of all calls; on the wire of links"},
        "mfu": {**_NUMBER_OR_NULL, "description": "null where it computes nothing"},
        "bound": {"enum": ["compute", "memory", "launch", "communication"]},
        "origin": {
            "enum": [0, 1, 2, 3, 4],
            "description": "measured, interpolated, extrapolated, borrowed, modelled",
        },
        "source": {"type": "string", "description": "the measured tables that it comes from"},
        "dtype": {"type": "string"},
    },
    {},
)
_MEMORY: Final[Schema] = {
    "type": "object",
    "additionalProperties": {"type": "integer"},
    "description": "bytes, and tokens of KV cache, of one GPU: fastroof.plan.memory.PlanMemory",
}
_STAGE: Final[Schema] = _schema(
    "A pipeline stage.", {"stage": _COUNT, "layers": _COUNT, "memory": _MEMORY}, {}
)
_FACTS: Final[Members] = {
    "layout": {"type": "object", "additionalProperties": _TOKENS, "description": "tp, pp and so on, gpus"},
    "memory": {**_MEMORY, "description": "of one GPU, of the stage with the least room"},
    "stages": _list_of(_STAGE, "pipeline stages in their order; one where there are none"),
}

FORMS: Final = (
    Form(
        "decode",
        "Times of steps of equal decodes.",
        {
            "batch_size": _one_or_list("requests a step; one number for all steps will do"),
            "kv_len": _one_or_list("tokens that each attends to, the new one among them"),
        },
        *_DETAILS,
    ),
    Form("requests", "Times of steps of any requests.", {"requests": _list_of(_STEP, "steps")}, *_DETAILS),
    Form(
        "ragged",
        "Times of steps of any requests, as the arrays of a StepBatch.",
        {
            "new_tokens": _list_of(_TOKENS, _PER_REQUEST),
            "context_len": _list_of(_COUNT, _PER_REQUEST),
            "offsets": _list_of(_COUNT, "where steps start among them, and the end"),
        },
        *_DETAILS,
    ),
    Form(
        "prefill",
        "Times of steps of equal chunks of prompts.",
        {"new_tokens": _one_or_list("of each chunk")},
        _CHUNK | _DETAILS[0],
        *_DETAILS[1:],
    ),
    Form(
        "verify",
        "Times of steps that verify draft tokens.",
        {
            "batch_size": _one_or_list("requests a step"),
            "kv_len": _one_or_list("tokens that the last query of each attends to"),
            "tokens": _one_or_list("new tokens of each: 1 and its draft tokens"),
        },
        _STAGES,
        _LATENCY,
        _STAGE_US,
    ),
    Form(
        "explain",
        "One step by operator.",
        {
            "explain": {
                "anyOf": [
                    _STEP,
                    _schema(
                        "a step that verifies draft tokens",
                        {"batch_size": _TOKENS, "kv_len": _TOKENS, "tokens": _TOKENS},
                        {},
                    ),
                ]
            }
        },
        _ERRORS,
        {
            "total_us": {**_NUMBER, "description": "the step"},
            "origin": _integer("the largest of its operators'", 0),
            "operators": _list_of(_OPERATOR, "in the order of the step"),
        },
        {"relative_error": {**_NUMBER_OR_NULL, "description": "one standard error over the step's time"}},
    ),
    Form(
        "memory",
        "What one GPU holds: weights, room for KV cache, windows, states.",
        {"memory": _TRUE},
        {
            "max_tokens": _integer("of the largest step, instead of the plan's"),
            "max_seqs": _integer("requests at once at most, instead of the engine's"),
        },
        _FACTS,
        {},
    ),
    Form(
        "pipeline",
        "Micro-batches that follow each other through the pipeline stages.",
        {"pipeline": _list_of(_STEP, "micro-batches, in their order")},
        {},
        {
            "pipeline_us": {**_NUMBER, "description": "from the first one's start to the last one's end"},
            "cycle_us": {**_NUMBER, "description": "in which each makes a step, where they keep going round"},
            **_STAGE_US,
        },
        {},
    ),
    Form(
        "kv_transfer",
        "KV caches of prompts on their way from the plan to another engine's.",
        {
            "kv_transfer": _schema(
                "a link, and what it is to carry",
                {"prompts": _list_of(_TOKENS, "tokens of each prompt")},
                {
                    "bytes_per_s": {
                        **_NUMBER,
                        "exclusiveMinimum": 0,
                        "description": "of one GPU; else NVLink's",
                    },
                    "latency_us": {**_NUMBER, "minimum": 0, "description": "added to each transfer; else 0"},
                    "decode_plan": {
                        "type": ["string", "integer", "null"],
                        "description": "name or number of the plan that gets them; else the same",
                    },
                },
            )
        },
        {},
        {
            "transfer_us": _list_of(_NUMBER_OR_NULL, "microseconds a prompt, once it has the link"),
            "kv_bytes": _list_of(_COUNT, "bytes a prompt, of all layers and heads"),
        },
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

FORM_WORDS: Final = " or ".join(
    "{" + ", ".join([*sorted(form.needs), *(f"{name}?" for name in form.may)]) + "}" for form in FORMS
)
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
