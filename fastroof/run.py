"""Batches of steps, and running them through a plan: check at the edge, then the loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastroof.compiled import steps
from fastroof.errors import BatchError, PlanRangeError

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = ["StepBatch", "StepComponents", "StepTimes", "decode_us", "prefill_us", "run_batch", "step_us"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer[Any]]


def _int_array(name: str, value: Any) -> Ints:
    """An integer array as it is, or as int64; anything else is refused by name."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise BatchError(f"{name} must hold integers, got {value!r:.60}") from None
    if array.dtype.kind == "b" or array.dtype.kind not in "iu":
        if array.size:
            raise BatchError(f"{name} must hold integers, got {array.dtype} in {value!r:.60}")
        return np.zeros(array.shape, np.int64)
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise BatchError(f"{name} must fit int64, got {array.max()}")
    return array if array.dtype in (np.int32, np.int64) else array.astype(np.int64)


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
        Where each step's requests start; rises from 0 to the number of requests.

    Raises
    ------
    BatchError
        If the arrays are not one-dimensional integers of fitting lengths.

    Examples
    --------
    >>> StepBatch([2048, 1], [0, 4095], [0, 2]).num_steps
    1
    """

    new_tokens: Ints
    context_len: Ints
    offsets: Ints

    def __post_init__(self) -> None:
        for name in ("new_tokens", "context_len", "offsets"):
            array = _int_array(name, getattr(self, name))
            if array.ndim != 1:
                raise BatchError(f"{name} must be one-dimensional, got shape {array.shape}")
            object.__setattr__(self, name, np.ascontiguousarray(array))
        if len(self.new_tokens) != len(self.context_len):
            raise BatchError(
                f"new_tokens has {len(self.new_tokens)} requests, context_len {len(self.context_len)}"
            )
        offsets = self.offsets
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(self.new_tokens):
            raise BatchError(
                f"offsets must start at 0 and end at the {len(self.new_tokens)} requests, "
                f"got {offsets.tolist()!r:.60}"
            )
        if (np.diff(offsets) < 0).any():
            at = int(np.flatnonzero(np.diff(offsets) < 0)[0])
            raise BatchError(
                f"offsets must not fall: {offsets[at]} is followed by {offsets[at + 1]} at step {at}"
            )

    @classmethod
    def from_requests(cls, requests: Iterable[Iterable[tuple[int, int]]]) -> StepBatch:
        """Build a batch from one list of (new_tokens, context_len) a step.

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
                f"a list of (new_tokens, context_len) a step is needed, got {requests!r:.60}"
            ) from None
        flat = [request for step in listed for request in step]
        try:
            pairs = np.array(flat) if flat else np.zeros((0, 2), np.int64)
        except ValueError:
            pairs = np.zeros(0)
        if pairs.ndim != 2 or pairs.shape[1] != 2:
            wrong = next(
                (r for r in flat if not isinstance(r, Sequence | np.ndarray) or len(r) != 2), flat[0]
            )
            raise BatchError(f"a request must be (new_tokens, context_len), got {wrong!r:.60}")
        offsets = np.cumsum([0, *map(len, listed)])
        return cls(pairs[:, 0], pairs[:, 1], offsets)

    @property
    def num_steps(self) -> int:
        """Steps in the batch."""
        return len(self.offsets) - 1

    def __len__(self) -> int:
        return self.num_steps


class StepComponents(NamedTuple):
    """Parts of steps, us: float64 arrays of shape (steps,)."""

    tokens_us: Floats
    logits_us: Floats
    decode_attention_us: Floats
    prefill_attention_us: Floats
    runtime_us: Floats


class StepTimes(NamedTuple):
    """Times of steps.

    Attributes
    ----------
    latency_us : ndarray of float64, shape (steps,)
        Microseconds a step; 0 for a step without requests.
    origin : ndarray of uint8, shape (steps,)
        The largest origin of its parts: 0 measured to 4 modelled.
    components : StepComponents
        Its parts, in the order in which they are added.
    """

    latency_us: Floats
    origin: npt.NDArray[np.uint8]
    components: StepComponents


