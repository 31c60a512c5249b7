"""Requests and replies as lines of JSON.

A line is a request: one object with one kind of steps, and if it likes an ``id`` (a string or an integer,
which comes back) and a ``plan`` (name or number; it may be left out where one plan is served).

===========================================================  ============================================
``{"batch_size": [64, 65], "kv_len": [4096, 4096]}``         steps of equal decodes; one number for all
                                                             steps will do for either
``{"requests": [[[2048, 0], [1, 4095]], [[1, 100]]]}``       one list of [new_tokens, context_len] a step
``{"new_tokens": ..., "context_len": ..., "offsets": ...}``  the same as the arrays of a ``StepBatch``
``{"simulate": {"workload": {"rate": 10}}}``                 an engine over time, see
                                                             :mod:`fastroof.backends.serve.simulations`
``{"describe": true}``                                       fastroof's version, the plans, the limits
===========================================================  ============================================

The reply is one line: ``{"id": 1, "latency_us": [...]}``, a number a step, which reads back to the same bits;
``{"id": 1, "summary": {...}}`` of a simulation;
``{"id": 1, "fastroof": ..., "plans": [...], "limits": {...}}`` of a description; or
``{"id": 1, "error": "BatchError", "message": "..."}``. ``id`` is null where there was none to be read. Blank
lines are passed over; a last line without an end is read as well.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from fastroof.arrays import Ints
from fastroof.backends.serve.answer import as_refusal
from fastroof.backends.serve.pipe import PIPE_BYTES, Inflow
from fastroof.errors import BackendError, BatchError, FastroofError
from fastroof.run.arrays import int_array

if TYPE_CHECKING:
    from fastroof.backends.serve.answer import ServedPlans

__all__ = ["LineReader", "answer_line", "error_line"]

_FORMS: Final = (
    frozenset({"batch_size", "kv_len"}),
    frozenset({"requests"}),
    frozenset({"new_tokens", "context_len", "offsets"}),
    frozenset({"simulate"}),
    frozenset({"describe"}),
)
_FORM_WORDS: Final = " or ".join("{" + ", ".join(sorted(form)) + "}" for form in _FORMS)


class LineReader:
    """Finds lines in what a pipe holds.

    Parameters
    ----------
    inflow : Inflow
        Where bytes come from.
    most_bytes : int
        Longer lines are dropped as they come.
    first : bytes
        What was read already.
    """

    def __init__(self, inflow: Inflow, most_bytes: int, first: bytes = b"") -> None:
        self._inflow = inflow
        self._most_bytes = most_bytes
        self._held = bytearray(first)
        self._searched = 0
        self._room = memoryview(bytearray(PIPE_BYTES))
        self._is_dropping = False

    def next_line(self) -> bytes | None:
        """Wait for the next line, without its end; None at the end of all.

        Raises
        ------
        BackendError
            Once for a line that is too long or was cut off; the call after it goes on.
        """
        while True:
            end = self._held.find(b"\n", self._searched)
            if end >= 0:
                line = bytes(self._held[:end])
                del self._held[: end + 1]
                self._searched = 0
                if self._is_dropping:
                    self._is_dropping = False
                    continue
                self._check(len(line))
                return line
            if self._is_dropping:
                self._held.clear()
            elif len(self._held) > self._most_bytes:
                self._is_dropping = True
                self._check(len(self._held))
            self._searched = len(self._held)
            count = self._inflow.read_into(self._room)
            if not count:
                return self._last_line()
            self._held += self._room[:count]

    def _check(self, count: int) -> None:
        if count > self._most_bytes:
            raise BackendError(
                f"a line is longer than the {self._most_bytes} bytes of a message: send several"
            )

    def _last_line(self) -> bytes | None:
        line = bytes(self._held)
        self._held.clear()
        self._searched = 0
        if not line or self._is_dropping:
            return None
        if self._inflow.was_stopped:
            raise BackendError(f"{self._inflow.end_words()} after {len(line)} bytes of a line")
        return line


def answer_line(served: ServedPlans, line: bytes) -> bytes:
    """Answer a line that is not blank, whatever it holds, with a line."""
    request_id: str | int | None = None
    try:
        request = _parsed(line)
        request_id = _request_id(request)
        answer = _answer(served, request)
    except Exception as error:
        return error_line(as_refusal(error), request_id)
    return _line({"id": request_id, **answer})


def error_line(error: FastroofError, request_id: str | int | None = None) -> bytes:
    """Write the line that stands for an error."""
    return _line({"id": request_id, "error": type(error).__name__, "message": str(error)})


def _line(reply: dict[str, Any]) -> bytes:
    return json.dumps(reply, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BackendError(f"a line must be JSON: {error}") from None
    if not isinstance(request, dict):
        raise BackendError(f"a line must be an object with {_FORM_WORDS}, got {line[:60]!r}")
    return request


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _request_id(request: dict[str, Any]) -> str | int | None:
    request_id: str | int | None = request.pop("id", None)
    if request_id is not None and type(request_id) not in (str, int):
        raise BackendError(f"id must be a string or an integer, got {request_id!r:.60}")
    return request_id


def _answer(served: ServedPlans, request: dict[str, Any]) -> dict[str, Any]:
    plan = request.pop("plan", None)
    if request.keys() not in _FORMS:
        raise BackendError(f"an object needs {_FORM_WORDS}, got {sorted(request)!r:.200}")
    if "describe" in request:
        if request["describe"] is not True:
            raise BackendError(f'"describe" must be true, got {request["describe"]!r:.60}')
        return served.describe()
    if plan is None:
        if len(served) > 1:
            raise BackendError(f'which of {len(served)} plans? "plan" is missing; {served.names_words()}')
        plan = 0
    elif type(plan) not in (str, int):
        raise BackendError(f'"plan" must be a name or a number, got {plan!r:.60}')
    if "simulate" in request:
        return served.simulate(plan, request["simulate"])
    if "requests" in request:
        times = served.requests_us(plan, request["requests"])
    elif "offsets" in request:
        times = served.step_us(plan, **{name: _list(name, value) for name, value in request.items()})
    else:
        times = served.decode_us(plan, **request)
    return {"latency_us": times.tolist()}


def _list(name: str, value: Any) -> Ints:
    array = int_array(name, value)
    if array.ndim != 1:
        raise BatchError(f'"{name}" must be one list of integers, got {value!r:.60}')
    return array
