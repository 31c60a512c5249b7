"""Time batches of steps: check the sizes, then run the compiled loops."""

from __future__ import annotations

import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Final

import numpy as np

from fastroof.arrays import Floats, Ints
from fastroof.checks import whole_number
from fastroof.compiled import decode_lines, ragged_steps, steps, verification
from fastroof.compiled.layout import LINE_BYTES
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.errors import BatchError, PlanRangeError
from fastroof.given_arrays import common_shape
from fastroof.run.batch import (
    PlanArena,
    StepBatch,
    StepComponents,
    StepTimes,
    TimedPlan,
    as_loops_read,
    chunks,
    int_array,
)

STREAMED_BYTES: Final = 2**24
"""Largest output of decode steps that goes through the caches, where its next reader may find it."""
IS_STREAMED: Final = platform.machine() in ("x86_64", "AMD64")
"""Whether larger ones are stored past the caches: other processors were not measured."""


def _first(wrong: Any) -> int:
    return int(np.flatnonzero(wrong)[0])


def _refuse(plan: PlanArena, limit: str, count: int, where: str) -> None:
    """Raise for a step beyond a limit of the plan, max_num_batched_tokens or max_num_seqs."""
    what = "tokens" if limit == "max_num_batched_tokens" else "sequences"
    raise PlanRangeError(
        f"{where} has {count} {what}, the plan times up to {getattr(plan, limit)}: "
        f"use compile_plan(..., {limit}={count}) or more"
    )


def raise_sizes(plan: PlanArena, sizes: dict[str, Ints], before: int) -> None:
    """Raise an error about the first invalid size of equal steps, if any."""
    limit = MAX_KV_LEN
    for name, array in sizes.items():
        least = 0 if name == "context_len" else 1
        if (array < least).any():
            i = _first(array < least)
            raise BatchError(f"{name} must be at least {least}, got {array[i]} at position {before + i}")
    seqs = sizes["batch_size"]
    new = sizes["tokens"] if "tokens" in sizes else sizes.get("new_tokens", np.ones_like(seqs))
    context = sizes["kv_len"] - np.minimum(new, limit) if "kv_len" in sizes else sizes["context_len"]
    if (context < 0).any():
        i = _first(context < 0)
        raise BatchError(
            f"kv_len includes the {int(new[i])} tokens that a step verifies and must be at least as many, "
            f"got {int(sizes['kv_len'][i])} at position {before + i}"
        )
    too_long = (new > limit) | (context > limit - np.minimum(new, limit))
    if too_long.any():
        i = _first(too_long)
        what = "kv_len" if "kv_len" in sizes else "context_len + new_tokens"
        kv_len = int(context[i]) + int(new[i])
        raise BatchError(f"{what} must be at most {limit}, got {kv_len} at position {before + i}")
    if (seqs > plan.max_num_seqs).any():
        i = _first(seqs > plan.max_num_seqs)
        _refuse(plan, "max_num_seqs", int(seqs[i]), f"the step at position {before + i}")
    tokens = seqs * np.minimum(new, limit)
    if (tokens > plan.max_num_batched_tokens).any():
        i = _first(tokens > plan.max_num_batched_tokens)
        _refuse(plan, "max_num_batched_tokens", int(tokens[i]), f"the step at position {before + i}")


def raise_requests(plan: PlanArena, batch: StepBatch) -> None:
    """Raise an error about the first invalid request or step of a ragged batch."""
    StepBatch(batch.new_tokens, batch.context_len, batch.offsets)  # its arrays may have been changed
    new, context = batch.new_tokens.astype(np.int64), batch.context_len.astype(np.int64)
    limit = MAX_KV_LEN
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
    if (seqs > plan.max_num_seqs).any():
        i = _first(seqs > plan.max_num_seqs)
        _refuse(plan, "max_num_seqs", int(seqs[i]), f"step {i}")
    running = np.r_[0, np.cumsum(new)]
    tokens = running[batch.offsets[1:]] - running[batch.offsets[:-1]]
    i = _first(tokens > plan.max_num_batched_tokens)
    _refuse(plan, "max_num_batched_tokens", int(tokens[i]), f"step {i}")


