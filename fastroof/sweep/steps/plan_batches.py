"""Decode steps of plans x lengths x batch sizes in arrays, and the best batch of each length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Flags, Floats, Longs
from fastroof.checks import is_number, shown, whole_number
from fastroof.errors import BatchError, PlanRangeError, SweepError
from fastroof.units import US_PER_MS

if TYPE_CHECKING:
    from fastroof.compiled.sweeps import PlanRows, Scratch
    from fastroof.plan import StepPlan

# `import fastroof.sweep` must not import numba: it is imported when steps are timed.


LIMITS: Final = ("batch grid", "memory", "tpot", "throughput")
"""What can limit the batch size of a row, in the order of the codes in :class:`BestBatches`."""

PARTS_A_THREAD: Final = 4
"""Parts per thread, so that a delayed thread does not delay the others."""

STEPS_A_PART: Final = 2**20
"""Minimum size of a part, a quarter of a millisecond: starting a thread takes as long."""


class BestBatches(NamedTuple):
    """Batch size with the most tokens/s within the limits, for each plan and length.

    Attributes
    ----------
    batch_size : ndarray of int64, shape (plans, lengths)
        0 if no batch size is within the limits.
    step_us : ndarray of float64, shape (plans, lengths)
        Time of that step, us; NaN if no batch size is within the limits.
    limited_by : ndarray of uint8, shape (plans, lengths)
        What prevents the next larger batch size, or the smallest if ``batch_size`` is 0: an index into
        :data:`fastroof.sweep.LIMITS`.
    over_memory, over_tpot : ndarray of int64, shape (plans, lengths)
        Number of batch sizes beyond KV memory, and number of the others beyond the time limit.
    """

    batch_size: Longs
    step_us: Floats
    limited_by: Flags
    over_memory: Longs
    over_tpot: Longs


def decode_times_us(
    plans: StepPlan | Iterable[StepPlan],
    batch_size: Any,
    kv_len: Any,
    *,
    out: Floats | None = None,
    threads: int = 1,
) -> Floats:
    """Return the time of every decode step of plans x lengths x batch sizes.

    Parameters
    ----------
    plans : StepPlan or iterable of StepPlan
        Plans to evaluate.
    batch_size, kv_len : int or array_like of int, one-dimensional
        The axes of the product, in any order; sorted ones are fastest.
    out : ndarray of float64, optional
        C-contiguous output array of the result's shape. Allocating a new array takes longer than the steps:
        reuse one for repeated calls.
    threads : int
        Number of threads; the result does not depend on it.

    Returns
    -------
    ndarray of float64, shape (plans, lengths, batch sizes)
        Microseconds per step: ``out[p, i, j]`` equals ``plans[p].decode_us(batch_size[j], kv_len[i])`` to the
        last bit.

    Raises
    ------
    PlanRangeError
        If a batch size is larger than a plan's maximum.
    BatchError
        If a size is not an integer of at least 1, or ``out`` has another shape or dtype.
    SweepError
        If ``plans`` or ``threads`` are invalid.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.sweep import decode_times_us
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> times_us = decode_times_us([plan], batch_size=[1, 8, 64], kv_len=[1024, 4096])
    >>> times_us.shape, bool(times_us[0, 1, 2] == plan.decode_us(64, 4096))
    ((1, 2, 3), True)
    """
    chosen = _plan_list(plans)
    batches, lengths = _axis("batch_size", batch_size), _axis("kv_len", kv_len)
    shape = (len(chosen), len(lengths), len(batches))
    if out is None:
        out = np.empty(shape)
    elif not (isinstance(out, np.ndarray) and out.dtype == np.float64 and out.shape == shape):
        raise BatchError(f"out must be a float64 array of shape {shape}: plans, kv_len, batch sizes")
    elif not (out.flags.c_contiguous and out.flags.writeable):
        raise BatchError("out must be C-contiguous and writeable")
    all_rows_us(chosen, [lengths] * len(chosen), batches, out.reshape(-1), threads)
    return out


def best_batches(
    plans: StepPlan | Iterable[StepPlan],
    batch_size: Any,
    kv_len: Any,
    *,
    tpot_ms: float | None = None,
    threads: int = 1,
) -> BestBatches:
    """Find the batch size with the most tokens/s within memory and a limit on the time per output token.

    Parameters
    ----------
    plans : StepPlan or iterable of StepPlan
        Plans to evaluate; ``plan.memory`` determines how many sequences fit.
    batch_size : array_like of int, one-dimensional
        Batch sizes to choose from, ascending.
    kv_len : int or array_like of int, one-dimensional
        Lengths to choose at, in any order; sorted ones are fastest.
    tpot_ms : float, optional
        Maximum time of a step, ms.
    threads : int
        Number of threads; the result does not depend on it.

    Returns
    -------
    BestBatches
        Arrays of shape (plans, lengths).

    Raises
    ------
    PlanRangeError, BatchError, SweepError
        As in :func:`decode_times_us`; also if ``batch_size`` is empty or not ascending, or the limit is not
        above 0.

    Notes
    -----
    Every step that fits in memory is evaluated; nothing is inferred from neighbours, since measured kernels
    are jagged. Ties go to the smaller batch.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.sweep import LIMITS, best_batches
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> best = best_batches(plan, range(1, 257), [1024, 65536])
    >>> LIMITS[best.limited_by[0, 1]]
    'memory'
    """
    chosen = _plan_list(plans)
    batches, lengths = _axis("batch_size", batch_size), _axis("kv_len", kv_len)
    if not len(batches) or (np.diff(batches) <= 0).any():
        raise BatchError(f"batch_size must be ascending and not empty, got {shown(batch_size)}")
    is_limit = tpot_ms is None or is_number(tpot_ms) or (type(tpot_ms) is float and tpot_ms == math.inf)
    limit_us = math.inf if tpot_ms is None else tpot_ms * US_PER_MS if is_limit else math.nan
    if not limit_us > 0:
        raise SweepError(f"tpot_ms must be above 0, got {shown(tpot_ms)}")
    best = best_rows(chosen, [lengths] * len(chosen), batches, float(limit_us), threads)
    return BestBatches._make(answer.reshape(len(chosen), len(lengths)) for answer in best)


def all_rows_us(
    plans: Sequence[StepPlan], kv_len: Sequence[Longs], batch_size: Longs, out: Floats, threads: int
) -> None:
    """Evaluate all batch sizes at each plan's lengths into ``out``: one row per length, plan by plan."""
    from fastroof.compiled import sweeps

    count = len(batch_size)

    def loop(rows: PlanRows, part: slice) -> int:
        return sweeps.decode_grid_us(
            rows, batch_size, _scratch(count), out[part.start * count : part.stop * count]
        )

    if _in_threads(loop, plans, kv_len, count, threads):
        _refuse(plans, kv_len, batch_size)


