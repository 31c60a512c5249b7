"""What a message may hold: one model for each kind, whichever way it comes; nothing in a message is a path.

A message is an object with the keys of one kind, and may also have ``plan``, ``v`` and ``id``. With steps,
``"errors": true`` adds their ``relative_error``, one standard error over each step's time, and
``"stages": true`` adds ``stage_us``, one list per step; with ``explain``, the first does too. The validators
check lengths against the server's limits, the context of validation, before anything is made of a list.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)

from fastroof.arrays import Floats, Ints
from fastroof.backends.serve.simulations import Simulation
from fastroof.checks import MOST_SUGGESTED, shown
from fastroof.documents import parse_json
from fastroof.errors import BackendError, BatchError, FastroofError
from fastroof.run import StepBatch
from fastroof.run.batch import int_array

if TYPE_CHECKING:
    from fastroof.backends.serve.limits import ServeLimits
    from fastroof.plan import StepPlan

PROTOCOL: Final = 1
"""Version of the protocol: a new key or kind keeps it, a changed one does not."""

_MOST: Final = 2**31 - 1
_Model = TypeVar("_Model", bound=BaseModel)


def _sizes(value: Any, info: ValidationInfo) -> Ints:
    """Read one number for all steps, or a list with one a step."""
    name = str(info.field_name)
    if type(value) is list:
        _limits(info).check_steps(len(value))
    array = int_array(name, value if type(value) in (int, list) else [value])
    if array.ndim > 1:
        raise BatchError(f"{name} must be one list of integers, got {shown(value)}")
    return array


def _list(value: Any, info: ValidationInfo) -> Ints:
    """Read a list of integers of requests."""
    if type(value) is not list:
        raise BatchError(f'"{info.field_name}" must be one list of integers, got {shown(value)}')
    _limits(info).check_requests(len(value) - (info.field_name == "offsets"))
    array = int_array(str(info.field_name), value)
    if array.ndim != 1:
        raise BatchError(f'"{info.field_name}" must be one list of integers, got {shown(value)}')
    return array


def _batch(value: Any, info: ValidationInfo) -> StepBatch:
    """Read steps, each a list of [new_tokens, context_len]."""
    if type(value) is not list:
        raise BatchError(f'"{info.field_name}" must be one list of [new_tokens, context_len] per step, '
                         f"got {shown(value)}")  # fmt: skip
    _limits(info).check_steps(len(value))
    _limits(info).check_requests(sum(len(step) for step in value if type(step) is list))
    return StepBatch.from_requests(value)


def _limits(info: ValidationInfo) -> ServeLimits:
    limits: ServeLimits = info.context  # type: ignore[assignment]
    return limits


def _true(value: Any) -> Any:
    if value is not True:
        raise ValueError("must be true")
    return value


def _name_or_number(value: Any) -> Any:
    if value is not None and type(value) not in (str, int):
        raise ValueError("must be a name or a number")
    return value


def _integers(least: int) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "integer", "minimum": least}}


def _one_or_list(least: int) -> Any:
    schema = {"anyOf": [{"type": "integer", "minimum": least}, _integers(least)]}
    return PlainValidator(_sizes), WithJsonSchema(schema)


_PAIR: Final = {"type": "array", "prefixItems": [{"type": "integer", "minimum": 1},
                {"type": "integer", "minimum": 0}], "items": False, "minItems": 2}  # fmt: skip
_STEP: Final = {"type": "array", "items": _PAIR}

Sizes = Annotated[Any, *_one_or_list(1)]
Contexts = Annotated[Any, *_one_or_list(0)]
Integers = Annotated[Any, PlainValidator(_list), WithJsonSchema(_integers(0))]
Steps = Annotated[Any, PlainValidator(_batch), WithJsonSchema({"type": "array", "items": _STEP})]
Yes = Annotated[Literal[True], BeforeValidator(_true)]
Which = Annotated[
    Any, PlainValidator(_name_or_number), WithJsonSchema({"type": ["string", "integer", "null"]})
]
Tokens = Annotated[int, Field(ge=1, le=_MOST)]


class Strict(BaseModel):
    """A model that takes what it lists, of exactly these types, and nothing else."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Message(Strict):
    """A message of any kind."""

    kind: ClassVar[str]
    id: Which = Field(None, description="comes back in the reply")
    v: Literal[1] = Field(1, description="version of the protocol")
    plan: Which = Field(None, description="name or number of a plan; optional if one is served")


