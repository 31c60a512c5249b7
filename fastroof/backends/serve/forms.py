"""What a message and its reply may hold, defined once: answers are picked by it, and schemas made of it.

A message is an object with the members of one form, and may also have ``plan``, ``v`` and ``id``. Types are
those of JSON Schema, which OpenAPI 3.1 shares. Values are checked where they are read, so this costs a
message one look-up.

===========================================================  ============================================
``{"batch_size": [64, 65], "kv_len": [4096, 4096]}``         decode steps; one number for all steps is
                                                             valid for either
``{"requests": [[[2048, 0], [1, 4095]], [[1, 100]]]}``       one list of [new_tokens, context_len] a step
``{"new_tokens": ..., "context_len": ..., "offsets": ...}``  the same as the arrays of a ``StepBatch``
``{"new_tokens": [2048], "context_len": 0}``                 steps of equal prompt chunks, with a
                                                             ``batch_size`` if there are several
``{"batch_size": 8, "kv_len": 4096, "tokens": 4}``           steps that verify draft tokens
``{"explain": [[2048, 0], [1, 4095]]}``                      one step by operator
``{"memory": true}``                                         layout, memory and stages of a plan
``{"pipeline": [[[1, 999]], [[1, 999]]]}``                   micro-batches through the pipeline's stages
``{"kv_transfer": {"prompts": [1000]}}``                     KV caches on their way to another engine
``{"simulate": {"workload": {"rate": 10}}}``                 an engine over time, see
                                                             :mod:`fastroof.backends.serve.questions`
``{"describe": true}``                                       versions, plans and limits of the server
===========================================================  ============================================

With steps, ``"errors": true`` adds their ``relative_error``, one standard error over each step's time, and
``"stages": true`` adds ``stage_us``, one list per step; with ``explain``, the first does too.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats

PROTOCOL: Final = 1
"""Version of the protocol: a new member or form keeps it, a changed one does not."""

Schema = dict[str, Any]
Members = dict[str, Schema]


class Form(NamedTuple):
    """One kind of message: JSON Schemas of its members and of its reply's."""

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
    "v": {"const": PROTOCOL, "description": "version of the protocol (default: 1)"},
    "plan": {
        "type": ["string", "integer", "null"],
        "description": "name or number of a plan; optional if one is served",
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
        {"type": "array", "items": _NUMBER_OR_NULL}, "one list per step: microseconds in each pipeline stage"
    )
}
_DETAILS: Final = _ERRORS | _STAGES, _LATENCY, _RELATIVE | _STAGE_US
_PER_REQUEST: Final = "of each request, of all steps"
_CHUNK: Final[Members] = {
    "context_len": _one_or_list("tokens in the cache before them (default: 0)", 0),
    "batch_size": _one_or_list("chunks a step (default: 1)"),
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
        "mfu": {**_NUMBER_OR_NULL, "description": "null if it computes nothing"},
        "bound": {"enum": ["compute", "memory", "launch", "communication"]},
        "origin": {
            "enum": [0, 1, 2, 3, 4],
            "description": "measured, interpolated, extrapolated, borrowed, modelled",
        },
        "source": {"type": "string", "description": "source of its measured tables"},
        "dtype": {"type": "string"},
    },
    {},
)
_MEMORY: Final[Schema] = {
    "type": "object",
    "additionalProperties": {"type": ["integer", "null"]},
    "description": "bytes, tokens and blocks of KV cache of one GPU: fastroof.plan.memory.PlanMemory.facts; "
    "null if the engine's blocks are unknown",
}
_STAGE: Final[Schema] = _schema(
    "A pipeline stage.", {"stage": _COUNT, "layers": _COUNT, "memory": _MEMORY}, {}
)
_FACTS: Final[Members] = {
    "layout": {"type": "object", "additionalProperties": _TOKENS, "description": "tp, pp and so on, gpus"},
    "memory": {**_MEMORY, "description": "of one GPU, in the stage with the least room"},
    "stages": _list_of(_STAGE, "pipeline stages in order; one without pipeline parallelism"),
}

