"""Requests and replies as lines of JSON.

A line is a request: one object with one kind of steps, and if it likes an ``id`` (a string or an integer,
which comes back), a ``plan`` (name or number; it may be left out where one plan is served) and ``"v": 1``,
the version of what is spoken here: another is refused, and one that is left out is 1.

===========================================================  ============================================
``{"batch_size": [64, 65], "kv_len": [4096, 4096]}``         steps of equal decodes; one number for all
                                                             steps will do for either
``{"requests": [[[2048, 0], [1, 4095]], [[1, 100]]]}``       one list of [new_tokens, context_len] a step
``{"new_tokens": ..., "context_len": ..., "offsets": ...}``  the same as the arrays of a ``StepBatch``
``{"new_tokens": [2048], "context_len": 0}``                 steps of equal chunks of prompts, with a
                                                             ``batch_size`` if they are several
``{"batch_size": 8, "kv_len": 4096, "tokens": 4}``           steps that verify draft tokens
``{"explain": [[2048, 0], [1, 4095]]}``                      one step by operator
``{"memory": true}``                                         layout, memory and stages of a plan
``{"pipeline": [[[1, 999]], [[1, 999]]]}``                   micro-batches through the pipeline's stages
``{"kv_transfer": {"prompts": [1000]}}``                     KV caches on their way to another engine
``{"simulate": {"workload": {"rate": 10}}}``                 an engine over time, see
                                                             :mod:`fastroof.backends.serve.simulations`
``{"describe": true}``                                       fastroof's version, the protocol's, the plans,
                                                             the limits
===========================================================  ============================================

Beside steps ``"errors": true`` asks for their ``relative_error``, one standard error over each step's time,
and ``"stages": true`` for ``stage_us``, a list a step; beside ``explain`` the first does too. What else a
message may hold, and what replies do, is in :mod:`fastroof.backends.serve.message_forms`.

The reply is one line: ``{"id": 1, "latency_us": [...]}``, a number a step, which reads back to the same bits;
``{"id": 1, "summary": {...}}`` of a simulation;
``{"id": 1, "fastroof": ..., "protocol": 1, "plans": [...], "limits": {...}}`` of a description; or
``{"id": 1, "error": "BatchError", "message": "..."}``. ``id`` is null where there was none to be read. Blank
lines are passed over; a last line without an end is read as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastroof.backends.serve.limits import call_stop
from fastroof.backends.serve.messages import answer_text, error_reply, write_reply
from fastroof.backends.serve.pipe import PIPE_BYTES, Inflow
from fastroof.errors import BackendError, FastroofError

if TYPE_CHECKING:
    from fastroof.backends.serve.answer import ServedPlans
    from fastroof.backends.serve.limits import ServeLimits

__all__ = ["LineReader", "answer_line", "error_line"]


class LineReader:
    """Finds lines in what a pipe holds.

    Parameters
    ----------
    inflow : Inflow
        Where bytes come from.
    limits : ServeLimits
        Longer lines are dropped as they come.
    first : bytes
        What was read already.
    """

    def __init__(self, inflow: Inflow, limits: ServeLimits, first: bytes = b"") -> None:
        self._inflow = inflow
        self._limits = limits
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
                self._limits.check_line(len(line))
                return line
            if self._is_dropping:
                self._held.clear()
            elif len(self._held) > self._limits.json_bytes:
                self._is_dropping = True
                self._limits.check_line(len(self._held))
            self._searched = len(self._held)
            count = self._inflow.read_into(self._room)
            if not count:
                return self._last_line()
            self._held += self._room[:count]

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
    """Answer a line that is not blank, whatever it holds, with a line, as a call of its own."""
    with call_stop(served.limits.max_call_s).watched():
        return write_reply(answer_text(served, line).reply) + b"\n"


def error_line(error: FastroofError, request_id: str | int | None = None) -> bytes:
    """Write the line that stands for an error."""
    return write_reply(error_reply(error, request_id)) + b"\n"
