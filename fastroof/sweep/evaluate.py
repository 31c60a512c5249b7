"""Evaluating a plan over its grid: the compiled loops' wrapper, from sizes to rows."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastroof.columns import ORIGINS
from fastroof.compiled.steps import decode_origins
from fastroof.compiled.sweeps import best_decode_batches
from fastroof.errors import PlanRangeError
from fastroof.plan import StepPlan
from fastroof.sweep.spec import SweepSpec
from fastroof.sweep.summary import BestStep
from fastroof.sweep.units import Unit
from fastroof.units import US_PER_MS, US_PER_S

__all__ = ["Evaluated", "Evaluator"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LIMITS: Final = ("batch grid", "memory", "tpot", "throughput")
"""Names of the ``LIMITED_BY_`` codes, in their order."""


class Evaluated(NamedTuple):
    """Rows of one unit of work, and what was counted on the way.

    Attributes
    ----------
    rows : pyarrow.RecordBatch
        Of the results' schema.
    evaluations : int
        Steps that were timed.
    over_memory, over_tpot : int
        Of those, the ones beyond memory, and of the others the ones beyond the TPOT limit.
    """

    rows: pa.RecordBatch
    evaluations: int
    over_memory: int
    over_tpot: int


class _Best(NamedTuple):
    """For each length the best batch, 0 where there is none, and its step."""

    batch_size: Ints
    step_us: Floats
    limited_by: npt.NDArray[np.uint8]
    over_memory: int
    over_tpot: int


class Evaluator:
    """Evaluates units of one spec; holds nothing that a unit changes, so threads may share it.

    Parameters
    ----------
    spec : SweepSpec
        What to sweep.
    schema : pyarrow.Schema
        Of the rows.
    """

    def __init__(self, spec: SweepSpec, schema: pa.Schema) -> None:
        self.batch_size = np.array(spec.batch_size)
        self.limit_us = math.inf if spec.tpot_limit_ms is None else spec.tpot_limit_ms * US_PER_MS
        self.keep = spec.keep
        self.schema = schema

    def compile_loops(self, plan: StepPlan) -> None:
        """Have the loops compiled, on no work, so that the time of evaluating is that alone."""
        nothing = np.zeros(0, np.int64)
        self._best(plan, nothing)
        self._origins(plan, nothing, nothing)

    def evaluate(self, unit: Unit) -> Evaluated:
        """Time every step of a unit."""
        return self._evaluate_best(unit) if self.keep == "best" else self._evaluate_all(unit)

    def best_step(self, plan: StepPlan, kv_len: int) -> BestStep:
        """Find the best step at one length, for the summary."""
        best = self._best(plan, np.array([kv_len]))
        found = bool(best.batch_size[0])
        step_us = float(best.step_us[0])
        rate = float(best.batch_size[0]) / step_us * US_PER_S
        origin = int(self._origins(plan, best.batch_size, np.array([kv_len]))[0])
        return BestStep(
            model=plan.model.name,
            tp=plan.tp,
            dtype=plan.dtype,
            kv_dtype=plan.kv_dtype,
            kv_len=kv_len,
            batch_size=int(best.batch_size[0]),
            step_us=step_us if found else None,
            tokens_per_s=rate if found else None,
            tokens_per_s_per_gpu=rate / plan.tp if found else None,
            limited_by=LIMITS[best.limited_by[0]],
            origin=ORIGINS[origin] if found else None,
        )

    def _evaluate_best(self, unit: Unit) -> Evaluated:
        best = self._best(unit.plan, unit.kv_len)
        columns = self._step_columns(unit.plan, unit.kv_len, best.batch_size, best.step_us)
        columns["limited_by"] = _names(best.limited_by, LIMITS)
        rows = self._rows(unit.plan, columns)
        evaluations = len(unit.kv_len) * len(self.batch_size)
        return Evaluated(rows, evaluations, best.over_memory, best.over_tpot)

    def _evaluate_all(self, unit: Unit) -> Evaluated:
        plan = unit.plan
        kv_len = np.repeat(unit.kv_len, len(self.batch_size))
        batch_size = np.tile(self.batch_size, len(unit.kv_len))
        step_us = plan.decode_us(batch_size, kv_len)
        over_memory = batch_size * kv_len > plan.memory.max_kv_tokens
        over_tpot = ~over_memory & ~(step_us <= self.limit_us)
        columns = self._step_columns(plan, kv_len, batch_size, step_us)
        columns["exceeds"] = _names(
            over_tpot.astype(np.uint8), ("memory", "tpot"), ~(over_memory | over_tpot)
        )
        rows = self._rows(plan, columns)
        return Evaluated(rows, len(kv_len), int(over_memory.sum()), int(over_tpot.sum()))

    def _best(self, plan: StepPlan, kv_len: Ints) -> _Best:
        row_kv_len = np.empty(len(self.batch_size), np.int64)
        row_us = np.empty(len(self.batch_size))
        at = np.empty(len(kv_len), np.int64)
        step_us = np.empty(len(kv_len))
        limited_by = np.empty(len(kv_len), np.uint8)
        exceeds = np.zeros(2, np.int64)
        code = best_decode_batches(
            plan.arena, self.batch_size, kv_len, plan.memory.max_kv_tokens, self.limit_us,
            row_kv_len, row_us, at, step_us, limited_by, exceeds,
        )  # fmt: skip
        if code:
            raise PlanRangeError(
                f"{plan!r} is smaller than the sweep, whose largest batch is {self.batch_size[-1]}: "
                f"compile_plan(..., max_tokens={self.batch_size[-1]}, max_seqs={self.batch_size[-1]})"
            )
        batch_size = np.where(at < 0, 0, self.batch_size[at])
        return _Best(batch_size, step_us, limited_by, int(exceeds[0]), int(exceeds[1]))

    def _origins(self, plan: StepPlan, batch_size: Ints, kv_len: Ints) -> npt.NDArray[np.uint8]:
        out = np.empty(len(kv_len), np.uint8)
        decode_origins(plan.arena, batch_size, kv_len, out)
        return out

    def _step_columns(
        self, plan: StepPlan, kv_len: Ints, batch_size: Ints, step_us: Floats
    ) -> dict[str, pa.Array]:
        nothing = batch_size == 0
        rate = batch_size / step_us * US_PER_S
        return {
            "kv_len": pa.array(kv_len),
            "batch_size": pa.array(batch_size),
            "step_us": pa.array(step_us, mask=nothing),
            "tokens_per_s": pa.array(rate, mask=nothing),
            "tokens_per_s_per_gpu": pa.array(rate / plan.tp, mask=nothing),
            "origin": _names(self._origins(plan, batch_size, kv_len), ORIGINS, nothing),
        }

    def _rows(self, plan: StepPlan, columns: dict[str, pa.Array]) -> pa.RecordBatch:
        memory = plan.memory
        constants: dict[str, Any] = {
            "model": plan.model.name,
            "gpu": plan.gpu.name,
            "tp": plan.tp,
            "dtype": plan.dtype,
            "kv_dtype": plan.kv_dtype,
            "runtime": plan.runtime,
            "weight_bytes": memory.weight_bytes,
            "max_kv_tokens": memory.max_kv_tokens,
        }
        size = len(columns["kv_len"])
        arrays = [
            columns[f.name] if f.name in columns else pa.repeat(pa.scalar(constants[f.name], f.type), size)
            for f in self.schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _names(
    codes: npt.NDArray[np.uint8], names: tuple[str, ...], missing: npt.NDArray[np.bool_] | None = None
) -> pa.Array:
    """Text column of coded names; null where missing."""
    indices = pa.array(codes.astype(np.int8), mask=missing)
    return pa.DictionaryArray.from_arrays(indices, pa.array(names)).dictionary_decode()
