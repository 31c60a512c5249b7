"""Evaluating a unit of a sweep over steps: a plan and lengths in, rows of steps out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from fastroof.arrays import Bools, Flags, Floats, Longs
from fastroof.arrow import arrow_schema
from fastroof.checks import is_number, shown, whole_number
from fastroof.columns import ORIGINS
from fastroof.compiled.steps import decode_origins
from fastroof.config import load_gpu
from fastroof.errors import BatchError, GpuError, MissingTableError, PlanError, PlanRangeError, SweepError
from fastroof.models import Layout, load_model
from fastroof.plan import StepPlan, compile_plan
from fastroof.sweep.kind import GpuTables
from fastroof.sweep.steps.spec import BestStep, StepSpec, step_columns
from fastroof.sweep.units import NO_ROUTING, PlanKey, UnitResult, WorkUnit
from fastroof.units import US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from fastroof.compiled.sweeps import PlanRows, Scratch


# `import fastroof.sweep` needs no numba; whatever needs it is imported when steps are timed.


LIMITS: Final = ("batch grid", "memory", "tpot", "throughput")
"""What can limit the batch size of a row, in the order of the codes in :class:`BestBatches`."""

PARTS_A_THREAD: Final = 4
"""Parts, so that a thread that the machine holds up does not hold up the others."""

STEPS_A_PART: Final = 2**20
"""No part is smaller, a quarter of a millisecond: starting a thread takes as long."""


class BestBatches(NamedTuple):
    """For each plan and length the batch size with the most tokens a second within the limits.

    Attributes
    ----------
    batch_size : ndarray of int64, shape (plans, lengths)
        0 if no batch size is within the limits.
    step_us : ndarray of float64, shape (plans, lengths)
        Time of that step, us; NaN if there is none.
    limited_by : ndarray of uint8, shape (plans, lengths)
        What stops the next larger batch size, or the smallest where ``batch_size`` is 0: the place of its
        name in :data:`fastroof.sweep.LIMITS`.
    over_memory, over_tpot : ndarray of int64, shape (plans, lengths)
        How many batch sizes are beyond KV memory, and how many of the others beyond the time limit.
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
    """Time every decode step of plans x lengths x batch sizes.

    Parameters
    ----------
    plans : StepPlan or iterable of StepPlan
        What is timed.
    batch_size, kv_len : int or array_like of int, one-dimensional
        The axes of the product, in any order; it is fastest where they rise.
    out : ndarray of float64, optional
        Where to put the answer; of its shape, and C-contiguous. A new array costs more than the steps do:
        pass the last one again where many are timed.
    threads : int
        Threads to share the rows over; any number gives the same bits.

    Returns
    -------
    ndarray of float64, shape (plans, lengths, batch sizes)
        Microseconds a step: ``out[p, i, j]`` is ``plans[p].decode_us(batch_size[j], kv_len[i])`` to the
        last bit.

    Raises
    ------
    PlanRangeError
        If a batch size is larger than a plan.
    BatchError
        If a size is not an integer of at least 1, or ``out`` does not fit.
    SweepError
        If ``plans`` or ``threads`` are something else.

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
        raise BatchError(f"out must be a float64 array of shape {shape}, a row a plan and kv_len")
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
    """Find the batch size that gives the most tokens a second within memory and a time per output token.

    Parameters
    ----------
    plans : StepPlan or iterable of StepPlan
        What is timed; ``plan.memory`` says how many sequences fit.
    batch_size : array_like of int, one-dimensional
        Batch sizes to choose from, rising.
    kv_len : int or array_like of int, one-dimensional
        Lengths to choose at, in any order; it is fastest where they rise.
    tpot_ms : float, optional
        Longest step allowed, ms.
    threads : int
        Threads to share the rows over; any number gives the same answer.

    Returns
    -------
    BestBatches
        Arrays of shape (plans, lengths).

    Raises
    ------
    PlanRangeError, BatchError, SweepError
        As :func:`decode_times_us` does; also if ``batch_size`` is empty or does not rise, or the limit is
        not above 0.

    Notes
    -----
    Every step that memory has room for is timed; nothing is inferred from a neighbour, since measured
    kernels are jagged. Of equal rates the smaller batch is taken.

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
        raise BatchError(f"batch_size must hold at least one size and rise, got {shown(batch_size)}")
    is_limit = tpot_ms is None or is_number(tpot_ms) or (type(tpot_ms) is float and tpot_ms == math.inf)
    limit_us = math.inf if tpot_ms is None else tpot_ms * US_PER_MS if is_limit else math.nan
    if not limit_us > 0:
        raise SweepError(f"tpot_ms must be above 0, got {shown(tpot_ms)}")
    best = best_rows(chosen, [lengths] * len(chosen), batches, float(limit_us), threads)
    return BestBatches._make(answer.reshape(len(chosen), len(lengths)) for answer in best)