Loop = Callable[..., int]

PARTS_A_THREAD: Final = 4
"""Parts per thread, so that a delayed thread does not delay the others."""

STEPS_A_PART: Final = 2**14
"""Minimum steps of a part: starting a thread takes as long."""


def _in_threads(loop: Callable[[slice], int], count: int, threads: int) -> int:
    """Run a loop over ``count`` steps in equal parts on some threads, and OR their codes."""
    threads = whole_number("threads", threads, error=BatchError)  # a NumPy integer would overflow below
    parts = min(PARTS_A_THREAD * threads, -(-count // STEPS_A_PART))
    if threads == 1 or parts < 2:
        return int(loop(slice(0, count)))
    cuts = [count * i // parts for i in range(parts + 1)]
    code = 0
    with ThreadPoolExecutor(min(threads, parts)) as pool:
        for met in pool.map(loop, [slice(a, b) for a, b in pairwise(cuts)]):
            code |= int(met)
    return code


def _answer(out: Any, shape: tuple[int, ...], arrays: list[Ints]) -> Floats:
    """Return ``out`` if it is valid."""
    fits = isinstance(out, np.ndarray) and out.dtype == np.float64 and out.shape == shape
    if not fits or not out.flags.c_contiguous or not out.flags.writeable:
        raise BatchError(f"out must be a writeable, C-contiguous float64 array of shape {shape}")
    for array in arrays:
        if np.may_share_memory(out, array):
            raise BatchError("out must not share memory with the sizes")
    answer: Floats = out
    return answer


def _common_shape(names: tuple[str, ...], arrays: list[Ints]) -> tuple[int, ...]:
    shape = arrays[0].shape
    for array in arrays:
        if array.shape != shape:
            return common_shape({n: a.shape for n, a in zip(names, arrays, strict=True)}, BatchError)
    return shape


def _equal_steps(
    plan: PlanArena, loop: Loop, names: tuple[str, ...], values: tuple[Any, ...], out: Any, threads: int
) -> float | Floats:
    """Run a loop over steps of equal requests, with integer arrays of any type."""
    arrays = [int_array(name, value) for name, value in zip(names, values, strict=True)]
    shape = _common_shape(names, arrays)
    answer = np.empty(shape) if out is None else _answer(out, shape, arrays)
    flat = answer.reshape(-1)
    native = as_loops_read(arrays, shape)

    def run(part: slice) -> int:
        if native is not None:
            is_all = part.stop - part.start == len(flat)
            return loop(*native, flat) if is_all else loop(*[a[part] for a in native], flat[part])
        code = 0
        for where, converted in chunks(arrays, part):
            code |= loop(*converted, flat[where])
        return code

    if _in_threads(run, len(flat), threads):
        for where, converted in chunks(arrays, slice(0, len(flat))):
            raise_sizes(plan, dict(zip(names, converted, strict=True)), where.start)
    if out is not None:
        return answer
    return answer if shape else float(flat[0])


def decode_us(
    plan: PlanArena, lines: Floats | None, batch_size: Any, kv_len: Any, out: Any, threads: int
) -> float | Floats:
    """Time equal decode steps, by the plan's tabulated decode lines if it has any."""

    def loop(batch: Ints, kv: Ints, out: Floats) -> int:
        if lines is None:
            return steps.general_decode_steps_us(plan.arena, batch, kv, out)
        line_at = np.empty(decode_lines.CHUNK, np.uint32)
        if not (IS_STREAMED and out.nbytes > STREAMED_BYTES and out.flags.aligned):
            return decode_lines.decode_steps_us(lines, batch, kv, line_at, out, None)
        lead = -out.ctypes.data % LINE_BYTES // out.itemsize
        code = decode_lines.decode_steps_us(lines, batch[:lead], kv[:lead], line_at, out[:lead], None)
        return code or decode_lines.decode_steps_us(lines, batch[lead:], kv[lead:], line_at, out[lead:], True)

    return _equal_steps(plan, loop, ("batch_size", "kv_len"), (batch_size, kv_len), out, threads)


def prefill_us(
    plan: PlanArena, new_tokens: Any, context_len: Any, batch_size: Any, out: Any, threads: int
) -> float | Floats:
    """Time steps of equal chunks."""
    names = ("new_tokens", "context_len", "batch_size")

    def loop(new: Ints, context: Ints, batch: Ints, out: Floats) -> int:
        return steps.prefill_steps_us(plan.arena, new, context, batch, out)

    return _equal_steps(plan, loop, names, (new_tokens, context_len, batch_size), out, threads)


def verify_us(
    plan: PlanArena, arena: Floats, batch_size: Any, kv_len: Any, tokens: Any, out: Any, threads: int
) -> float | Floats:
    """Time steps that verify draft tokens; ``arena`` is the plan's verification arena."""

    def loop(batch: Ints, kv: Ints, tokens: Ints, out: Floats) -> int:
        return verification.verify_steps_us(arena, batch, kv, tokens, out)

    return _equal_steps(
        plan, loop, ("batch_size", "kv_len", "tokens"), (batch_size, kv_len, tokens), out, threads
    )


def step_us(plan: PlanArena, batch: StepBatch, threads: int) -> Floats:
    """Time ragged steps."""
    out = np.empty(_checked(batch).num_steps)

    def loop(part: slice) -> int:
        offsets = batch.offsets[part.start : part.stop + 1]
        return ragged_steps.ragged_steps_us(
            plan.arena, batch.new_tokens, batch.context_len, offsets, out[part]
        )

    if _in_threads(loop, len(out), threads):
        raise_requests(plan, batch)
    return out


def one_step_us(plan: PlanArena, new_tokens: Any, context_len: Any) -> float:
    """Time one step of the requests in two arrays."""
    new, context = int_array("new_tokens", new_tokens), int_array("context_len", context_len)
    native = as_loops_read([new, context], new.shape)
    if native is not None and new.ndim == 1:
        out = np.empty(1)
        offsets = np.array([0, len(new)])
        if not ragged_steps.ragged_steps_us(plan.arena, native[0], native[1], offsets, out):
            return float(out[0])
    return float(step_us(plan, StepBatch(new, context, np.array([0, new.size])), 1)[0])


def run_batch(plan: TimedPlan, batch: StepBatch, threads: int) -> StepTimes:
    """Time ragged steps, with the origin and the components of each."""
    count = _checked(batch).num_steps
    out = np.empty(count)
    origin = np.empty(count, np.uint8)
    components = StepComponents(*(np.empty(count) for _ in StepComponents._fields))

    def loop(part: slice) -> int:
        offsets = batch.offsets[part.start : part.stop + 1]
        tokens, logits, decode, prefill, runtime = (component[part] for component in components)
        parts = (tokens, logits, decode, prefill, runtime)
        requests = (batch.new_tokens, batch.context_len, offsets)
        return ragged_steps.ragged_step_parts(plan.arena, *requests, parts, out[part], origin[part])

    if _in_threads(loop, count, threads):
        raise_requests(plan, batch)
    return StepTimes(out, origin, components, made_from=plan.made_from)


def _checked(batch: Any) -> StepBatch:
    if not isinstance(batch, StepBatch):
        raise BatchError(
            f"batch must be a StepBatch, got {type(batch).__name__}; use "
            "StepBatch.from_requests([[(new_tokens, context_len), ...], ...])"
        )
    return batch


def round_us(times_us: Floats) -> float:
    """Time of a round of micro-batches, us, from their times of shape (batches, stages).

    The longest of any stage for all batches and of any batch for all stages; 0 without batches.
    """
    if not times_us.size:
        return 0.0
    # summed in order, as in fastroof_step.h
    return float(max(times_us.cumsum(axis=0)[-1].max(), times_us.cumsum(axis=1)[:, -1].max()))