class TimedSteps(Message):
    """Steps whose times are asked for: a method of the plan, and the keys that are its arguments."""

    method: ClassVar[str]
    sizes: ClassVar[tuple[str, ...]]
    stages: bool = Field(False, description="times in each pipeline stage as well")

    @property
    def arrays(self) -> list[Any]:
        """Arguments of the plan's method."""
        return [getattr(self, name) for name in self.sizes]

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return max(int(array.size) for array in self.arrays)

    @property
    def num_requests(self) -> int:
        """Number of requests that are listed one by one to answer; 0 if none are."""
        return 0

    def times_us(self, plan: StepPlan) -> Floats:
        """Return microseconds a step."""
        return np.atleast_1d(getattr(plan, self.method)(*self.arrays))


class WithErrors(TimedSteps):
    """Steps whose standard errors are known."""

    errors: bool = Field(False, description="standard errors as well")

    def relative_errors(self, plan: StepPlan) -> Floats:
        """Return one standard error over the time of each."""
        return np.atleast_1d(plan.step_error(*self.arrays))


class Decode(WithErrors):
    """Times of steps of equal decodes: ``{"batch_size": [64, 65], "kv_len": 4096}``."""

    kind, method, sizes = "decode", "decode_us", ("batch_size", "kv_len")
    batch_size: Sizes = Field(description="requests a step, or one number for all steps")
    kv_len: Sizes = Field(description="tokens that each attends to, including the new one")

    def relative_errors(self, plan: StepPlan) -> Floats:
        """Return ``plan.decode_error``."""
        return np.atleast_1d(plan.decode_error(*self.arrays))


class _Batch(WithErrors):
    """Steps of any requests, whose only argument is a StepBatch."""

    method = "step_us"

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return int(self.arrays[0].num_steps)

    @property
    def num_requests(self) -> int:
        """Requests of all steps."""
        return len(self.arrays[0].new_tokens)


class AnySteps(_Batch):
    """Times of steps of any requests: ``{"requests": [[[2048, 0], [1, 4095]], [[1, 100]]]}``."""

    kind, sizes = "requests", ("requests",)
    requests: Steps = Field(description="one list of [new_tokens, context_len] a step")


class Ragged(_Batch):
    """Times of steps of any requests, as the arrays of a StepBatch."""

    kind = "ragged"
    new_tokens: Integers = Field(description="of each request, of all steps")
    context_len: Integers = Field(description="of each request, of all steps")
    offsets: Integers = Field(description="where steps start among them, and the end")

    @property
    def arrays(self) -> list[Any]:
        """The steps."""
        return [StepBatch(self.new_tokens, self.context_len, self.offsets)]


class Prefill(WithErrors):
    """Times of steps of equal chunks of prompts: ``{"new_tokens": [2048], "context_len": 0}``."""

    kind, method, sizes = "prefill", "prefill_us", ("new_tokens", "context_len", "batch_size")
    new_tokens: Sizes = Field(description="of each chunk")
    context_len: Contexts = Field(0, description="tokens in the cache before them", validate_default=True)
    batch_size: Sizes = Field(1, description="chunks a step", validate_default=True)

    @property
    def num_requests(self) -> int:
        """Chunks of all steps if errors are asked for: they are those of a batch that lists the chunks."""
        if not self.errors or not self.batch_size.size:
            return 0
        # nothing has checked batch_size yet, so the sum is of floats, which hold any
        each = np.broadcast_to(self.batch_size, (self.num_steps,)).astype(np.float64)
        return int(np.maximum(each, 0.0).sum())

    def relative_errors(self, plan: StepPlan) -> Floats:
        """Return ``plan.step_error`` of the same chunks, listed."""
        new, context, batch = np.broadcast_arrays(*map(np.atleast_1d, self.arrays))
        offsets = np.r_[0, np.cumsum(batch)]
        return plan.step_error(StepBatch(np.repeat(new, batch), np.repeat(context, batch), offsets))


