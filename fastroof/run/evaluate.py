"""Running batches through a plan: check at the edge, then the loops."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.arrays import Floats, Ints
from fastroof.checks import whole_number
from fastroof.compiled import decode_lines, ragged_steps, steps, verification
from fastroof.errors import BatchError
from fastroof.run.arrays import as_loops_read, chunks, int_array
from fastroof.run.batch import StepBatch, StepComponents, StepTimes
from fastroof.run.size_errors import raise_requests, raise_sizes
from fastroof.run.timed_plan import TimedPlan

if TYPE_CHECKING:
    from fastroof.plan.step_plan import StepPlan

__all__ = ["decode_us", "one_step_us", "prefill_us", "run_batch", "step_us", "verify_us"]

Loop = Callable[..., int]

PARTS_A_THREAD: Final = 4
"""Parts, so that a thread that the machine holds up does not hold up the others."""

STEPS_A_PART: Final = 2**14
"""No part is smaller: starting a thread takes as long."""


def _in_threads(loop: Callable[[slice], int], count: int, threads: int) -> int:
    """Run a loop over ``count`` steps in equal parts, by some threads, and OR their codes."""
    threads = whole_number("threads", threads, error=BatchError)  # NumPy's own would overflow below
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
    """Where the times go: ``out`` if it will do."""
    fits = isinstance(out, np.ndarray) and out.dtype == np.float64 and out.shape == shape
    if not fits or not out.flags.c_contiguous or not out.flags.writeable:
        raise BatchError(f"out must be a writeable, C-contiguous float64 array of shape {shape}")
    for array in arrays:
        if np.may_share_memory(out, array):
            raise BatchError("out must not share memory with the sizes, which are read while it is written")
    answer: Floats = out
    return answer


def _common_shape(names: tuple[str, ...], arrays: list[Ints]) -> tuple[int, ...]:
    shape = arrays[0].shape
    for array in arrays:
        if array.shape != shape:
            try:
                return np.broadcast_shapes(*[a.shape for a in arrays])
            except ValueError:
                shapes = ", ".join(f"{n} {a.shape}" for n, a in zip(names, arrays, strict=True))
                raise BatchError(f"shapes do not broadcast: {shapes}") from None
    return shape


def _equal_steps(
    plan: StepPlan, loop: Loop, names: tuple[str, ...], values: tuple[Any, ...], out: Any, threads: int
) -> float | Floats:
    """Time steps of equal requests: a loop over integers of any kind."""
    arrays = [int_array(name, value) for name, value in zip(names, values, strict=True)]
    shape = _common_shape(names, arrays)
    answer = np.empty(shape) if out is None else _answer(out, shape, arrays)
    flat = answer.reshape(-1)
    native = as_loops_read(arrays, shape)

    def run(part: slice) -> int:
        if native is not None:
            whole = part.stop - part.start == len(flat)
            return loop(*native, flat) if whole else loop(*[a[part] for a in native], flat[part])
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


def decode_us(plan: StepPlan, batch_size: Any, kv_len: Any, out: Any, threads: int) -> float | Floats:
    """Answer ``plan.decode_us``."""
    lines = plan.decode_lines

    def loop(batch: Ints, kv: Ints, out: Floats) -> int:
        if lines is None:
            return steps.general_decode_steps_us(plan.arena, batch, kv, out)
        line_at = np.empty(decode_lines.CHUNK, np.uint32)
        return decode_lines.decode_steps_us(lines, batch, kv, line_at, out)

    return _equal_steps(plan, loop, ("batch_size", "kv_len"), (batch_size, kv_len), out, threads)


def prefill_us(
    plan: StepPlan, new_tokens: Any, context_len: Any, batch_size: Any, out: Any, threads: int
) -> float | Floats:
    """Answer ``plan.prefill_us``."""
    names = ("new_tokens", "context_len", "batch_size")

    def loop(new: Ints, context: Ints, batch: Ints, out: Floats) -> int:
        return steps.prefill_steps_us(plan.arena, new, context, batch, out)

    return _equal_steps(plan, loop, names, (new_tokens, context_len, batch_size), out, threads)


def verify_us(
    plan: StepPlan, batch_size: Any, kv_len: Any, tokens: Any, out: Any, threads: int
) -> float | Floats:
    """Answer ``plan.verify_us``."""

    def loop(batch: Ints, kv: Ints, tokens: Ints, out: Floats) -> int:
        return verification.verify_steps_us(plan.verification_arena, batch, kv, tokens, out)

    return _equal_steps(
        plan, loop, ("batch_size", "kv_len", "tokens"), (batch_size, kv_len, tokens), out, threads
    )


def step_us(plan: StepPlan, batch: StepBatch, threads: int) -> Floats:
    """Answer ``plan.step_us``."""
    out = np.empty(_checked(batch).num_steps)

    def loop(part: slice) -> int:
        offsets = batch.offsets[part.start : part.stop + 1]
        return ragged_steps.ragged_steps_us(
            plan.arena, batch.new_tokens, batch.context_len, offsets, out[part]
        )

    if _in_threads(loop, len(out), threads):
        raise_requests(plan, batch)
    return out


def one_step_us(plan: StepPlan, new_tokens: Any, context_len: Any) -> float:
    """Answer ``plan.step_scalar``: one step, a request an element."""
    new, context = int_array("new_tokens", new_tokens), int_array("context_len", context_len)
    native = as_loops_read([new, context], new.shape)
    if native is not None and new.ndim == 1:
        out = np.empty(1)
        whole = np.array([0, len(new)])
        if not ragged_steps.ragged_steps_us(plan.arena, native[0], native[1], whole, out):
            return float(out[0])
    return float(step_us(plan, StepBatch(new, context, np.array([0, new.size])), 1)[0])


def run_batch(plan: TimedPlan, batch: StepBatch, threads: int) -> StepTimes:
    """Answer ``plan.run``."""
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
            f"a StepBatch is needed, got {type(batch).__name__}: "
            "StepBatch.from_requests([[(new_tokens, context_len), ...], ...])"
        )
    return batch
