"""Sweeps and the plans they take: a cartesian grid written out, reduced to the best batch, 10,000 plans."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fastroof.bench.inputs import sweep_axes
from fastroof.bench.numpy_steps import NumpySteps
from fastroof.bench.workload import Baseline, Setup, Workload
from fastroof.config import load_model, model_names
from fastroof.errors import FastroofError, PlanError
from fastroof.plan import StepPlan, compile_plan, compile_plans
from fastroof.plan.table_curves import TableCurves
from fastroof.sweep import run_sweep

__all__ = ["many_plans", "numpy_best", "sweep_best", "sweep_written"]

MAX_BATCH: Final = 512
NUMPY_PLANS: Final = 4
TP: Final = (1, 2, 4, 8)
DTYPES: Final = ("bf16", "fp8")


def _requests(setup: Setup, count: int) -> list[dict[str, Any]]:
    """Arguments of ``count`` distinct plans: presets and splits that compile, at growing depths."""
    curves = TableCurves(setup.tables)
    fitting: list[dict[str, Any]] = []
    for name, tp, dtype in product(model_names(), TP, DTYPES):
        request: dict[str, Any] = {
            "model": replace(load_model(name), sliding_window=None),
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
        {**request, "model": replace(request["model"], num_layers=request["model"].num_layers + more)}
        for more in range(count)
        for request in fitting
    )
    return list(islice(deeper, count))


def _plans(setup: Setup) -> list[StepPlan]:
    return list(compile_plans(_requests(setup, setup.size(100, 4)), setup.tables, setup.gpu))


def sweep_written(setup: Setup) -> Workload:
    """Build every step of 100 plans x 256 batch sizes x 128 lengths, written out."""
    from fastroof.bench.stream import stream_out

    plans, (batch, kv_len) = _plans(setup), sweep_axes(setup)
    out = np.empty((len(plans), len(batch), len(kv_len)))
    streamed = np.empty(out.size)

    def run() -> npt.NDArray[np.float64]:
        for plan, answer in zip(plans, out, strict=True):
            plan.decode_us(batch[:, None], kv_len, out=answer, threads=setup.threads)
        return out

    few = [plan for plan in plans[:NUMPY_PLANS] if NumpySteps.serves(plan, setup.tables)]
    baselines = [Baseline("stream", partial(stream_out, 1.0, streamed), out.size, None)]
    if len(few) == len(plans[:NUMPY_PLANS]):
        numpy = [NumpySteps(plan, setup.tables) for plan in few]
        written = np.empty((len(few), *out.shape[1:]))

        def broadcast() -> npt.NDArray[np.float64]:
            for steps, answer in zip(numpy, written, strict=True):
                answer[:] = steps.grid_us(batch, kv_len)
            return written

        baselines.append(Baseline("NumPy", broadcast, written.size))
    title = f"{len(plans)} plans x {len(batch)} batches x {len(kv_len)} kv, written"
    return Workload("sweep", title, "step", out.size, run, out.itemsize, tuple(baselines))


def sweep_best(setup: Setup) -> Workload:
    """Build a sweep that keeps the best batch of each plan and length, without reading and writing files."""
    batch, kv_len = sweep_axes(setup)
    spec = {
        "gpu": setup.gpu.name,
        "tables": setup.folder,
        "models": list(model_names()[: setup.size(len(model_names()), 1)]),
        "tp": list(TP),
        "dtype": list(DTYPES),
        "batch_size": batch.tolist(),
        "kv_len": kv_len.tolist(),
        "report_kv_len": int(kv_len[-1]),
    }

    def run_with(threads: int) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return run_sweep(spec, Path(folder) / "best.parquet", threads=threads)

    found = run_with(setup.threads)
    baselines = []
    plans = [plan for plan in _plans(setup)[:NUMPY_PLANS] if NumpySteps.serves(plan, setup.tables)]
    if plans:
        numpy = [NumpySteps(plan, setup.tables) for plan in plans]
        few = len(plans) * len(batch) * len(kv_len)
        baselines.append(Baseline("NumPy", partial(numpy_best, plans, numpy, batch, kv_len), few, None))
    title = f"{found.plans} plans x {len(batch)} batches x {len(kv_len)} kv, best batch kept"
    return Workload(
        "sweep-best", title, "step", found.evaluations,
        lambda: run_with(setup.threads).evaluate_s, 0.0, tuple(baselines), reports_seconds=True,
    )  # fmt: skip


def numpy_best(plans: list[StepPlan], numpy: list[NumpySteps], batch: Any, kv_len: Any) -> list[Any]:
    """For each plan and length the batch with the most tokens a second that memory has room for."""
    best = []
    for plan, steps in zip(plans, numpy, strict=True):
        rate = batch[:, None] / steps.grid_us(batch, kv_len)
        rate[batch[:, None] * kv_len > plan.memory.max_kv_tokens] = 0.0
        best.append(rate.argmax(axis=0))
    return best


def many_plans(setup: Setup) -> Workload:
    """Build thousands of plans of a sweep, from curves that they share."""
    count = setup.size(10_000, 20)
    requests = _requests(setup, count)
    return Workload(
        "plans", f"{count:,} plans up to {MAX_BATCH} tokens, shared curves", "plan", count,
        lambda: compile_plans(requests, setup.tables, setup.gpu),
    )  # fmt: skip
