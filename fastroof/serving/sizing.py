"""How large a batch or a context may be: decode steps asked backwards, from their time to their size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.checks import shown, whole_number
from fastroof.compiled import sizing as loops
from fastroof.compiled.steps import MAX_KV_LEN
from fastroof.errors import BatchError
from fastroof.given_arrays import number_array
from fastroof.plan.given_plan import check_plan
from fastroof.run.arrays import int_array
from fastroof.run.size_errors import raise_sizes
from fastroof.units import US_PER_MS

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.plan.gpu_memory import PlanMemory

__all__ = ["largest_batch", "largest_context", "positive"]


def positive(name: str, value: Any) -> Floats:
    """Numbers above 0, inf among them, as an array of float64."""
    array = number_array(value)
    if array is None or not (array > 0).all():
        raise BatchError(f"{name} must hold numbers above 0, got {shown(value)}")
    return array.astype(np.float64)


def _together(name: str, sizes: Any, tpot_ms: Any) -> tuple[tuple[int, ...], Longs, Floats]:
    """Sizes as int64 and limits in us, flat and of one shape."""
    # a limit that is no longer finite in us is none
    with np.errstate(over="ignore"):
        both: list[Any] = [int_array(name, sizes), positive("tpot_ms", tpot_ms) * US_PER_MS]
    try:
        integers, limits = np.broadcast_arrays(*both)
    except ValueError:
        raise BatchError(
            f"shapes do not broadcast: {name} {both[0].shape}, tpot_ms {both[1].shape}"
        ) from None
    flat = integers.astype(np.int64).reshape(-1)
    # copied: numba asks whether it may write, which a view that was broadcast answers with a warning
    return integers.shape, flat, np.array(limits).reshape(-1)


def _memory(plan: StepPlan, max_seqs: int | None) -> PlanMemory:
    """One GPU's memory where so many requests run at once at most."""
    if max_seqs is None:
        return plan.memory
    return plan.memory_of(max_seqs=whole_number("max_seqs", max_seqs, most=2**31 - 1, error=BatchError))


def largest_batch(plan: StepPlan, kv_len: Any, tpot_ms: Any = np.inf, *, max_seqs: int | None = None) -> Any:
    """Largest number of requests that decode together within memory and a time per output token.

    Parameters
    ----------
    plan : StepPlan
        The model on its GPUs.
    kv_len : int or array_like of int
        Tokens that each request attends to, the new one included. Broadcast, as is the next.
    tpot_ms : number or array_like
        Longest step, ms; inf for memory alone.
    max_seqs : int, optional
        Requests that the engine is started for; by default, and where they are more, the engine's own. For
        fewer, some engines reserve less memory, see ``plan.memory_of``.

    Returns
    -------
    int or ndarray of int64
        The largest ``b`` up to ``max_seqs``, ``plan.max_seqs`` and ``plan.max_tokens`` whose KV cache fits,
        ``b <= plan.memory.max_sequences(kv_len)``, and whose step keeps the limit,
        ``plan.decode_us(b, kv_len) <= tpot_ms * 1000``; 0 where there is none. Smaller batches may
        be slower: measured kernels are jagged.

    Raises
    ------
    BatchError
        If a length is not an integer of at least 1, or a limit not a number above 0.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.serving.sizing import largest_batch
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"))
    >>> batch_size = largest_batch(plan, 4096, tpot_ms=10)
    >>> bool(plan.decode_us(batch_size, 4096) <= 10_000 < plan.decode_us(batch_size + 1, 4096))
    True
    """
    check_plan("plan", plan, BatchError)
    shape, lengths, limits_us = _together("kv_len", kv_len, tpot_ms)
    raise_sizes(plan, {"batch_size": np.ones_like(lengths), "kv_len": lengths}, 0)
    order = np.argsort(lengths, kind="stable")
    memory = _memory(plan, max_seqs)
    batches = np.arange(1, min(plan.max_tokens, plan.max_seqs, max_seqs or plan.max_seqs) + 1)
    largest = np.empty_like(lengths)
    loops.largest_batches(
        plan.arena,
        memory.kv_room,
        batches,
        lengths[order],
        limits_us[order],
        loops.new_scratch(len(batches)),
        largest,
    )
    answer = np.empty_like(lengths)
    answer[order] = largest
    return answer.reshape(shape) if shape else int(answer[0])


def largest_context(
    plan: StepPlan,
    batch_size: Any,
    tpot_ms: Any = np.inf,
    *,
    max_kv_len: int | None = None,
    max_seqs: int | None = None,
) -> Any:
    """Largest context that a number of requests can have within memory and a time per output token.

    Parameters
    ----------
    plan : StepPlan
        The model on its GPUs.
    batch_size : int or array_like of int
        Requests that decode together. Broadcast, as is the next.
    tpot_ms : number or array_like
        Longest step, ms; inf for memory alone.
    max_kv_len : int, optional
        Longest sequence to look at; by default ``plan.model.max_position``.
    max_seqs : int, optional
        Requests that the engine is started for; by default, and where they are more, the engine's own. For
        fewer, some engines reserve less memory, see ``plan.memory_of``.

    Returns
    -------
    int or ndarray of int64
        The largest ``kv_len`` whose KV cache fits, ``batch_size <= plan.memory.max_sequences(kv_len)``, and
        whose step keeps the limit, ``plan.decode_us(batch_size, kv_len) <= tpot_ms * 1000``; 0 where
        there is none. Shorter contexts may be slower: measured kernels are jagged.

    Raises
    ------
    PlanRangeError
        If a batch size is larger than the plan.
    BatchError
        If a size is not an integer of at least 1, or a limit not a number above 0.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.serving.sizing import largest_context
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"))
    >>> kv_len = largest_context(plan, 16, tpot_ms=10)
    >>> bool(plan.decode_us(16, kv_len) <= 10_000 < plan.decode_us(16, kv_len + 1))
    True
    """
    check_plan("plan", plan, BatchError)
    longest = plan.model.max_position if max_kv_len is None else max_kv_len
    longest = whole_number("max_kv_len", longest, most=MAX_KV_LEN, error=BatchError)
    shape, batches, limits_us = _together("batch_size", batch_size, tpot_ms)
    raise_sizes(plan, {"batch_size": batches, "kv_len": np.ones_like(batches)}, 0)
    answer = np.empty_like(batches)
    memory = _memory(plan, max_seqs)
    loops.largest_contexts(plan.arena, memory.kv_room, longest, batches, limits_us, answer)
    return answer.reshape(shape) if shape else int(answer[0])
