"""Batches of steps, and the times that a plan gives them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from fastroof.arrays import Flags, Floats, Ints
from fastroof.arrow import ORIGIN, RELATIVE_ERROR, ArrowResult, arrow_schema
from fastroof.checks import shown
from fastroof.columns import Column
from fastroof.errors import BatchError, FastroofError
from fastroof.given_arrays import is_masked, number_array, refused

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK: Final = 2**16
"""Elements converted at once: they fit the cache."""


def int_array(name: str, value: Any, error: type[FastroofError] = BatchError) -> Ints:
    """Return an array of integers unchanged; refuse anything else."""
    array = number_array(value)
    if array is None:
        raise error(f"{name} must hold integers, {_found(value)}")
    if array.dtype.kind == "f":
        if array.size:
            raise error(f"{name} must hold integers, got {array.dtype} in {shown(value)}")
        return np.zeros(array.shape, np.int64)
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise error(f"{name} must fit int64, got {array.max()}")
    return array


def int_vector(name: str, value: Any) -> Ints:
    """Return a one-dimensional array of integers unchanged; refuse anything else."""
    array = int_array(name, value)
    if array.ndim != 1:
        raise BatchError(f"{name} must be one-dimensional, got shape {array.shape}")
    return array


def check_offsets(name: str, offsets: Ints, num_requests: int) -> None:
    """Refuse starts of steps that do not rise from 0 to the number of requests."""
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != num_requests:
        # only the ends: there may be millions
        ends = f"{offsets[0]} and {offsets[-1]}" if len(offsets) else "none"
        raise BatchError(f"{name} must start at 0 and end at the {num_requests} requests, got {ends}")
    falls = np.flatnonzero(np.diff(offsets) < 0)
    if len(falls):
        at = int(falls[0])
        raise BatchError(
            f"{name} must not decrease: {offsets[at]} is followed by {offsets[at + 1]} at step {at}"
        )


def _found(value: Any) -> str:
    """The type and value given instead of integers."""
    if is_masked(type(value)):
        return refused(value)
    kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
    return f"got {kind} in {shown(value)}"


_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


class _Writable:
    """The memory of a read-only array, described to NumPy as writable; loops only read it."""

    def __init__(self, array: Ints) -> None:
        self.array = array
        self.__array_interface__ = {
            **array.__array_interface__,
            "data": (array.__array_interface__["data"][0], False),
        }


def loop_array(array: Ints) -> Ints:
    """Return a contiguous int32 or int64 array as loops take it; read-only is another numba type."""
    return array if array.flags.writeable else np.asarray(_Writable(array))


def as_loops_read(arrays: list[Ints], shape: tuple[int, ...]) -> list[Ints] | None:
    """Return flat views of arrays that loops can read in place, or None if one must be converted."""
    first = arrays[0].dtype
    if not (first is _INT64 or first is _INT32 or first in (_INT64, _INT32)):
        return None
    for array in arrays:
        # carray: C-contiguous, aligned and writable
        usable = array.flags.carray or (array.flags.c_contiguous and array.flags.aligned)
        dtype = array.dtype
        if not (dtype is first or dtype == first) or array.shape != shape or not usable:
            return None
    return [loop_array(array).reshape(-1) for array in arrays]


def chunks(arrays: list[Ints], part: slice) -> Iterator[tuple[slice, list[Ints]]]:
    """Convert a part of broadcast arrays to int64, chunk by chunk; each chunk reuses the buffers."""
    if part.start == part.stop:
        return
    iterator: Any = np.nditer(
        tuple(arrays),
        flags=["external_loop", "buffered", "ranged"],
        op_flags=[["readonly"]] * len(arrays),
        op_dtypes=[np.int64] * len(arrays),
        casting="unsafe",  # uint64 that does not fit was refused
        order="C",
        buffersize=CHUNK,
    )
    iterator.iterrange = (part.start, part.stop)
    scratch = [np.empty(min(CHUNK, part.stop - part.start), np.int64) for _ in arrays]
    start = part.start
    for values in iterator:
        # one operand is an array, several are a tuple
        columns = values if isinstance(values, tuple) else (values,)
        for first in range(0, len(columns[0]), CHUNK):
            count = min(CHUNK, len(columns[0]) - first)
            for buffer, column in zip(scratch, columns, strict=True):
                buffer[:count] = column[first : first + count]
            yield slice(start, start + count), [buffer[:count] for buffer in scratch]
            start += count


@dataclass(frozen=True, eq=False)
class StepBatch:
    """Steps of requests as CSR arrays: step i holds requests ``offsets[i]:offsets[i + 1]``.

    Parameters
    ----------
    new_tokens : ndarray of int, shape (requests,)
        New tokens of each request, at least 1. One new token after a context is a decode.
    context_len : ndarray of int, shape (requests,)
        Tokens already in the KV cache of each request.
    offsets : ndarray of int, shape (steps + 1,)
        Where each step's requests start, from 0 to the number of requests, non-decreasing.

    Raises
    ------
    BatchError
        If the arrays are not one-dimensional integers of matching lengths.

    Examples
    --------
    >>> StepBatch([2048, 1], [0, 4095], [0, 2]).num_steps
    1
    """

    new_tokens: Ints
    context_len: Ints
    offsets: Ints

    def __post_init__(self) -> None:
        arrays = {
            name: int_vector(name, getattr(self, name)) for name in ("new_tokens", "context_len", "offsets")
        }
        # both sizes have one width and offsets are int64: loops are compiled for few types
        narrow = arrays["new_tokens"].dtype == arrays["context_len"].dtype == np.int32
        for name, array in arrays.items():
            dtype = np.int32 if narrow and name != "offsets" else np.int64
            object.__setattr__(self, name, loop_array(np.ascontiguousarray(array, dtype)))
        if len(self.new_tokens) != len(self.context_len):
            raise BatchError(
                f"new_tokens has {len(self.new_tokens)} requests, context_len {len(self.context_len)}"
            )
        check_offsets("offsets", self.offsets, len(self.new_tokens))

    @classmethod
    def from_requests(cls, requests: Iterable[Iterable[tuple[int, int]]]) -> StepBatch:
        """Build a batch from one list of (new_tokens, context_len) per step.

        Raises
        ------
        BatchError
            If a request is not a pair of integers.

        Examples
        --------
        >>> StepBatch.from_requests([[(2048, 0)], [(1, 4095), (1, 100)]]).offsets.tolist()
        [0, 1, 3]
        """
        try:
            listed = [list(step) for step in requests]
        except TypeError:
            raise BatchError(
                f"requests must be one list of (new_tokens, context_len) per step, got {shown(requests)}"
            ) from None
        flat = [request for step in listed for request in step]
        pairs = number_array(flat) if flat else np.zeros((0, 2), np.int64)
        if pairs is None or pairs.ndim != 2 or pairs.shape[1] != 2:
            wrong = next((request for request in flat if not _is_pair(request)), flat[0])
            raise BatchError(f"a request must be (new_tokens, context_len), two integers, got {shown(wrong)}")
        offsets = np.cumsum([0, *map(len, listed)])
        return cls(pairs[:, 0], pairs[:, 1], offsets)

    @property
    def num_steps(self) -> int:
        """Steps in the batch."""
        return len(self.offsets) - 1

    def __len__(self) -> int:
        return self.num_steps


def _is_pair(request: Any) -> bool:
    if isinstance(request, np.ndarray):
        return bool(request.shape == (2,))
    return isinstance(request, Sequence) and len(request) == 2


class StepComponents(NamedTuple):
    """Parts of steps, us: float64 arrays of shape (steps,)."""

    tokens_us: Floats
    logits_us: Floats
    decode_attention_us: Floats
    prefill_attention_us: Floats
    runtime_us: Floats


@dataclass(frozen=True, eq=False)
class StepTimes(ArrowResult):
    """Times of steps.

    Attributes
    ----------
    latency_us : ndarray of float64, shape (steps,)
        Microseconds per step; 0 for a step without requests.
    origin : ndarray of uint8, shape (steps,)
        The largest origin of its parts: 0 measured to 4 modelled.
    components : StepComponents
        Its parts, which add up to the latency except for rounding.
    relative_error : ndarray of float64, shape (steps,), or None
        One standard error divided by the latency, 0 for a step without requests; None without ``with_error``.
    made_from : mapping of str to str
        Metadata of its Arrow table: fastroof's version, the tables' hash and the plan.
    """

    latency_us: Floats
    origin: Flags
    components: StepComponents
    relative_error: Floats | None = None
    made_from: Mapping[str, str] = field(default_factory=dict, repr=False)

    arrow_columns = (
        Column("step", "int", "", "position in the batch", 0),
        Column("latency_us", "float", "us", "time of the step", 0),
        Column("tokens_us", "float", "us", "per-token operators of all layers", 0),
        Column("logits_us", "float", "us", "LM head over the step's requests", 0),
        Column("decode_attention_us", "float", "us", "decode attention of all layers", 0),
        Column("prefill_attention_us", "float", "us", "prefill attention of all layers", 0),
        Column("runtime_us", "float", "us", "what the engine adds", 0),
        ORIGIN,
        RELATIVE_ERROR,
    )

    def columns(self) -> dict[str, Any]:
        """Return position, latency_us, components, origin (codes) and relative_error of every step."""
        return {
            "step": np.arange(len(self.latency_us)),
            "latency_us": self.latency_us,
            **self.components._asdict(),
            "origin": self.origin,
            "relative_error": self.relative_error,
        }


class PlanArena(Protocol):
    """What loops need of a plan."""

    @property
    def arena(self) -> Floats:
        """The plan as loops read it."""

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of the largest step."""

    @property
    def max_num_seqs(self) -> int:
        """Sequences of the largest step."""


