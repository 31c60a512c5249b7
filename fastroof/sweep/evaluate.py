"""Evaluating plans over their grids: from sizes to rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastroof.columns import ORIGINS
from fastroof.compiled.steps import decode_origins
from fastroof.plan import StepPlan
from fastroof.sweep.cartesian import LIMITS, best_rows, grid_rows_us
from fastroof.sweep.spec import SweepSpec
from fastroof.sweep.summary import BestStep
from fastroof.sweep.units import Unit
from fastroof.units import US_PER_MS, US_PER_S

__all__ = ["Evaluated", "Evaluator"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

ROWS_A_THREAD: Final = 2**16
"""A thread is started for the origins of no fewer rows: starting it takes as long."""


class Evaluated(NamedTuple):
    """Rows of some units of work, and what was counted on the way.

    Attributes
    ----------
    rows : pyarrow.RecordBatch
        Of the results' schema.
    evaluations : int
        Steps that were timed, or found to be beyond memory.
    over_memory, over_tpot : int
        Of those, the ones beyond memory, and of the others the ones beyond the TPOT limit.
    """

    rows: pa.RecordBatch
    evaluations: int
    over_memory: int
    over_tpot: int


class Evaluator:
    """Evaluates units of one spec.

    Parameters
    ----------
    spec : SweepSpec
        What to sweep.
    schema : pyarrow.Schema
        Of the rows.
    threads : int
        Threads to share the rows over.
    """

    def __init__(self, spec: SweepSpec, schema: pa.Schema, threads: int = 1) -> None:
        self.batch_size = np.array(spec.batch_size)
        self.limit_us = math.inf if spec.tpot_limit_ms is None else spec.tpot_limit_ms * US_PER_MS
        self.keep = spec.keep
        self.with_error = spec.with_error
        self.schema = schema
        self.threads = threads

    def compile_loops(self, plan: StepPlan) -> None:
        """Have the loops compiled, on no work, so that the time of evaluating is that alone."""
        nothing = [np.zeros(0, np.int64)]
        if self.keep == "all":
            grid_rows_us([plan], nothing, self.batch_size, np.empty(0), 1)
        best_rows([plan], nothing, self.batch_size, self.limit_us, 1)
        self._origins([plan], nothing, nothing)

    def evaluate(self, units: Sequence[Unit]) -> Evaluated:
        """Time every step of some units."""
        plans, kv_len = [unit.plan for unit in units], [unit.kv_len for unit in units]
        return (
            self._evaluate_best(plans, kv_len) if self.keep == "best" else self._evaluate_all(plans, kv_len)
        )

    def best_steps(self, plans: Sequence[StepPlan], kv_len: Sequence[int]) -> list[BestStep]:
        """Find the best step of each plan at one length, for the summary."""
        lengths = [np.array([length]) for length in kv_len]
        best = best_rows(plans, lengths, self.batch_size, self.limit_us, self.threads)
        origins = self._origins(plans, lengths, best.batch_size[:, None])
        errors = self._errors(plans, lengths, best.batch_size[:, None])
        return [
            _best_step(plan, length, int(batch), float(step_us), LIMITS[limit], ORIGINS[origin], float(error))
            for plan, length, batch, step_us, limit, origin, error in zip(
                plans, kv_len, best.batch_size, best.step_us, best.limited_by, origins, errors, strict=True
            )
        ]

    def _evaluate_best(self, plans: Sequence[StepPlan], kv_len: Sequence[Ints]) -> Evaluated:
        best = best_rows(plans, kv_len, self.batch_size, self.limit_us, self.threads)
        bounds = np.cumsum([len(lengths) for lengths in kv_len])[:-1]
        columns = self._step_columns(
            plans, kv_len, np.split(best.batch_size, bounds), best.batch_size, best.step_us
        )
        columns["limited_by"] = _names(best.limited_by, LIMITS)
        evaluations = len(best.batch_size) * len(self.batch_size)
        rows = self._rows(plans, kv_len, columns)
        return Evaluated(rows, evaluations, int(best.over_memory.sum()), int(best.over_tpot.sum()))

    def _evaluate_all(self, plans: Sequence[StepPlan], kv_len: Sequence[Ints]) -> Evaluated:
        count = len(self.batch_size)
        repeated = [np.repeat(lengths, count) for lengths in kv_len]
        tiled = [np.tile(self.batch_size, len(lengths)) for lengths in kv_len]
        batch_size = np.concatenate(tiled)
        step_us = np.empty(len(batch_size))
        grid_rows_us(plans, kv_len, self.batch_size, step_us, self.threads)
        max_kv_tokens = np.repeat([plan.memory.max_kv_tokens for plan in plans], [len(t) for t in tiled])
        over_memory = batch_size * np.concatenate(repeated) > max_kv_tokens
        over_tpot = ~over_memory & ~(step_us <= self.limit_us)
        columns = self._step_columns(plans, repeated, tiled, batch_size, step_us)
        columns["exceeds"] = _names(
            over_tpot.astype(np.uint8), ("memory", "tpot"), ~(over_memory | over_tpot)
        )
        rows = self._rows(plans, repeated, columns)
        return Evaluated(rows, len(step_us), int(over_memory.sum()), int(over_tpot.sum()))

    def _origins(
        self, plans: Sequence[StepPlan], kv_len: Sequence[Ints], batch_size: Iterable[Ints]
    ) -> npt.NDArray[np.uint8]:
        """How each row's step is made, plan after plan."""

        def origins(plan: StepPlan, lengths: Ints, batches: Ints) -> npt.NDArray[np.uint8]:
            out = np.empty(len(lengths), np.uint8)
            decode_origins(plan.arena, batches, lengths, out)
            return out

        nothing = np.empty(0, np.uint8)
        threads = min(self.threads, len(plans), sum(map(len, kv_len)) // ROWS_A_THREAD)
        if threads < 2:
            return np.concatenate([nothing, *map(origins, plans, kv_len, batch_size)])
        with ThreadPoolExecutor(threads) as pool:
            return np.concatenate([nothing, *pool.map(origins, plans, kv_len, batch_size)])

    def _errors(
        self, plans: Sequence[StepPlan], kv_len: Sequence[Ints], batch_size: Iterable[Ints]
    ) -> Floats:
        """Relative standard error of each row's step, plan after plan; NaN where there is none or unasked."""
        found = [np.empty(0)]
        for plan, lengths, batches in zip(plans, kv_len, batch_size, strict=True):
            error = np.full(len(lengths), np.nan)
            some = batches > 0
            if self.with_error:
                error[some] = plan.decode_error(batches[some], lengths[some])
            found.append(error)
        return np.concatenate(found)

    def _step_columns(
        self,
        plans: Sequence[StepPlan],
        kv_len: Sequence[Ints],
        batch_sizes: Sequence[Ints],
        batch_size: Ints,
        step_us: Floats,
    ) -> dict[str, pa.Array]:
        nothing = batch_size == 0
        rate = batch_size / step_us * US_PER_S
        tp = np.repeat([plan.tp for plan in plans], [len(lengths) for lengths in kv_len])
        return {
            "kv_len": pa.array(np.concatenate(kv_len)),
            "batch_size": pa.array(batch_size),
            "step_us": pa.array(step_us, mask=nothing),
            "tokens_per_s": pa.array(rate, mask=nothing),
            "tokens_per_s_per_gpu": pa.array(rate / tp, mask=nothing),
            "origin": _names(self._origins(plans, kv_len, batch_sizes), ORIGINS, nothing),
            "relative_error": pa.array(self._errors(plans, kv_len, batch_sizes), from_pandas=True),
        }

    def _rows(
        self, plans: Sequence[StepPlan], kv_len: Sequence[Ints], columns: dict[str, pa.Array]
    ) -> pa.RecordBatch:
        plan_of_row = pa.array(np.repeat(np.arange(len(plans)), [len(lengths) for lengths in kv_len]))
        memory = [plan.memory for plan in plans]
        constants: dict[str, list[Any]] = {
            "model": [plan.model.name for plan in plans],
            "gpu": [plan.gpu.name for plan in plans],
            "tp": [plan.tp for plan in plans],
            "dtype": [plan.dtype for plan in plans],
            "kv_dtype": [plan.kv_dtype for plan in plans],
            "runtime": [plan.runtime for plan in plans],
            "weight_bytes": [m.weight_bytes for m in memory],
            "max_kv_tokens": [m.max_kv_tokens for m in memory],
        }
        arrays = [
            columns[f.name] if f.name in columns else pa.array(constants[f.name], f.type).take(plan_of_row)
            for f in self.schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _best_step(
    plan: StepPlan,
    kv_len: int,
    batch_size: int,
    step_us: float,
    limited_by: str,
    origin: str,
    relative_error: float,
) -> BestStep:
    found = batch_size > 0
    rate = batch_size / step_us * US_PER_S
    return BestStep(
        model=plan.model.name,
        tp=plan.tp,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        kv_len=kv_len,
        batch_size=batch_size,
        step_us=step_us if found else None,
        tokens_per_s=rate if found else None,
        tokens_per_s_per_gpu=rate / plan.tp if found else None,
        limited_by=limited_by,
        origin=origin if found else None,
        relative_error=None if math.isnan(relative_error) else relative_error,
    )


def _names(
    codes: npt.NDArray[np.uint8], names: tuple[str, ...], missing: npt.NDArray[np.bool_] | None = None
) -> pa.Array:
    """Text column of coded names; null where missing."""
    indices = pa.array(codes.astype(np.int8), mask=missing)
    return pa.DictionaryArray.from_arrays(indices, pa.array(names)).dictionary_decode()
