"""The workloads of ``fastroof bench``: each function returns units, bytes and baselines for a setup."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice, product, repeat
from pathlib import Path
from typing import Any, Final

import numpy as np

import fastroof
from fastroof.arrays import Floats
from fastroof.bench import workload as inputs
from fastroof.bench.numpy_steps import NumpySteps
from fastroof.bench.workload import Baseline, Setup, Workload, ragged_decodes
from fastroof.errors import FastroofError, PlanError
from fastroof.models import ModelSpec, load_model, model_names
from fastroof.models.attention import GroupedQueryAttention
from fastroof.operators.attention import ATTENTION_DECODE, ATTENTION_PREFILL
from fastroof.operators.gemm import GEMM
from fastroof.plan import StepPlan, compile_plan, compile_plans
from fastroof.plan.curves import TableCurves
from fastroof.run import StepBatch
from fastroof.sweep import best_batches, decode_times_us
from fastroof.tables import Tables

MAX_BATCH: Final = 512
NUMPY_PLANS: Final = 4
TP: Final = (1, 2, 4, 8)
DTYPES: Final = ("bf16", "fp8")


def _requests(setup: Setup, count: int) -> list[dict[str, Any]]:
    """Return the arguments of ``count`` distinct plans: presets, layouts and growing depths."""
    curves = TableCurves(setup.tables)
    fitting: list[dict[str, Any]] = []
    dense = [name for name in model_names() if _is_dense(load_model(name))]
    for name, tp, dtype in product(dense, TP, DTYPES):
        request: dict[str, Any] = {
            "model": load_model(name).with_full_attention(),
            "tp": tp,
            "dtype": dtype,
            "engine": "kernels",
            "max_num_batched_tokens": MAX_BATCH,
            "max_num_seqs": MAX_BATCH,
        }
        try:
            compile_plan(gpu=setup.gpu, tables=setup.tables, curves=curves, **request)
        except FastroofError:
            continue
        fitting.append(request)
        if len(fitting) == count:
            break
    if not fitting:
        raise PlanError(f"the tables of {setup.gpu.name} support no model preset; use other tables")
    deeper = (
        {**request, "model": _deeper(request["model"], more)} for more in range(count) for request in fitting
    )
    return list(islice(deeper, count))


def _is_dense(model: ModelSpec) -> bool:
    """Return whether all layers have grouped-query attention and an MLP without experts."""
    return all(
        isinstance(kind.attention, GroupedQueryAttention) and not kind.mlp.has_experts for kind in model.kinds
    )


def _deeper(model: ModelSpec, more: int) -> ModelSpec:
    group = model.layers[0]
    return replace(model, layers=(replace(group, count=group.count + more), *model.layers[1:]))


def sweep_plans(setup: Setup) -> list[StepPlan]:
    """Compile a hundred plans of presets and layouts."""
    return list(compile_plans(_requests(setup, setup.size(100, 4)), setup.gpu, setup.tables))


def sweep_written(setup: Setup) -> Workload:
    """Build every step of 100 plans x 128 lengths x 256 batch sizes, written to memory."""
    plans, (batch, kv_len) = sweep_plans(setup), inputs.sweep_axes(setup)
    out = np.empty((len(plans), len(kv_len), len(batch)))
    streamed = np.empty(out.size)
    baselines = [Baseline("stream", partial(inputs.stream_out, 1.0, streamed), out.size, None)]
    few = plans[:NUMPY_PLANS]
    if all(NumpySteps.serves(plan, setup.tables) for plan in few):
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
    """Build the same grid, of which only the best batch of each plan and length is stored."""
    plans, (batch, kv_len) = sweep_plans(setup), inputs.sweep_axes(setup)
    points = len(batch) * len(kv_len)
    baselines = []
    few = [plan for plan in plans[:NUMPY_PLANS] if NumpySteps.serves(plan, setup.tables)]
    if few:
        numpy = [NumpySteps(plan, setup.tables) for plan in few]
        compared = partial(numpy_best, few, numpy, batch, kv_len)
        baselines.append(Baseline("NumPy", compared, len(few) * points, None))
    title = f"{len(plans)} plans x {len(batch)} batches x {len(kv_len)} kv, best batch kept"
    return Workload(
        "sweep-best", title, "step", len(plans) * points,
        lambda: best_batches(plans, batch, kv_len, threads=setup.threads), 0.0, tuple(baselines),
    )  # fmt: skip


def numpy_best(plans: list[StepPlan], numpy: list[NumpySteps], batch: Any, kv_len: Any) -> list[Any]:
    """Return for each plan and length the batch with the most tokens/s that fits in memory."""
    best = []
    for plan, steps in zip(plans, numpy, strict=True):
        rate = batch[:, None] / steps.grid_us(batch, kv_len)
        rate[batch[:, None] > plan.memory.max_sequences(kv_len)] = 0.0
        best.append(rate.argmax(axis=0))
    return best


def many_plans(setup: Setup) -> Workload:
    """Build thousands of plans of a sweep from shared curves."""
    count = setup.size(10_000, 20)
    requests = _requests(setup, count)
    return Workload(
        "plans", f"{count:,} plans up to {MAX_BATCH} tokens, shared curves", "plan", count,
        lambda: compile_plans(requests, setup.gpu, setup.tables),
    )  # fmt: skip


PACKAGE: Final = Path(fastroof.__file__).resolve().parents[1]
IMPORT: Final = (
    "import time; began = time.perf_counter(); import fastroof; print(time.perf_counter() - began)"
)


def _python(*arguments: str) -> str:
    """Return the output of a fresh interpreter that imports the fastroof of this process."""
    paths = [str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise FastroofError(f"python {' '.join(arguments)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def import_seconds(setup: Setup) -> Workload:
    """Build ``import fastroof`` in a fresh process, without the interpreter's start."""
    return Workload(
        "import", "import fastroof, fresh process", "process", 1,
        lambda: float(_python("-c", IMPORT)), reports_seconds=True,
    )  # fmt: skip


