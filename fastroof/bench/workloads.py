"""The workloads of ``fastroof bench``: each a function from a setup to units, bytes and baselines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Any, Final

import numpy as np

from fastroof.bench.inputs import chunk_sizes, decode_sizes, mixed_batch, ragged_decodes
from fastroof.bench.numpy_steps import NumpySteps
from fastroof.bench.processes import import_seconds, step_command
from fastroof.bench.sweeps import many_plans, sweep_best, sweep_written
from fastroof.bench.workload import Baseline, Setup, Workload
from fastroof.operators.attention import ATTENTION_DECODE, ATTENTION_PREFILL
from fastroof.operators.gemm import GEMM
from fastroof.plan import compile_plan
from fastroof.plan.curves import TableCurves
from fastroof.run import StepBatch
from fastroof.tables import Tables

__all__ = ["WORKLOADS", "homogeneous_decode", "ragged"]

FLOAT_BYTES: Final = 8
NUMPY_STEPS: Final = 500_000
NUMPY_RAGGED_STEPS: Final = 2_000


def homogeneous_decode(setup: Setup, count: int, dtype: Any = np.int32, name: str = "decode") -> Workload:
    """Build ``plan.decode_us`` over arrays of steps."""
    from fastroof.bench.stream import stream_decodes

    batch, kv_len = decode_sizes(setup, count, dtype)
    out, streamed = np.empty(count), np.empty(count)
    baselines = [Baseline("stream", partial(stream_decodes, batch, kv_len, streamed), count, None)]
    if NumpySteps.serves(setup.plan, setup.tables):
        few = min(count, NUMPY_STEPS)
        numpy = NumpySteps(setup.plan, setup.tables)
        baselines.append(Baseline("NumPy", lambda: numpy.decode_us(batch[:few], kv_len[:few]), few))
    return Workload(
        name,
        f"{count:,} decode steps, {np.dtype(dtype).name} in, float64 out",
        "step",
        count,
        lambda: setup.plan.decode_us(batch, kv_len, out=out, threads=setup.threads),
        2 * batch.itemsize + FLOAT_BYTES,
        tuple(baselines),
    )


def prefill(setup: Setup) -> Workload:
    """Build ``plan.prefill_us`` over arrays of steps."""
    from fastroof.bench.stream import stream_prefills

    count = setup.size(2_000_000, 10_000)
    sizes = chunk_sizes(count)
    out, streamed = np.empty(count), np.empty(count)
    baselines = [Baseline("stream", partial(stream_prefills, *sizes, streamed), count, None)]
    if NumpySteps.serves(setup.plan, setup.tables):
        few = [size[: min(count, NUMPY_STEPS)] for size in sizes]
        numpy = NumpySteps(setup.plan, setup.tables)
        baselines.append(Baseline("NumPy", lambda: numpy.prefill_us(*few), len(few[0])))
    return Workload(
        "prefill",
        f"{count:,} prefill steps of 1 to 4 equal chunks, int32 in, float64 out",
        "step",
        count,
        lambda: setup.plan.prefill_us(*sizes, out=out, threads=setup.threads),
        3 * sizes[0].itemsize + FLOAT_BYTES,
        tuple(baselines),
    )


def ragged(setup: Setup, batch: StepBatch, name: str, title: str) -> Workload:
    """Build ``plan.step_us`` over a ragged batch; its unit is a request."""
    from fastroof.bench.stream import stream_requests

    steps, requests = batch.num_steps, len(batch.new_tokens)
    streamed = np.empty(steps)
    arrays = batch.new_tokens, batch.context_len, batch.offsets
    baselines = [Baseline("stream", partial(stream_requests, *arrays, streamed), requests, None)]
    if NumpySteps.serves(setup.plan, setup.tables):
        numpy = NumpySteps(setup.plan, setup.tables)
        few = batch.offsets[: min(steps, NUMPY_RAGGED_STEPS) + 1]
        part = StepBatch(batch.new_tokens[: few[-1]], batch.context_len[: few[-1]], few)
        baselines.append(Baseline("NumPy", lambda: numpy.step_us(part), int(few[-1])))
    moved = requests * 2 * batch.new_tokens.itemsize + steps * (batch.offsets.itemsize + FLOAT_BYTES)
    return Workload(
        name,
        f"{steps:,} {title} steps of about {requests / steps:.0f} requests, {batch.new_tokens.dtype.name} in",
        "request",
        requests,
        lambda: setup.plan.step_us(batch, threads=setup.threads),
        moved / requests,
        tuple(baselines),
    )


def _ragged_steps(setup: Setup) -> int:
    return setup.size(100_000, 1_000)


def _calls(setup: Setup, name: str, title: str, call: Callable[[], Any]) -> Workload:
    """Build one call after another, as a Python loop makes them."""
    count = setup.size(20_000, 200)

    def run() -> None:
        for _ in repeat(None, count):
            call()

    return Workload(name, title, "call", count, run)


def _decode_calls(setup: Setup, name: str, title: str, call: Callable[[int, int], Any]) -> Workload:
    """Build calls of two ints, without another call around each: some take less than that."""
    count = setup.size(1_000_000, 1_000)

    def run() -> None:
        for _ in repeat(None, count):
            call(64, 4096)

    return Workload(name, title, "call", count, run)


def scalar(setup: Setup) -> Workload:
    """Build ``plan.decode_us`` of two ints."""
    return _decode_calls(setup, "scalar", "plan.decode_us(64, 4096)", setup.plan.decode_us)


def scalar_callable(setup: Setup) -> Workload:
    """Build the callable that ``plan.scalar`` is."""
    return _decode_calls(setup, "scalar-callable", "plan.scalar(64, 4096)", setup.plan.scalar)


def one_row(setup: Setup) -> Workload:
    """Build ``plan.decode_us`` of arrays of one step."""
    decode_us = setup.plan.decode_us
    batch, kv_len, out = np.array([64], np.int32), np.array([4096], np.int32), np.empty(1)
    return _calls(
        setup, "one-row", "plan.decode_us of arrays of one step", lambda: decode_us(batch, kv_len, out=out)
    )


def one_step(setup: Setup) -> Workload:
    """Build ``plan.step_us`` of one ragged step."""
    batch = ragged_decodes(1)
    step_us = setup.plan.step_us
    title = f"plan.step_us of one step of {len(batch.new_tokens)} requests"
    return _calls(setup, "one-step", title, lambda: step_us(batch))


def one_plan(setup: Setup) -> Workload:
    """Build one plan from curves that exist."""
    count = setup.size(50, 2)
    curves = TableCurves(setup.tables)

    def run() -> None:
        for _ in repeat(None, count):
            compile_plan(setup.model, setup.gpu, setup.tables, max_tokens=8192, curves=curves)

    return Workload("plan", "one plan up to 8192 tokens, curves cached", "plan", count, run)


def pack(setup: Setup) -> Workload:
    """Pack what one model needs of the tables: GEMMs of a dtype, attention of a head shape."""
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
        setup, ragged_decodes(_ragged_steps(setup)), "ragged-decode", "decode"
    ),
    "ragged-mixed": lambda setup: ragged(setup, mixed_batch(_ragged_steps(setup)), "ragged-mixed", "mixed"),
    "sweep": sweep_written,
    "sweep-best": sweep_best,
    "scalar": scalar,
    "scalar-callable": scalar_callable,
    "one-row": one_row,
    "one-step": one_step,
    "plan": one_plan,
    "plans": many_plans,
    "pack": pack,
    "import": import_seconds,
    "command": step_command,
}
"""Every workload of steps, plans and starts, by name, in the order in which they are reported."""
