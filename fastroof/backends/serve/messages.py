"""Messages as every server answers them: a JSON object in, a JSON object out.

What they may hold is in :mod:`fastroof.backends.serve.forms`. The reply to steps is ``{"id": 1, "latency_us":
[...]}``, one number per step, which reads back to the same bits; an error is ``{"id": 1, "error":
"BatchError", "message": "..."}``. ``id`` is null if the message has none that could be read.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastroof.arrays import Floats, Ints
from fastroof.backends.serve.answer import AnySteps, as_refusal
from fastroof.backends.serve.forms import FORM_OF, FORM_WORDS, PROTOCOL, floats_for_json
from fastroof.backends.serve.limits import call_stop
from fastroof.checks import shown, true_or_false
from fastroof.documents import parse_json
from fastroof.errors import BackendError, BatchError, FastroofError
from fastroof.run import StepBatch
from fastroof.run.batch import int_array
from fastroof.stopping import check_stopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastroof.backends.serve.answer import AskedSteps, ServedPlans

_PART: Final = 2**15
"""Elements of a list that are written at once: other threads run between the parts."""


class Answered(NamedTuple):
    """The form of a message ("none" if it has none), its reply ready for JSON, and what was raised."""

    form: str
    reply: dict[str, Any]
    error: Exception | None


def answer_text(served: ServedPlans, text: bytes) -> Answered:
    """Answer a message as it came, whatever it holds.

    >>> import fastroof
    >>> from fastroof.backends.serve.answer import ServedPlans
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"))
    >>> answered = answer_text(ServedPlans({"small": plan}), b'{"id": 1, "batch_size": 0, "kv_len": 9}')
    >>> answered.form, answered.reply["id"], answered.reply["error"], type(answered.error).__name__
    ('decode', 1, 'BatchError', 'BatchError')
    """
    request_id: str | int | None = None
    form = "none"
    try:
        served.limits.check_line(len(text))
        message = parse_message(text)
        request_id = take_id(message)
        check_stopped()
        found = FORM_OF.get(frozenset(message))
        form = "none" if found is None else found.name
        return Answered(form, {"id": request_id, **answer_message(served, message)}, None)
    except Exception as error:
        return Answered(form, error_reply(as_refusal(error), request_id), error)


def answer_line(served: ServedPlans, line: bytes) -> bytes:
    """Answer a line that is not blank, whatever it holds, with a line, as a call of its own."""
    with call_stop(served.limits.max_call_s).watched():
        return write_reply(answer_text(served, line).reply) + b"\n"


def answer_message(served: ServedPlans, message: dict[str, Any]) -> dict[str, Any]:
    """Answer a message without its id; no number in the reply is NaN or infinite."""
    form = FORM_OF.get(frozenset(message))
    if form is None:
        _check_version(message)
        raise BackendError(f"an object needs {FORM_WORDS}, got {shown(sorted(message), 200)}")
    if "v" in message:
        _check_version(message)
    return _ANSWERS[form.name](served, message)


def parse_message(text: bytes) -> dict[str, Any]:
    """Read the JSON of a message: an object without NaN and Infinity."""
    message = parse_json(text, "a message", BackendError, most_bytes=len(text), allow_constants=False)
    if not isinstance(message, dict):
        raise BackendError(f"a message must be an object with {FORM_WORDS}, got {text[:60]!r}")
    return message


def take_id(message: dict[str, Any]) -> str | int | None:
    """Remove the id from a message and return it; None if it has none."""
    request_id: str | int | None = message.pop("id", None)
    if request_id is not None and type(request_id) not in (str, int):
        raise BackendError(f"id must be a string or an integer, got {shown(request_id)}")
    return request_id


def error_reply(error: FastroofError, request_id: str | int | None = None) -> dict[str, Any]:
    """Return the reply that stands for an error."""
    return {"id": request_id, "error": type(error).__name__, "message": str(error)}


def write_reply(reply: dict[str, Any]) -> bytes:
    """Write a reply as JSON, whose numbers read back to the same bits."""
    if not any(type(value) is list and len(value) > _PART for value in reply.values()):
        return _json(reply)
    members = []
    for name, value in reply.items():
        if type(value) is list and len(value) > _PART:
            parts = (_json(value[at : at + _PART])[1:-1] for at in range(0, len(value), _PART))
            text = b"[" + b",".join(parts) + b"]"
        else:
            text = _json(value)
        members.append(_json(name) + b":" + text)
    return b"{" + b",".join(members) + b"}"


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _check_version(message: dict[str, Any]) -> None:
    version = message.get("v", PROTOCOL)
    if type(version) is not int or version != PROTOCOL:
        raise BackendError(
            f'"v" must be the version of the protocol, which is {PROTOCOL}; got {shown(version)}'
        )


def _plan(served: ServedPlans, message: dict[str, Any]) -> str | int:
    plan = message.get("plan")
    if plan is None:
        return served.only_plan()
    if type(plan) is str or type(plan) is int:
        return plan
    raise BackendError(f'"plan" must be a name or a number, got {shown(plan)}')


def _list(name: str, value: Any) -> Ints:
    array = int_array(name, value)
    if array.ndim != 1:
        raise BatchError(f'"{name}" must be one list of integers, got {shown(value)}')
    return array


def _flag(message: dict[str, Any], name: str) -> bool:
    return true_or_false(f'"{name}"', message.get(name, False), BackendError)


def _times(times_us: Floats) -> dict[str, Any]:
    return {"latency_us": times_us.tolist()}


def _detailed(served: ServedPlans, message: dict[str, Any], steps: AskedSteps) -> dict[str, Any]:
    """Answer steps with the errors and stages that their message asks for."""
    errors, stages = _flag(message, "errors"), _flag(message, "stages")
    detail = served.detailed(_plan(served, message), steps, errors=errors, stages=stages)
    return {name: floats_for_json(value) for name, value in detail._asdict().items() if value is not None}


def _decode(served: ServedPlans, message: dict[str, Any]) -> dict[str, Any]:
    sizes = message["batch_size"], message["kv_len"]
    if "errors" in message or "stages" in message:
        return _detailed(served, message, served.decode_steps(*sizes))
    return _times(served.decode_us(_plan(served, message), *sizes))


def _prefill(served: ServedPlans, message: dict[str, Any]) -> dict[str, Any]:
    sizes = message["new_tokens"], message.get("context_len", 0), message.get("batch_size", 1)
    if "errors" in message or "stages" in message:
        return _detailed(served, message, served.chunk_steps(*sizes))
    return _times(served.prefill_us(_plan(served, message), *sizes))


def _verify(served: ServedPlans, message: dict[str, Any]) -> dict[str, Any]:
    sizes = message["batch_size"], message["kv_len"], message["tokens"]
    if "stages" in message:
        return _detailed(served, message, served.verify_steps(*sizes))
    return _times(served.verify_us(_plan(served, message), *sizes))


def _requests(served: ServedPlans, message: dict[str, Any]) -> dict[str, Any]:
    if "errors" in message or "stages" in message:
        return _detailed(served, message, AnySteps(StepBatch.from_requests(message["requests"])))
    return _times(served.requests_us(_plan(served, message), message["requests"]))


def _ragged(served: ServedPlans, message: dict[str, Any]) -> dict[str, Any]:
    arrays = [_list(name, message[name]) for name in ("new_tokens", "context_len", "offsets")]
    if "errors" in message or "stages" in message:
        return _detailed(served, message, AnySteps(StepBatch(*arrays)))
    return _times(served.step_us(_plan(served, message), *arrays))


def _explain(served: ServedPlans, message: dict[str, Any]) -> dict[str, Any]:
    return served.explain(_plan(served, message), message["explain"], errors=_flag(message, "errors"))


def _memory(served: ServedPlans, message: dict[str, Any]) -> dict[str, Any]:
    _check_true(message, "memory")
    sizes = message.get("max_tokens"), message.get("max_seqs")
    return served.memory(_plan(served, message), *sizes)


def _pipeline(served: ServedPlans, message: dict[str, Any]) -> dict[str, Any]:
    return served.pipeline(_plan(served, message), message["pipeline"])


def _kv_transfer(served: ServedPlans, message: dict[str, Any]) -> dict[str, Any]:
    return served.kv_transfer(_plan(served, message), message["kv_transfer"])


def _check_true(message: dict[str, Any], name: str) -> None:
    if message[name] is not True:
        raise BackendError(f'"{name}" must be true, got {shown(message[name])}')


def _simulate(served: ServedPlans, message: dict[str, Any]) -> dict[str, Any]:
    return served.simulate(_plan(served, message), message["simulate"])


def _describe(served: ServedPlans, message: dict[str, Any]) -> dict[str, Any]:
    _check_true(message, "describe")
    return served.describe()


_ANSWERS: Final[dict[str, Callable[[ServedPlans, dict[str, Any]], dict[str, Any]]]] = {
    "decode": _decode,
    "requests": _requests,
    "ragged": _ragged,
    "prefill": _prefill,
    "verify": _verify,
    "explain": _explain,
    "memory": _memory,
    "pipeline": _pipeline,
    "kv_transfer": _kv_transfer,
    "simulate": _simulate,
    "describe": _describe,
}