def step_command(setup: Setup) -> Workload:
    """Build ``fastroof step`` from process start to answer; the first call fills the cache of loops."""
    command = ("-m", "fastroof", "step", "--model", "llama-3.1-8b", "--decode", "64x4096")
    return Workload(
        "command", "fastroof step ..., process start to answer, warm cache", "process", 1,
        lambda: _python(*command),
    )  # fmt: skip


FLOAT_BYTES: Final = 8
NUMPY_STEPS: Final = 500_000
NUMPY_RAGGED_STEPS: Final = 2_000


def _baselines(
    setup: Setup, stream: Callable[[], Any], count: int, numpy: Callable[[NumpySteps], Any], few: int
) -> tuple[Baseline, ...]:
    """Return the stream loop, and NumPy on the first units where it serves the plan."""
    baselines = (Baseline("stream", stream, count, None),)
    if not NumpySteps.serves(setup.plan, setup.tables):
        return baselines
    return (*baselines, Baseline("NumPy", partial(numpy, NumpySteps(setup.plan, setup.tables)), few))


def homogeneous_decode(setup: Setup, count: int, dtype: Any = np.int32, name: str = "decode") -> Workload:
    """Build ``plan.decode_us`` over arrays of steps."""
    batch, kv_len = inputs.decode_sizes(setup, count, dtype)
    out, few = np.empty(count), min(count, NUMPY_STEPS)
    stream = partial(inputs.stream_decodes, batch, kv_len, np.empty(count))
    return Workload(
        name, f"{count:,} decode steps, {np.dtype(dtype).name} in, float64 out", "step", count,
        lambda: setup.plan.decode_us(batch, kv_len, out=out, threads=setup.threads),
        2 * batch.itemsize + FLOAT_BYTES,
        _baselines(setup, stream, count, lambda numpy: numpy.decode_us(batch[:few], kv_len[:few]), few),
    )  # fmt: skip


def prefill(setup: Setup) -> Workload:
    """Build ``plan.prefill_us`` over arrays of steps."""
    count = setup.size(2_000_000, 10_000)
    sizes = inputs.chunk_sizes(count)
    out, few = np.empty(count), min(count, NUMPY_STEPS)
    stream = partial(inputs.stream_prefills, *sizes, np.empty(count))
    return Workload(
        "prefill", f"{count:,} prefill steps of 1 to 4 equal chunks, int32 in, float64 out", "step", count,
        lambda: setup.plan.prefill_us(*sizes, out=out, threads=setup.threads),
        3 * sizes[0].itemsize + FLOAT_BYTES,
        _baselines(
            setup, stream, count, lambda numpy: numpy.prefill_us(*(size[:few] for size in sizes)), few
        ),
    )  # fmt: skip


