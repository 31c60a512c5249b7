"""Plans by name or number, and what they answer to messages within a server's limits."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof._version import __version__
from fastroof.arrays import Floats
from fastroof.backends.plan_facts import plan_facts
from fastroof.backends.serve import messages
from fastroof.backends.serve.limits import ServeLimits, call_stop
from fastroof.backends.serve.messages import (
    PROTOCOL,
    Message,
    TimedSteps,
    VerifyStep,
    WithErrors,
    id_of,
    kind_of,
    parse_message,
    read_message,
)
from fastroof.backends.serve.simulations import simulated
from fastroof.checks import shown
from fastroof.errors import BackendError, FastroofError
from fastroof.plan.pipeline import in_each_stage
from fastroof.plan.start import check_hand_over
from fastroof.stopping import check_stopped

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

_PART: Final = 2**15
"""Elements of a list that are written at once: other threads run between the parts."""


class ServedPlans:
    """What a server answers from.

    Parameters
    ----------
    plans : mapping of str to StepPlan
        By name; a plan's number is its place in it, from 0.
    limits : ServeLimits
        What is refused.

    Raises
    ------
    BackendError
        If there are no plans, or more than the limits allow.

    Examples
    --------
    >>> import fastroof
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> served = ServedPlans({"small": plan})
    >>> served.answer({"batch_size": [64], "kv_len": 4096})["latency_us"] == [plan.decode_us(64, 4096)]
    True
    """

    def __init__(self, plans: Mapping[str, StepPlan], limits: ServeLimits | None = None) -> None:
        self.limits = limits or ServeLimits()
        if not plans:
            raise BackendError("there is no plan to serve: name at least one")
        if len(plans) > self.limits.max_plans:
            raise BackendError(
                f"{len(plans)} plans are more than the {self.limits.max_plans} that a server may hold: "
                "a larger max_plans, or another server"
            )
        self.by_name = dict(plans)

    def plan(self, which: str | int | None) -> StepPlan:
        """Return a plan by its name or number; the only one needs neither."""
        if which is None and len(self.by_name) > 1:
            raise BackendError(f'which of {len(self.by_name)} plans? "plan" is missing; {self._names()}')
        if isinstance(which, str):
            served = self.by_name.get(which)
        else:
            number = which or 0
            served = [*self.by_name.values()][number] if 0 <= number < len(self.by_name) else None
        if served is None:
            raise BackendError(f"no plan {shown(which, 80)} is served; {self._names()}")
        return served

    def _names(self) -> str:
        return "there are: " + ", ".join(f"{i} {name}" for i, name in enumerate(self.by_name))

    def answer(self, document: dict[str, Any]) -> dict[str, Any]:
        """Answer a message, without its id; no number in the reply is NaN or infinite."""
        message = read_message(document, self.limits)
        check_stopped()
        if isinstance(message, TimedSteps):
            columns = self.times(message)
            return {name: floats_for_json(column) for name, column in columns.items()}
        return _ANSWERS[type(message)](self, message)

    def times(self, steps: TimedSteps) -> dict[str, Floats]:
        """Time steps, with the standard errors and the times in each pipeline stage that they ask for."""
        plan = self.plan(steps.plan)
        errors = isinstance(steps, WithErrors) and steps.errors
        if errors or steps.stages:
            self.limits.check_detailed(
                steps.num_steps, len(plan.stages) if steps.stages else 1, steps.num_requests
            )
        columns = {"latency_us": steps.times_us(plan)}
        if isinstance(steps, WithErrors) and errors:
            check_stopped()
            columns["relative_error"] = steps.relative_errors(plan)
        if steps.stages:
            check_stopped()
            columns["stage_us"] = in_each_stage(plan, steps.times_us)
        return columns

    def describe(self) -> dict[str, Any]:
        """Return what is served: versions, the plans in order, the limits."""
        plans = [
            {"number": number, "name": name, **plan.describe(), **plan_facts(plan)}
            for number, (name, plan) in enumerate(self.by_name.items())
        ]
        limits = {name: value for name, value in vars(self.limits).items() if name not in _SERVER_LIMITS}
        return {"fastroof": __version__, "protocol": PROTOCOL, "plans": plans, "limits": limits}


_SERVER_LIMITS: Final = ("max_plans", "max_calls")


def _explain(served: ServedPlans, message: messages.Explain) -> dict[str, Any]:
    plan, asked = served.plan(message.plan), message.explain
    if isinstance(asked, VerifyStep):
        if message.errors:
            raise BackendError("standard errors of steps that verify drafts are not known: leave them out")
        explained = plan.explain_verification(asked.batch_size, asked.kv_len, asked.tokens)
    else:
        explained = plan.explain(asked, with_error=message.errors)
    answer = {
        "total_us": explained.total_us,
        "origin": explained.origin,
        "operators": [operator._asdict() for operator in explained.operators],
    }
    if message.errors:
        answer["relative_error"] = explained.relative_error
    return dict(for_json(answer))


def _memory(served: ServedPlans, message: messages.Memory) -> dict[str, Any]:
    sizes = message.max_num_batched_tokens, message.max_num_seqs
    return plan_facts(served.plan(message.plan), max_num_batched_tokens=sizes[0], max_num_seqs=sizes[1])


def _pipeline(served: ServedPlans, message: messages.Pipeline) -> dict[str, Any]:
    plan, batch = served.plan(message.plan), message.pipeline
    served.limits.check_detailed(batch.num_steps, len(plan.stages), len(batch.new_tokens))
    return {
        "pipeline_us": plan.pipeline_us(batch),
        "cycle_us": plan.cycle_us(batch),
        "stage_us": floats_for_json(plan.stage_times_us(batch)),
    }


def _kv_transfer(served: ServedPlans, message: messages.KvTransfer) -> dict[str, Any]:
    from fastroof.simulation.pools import Link, takes_us, whole_kv_bytes

    asked = message.kv_transfer
    prefill = served.plan(message.plan)
    decode = prefill if asked.decode_plan is None else served.plan(asked.decode_plan)
    check_hand_over(prefill, decode, BackendError)
    sizes = asked.prompts.astype(np.int64)
    with np.errstate(over="ignore"):  # what takes longer than a float can hold is null
        transfer_us = takes_us(prefill, decode, sizes, Link(asked.bytes_per_s, asked.latency_us))
    return {
        "transfer_us": floats_for_json(transfer_us),
        "kv_bytes": whole_kv_bytes(decode).kv_bytes(sizes).tolist(),
    }


def _simulate(served: ServedPlans, message: messages.Simulate) -> dict[str, Any]:
    found = simulated(served.plan(message.plan), message.simulate, served.limits)
    answer = {"summary": for_json(found.summary())}
    check_stopped()
    if message.simulate.requests:
        answer["requests"] = for_json(found.requests.to_pydict())
    return answer


_ANSWERS: Final[dict[type[Message], Callable[[ServedPlans, Any], dict[str, Any]]]] = {
    messages.Explain: _explain,
    messages.Memory: _memory,
    messages.Pipeline: _pipeline,
    messages.KvTransfer: _kv_transfer,
    messages.Simulate: _simulate,
    messages.Describe: lambda served, _: served.describe(),
}


class Answered(NamedTuple):
    """The kind of a message ("none" if it has none), its reply ready for JSON, and what was raised."""

    kind: str
    reply: dict[str, Any]
    error: Exception | None


def answer_text(served: ServedPlans, text: bytes) -> Answered:
    """Answer a message as it came, whatever it holds.

    >>> import fastroof
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"))
    >>> answered = answer_text(ServedPlans({"small": plan}), b'{"id": 1, "batch_size": 0, "kv_len": 9}')
    >>> answered.kind, answered.reply["id"], answered.reply["error"], type(answered.error).__name__
    ('decode', 1, 'BatchError', 'BatchError')
    """
    request_id: str | int | None = None
    kind = "none"
    try:
        served.limits.check_line(len(text))
        document = parse_message(text)
        request_id = id_of(document)
        check_stopped()
        kind = kind_of(document).kind
        return Answered(kind, {"id": request_id, **served.answer(document)}, None)
    except Exception as error:
        return Answered(kind, error_reply(as_refusal(error), request_id), error)


def answer_line(served: ServedPlans, line: bytes) -> bytes:
    """Answer a line that is not blank, whatever it holds, with a line, as a call of its own."""
    with call_stop(served.limits.max_call_s).watched():
        return write_reply(answer_text(served, line).reply) + b"\n"


def as_refusal(error: Exception) -> FastroofError:
    """Return the error for the client; a fault of the server is printed and reported as one."""
    if isinstance(error, FastroofError):
        return error
    traceback.print_exception(error)
    return BackendError(f"the server failed on this message: {type(error).__name__}: {error}")


def error_reply(error: FastroofError, request_id: str | int | None = None) -> dict[str, Any]:
    """Return the reply that stands for an error."""
    return {"id": request_id, "error": type(error).__name__, "message": str(error)}


def write_reply(reply: dict[str, Any]) -> bytes:
    """Write a reply as JSON, whose numbers read back to the same bits."""
    members = []
    for name, value in reply.items():
        if type(value) is list and len(value) > _PART:
            parts = (_json(value[at : at + _PART])[1:-1] for at in range(0, len(value), _PART))
            members.append(_json(name) + b":[" + b",".join(parts) + b"]")
        else:
            members.append(_json(name) + b":" + _json(value))
    return b"{" + b",".join(members) + b"}"


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


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