class Verify(TimedSteps):
    """Times of steps that verify draft tokens; no table has rows of them, so their errors are not known."""

    kind, method, sizes = "verify", "verify_us", ("batch_size", "kv_len", "tokens")
    batch_size: Sizes = Field(description="requests a step")
    kv_len: Sizes = Field(description="tokens that the last query of each attends to")
    tokens: Sizes = Field(description="new tokens of each: 1 and its draft tokens")


class VerifyStep(Strict):
    """One step that verifies draft tokens."""

    batch_size: Tokens
    kv_len: Tokens
    tokens: Tokens


def _explained(value: Any, info: ValidationInfo) -> Any:
    if type(value) is dict:
        return _validated(VerifyStep, value, _limits(info), '"explain"')
    if type(value) is not list:
        raise BackendError(
            '"explain" must be a list of [new_tokens, context_len], or an object of batch_size, kv_len, '
            f"tokens; got {shown(value, 100)}"
        )
    if len(value) > (most := _limits(info).max_detailed_requests):
        raise BackendError(f"{len(value)} requests are more than the {most} of an explanation")
    return value


class Explain(Message):
    """One step by operator: ``{"explain": [[2048, 0], [1, 4095]]}``."""

    kind = "explain"
    explain: Annotated[
        Any,
        PlainValidator(_explained),
        WithJsonSchema({"anyOf": [_STEP, VerifyStep.model_json_schema()]}),
    ] = Field(description="requests of a step, or a step that verifies draft tokens")
    errors: bool = Field(False, description="standard errors as well")


class Memory(Message):
    """What one GPU holds: weights, room for KV cache, windows, states."""

    kind = "memory"
    memory: Yes
    max_num_batched_tokens: Tokens | None = Field(None, description="tokens of a step, not the plan's")
    max_num_seqs: Tokens | None = Field(None, description="concurrent requests, instead of the engine's")


class Pipeline(Message):
    """Micro-batches that follow each other through the stages: ``{"pipeline": [[[1, 999]], [[1, 999]]]}``."""

    kind = "pipeline"
    pipeline: Steps = Field(description="micro-batches, in their order")


def _prompts(array: Ints) -> Ints:
    if array.size and not (array.min() >= 1 and array.max() <= _MOST):
        wrong = array.min() if array.min() < 1 else array.max()
        raise BatchError(f"a prompt has from 1 to {_MOST} tokens, got {wrong}")
    return array


class Transfer(Strict):
    """A link, and the prompts that it carries."""

    prompts: Annotated[Integers, AfterValidator(_prompts)] = Field(description="tokens of each prompt")
    bytes_per_s: float | None = Field(None, gt=0, description="of one GPU (default: NVLink's)")
    latency_us: float = Field(0.0, ge=0, description="added to each transfer")
    decode_plan: Which = Field(None, description="name or number of the receiving plan (default: the same)")


class KvTransfer(Message):
    """KV caches of prompts on their way from the plan to another engine's."""

    kind = "kv_transfer"
    kv_transfer: Transfer


class Simulate(Message):
    """An engine over time: ``{"simulate": {"workload": {"rate": 10}}}``."""

    kind = "simulate"
    simulate: Simulation


class Describe(Message):
    """What is served."""

    kind = "describe"
    describe: Yes