def ragged(setup: Setup, batch: StepBatch, name: str, title: str) -> Workload:
    """Build ``plan.step_us`` over a ragged batch; the unit is a request."""
    steps, requests = batch.num_steps, len(batch.new_tokens)
    few = batch.offsets[: min(steps, NUMPY_RAGGED_STEPS) + 1]
    part = StepBatch(batch.new_tokens[: few[-1]], batch.context_len[: few[-1]], few)
    moved = requests * 2 * batch.new_tokens.itemsize + steps * (batch.offsets.itemsize + FLOAT_BYTES)
    arrays = batch.new_tokens, batch.context_len, batch.offsets, np.empty(steps)
    stream = partial(inputs.stream_requests, *arrays)
    return Workload(
        name,
        f"{steps:,} {title} steps of about {requests / steps:.0f} requests, {batch.new_tokens.dtype.name} in",
        "request",
        requests,
        lambda: setup.plan.step_us(batch, threads=setup.threads),
        moved / requests,
        _baselines(setup, stream, requests, lambda numpy: numpy.step_us(part), int(few[-1])),
    )


def _calls(name: str, title: str, unit: str, count: int, call: Callable[[], Any]) -> Workload:
    """Build consecutive calls, as a Python loop makes them."""

    def run() -> None:
        for _ in repeat(None, count):
            call()

    return Workload(name, title, unit, count, run)


def _scalar(setup: Setup, name: str, call: str) -> Workload:
    """Build calls of two ints without a wrapper, whose call would take longer than some of them."""
    count, predict = setup.size(1_000_000, 1_000), getattr(setup.plan, call)

    def run() -> None:
        for _ in repeat(None, count):
            predict(64, 4096)

    return Workload(name, f"plan.{call}(64, 4096)", "call", count, run)


def one_row(setup: Setup) -> Workload:
    """Build ``plan.decode_us`` of arrays with one step."""
    sizes, out = (np.array([64], np.int32), np.array([4096], np.int32)), np.empty(1)
    call = partial(setup.plan.decode_us, *sizes, out=out)
    return _calls("one-row", "plan.decode_us of arrays of one step", "call", setup.size(20_000, 200), call)


def one_step(setup: Setup) -> Workload:
    """Build ``plan.step_us`` of one ragged step."""
    batch = ragged_decodes(1)
    title = f"plan.step_us of one step of {len(batch.new_tokens)} requests"
    return _calls("one-step", title, "call", setup.size(20_000, 200), partial(setup.plan.step_us, batch))


def one_plan(setup: Setup) -> Workload:
    """Build one plan from cached curves."""
    call = partial(
        compile_plan, setup.model, setup.gpu, setup.tables,
        max_num_batched_tokens=8192, engine="kernels", curves=TableCurves(setup.tables),
    )  # fmt: skip
    return _calls("plan", "one plan up to 8192 tokens, curves cached", "plan", setup.size(50, 2), call)


def pack(setup: Setup) -> Workload:
    """Pack the tables that one model needs: GEMMs of a dtype, attention of a head shape."""
    measured, gpu = setup.tables.measured, setup.tables.gpu
    dtypes = sorted(set(setup.tables.table(GEMM.name).columns["dtype"].tolist()) & {"bf16", "fp8"})[:1]

    def run() -> None:
        tables = Tables(measured, gpu)
        GEMM.packed(tables, dtypes[0])
        ATTENTION_DECODE.grid(tables, setup.plan.heads)
        ATTENTION_PREFILL.grid(tables, setup.plan.heads)

    return Workload("pack", f"tables of one model packed: {dtypes[0]} GEMMs, attention", "pack", 1, run)


WORKLOADS: Final[dict[str, Callable[[Setup], Workload]]] = {
    "decode": lambda setup: homogeneous_decode(setup, setup.size(10_000_000, 20_000)),
    "prefill": prefill,
    "ragged-decode": lambda setup: ragged(
        setup, ragged_decodes(setup.size(100_000, 1_000)), "ragged-decode", "decode"
    ),
    "ragged-mixed": lambda setup: ragged(
        setup, inputs.mixed_batch(setup.size(100_000, 1_000)), "ragged-mixed", "mixed"
    ),
    "sweep": sweep_written,
    "sweep-best": sweep_best,
    "scalar": lambda setup: _scalar(setup, "scalar", "decode_us"),
    "scalar-callable": lambda setup: _scalar(setup, "scalar-callable", "scalar"),
    "one-row": one_row,
    "one-step": one_step,
    "plan": one_plan,
    "plans": many_plans,
    "pack": pack,
    "import": import_seconds,
    "command": step_command,
}
"""All workloads of steps, plans and starts by name, in report order."""
