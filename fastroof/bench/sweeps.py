"""Sweeps and the plans they take: a cartesian grid written out, reduced to the best batch, 10,000 plans."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice, product
from typing import Any, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.bench.inputs import sweep_axes
from fastroof.bench.numpy_steps import NumpySteps
from fastroof.bench.workload import Baseline, Setup, Workload
from fastroof.errors import FastroofError, PlanError
from fastroof.models import ModelSpec, load_model, model_names
from fastroof.models.attention import GroupedQueryAttention
from fastroof.plan import StepPlan, compile_plan, compile_plans
from fastroof.plan.curves import TableCurves
from fastroof.sweep import best_batches, decode_times_us

__all__ = ["many_plans", "numpy_best", "sweep_best", "sweep_plans", "sweep_written"]

MAX_BATCH: Final = 512
NUMPY_PLANS: Final = 4
TP: Final = (1, 2, 4, 8)
DTYPES: Final = ("bf16", "fp8")


def _requests(setup: Setup, count: int) -> list[dict[str, Any]]:
    """Arguments of ``count`` distinct plans: presets and splits that compile, at growing depths."""
    curves = TableCurves(setup.tables)
    fitting: list[dict[str, Any]] = []
    dense = [name for name in model_names() if _is_dense(load_model(name))]
    for name, tp, dtype in product(dense, TP, DTYPES):
        request: dict[str, Any] = {
            "model": load_model(name).with_full_attention(),
            "tp": tp,
            "dtype": dtype,
            "max_tokens": MAX_BATCH,
            "max_seqs": MAX_BATCH,
        }
        try:
            compile_plan(gpu=setup.gpu, tables=setup.tables, curves=curves, **request)
        except FastroofError:
            continue
        fitting.append(request)
        if len(fitting) == count:
            break
    if not fitting:
        raise PlanError(f"the tables of {setup.gpu.name} serve none of fastroof's models: nothing to sweep")
    deeper = (
        {**request, "model": _deeper(request["model"], more)} for more in range(count) for request in fitting
    )
    return list(islice(deeper, count))


def _is_dense(model: ModelSpec) -> bool:
    """Whether all layers are of grouped heads and an MLP without experts."""
    return all(
        isinstance(kind.attention, GroupedQueryAttention) and not kind.mlp.has_experts for kind in model.kinds
    )


def _deeper(model: ModelSpec, more: int) -> ModelSpec:
    group = model.layers[0]
    return replace(model, layers=(replace(group, count=group.count + more), *model.layers[1:]))


def sweep_plans(setup: Setup) -> list[StepPlan]:
    """Compile a hundred plans, presets and splits."""
    return list(compile_plans(_requests(setup, setup.size(100, 4)), setup.gpu, setup.tables))


def sweep_written(setup: Setup) -> Workload:
    """Build every step of 100 plans x 128 lengths x 256 batch sizes, written out."""
    from fastroof.bench.stream import stream_out

    plans, (batch, kv_len) = sweep_plans(setup), sweep_axes(setup)
    out = np.empty((len(plans), len(kv_len), len(batch)))
    streamed = np.empty(out.size)
    few = [plan for plan in plans[:NUMPY_PLANS] if NumpySteps.serves(plan, setup.tables)]
    baselines = [Baseline("stream", partial(stream_out, 1.0, streamed), out.size, None)]
    if len(few) == len(plans[:NUMPY_PLANS]):
        numpy = [NumpySteps(plan, setup.tables) for plan in few]
        written = np.empty((len(few), *out.shape[1:]))

        def broadcast() -> Floats:
            for steps, answer in zip(numpy, written, strict=True):
                answer[:] = steps.grid_us(batch, kv_len).T
            return written

        baselines.append(Baseline("NumPy", broadcast, written.size))
    title = f"{len(plans)} plans x {len(batch)} batches x {len(kv_len)} kv, written"
    return Workload(
        "sweep", title, "step", out.size,
        lambda: decode_times_us(plans, batch, kv_len, out=out, threads=setup.threads),
        out.itemsize, tuple(baselines),
    )  # fmt: skip


def sweep_best(setup: Setup) -> Workload:
    """Build the same grid, of which the best batch of each plan and length is kept."""
    plans, (batch, kv_len) = sweep_plans(setup), sweep_axes(setup)
    baselines = []
    few = [plan for plan in plans[:NUMPY_PLANS] if NumpySteps.serves(plan, setup.tables)]
    if few:
        numpy = [NumpySteps(plan, setup.tables) for plan in few]
        count = len(few) * len(batch) * len(kv_len)
        baselines.append(Baseline("NumPy", partial(numpy_best, few, numpy, batch, kv_len), count, None))
    title = f"{len(plans)} plans x {len(batch)} batches x {len(kv_len)} kv, best batch kept"
    return Workload(
        "sweep-best", title, "step", len(plans) * len(batch) * len(kv_len),
        lambda: best_batches(plans, batch, kv_len, threads=setup.threads), 0.0, tuple(baselines),
    )  # fmt: skip


def numpy_best(plans: list[StepPlan], numpy: list[NumpySteps], batch: Any, kv_len: Any) -> list[Any]:
    """For each plan and length the batch with the most tokens a second that memory has room for."""
    best = []
    for plan, steps in zip(plans, numpy, strict=True):
        rate = batch[:, None] / steps.grid_us(batch, kv_len)
        rate[batch[:, None] > plan.memory.max_sequences(kv_len)] = 0.0
        best.append(rate.argmax(axis=0))
    return best


def many_plans(setup: Setup) -> Workload:
    """Build thousands of plans of a sweep, from curves that they share."""
    count = setup.size(10_000, 20)
    requests = _requests(setup, count)
    return Workload(
        "plans", f"{count:,} plans up to {MAX_BATCH} tokens, shared curves", "plan", count,
        lambda: compile_plans(requests, setup.gpu, setup.tables),
    )  # fmt: skip