_BY_KEY: Final[dict[str, type[Message]]] = {
    "describe": Describe, "simulate": Simulate, "kv_transfer": KvTransfer, "pipeline": Pipeline,
    "memory": Memory, "explain": Explain, "requests": AnySteps, "offsets": Ragged, "tokens": Verify,
    "kv_len": Decode, "new_tokens": Prefill, "context_len": Prefill, "batch_size": Decode,
}  # fmt: skip
"""The kind of a message by the first of these keys that it has."""

MESSAGES: Final = tuple(dict.fromkeys(_BY_KEY.values()))
"""Every kind of message."""


def parse_message(text: bytes) -> dict[str, Any]:
    """Read the JSON of a message: an object without NaN, Infinity or a key twice."""
    document = parse_json(text, "a message", BackendError, most_bytes=len(text), is_strict=True)
    if not isinstance(document, dict):
        raise BackendError(f"a message must be an object with one of {', '.join(_BY_KEY)}; got {text[:60]!r}")
    return document


def id_of(document: dict[str, Any]) -> str | int | None:
    """Return the id of a message; None if it has none."""
    request_id: str | int | None = document.get("id")
    if request_id is not None and type(request_id) not in (str, int):
        raise BackendError(f"id must be a string or an integer, got {shown(request_id)}")
    return request_id


def kind_of(document: dict[str, Any]) -> type[Message]:
    """Return the model of a message by its keys."""
    version = document.get("v", PROTOCOL)
    if type(version) is not int or version != PROTOCOL:
        raise BackendError(f'"v" must be {PROTOCOL}, the version of the protocol; got {shown(version)}')
    found = next((kind for key, kind in _BY_KEY.items() if key in document), None)
    if found is None:
        unknown = [key for key in document if key not in Message.model_fields]
        if not unknown:
            raise BackendError(f"a message needs one of {', '.join(_BY_KEY)}; got {shown(sorted(document))}")
        raise BackendError(_unknown_key("a message", unknown[0], [*_BY_KEY, *Message.model_fields]))
    return found


def read_message(document: dict[str, Any], limits: ServeLimits) -> Message:
    """Check a message within the limits of a server."""
    key = next((key for key in _BY_KEY if key in document), None)
    return _validated(kind_of(document), document, limits, f"a message with {key}")


def _validated(model: type[_Model], document: dict[str, Any], limits: ServeLimits, what: str) -> _Model:
    try:
        return model.model_validate(document, context=limits)
    except ValidationError as error:
        raise _refusal(error, model, what) from None


def _refusal(error: ValidationError, model: type[BaseModel], what: str) -> FastroofError:
    """Return the first fault as an error in one line, unknown keys first: another may be missing for it."""
    faults = error.errors(include_url=False)
    fault = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
    raised = fault.get("ctx", {}).get("error")
    if isinstance(raised, FastroofError):
        return raised
    *path, last = fault["loc"] or (what,)  # a key that is no text has no place
    for part in path:
        found = model.model_fields[part].annotation if isinstance(part, str) else None
        within = [one for one in (found, *get_args(found)) if isinstance(one, type)]
        model = next((one for one in within if issubclass(one, BaseModel)), model)
        what = f'"{part}"'
    if fault["type"] == "extra_forbidden":
        return BackendError(_unknown_key(what, str(last), [*model.model_fields]))
    if fault["type"] == "missing":
        return BackendError(f'{what} needs "{last}"; it takes {", ".join(model.model_fields)}')
    words = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    words = re.sub("a valid dictionary or instance of .*", "an object", words)
    name = ".".join(str(part) for part in (*path, last))
    return BackendError(f'"{name}" {words}, got {shown(fault["input"])}')


def _unknown_key(what: str, given: str, names: list[str]) -> str:
    """Name the valid keys, the closest first."""
    closest = sorted(names, key=lambda name: -difflib.SequenceMatcher(None, given, name).ratio())
    more = f" and {len(names) - MOST_SUGGESTED} more" if len(names) > MOST_SUGGESTED else ""
    return f"{what} has no key {shown(given)}; valid: {', '.join(closest[:MOST_SUGGESTED])}{more}"
