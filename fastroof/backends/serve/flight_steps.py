"""Steps as columns of Arrow record batches, and their times as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import pyarrow as pa

from fastroof.arrays import Floats, Ints
from fastroof.backends.serve.limits import ServeLimits
from fastroof.backends.serve.steps_asked import AnySteps, DecodeSteps
from fastroof.errors import BackendError, BatchError
from fastroof.run import StepBatch

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = [
    "ERRORS",
    "TIMES",
    "TIMES_AND_ERRORS",
    "StepKind",
    "answer_batch",
    "batch_steps",
    "plan_metadata",
    "step_kind",
]

ERRORS: Final = "errors"
"""Behind a plan's name in a descriptor's path: standard errors are asked for as well."""


StepKind = Literal["decode", "ragged"]
"""Steps of equal decodes, a row each of two integers; or of any requests, a row each of two lists."""

TIMES: Final[Any] = pa.schema([pa.field("latency_us", pa.float64(), nullable=False)])
"""Schema of answers."""

TIMES_AND_ERRORS: Final[Any] = TIMES.append(pa.field("relative_error", pa.float64(), nullable=False))
"""Schema of answers with standard errors, one over the time of each step."""

_COLUMNS: Final[dict[frozenset[str], StepKind]] = {
    frozenset({"batch_size", "kv_len"}): "decode",
    frozenset({"new_tokens", "context_len"}): "ragged",
}
_WANTED: Final = "batch_size and kv_len of int32 or int64, or new_tokens and context_len of lists of them"


def step_kind(schema: Any) -> StepKind:
    """Tell what steps a schema describes.

    Parameters
    ----------
    schema : pyarrow.Schema
        batch_size and kv_len of int32 or int64; or new_tokens and context_len of lists (or large lists) of
        int32 or int64. The order of the two does not matter.

    Raises
    ------
    BackendError
        If the columns are others.

    Examples
    --------
    >>> step_kind(pa.schema([("batch_size", pa.int32()), ("kv_len", pa.int64())]))
    'decode'
    """
    try:
        names = schema.names
    except UnicodeDecodeError as error:
        raise BackendError(f"a column's name is no UTF-8 ({error}): the columns must be {_WANTED}") from None
    kind = _COLUMNS.get(frozenset(names))
    if kind is None or len(names) != 2:
        raise BackendError(f"the columns must be {_WANTED}, got {_shown(schema)}")
    for field in schema:
        of = field.type
        if kind == "ragged":
            if not pa.types.is_list(of) and not pa.types.is_large_list(of):
                raise BackendError(f"column {field.name} must hold lists, got {of}: send {_WANTED}")
            of = of.value_type
        if of not in (pa.int32(), pa.int64()):
            raise BackendError(
                f"column {field.name} must hold int32 or int64, got {field.type}: send {_WANTED}"
            )
    return kind


def _shown(schema: Any) -> str:
    names = ", ".join(f"{field.name!s:.40}: {field.type!s:.40}" for field in list(schema)[:4])
    return f"{len(schema.names)} ({names})" if names else "none"


def batch_steps(kind: StepKind, batch: Any, limits: ServeLimits) -> DecodeSteps | AnySteps:
    """Read the steps of a record batch.

    Columns are read where they lie: the offsets of their lists are the steps, in slices as well.

    Parameters
    ----------
    kind : {"decode", "ragged"}
        What :func:`step_kind` says of the batch's schema.
    batch : pyarrow.RecordBatch
        A step a row.
    limits : ServeLimits
        Most steps and requests of a batch.

    Returns
    -------
    DecodeSteps or AnySteps
        What a plan times.

    Raises
    ------
    BatchError
        Of the first step that is none, which it names.
    BackendError
        If the batch is larger than the limits, or its arrays are not what they say.

    Examples
    --------
    >>> import fastroof
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> steps = batch_steps("decode", pa.record_batch({"batch_size": [64], "kv_len": [4096]}), ServeLimits())
    >>> bool(steps.times_us(plan)[0] == plan.decode_us(64, 4096))
    True
    """
    if batch.num_rows > limits.max_steps:
        raise BackendError(
            f"{batch.num_rows} steps in a batch are more than the limit of {limits.max_steps}: send several"
        )
    try:
        batch.validate()
    except pa.ArrowException as error:
        raise BackendError(f"the record batch is malformed: {error!s:.200}") from None
    if kind == "decode":
        return DecodeSteps(*(_integers(name, batch.column(name)) for name in ("batch_size", "kv_len")))
    new_tokens, offsets = _lists("new_tokens", batch.column("new_tokens"), limits)
    context_len, others = _lists("context_len", batch.column("context_len"), limits)
    if not np.array_equal(offsets, others):
        step = int(np.flatnonzero(np.diff(offsets) != np.diff(others))[0])
        raise BatchError(
            f"step {step} has {offsets[step + 1] - offsets[step]} requests in new_tokens, "
            f"{others[step + 1] - others[step]} in context_len"
        )
    return AnySteps(StepBatch(new_tokens, context_len, offsets))


def _integers(name: str, column: Any) -> Ints:
    if column.null_count:
        raise BatchError(f"{name} is null in step {_first_null(column)}: every step needs one")
    values: Ints = column.to_numpy(zero_copy_only=True)
    return values


def _lists(name: str, column: Any, limits: ServeLimits) -> tuple[Ints, Ints]:
    """Values of the lists of a column, and where each list starts among them."""
    if column.null_count:
        raise BatchError(
            f"{name} is null in step {_first_null(column)}: an empty list is a step without requests"
        )
    if not len(column):
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    offsets = column.offsets.to_numpy(zero_copy_only=True)
    first, last = int(offsets[0]), int(offsets[-1])
    if last - first > limits.max_requests:
        raise BackendError(
            f"{last - first} requests in a batch are more than the limit of {limits.max_requests}: "
            "send several"
        )
    values = column.values.slice(first, last - first)
    if first:
        offsets = offsets - first
    if values.null_count:
        request = _first_null(values)
        step = int(np.searchsorted(offsets, request, side="right")) - 1
        raise BatchError(f"{name} is null in request {request - int(offsets[step])} of step {step}")
    return _aligned(values.to_numpy(zero_copy_only=True)), offsets


def _aligned(values: Ints) -> Ints:
    # as a message may not be: loops are compiled for aligned arrays
    return values if values.flags.aligned else values.copy()


def _first_null(column: Any) -> int:
    return int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])


def answer_batch(schema: Any, *columns: Floats) -> Any:
    """Put answers into a record batch; without any, an empty one."""
    return pa.record_batch(
        [pa.array(values) for values in columns or [np.empty(0)] * len(schema)], schema=schema
    )


def plan_metadata(plan: StepPlan) -> dict[str, str]:
    """Describe a plan in words, as the metadata of a schema.

    Examples
    --------
    >>> import fastroof
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels", tp=2)
    >>> plan_metadata(plan)["tp"]
    '2'
    """
    return {name: str(value) for name, value in plan.describe().items()}