def _in_threads(loop: Callable[[slice], int], count: int, threads: int) -> int:
    """Run a loop over ``count`` steps in equal parts, one a thread, and OR their codes."""
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise BatchError(f"threads must be an integer of at least 1, got {threads!r}")
    parts = min(threads, count)
    if parts < 2:
        return int(loop(slice(0, count)))
    bounds = [count * i // parts for i in range(parts + 1)]
    code = 0
    with ThreadPoolExecutor(parts) as pool:
        for met in pool.map(loop, [slice(a, b) for a, b in pairwise(bounds)]):
            code |= int(met)
    return code


def _broadcast(arguments: dict[str, Any], out: Floats | None) -> tuple[list[Ints], Floats, tuple[int, ...]]:
    arrays = {name: _int_array(name, value) for name, value in arguments.items()}
    if len({a.dtype for a in arrays.values()}) > 1:
        # one width for all: each mix of widths would be compiled anew
        arrays = {name: a.astype(np.int64) for name, a in arrays.items()}
    try:
        shape = np.broadcast_shapes(*(a.shape for a in arrays.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {a.shape}" for name, a in arrays.items())
        raise BatchError(f"shapes do not broadcast: {shapes}") from None
    flat = [np.ascontiguousarray(np.broadcast_to(a, shape)).reshape(-1) for a in arrays.values()]
    if out is None:
        return flat, np.empty(flat[0].shape), shape
    fits = isinstance(out, np.ndarray) and out.dtype == np.float64 and out.shape == shape
    if not fits or not out.flags.c_contiguous or not out.flags.writeable:
        raise BatchError(f"out must be a writeable, C-contiguous float64 array of shape {shape}")
    return flat, out.reshape(-1), shape


def _homogeneous(
    plan: StepPlan, loop: Any, arguments: dict[str, Any], out: Floats | None, threads: int
) -> Any:
    flat, answer, shape = _broadcast(arguments, out)
    code = _in_threads(
        lambda part: loop(plan.arena, *(a[part] for a in flat), answer[part]), len(answer), threads
    )
    if code:
        _raise_sizes(plan, dict(zip(arguments, flat, strict=True)))
    if out is not None:
        return out
    return float(answer[0]) if shape == () else answer.reshape(shape)


def decode_us(plan: StepPlan, batch_size: Any, kv_len: Any, out: Floats | None, threads: int) -> Any:
    """Answer ``plan.decode_us``."""
    arguments = {"batch_size": batch_size, "kv_len": kv_len}
    return _homogeneous(plan, steps.decode_steps_us, arguments, out, threads)


def prefill_us(
    plan: StepPlan, new_tokens: Any, context_len: Any, batch_size: Any, out: Floats | None, threads: int
) -> Any:
    """Answer ``plan.prefill_us``."""
    arguments = {"new_tokens": new_tokens, "context_len": context_len, "batch_size": batch_size}
    return _homogeneous(plan, steps.prefill_steps_us, arguments, out, threads)


def step_us(plan: StepPlan, batch: StepBatch, threads: int) -> Floats:
    """Answer ``plan.step_us``."""
    out = np.empty(_checked(batch).num_steps)
    code = _in_threads(
        lambda part: steps.ragged_steps_us(
            plan.arena, batch.new_tokens, batch.context_len, _offsets_of(batch, part), out[part]
        ),
        len(out),
        threads,
    )
    if code:
        _raise_requests(plan, batch)
    return out


def run_batch(plan: StepPlan, batch: StepBatch, threads: int) -> StepTimes:
    """Answer ``plan.run``."""
    count = _checked(batch).num_steps
    out = np.empty(count)
    origin = np.empty(count, np.uint8)
    components = StepComponents(*(np.empty(count) for _ in StepComponents._fields))
    code = _in_threads(
        lambda part: steps.ragged_step_parts(
            plan.arena,
            batch.new_tokens,
            batch.context_len,
            _offsets_of(batch, part),
            components.tokens_us[part],
            components.logits_us[part],
            components.decode_attention_us[part],
            components.prefill_attention_us[part],
            components.runtime_us[part],
            out[part],
            origin[part],
        ),
        count,
        threads,
    )
    if code:
        _raise_requests(plan, batch)
    return StepTimes(out, origin, components)


def _checked(batch: Any) -> StepBatch:
    if not isinstance(batch, StepBatch):
        raise BatchError(
            f"a StepBatch is needed, got {type(batch).__name__}: "
            "StepBatch.from_requests([[(new_tokens, context_len), ...], ...])"
        )
    return batch


def _offsets_of(batch: StepBatch, part: slice) -> Ints:
    return batch.offsets[part.start : part.stop + 1]


def _first(wrong: Any) -> int:
    return int(np.flatnonzero(wrong)[0])


def _refuse_tokens(plan: StepPlan, tokens: int, where: str) -> None:
    raise PlanRangeError(
        f"{where} has {tokens} tokens, the plan times up to {plan.max_tokens}: "
        f"compile_plan(..., max_tokens={tokens}) or more"
    )


def _refuse_seqs(plan: StepPlan, seqs: int, where: str) -> None:
    raise PlanRangeError(
        f"{where} has {seqs} sequences, the plan times up to {plan.max_seqs}: "
        f"compile_plan(..., max_seqs={seqs}) or more"
    )


def _raise_sizes(plan: StepPlan, arguments: dict[str, Ints]) -> None:
    """Find the first bad size of a homogeneous batch, and say what would do."""
    sizes = {name: array.astype(np.int64) for name, array in arguments.items()}
    limit = steps.MAX_KV_LEN
    for name, array in sizes.items():
        least = 0 if name == "context_len" else 1
        if (array < least).any():
            i = _first(array < least)
            raise BatchError(f"{name} must be at least {least}, got {array[i]} at position {i}")
    new = sizes.get("new_tokens", np.ones(1, np.int64))
    context = sizes["kv_len"] - 1 if "kv_len" in sizes else sizes["context_len"]
    too_long = (new > limit) | (context > limit - np.minimum(new, limit))
    if too_long.any():
        i = _first(too_long)
        kv_len = sum(int(np.broadcast_to(part, too_long.shape)[i]) for part in (context, new))
        what = "kv_len" if "kv_len" in sizes else "context_len + new_tokens"
        raise BatchError(f"{what} must be at most {limit}, got {kv_len} at position {i}")
    seqs = sizes["batch_size"]
    if (seqs > plan.max_seqs).any():
        i = _first(seqs > plan.max_seqs)
        _refuse_seqs(plan, int(seqs[i]), f"the step at position {i}")
    tokens = seqs * np.minimum(new, limit)
    i = _first(tokens > plan.max_tokens)
    _refuse_tokens(plan, int(tokens[i]), f"the step at position {i}")


def _raise_requests(plan: StepPlan, batch: StepBatch) -> None:
    """Find the first bad request or step of a ragged batch, and say what would do."""
    StepBatch(batch.new_tokens, batch.context_len, batch.offsets)  # someone may have written to its arrays
    new, context = batch.new_tokens.astype(np.int64), batch.context_len.astype(np.int64)
    limit = steps.MAX_KV_LEN
    checks = (
        (new < 1, "new_tokens must be at least 1, got {new}"),
        (context < 0, "context_len must be at least 0, got {context}"),
        (
            np.minimum(new, limit + 1) + np.minimum(context, limit) > limit,
            f"context_len + new_tokens must be at most {limit}, got {{context}} + {{new}}",
        ),
    )
    for wrong, message in checks:
        if wrong.any():
            r = _first(wrong)
            step = int(np.searchsorted(batch.offsets, r, side="right")) - 1
            where = f"in request {r - int(batch.offsets[step])} of step {step}"
            raise BatchError(f"{message.format(new=new[r], context=context[r])} {where}")
    seqs = np.diff(batch.offsets)
    if (seqs > plan.max_seqs).any():
        i = _first(seqs > plan.max_seqs)
        _refuse_seqs(plan, int(seqs[i]), f"step {i}")
    running = np.r_[0, np.cumsum(new)]
    tokens = running[batch.offsets[1:]] - running[batch.offsets[:-1]]
    i = _first(tokens > plan.max_tokens)
    _refuse_tokens(plan, int(tokens[i]), f"step {i}")