def all_rows_us(
    plans: Sequence[StepPlan], kv_len: Sequence[Longs], batch_size: Longs, out: Floats, threads: int
) -> None:
    """Time all batch sizes at the lengths of each plan, a row a length, plan after plan."""
    from fastroof.compiled import sweeps

    count = len(batch_size)

    def loop(some: PlanRows, part: slice) -> int:
        return sweeps.decode_grid_us(
            some, batch_size, _scratch(count), out[part.start * count : part.stop * count]
        )

    if _in_threads(loop, plans, kv_len, count, threads):
        _refuse(plans, kv_len, batch_size)


def best_rows(
    plans: Sequence[StepPlan], kv_len: Sequence[Longs], batch_size: Longs, limit_us: float, threads: int
) -> BestBatches:
    """Find the best of the batch sizes, which rise, at the lengths of each plan: flat, plan after plan."""
    from fastroof.compiled import sweeps

    num_rows = sum(map(len, kv_len))
    best = BestBatches(
        np.empty(num_rows, np.int64), np.empty(num_rows), np.empty(num_rows, np.uint8),
        np.empty(num_rows, np.int64), np.empty(num_rows, np.int64),
    )  # fmt: skip

    def loop(some: PlanRows, part: slice) -> int:
        answers = sweeps.BestRows._make(answer[part] for answer in best)
        return sweeps.best_decode_batches(some, batch_size, limit_us, _scratch(len(batch_size)), answers)

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
    """Run a loop over parts of the rows, by some threads, and OR their codes."""
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
        np.array([plan.memory.kv_room for plan in plans], np.int64).reshape(-1, 5),
        np.cumsum([0, *map(len, kv_len)]),
        np.concatenate([np.empty(0, np.int64), *kv_len]),
    )


def _rows_part(rows: PlanRows, part: slice) -> PlanRows:
    """A part of the rows, with the plans that have any there."""
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
        raise SweepError(f"plans must be StepPlans, as of compile_plan, got {shown(plans)}") from None
    for plan in listed:
        if not isinstance(plan, StepPlan):
            raise SweepError(f"plans must be StepPlans, as of compile_plan, got {type(plan).__name__}")
    return listed


def _axis(name: str, value: Any) -> Longs:
    from fastroof.run.batch import int_array

    sizes = int_array(name, value)
    if sizes.ndim > 1:
        raise BatchError(f"{name} must be one-dimensional, as an axis, got shape {sizes.shape}")
    # a copy that is contiguous, writeable and apart from the answer
    return np.array(sizes, np.int64, ndmin=1)


def _refuse(plans: Sequence[StepPlan], kv_len: Sequence[Longs], batch_size: Longs) -> None:
    """Name the size that cannot be timed, and the valid range."""
    from fastroof.run.evaluate import raise_sizes

    largest = int(batch_size.max(initial=0))
    for plan, lengths in zip(plans, kv_len, strict=True):
        if largest > min(plan.max_tokens, plan.max_seqs):
            raise PlanRangeError(
                f"{plan!r} is smaller than the largest batch, {largest}: "
                f"compile_plan(..., max_tokens={largest}, max_seqs={largest})"
            )
        raise_sizes(plan, {"batch_size": batch_size, "kv_len": np.ones_like(batch_size)}, 0)
        raise_sizes(plan, {"batch_size": np.ones_like(lengths), "kv_len": lengths}, 0)


SKIPPED: Final = {
    "context": "beyond the model's context",
    "tp": "cannot be split",
    "tables": "no measured table",
    "plan": "no plan",
    "memory": "weights do not fit in memory",
}
"""Words for what is left out whole, by reason."""


def evaluate_steps(spec: StepSpec, unit: WorkUnit, tables: GpuTables) -> UnitResult:
    """Time a unit's steps, and keep the best batch of each length, or all of them."""
    rows = _StepRows(spec)
    model = load_model(unit.plan.model)
    lengths = np.array([kv_len for kv_len in spec.kv_len if kv_len <= model.max_position], np.int64)
    skipped = []
    if len(lengths) < len(spec.kv_len) and unit.start == 0:
        above = (
            f"{len(spec.kv_len) - len(lengths)} of {len(spec.kv_len)} kv_len are above {model.max_position}"
        )
        skipped.append((SKIPPED["context"], f"{model.name}: {above}"))
    if not len(lengths):
        return UnitResult(rows.nothing(), {}, tuple(skipped))
    plan = _plan(spec, unit.plan, tables)
    if isinstance(plan, tuple):
        if unit.start == 0:
            skipped.append(plan)
        return UnitResult(rows.nothing(), {}, tuple(skipped))
    rows.compile_loops(plan)
    began = time.perf_counter()
    batch, counts = rows.evaluate(plan, lengths[unit.start : unit.stop])
    best: tuple[dict[str, Any], ...] = ()
    if unit.is_last:
        step = rows.best_step(plan, int(lengths[np.argmin(np.abs(lengths - spec.report_kv_len))]))
        best = (asdict(step),)
    evaluate_s = time.perf_counter() - began - rows.errors_s
    return UnitResult(batch, counts, tuple(skipped), best, evaluate_s)