FORMS: Final = (
    Form(
        "decode",
        "Times of steps of equal decodes.",
        {
            "batch_size": _one_or_list("requests a step, or one number for all steps"),
            "kv_len": _one_or_list("tokens that each attends to, including the new one"),
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
            "max_tokens": _integer("tokens of the largest step, instead of the plan's"),
            "max_seqs": _integer("maximum number of concurrent requests, instead of the engine's"),
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
            "cycle_us": {**_NUMBER, "description": "time a cycle if they keep going round"},
            **_STAGE_US,
        },
        {},
    ),
    Form(
        "kv_transfer",
        "KV caches of prompts on their way from the plan to another engine's.",
        {
            "kv_transfer": _schema(
                "a link and the prompts it carries",
                {"prompts": _list_of(_TOKENS, "tokens of each prompt")},
                {
                    "bytes_per_s": {
                        **_NUMBER,
                        "exclusiveMinimum": 0,
                        "description": "of one GPU (default: NVLink's)",
                    },
                    "latency_us": {
                        **_NUMBER,
                        "minimum": 0,
                        "description": "added to each transfer (default: 0)",
                    },
                    "decode_plan": {
                        "type": ["string", "integer", "null"],
                        "description": "name or number of the receiving plan (default: the same)",
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
        {"simulate": {**_OBJECT, "description": "see fastroof.backends.serve.questions"}},
        {},
        {"summary": {**_OBJECT, "description": "percentiles, rates and counts"}},
        {"requests": {**_OBJECT, "description": "columns, one row per request"}},
    ),
    Form(
        "describe",
        "What is served.",
        {"describe": _TRUE},
        {},
        {
            "fastroof": {"type": "string", "description": "its version"},
            "protocol": _integer("version of the protocol"),
            "plans": _list_of(_OBJECT, "plans in the order of their numbers"),
            "limits": {**_OBJECT, "description": "limits of a message"},
        },
        {},
    ),
)
"""Every form."""


def _member_sets(form: Form) -> list[frozenset[str]]:
    """Return every set of members that a message of a form may have, except its id."""
    extra = [*form.may, "plan", "v"]
    return [
        frozenset([*form.needs, *chosen])
        for count in range(len(extra) + 1)
        for chosen in combinations(extra, count)
    ]


FORM_OF: Final = {members: form for form in FORMS for members in _member_sets(form)}
"""The form of a message by its members, without the id."""

FORM_WORDS: Final = " or ".join(
    "{" + ", ".join([*sorted(form.needs), *(f"{name}?" for name in form.may)]) + "}" for form in FORMS
)
"""Valid members of a message, in words."""


def message_schemas() -> dict[str, Schema]:
    """Return JSON Schemas of every message and reply, as OpenAPI 3.1 takes them."""
    schemas = {}
    for form in FORMS:
        schemas[form.name] = _schema(form.words, form.needs, form.may | _ENVELOPE)
        reply = _schema("Its reply.", {"id": _ENVELOPE["id"]} | form.answers, form.may_answer)
        schemas[f"{form.name}_reply"] = reply
    words = {"type": "string"}
    schemas["error"] = _schema(
        "The reply to a message that is refused.",
        {"id": _ENVELOPE["id"], "error": words | {"description": "its kind"}, "message": words},
        {},
    )
    return schemas


def for_json(value: Any) -> Any:
    """Return a value as JSON has it, null for what is not a finite number.

    >>> for_json({"mfu": float("nan"), "calls": (np.int64(32), 1.5)})
    {'mfu': None, 'calls': [32, 1.5]}
    """
    if isinstance(value, dict):
        return {name: for_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def floats_for_json(values: Floats) -> list[Any]:
    """Return an array as lists, null for what is not a finite number."""
    listed: list[Any] = values.tolist()
    return listed if np.isfinite(values).all() else list(for_json(listed))