class TimedPlan(PlanArena, Protocol):
    """A plan, compiled or read from the cache."""

    @property
    def made_from(self) -> Mapping[str, str]:
        """Metadata of its answers' Arrow tables."""


_SIZES: Final = (
    Column("num_requests", "int", "", "requests in the step", 0),
    Column("num_tokens", "int", "tokens", "new tokens of all its requests", 0),
)
STEP_COLUMNS: Final = (StepTimes.arrow_columns[0], *_SIZES, *StepTimes.arrow_columns[1:-1])
"""Columns of :func:`step_table`: a step's sizes, times and origin."""


def step_table(plan: TimedPlan, batch: StepBatch, times: StepTimes) -> pa.Table:
    """Return a batch's step times as one Arrow table, one row per step."""
    import pyarrow as pa

    offsets = batch.offsets.astype(np.int64)
    running = np.concatenate([[0], np.cumsum(batch.new_tokens, dtype=np.int64)])
    table = times.to_arrow()
    sizes = {
        "num_requests": np.diff(offsets),
        "num_tokens": running[offsets[1:]] - running[offsets[:-1]],
    }
    error = () if times.relative_error is None else (RELATIVE_ERROR,)
    schema = arrow_schema((*STEP_COLUMNS, *error), plan.made_from)
    columns = [pa.array(sizes[f.name]) if f.name in sizes else table[f.name] for f in schema]
    return pa.table(columns, schema=schema)