def _plan(spec: StepSpec, key: PlanKey, tables: GpuTables) -> StepPlan | tuple[str, str]:
    """Compile a unit's plan, or return why there is none."""
    model = load_model(key.model)
    name = f"{model.name} {key.words}"
    largest = spec.batch_size[-1]
    try:
        model.check_layout(Layout(key.tp, key.pp, key.dp, key.ep))
    except PlanError as error:
        return SKIPPED["tp"], str(error)
    try:
        plan = compile_plan(
            model, load_gpu(key.gpu), tables.tables, dtype=key.dtype, kv_dtype=key.kv_dtype,
            engine=key.runtime, method=spec.method, max_tokens=largest, max_seqs=largest,
            curves=tables.curves, allow_modelled=spec.allow_modelled, **key.layout_options,
        )  # fmt: skip
    except MissingTableError as error:
        return SKIPPED["tables"], f"{name}: {error}"
    except (PlanError, GpuError) as error:
        return SKIPPED["plan"], f"{name}: {error}"
    return plan if plan.memory.max_kv_tokens else (SKIPPED["memory"], name)


class _StepRows:
    """Steps of one spec, timed and laid out as rows."""

    def __init__(self, spec: StepSpec) -> None:
        self.batch_size = np.array(spec.batch_size)
        self.limit_us = math.inf if spec.tpot_ms is None else spec.tpot_ms * US_PER_MS
        self.keep = spec.keep
        self.with_error = spec.with_error
        # errors are opt-in: the rate of a sweep is that of its steps
        self.errors_s = 0.0
        self.schema = arrow_schema(step_columns(spec.keep), {})

    def nothing(self) -> pa.RecordBatch:
        """No rows."""
        return pa.RecordBatch.from_pylist([], schema=self.schema)

    def compile_loops(self, plan: StepPlan) -> None:
        """Have the loops compiled, on no work, so that the time of evaluating is that alone."""
        nothing = np.zeros(0, np.int64)
        if self.keep == "all":
            all_rows_us([plan], [nothing], self.batch_size, np.empty(0), 1)
        best_rows([plan], [nothing], self.batch_size, self.limit_us, 1)
        _origins(plan, nothing, nothing)

    def evaluate(self, plan: StepPlan, kv_len: Longs) -> tuple[pa.RecordBatch, dict[str, int]]:
        """Time every step of some lengths: rows and counts."""
        rows_of = self._best if self.keep == "best" else self._all
        rows, over_memory, over_tpot = rows_of(plan, kv_len)
        evaluated = len(kv_len) * len(self.batch_size)
        return rows, {"evaluated": evaluated, "memory": over_memory, "tpot": over_tpot}

    def best_step(self, plan: StepPlan, kv_len: int) -> BestStep:
        """Find the best step at one length, for the summary."""
        best = best_rows([plan], [np.array([kv_len])], self.batch_size, self.limit_us, 1)
        origin = _origins(plan, np.array([kv_len]), best.batch_size)[0]
        error = float(self._errors(plan, np.array([kv_len]), best.batch_size)[0])
        batch, step_us = int(best.batch_size[0]), float(best.step_us[0])
        return _best_step(plan, kv_len, batch, step_us, LIMITS[best.limited_by[0]], ORIGINS[origin], error)

    def _errors(self, plan: StepPlan, kv_len: Longs, batch_size: Longs) -> Floats:
        """Relative standard error of each row's step; NaN if unknown or not requested."""
        error = np.full(len(kv_len), np.nan)
        some = batch_size > 0
        if self.with_error:
            began = time.perf_counter()
            error[some] = plan.decode_error(batch_size[some], kv_len[some])
            self.errors_s += time.perf_counter() - began
        return error

    def _best(self, plan: StepPlan, kv_len: Longs) -> tuple[pa.RecordBatch, int, int]:
        best = best_rows([plan], [kv_len], self.batch_size, self.limit_us, 1)
        columns = self._columns(plan, kv_len, best.batch_size, best.step_us)
        columns["limited_by"] = _names(best.limited_by, LIMITS)
        return self._rows(plan, columns), int(best.over_memory.sum()), int(best.over_tpot.sum())

    def _all(self, plan: StepPlan, kv_len: Longs) -> tuple[pa.RecordBatch, int, int]:
        repeated = np.repeat(kv_len, len(self.batch_size))
        batch_size = np.tile(self.batch_size, len(kv_len))
        step_us = np.empty(len(batch_size))
        all_rows_us([plan], [kv_len], self.batch_size, step_us, 1)
        over_memory = batch_size > plan.memory.max_sequences(repeated)
        over_tpot = ~over_memory & ~(step_us <= self.limit_us)
        columns = self._columns(plan, repeated, batch_size, step_us)
        columns["exceeds"] = _names(
            over_tpot.astype(np.uint8), ("memory", "tpot"), ~(over_memory | over_tpot)
        )
        return self._rows(plan, columns), int(over_memory.sum()), int(over_tpot.sum())

    def _columns(
        self, plan: StepPlan, kv_len: Longs, batch_size: Longs, step_us: Floats
    ) -> dict[str, pa.Array]:
        nothing = batch_size == 0
        rate = _tokens_per_s(plan, kv_len, batch_size, step_us)
        return {
            "kv_len": pa.array(kv_len),
            "batch_size": pa.array(batch_size),
            "step_us": pa.array(step_us, mask=nothing),
            "tokens_per_s": pa.array(rate, mask=nothing),
            "tokens_per_s_per_gpu": pa.array(rate / plan.layout.world_size, mask=nothing),
            "origin": _names(_origins(plan, kv_len, batch_size), ORIGINS, nothing),
            "relative_error": pa.array(self._errors(plan, kv_len, batch_size), from_pandas=True),
        }

    def _rows(self, plan: StepPlan, columns: dict[str, pa.Array]) -> pa.RecordBatch:
        constants: dict[str, Any] = {
            "model": plan.model.name,
            "gpu": plan.gpu.name,
            "tp": plan.tp,
            "pp": plan.layout.pp,
            "dp": plan.layout.dp,
            "ep": plan.layout.ep,
            "routing": plan.execution.routing if plan.model.has_experts else NO_ROUTING,
            "dtype": plan.dtype,
            "kv_dtype": plan.kv_dtype,
            "runtime": plan.runtime,
            "kernels": plan.kernels,
            "weight_bytes": plan.memory.weight_bytes,
            "max_kv_tokens": plan.memory.max_kv_tokens,
        }
        count = len(columns["kv_len"])
        arrays = [
            columns[f.name] if f.name in columns else pa.repeat(pa.scalar(constants[f.name], f.type), count)
            for f in self.schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _origins(plan: StepPlan, kv_len: Longs, batch_size: Longs) -> Flags:
    """How each row's step is made."""
    out = np.empty(len(kv_len), np.uint8)
    decode_origins(plan.arena, batch_size, kv_len, out)
    return out


def _tokens_per_s(plan: StepPlan, kv_len: Any, batch_size: Any, step_us: Any) -> Any:
    """Output tokens of all ranks, and of as many batches as stages at the pace of the slowest."""
    if plan.layout.pp > 1:
        step_us = plan.bottleneck.decode_us(np.maximum(batch_size, 1), kv_len)
    return batch_size * plan.batches_in_flight / step_us * US_PER_S


def _best_step(
    plan: StepPlan,
    kv_len: int,
    batch_size: int,
    step_us: float,
    limited_by: str,
    origin: str,
    relative_error: float,
) -> BestStep:
    is_any = batch_size > 0
    rate = _tokens_per_s(plan, kv_len, batch_size, step_us)
    return BestStep(
        model=plan.model.name,
        tp=plan.tp,
        pp=plan.layout.pp,
        dp=plan.layout.dp,
        ep=plan.layout.ep,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        kv_len=kv_len,
        batch_size=batch_size,
        step_us=step_us if is_any else None,
        tokens_per_s=rate if is_any else None,
        tokens_per_s_per_gpu=rate / plan.layout.world_size if is_any else None,
        limited_by=limited_by,
        origin=origin if is_any else None,
        relative_error=None if math.isnan(relative_error) else relative_error,
    )


def _names(codes: Flags, names: tuple[str, ...], missing: Bools | None = None) -> pa.Array:
    """Text column of coded names; null where missing."""
    indices = pa.array(codes.astype(np.int8), mask=missing)
    return pa.DictionaryArray.from_arrays(indices, pa.array(names)).dictionary_decode()
