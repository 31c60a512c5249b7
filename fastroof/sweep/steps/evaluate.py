"""Evaluation of a unit of a sweep over steps: a plan and lengths in, rows of steps out."""

from __future__ import annotations

import math
import time
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fastroof.arrays import Floats, Longs
from fastroof.arrow import arrow_schema
from fastroof.columns import ORIGINS
from fastroof.models import load_model
from fastroof.plan import StepPlan
from fastroof.plan.step_error import decode_origins
from fastroof.sweep.kind import GpuTables
from fastroof.sweep.steps.plan_batches import LIMITS, BestBatches, all_rows_us, best_rows
from fastroof.sweep.steps.spec import BestStep, StepSpec, step_columns
from fastroof.sweep.unit_plans import Lost, named_column, plan_columns, unit_plan
from fastroof.sweep.units import UnitResult, WorkUnit
from fastroof.units import US_PER_MS, US_PER_S

SKIPPED: Final = {
    "context": "beyond the model's context",
    "tp": "cannot be split",
    "tables": "no measured table",
    "plan": "no plan",
    "memory": "weights do not fit in memory",
}
"""Descriptions of the reasons why models or plans are skipped."""


def evaluate_steps(spec: StepSpec, unit: WorkUnit, tables: GpuTables) -> UnitResult:
    """Evaluate a unit's steps, and return the best batch of each length, or all."""
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
    largest = spec.batch_size[-1]
    plan = unit_plan(spec, unit.plan, tables, max_num_batched_tokens=largest, max_num_seqs=largest)
    if not isinstance(plan, Lost) and not plan.memory.max_kv_tokens:
        plan = Lost("memory", f"{model.name} on {plan.gpu.name} {unit.plan.words}")
    if isinstance(plan, Lost):
        if unit.start == 0:
            skipped.append((SKIPPED[plan.reason], plan.message))
        return UnitResult(rows.nothing(), {}, tuple(skipped))
    rows.compile_loops(plan)
    began = time.perf_counter()
    batch, counts = rows.evaluate(plan, lengths[unit.start : unit.stop])
    best: tuple[dict[str, Any], ...] = ()
    if unit.is_last:
        best = (rows.best_step(plan, lengths[[np.argmin(np.abs(lengths - spec.report_kv_len))]]),)
    evaluate_s = time.perf_counter() - began - rows.errors_s
    return UnitResult(batch, counts, tuple(skipped), best, evaluate_s)


class _StepRows:
    """Evaluator of one spec's steps, with its options as arrays."""

    def __init__(self, spec: StepSpec) -> None:
        self.batch_size = np.array(spec.batch_size)
        self.limit_us = math.inf if spec.tpot_ms is None else spec.tpot_ms * US_PER_MS
        self.keep = spec.keep
        self.with_error = spec.with_error
        # time of the opt-in errors, which does not count as evaluation
        self.errors_s = 0.0
        self.schema = arrow_schema(step_columns(spec.keep), {})

    def nothing(self) -> pa.RecordBatch:
        """Return an empty batch."""
        return pa.RecordBatch.from_pylist([], schema=self.schema)

    def compile_loops(self, plan: StepPlan) -> None:
        """Compile the loops on empty input, so that compilation is not part of the evaluation time."""
        nothing = np.zeros(0, np.int64)
        if self.keep == "all":
            all_rows_us([plan], [nothing], self.batch_size, np.empty(0), 1)
        best_rows([plan], [nothing], self.batch_size, self.limit_us, 1)
        decode_origins(plan, nothing, nothing)

    def evaluate(self, plan: StepPlan, kv_len: Longs) -> tuple[pa.RecordBatch, dict[str, int]]:
        """Evaluate all steps at some lengths; return rows and counts."""
        rows_of = self._best if self.keep == "best" else self._all
        rows, over_memory, over_tpot = rows_of(plan, kv_len)
        evaluated = len(kv_len) * len(self.batch_size)
        return rows, {"evaluated": evaluated, "memory": over_memory, "tpot": over_tpot}

    def best_step(self, plan: StepPlan, kv_len: Longs) -> dict[str, Any]:
        """Return the best step at one length as fields of :class:`BestStep`, for the summary."""
        columns = {**plan_columns(plan), **self._best_columns(plan, kv_len)[0]}
        values = {name: columns[name] for name in BestStep.__dataclass_fields__ if name in columns}
        return {name: of[0].as_py() if isinstance(of, pa.Array) else of for name, of in values.items()}

    def _errors(self, plan: StepPlan, kv_len: Longs, batch_size: Longs) -> Floats:
        """Return the relative standard error of each row's step; NaN if unknown or not requested."""
        error = np.full(len(kv_len), np.nan)
        has_decodes = batch_size > 0
        if self.with_error:
            began = time.perf_counter()
            error[has_decodes] = plan.decode_error(batch_size[has_decodes], kv_len[has_decodes])
            self.errors_s += time.perf_counter() - began
        return error

    def _best_columns(self, plan: StepPlan, kv_len: Longs) -> tuple[dict[str, pa.Array], BestBatches]:
        best = best_rows([plan], [kv_len], self.batch_size, self.limit_us, 1)
        columns = self._columns(plan, kv_len, best.batch_size, best.step_us)
        columns["limited_by"] = named_column(best.limited_by, LIMITS)
        return columns, best

    def _best(self, plan: StepPlan, kv_len: Longs) -> tuple[pa.RecordBatch, int, int]:
        columns, best = self._best_columns(plan, kv_len)
        return self._rows(plan, columns), int(best.over_memory.sum()), int(best.over_tpot.sum())

    def _all(self, plan: StepPlan, kv_len: Longs) -> tuple[pa.RecordBatch, int, int]:
        repeated = np.repeat(kv_len, len(self.batch_size))
        batch_size = np.tile(self.batch_size, len(kv_len))
        step_us = np.empty(len(batch_size))
        all_rows_us([plan], [kv_len], self.batch_size, step_us, 1)
        over_memory = batch_size > plan.memory.max_sequences(repeated)
        over_tpot = ~over_memory & ~(step_us <= self.limit_us)
        columns = self._columns(plan, repeated, batch_size, step_us)
        columns["exceeds"] = named_column(
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
            "origin": named_column(decode_origins(plan, batch_size, kv_len), ORIGINS, nothing),
            "relative_error": pa.array(self._errors(plan, kv_len, batch_size), from_pandas=True),
        }

    def _rows(self, plan: StepPlan, columns: dict[str, pa.Array]) -> pa.RecordBatch:
        constants = plan_columns(plan)
        count = len(columns["kv_len"])
        arrays = [
            columns[f.name] if f.name in columns else pa.repeat(pa.scalar(constants[f.name], f.type), count)
            for f in self.schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _tokens_per_s(plan: StepPlan, kv_len: Any, batch_size: Any, step_us: Any) -> Any:
    """Return the output rate of all ranks, with one batch in flight per stage, paced by the slowest stage."""
    if plan.layout.pp > 1:
        step_us = plan.bottleneck.decode_us(np.maximum(batch_size, 1), kv_len)
    return batch_size * plan.batches_in_flight / step_us * US_PER_S
