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
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.errors import BatchError, PlanRangeError
from fastroof.run.batch import (
    StepBatch,
    StepComponents,
    StepTimes,
    TimedPlan,
    as_loops_read,
    chunks,
    int_array,
)

if TYPE_CHECKING:
    from fastroof.plan.step_plan import StepPlan


def _first(wrong: Any) -> int:
    return int(np.flatnonzero(wrong)[0])


def _refuse_tokens(plan: TimedPlan, tokens: int, where: str) -> None:
    raise PlanRangeError(
        f"{where} has {tokens} tokens, the plan times up to {plan.max_tokens}: "
        f"compile_plan(..., max_tokens={tokens}) or more"
    )


def _refuse_seqs(plan: TimedPlan, seqs: int, where: str) -> None:
    raise PlanRangeError(
        f"{where} has {seqs} sequences, the plan times up to {plan.max_seqs}: "
        f"compile_plan(..., max_seqs={seqs}) or more"
    )


def raise_sizes(plan: TimedPlan, sizes: dict[str, Ints], before: int) -> None:
    """Say what is wrong with the first bad size of equal steps, if any is, and what would do."""
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
            f"kv_len counts the tokens that a step verifies, {int(new[i])}, and must be at least as many, "
            f"got {int(sizes['kv_len'][i])} at position {before + i}"
        )
    too_long = (new > limit) | (context > limit - np.minimum(new, limit))
    if too_long.any():
        i = _first(too_long)
        what = "kv_len" if "kv_len" in sizes else "context_len + new_tokens"
        kv_len = int(context[i]) + int(new[i])
        raise BatchError(f"{what} must be at most {limit}, got {kv_len} at position {before + i}")
    if (seqs > plan.max_seqs).any():
        i = _first(seqs > plan.max_seqs)
        _refuse_seqs(plan, int(seqs[i]), f"the step at position {before + i}")
    tokens = seqs * np.minimum(new, limit)
    if (tokens > plan.max_tokens).any():
        i = _first(tokens > plan.max_tokens)
        _refuse_tokens(plan, int(tokens[i]), f"the step at position {before + i}")


def raise_requests(plan: TimedPlan, batch: StepBatch) -> None:
    """Find the first bad request or step of a ragged batch, and say what would do."""
    StepBatch(batch.new_tokens, batch.context_len, batch.offsets)  # someone may have written to its arrays
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
    if (seqs > plan.max_seqs).any():
        i = _first(seqs > plan.max_seqs)
        _refuse_seqs(plan, int(seqs[i]), f"step {i}")
    running = np.r_[0, np.cumsum(new)]
    tokens = running[batch.offsets[1:]] - running[batch.offsets[:-1]]
    i = _first(tokens > plan.max_tokens)
    _refuse_tokens(plan, int(tokens[i]), f"step {i}")


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


def round_us(times_us: Floats) -> float:
    """Time of a round: no less than any stage needs for all batches, nor than any batch for all stages."""
    if not times_us.size:
        return 0.0
    # added up in their order, as fastroof_step.h's function does
    return float(max(times_us.cumsum(axis=0)[-1].max(), times_us.cumsum(axis=1)[:, -1].max()))
