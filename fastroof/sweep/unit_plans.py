"""The plan of a unit, and what its rows take from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fastroof.arrays import Bools, Flags
from fastroof.errors import GpuError, MissingTableError, PlanError
from fastroof.models import Layout, load_model
from fastroof.plan import StepPlan, compile_plan
from fastroof.sweep.kind import GpuTables
from fastroof.sweep.spec import SweepSpec
from fastroof.sweep.units import NO_ROUTING, PlanKey


class Lost(NamedTuple):
    """Why a plan or a deployment cannot be evaluated: the reason it is counted under, and the message."""

    reason: str
    message: str


def unit_plan(
    spec: SweepSpec, key: PlanKey, tables: GpuTables, *, max_num_batched_tokens: int, max_num_seqs: int
) -> StepPlan | Lost:
    """Compile the plan of a unit, or return why it cannot be compiled."""
    model = load_model(key.model)
    name = f"{model.name} on {tables.gpu.name} {key.words}"
    try:
        model.check_layout(Layout(key.tp, key.pp, key.dp, key.ep))
    except PlanError as error:
        return Lost("tp", str(error))
    try:
        return compile_plan(
            model, tables.gpu, tables.tables, dtype=key.dtype, kv_dtype=key.kv_dtype, engine=key.engine,
            max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs, curves=tables.curves,
            **spec.plan_options, **key.layout_options,
        )  # fmt: skip
    except (MissingTableError, PlanError, GpuError) as error:
        return lost(name, error)


def lost(name: str, error: Exception) -> Lost:
    """Return what a plan is lost for: its tables, or the plan itself."""
    return Lost("tables" if isinstance(error, MissingTableError) else "plan", f"{name}: {error}")


def plan_columns(plan: StepPlan) -> dict[str, Any]:
    """Return the columns that are the same in all rows of a plan, by name."""
    return {
        "model": plan.model.name,
        "gpu": plan.gpu.name,
        "tp": plan.tp,
        "pp": plan.layout.pp,
        "dp": plan.layout.dp,
        "ep": plan.layout.ep,
        "routing": plan.execution.routing if plan.model.has_experts else NO_ROUTING,
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        "engine": plan.engine,
        "kernels": plan.kernels,
        "weight_bytes": plan.memory.weight_bytes,
        "max_kv_tokens": plan.memory.max_kv_tokens,
    }


def named_column(codes: Flags, names: tuple[str, ...], missing: Bools | None = None) -> pa.Array:
    """Return a text column from codes; null where missing."""
    indices = pa.array(codes.astype(np.int8), mask=missing)
    return pa.DictionaryArray.from_arrays(indices, pa.array(names)).dictionary_decode()