def best_rows(
    plans: Sequence[StepPlan], kv_len: Sequence[Longs], batch_size: Longs, limit_us: float, threads: int
) -> BestBatches:
    """Find the best of the ascending batch sizes at each plan's lengths, as flat arrays plan by plan."""
    from fastroof.compiled import sweeps

    num_rows = sum(map(len, kv_len))
    best = BestBatches(
        np.empty(num_rows, np.int64), np.empty(num_rows), np.empty(num_rows, np.uint8),
        np.empty(num_rows, np.int64), np.empty(num_rows, np.int64),
    )  # fmt: skip

    def loop(rows: PlanRows, part: slice) -> int:
        answers = sweeps.BestRows._make(answer[part] for answer in best)
        return sweeps.best_decode_batches(rows, batch_size, limit_us, _scratch(len(batch_size)), answers)

    if _in_threads(loop, plans, kv_len, len(batch_size), threads):
        _refuse(plans, kv_len, batch_size)
    return best


def _in_threads(
    loop: Callable[[PlanRows, slice], int],
    plans: Sequence[StepPlan],
    kv_len: Sequence[Longs],
    steps_a_row: int,
    threads: int,
) -> int:
    """Run a loop over parts of the rows in threads, and OR the returned codes."""
    threads = whole_number("threads", threads, error=SweepError)
    rows = _plan_rows(plans, kv_len)
    num_rows = len(rows.kv_len)
    parts = min(PARTS_A_THREAD * threads, num_rows, -(-num_rows * steps_a_row // STEPS_A_PART))
    if threads == 1 or parts < 2:
        return loop(rows, slice(0, num_rows))
    slices = [slice(num_rows * i // parts, num_rows * (i + 1) // parts) for i in range(parts)]
    code = 0
    with ThreadPoolExecutor(min(threads, parts)) as pool:
        for met in pool.map(lambda part: loop(_rows_part(rows, part), part), slices):
            code |= met
    return code


def _plan_rows(plans: Sequence[StepPlan], kv_len: Sequence[Longs]) -> PlanRows:
    from fastroof.compiled.sweeps import PlanRows, arena_address

    return PlanRows(
        np.array([arena_address(plan.arena) for plan in plans], np.int64),
        np.array([len(plan.arena) for plan in plans], np.int64),
        np.array([plan.memory.kv_room for plan in plans], np.int64).reshape(-1, 8),
        np.cumsum([0, *map(len, kv_len)]),
        np.concatenate([np.empty(0, np.int64), *kv_len]),
    )


def _rows_part(rows: PlanRows, part: slice) -> PlanRows:
    """Return a part of the rows, with the plans that have rows in it."""
    first = int(np.searchsorted(rows.offsets, part.start, side="right")) - 1
    stop = int(np.searchsorted(rows.offsets, part.stop))
    offsets = np.clip(rows.offsets[first : stop + 1], part.start, part.stop) - part.start
    return rows._replace(
        arena_at=rows.arena_at[first:stop],
        arena_size=rows.arena_size[first:stop],
        kv_room=rows.kv_room[first:stop],
        offsets=offsets,
        kv_len=rows.kv_len[part],
    )


def _scratch(num_batches: int) -> Scratch:
    from fastroof.compiled.sweeps import Scratch

    floats = [np.empty(num_batches) for _ in range(4)]
    longs = [np.empty(num_batches, np.int64) for _ in range(3)]
    return Scratch._make([*floats, *longs])


def _plan_list(plans: Any) -> list[StepPlan]:
    from fastroof.plan import StepPlan

    try:
        listed = [plans] if isinstance(plans, StepPlan) else list(plans)
    except TypeError:
        raise SweepError(f"plans must be StepPlans from compile_plan, got {shown(plans)}") from None
    for plan in listed:
        if not isinstance(plan, StepPlan):
            raise SweepError(f"plans must be StepPlans from compile_plan, got {type(plan).__name__}")
    return listed


def _axis(name: str, value: Any) -> Longs:
    from fastroof.run.batch import int_array

    sizes = int_array(name, value)
    if sizes.ndim > 1:
        raise BatchError(f"{name} must be one-dimensional, got shape {sizes.shape}")
    # a contiguous, writeable copy that does not alias the output
    return np.array(sizes, np.int64, ndmin=1)


def _refuse(plans: Sequence[StepPlan], kv_len: Sequence[Longs], batch_size: Longs) -> None:
    """Raise for the size that is out of range, with the valid range."""
    from fastroof.run.evaluate import raise_sizes

    largest = int(batch_size.max(initial=0))
    for plan, lengths in zip(plans, kv_len, strict=True):
        if largest > min(plan.max_num_batched_tokens, plan.max_num_seqs):
            raise PlanRangeError(
                f"{plan!r} is smaller than the largest batch, {largest}: "
                f"compile_plan(..., max_num_batched_tokens={largest}, max_num_seqs={largest})"
            )
        raise_sizes(plan, {"batch_size": batch_size, "kv_len": np.ones_like(batch_size)}, 0)
        raise_sizes(plan, {"batch_size": np.ones_like(lengths), "kv_len": lengths}, 0)
