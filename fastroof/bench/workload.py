"""Elements of a benchmark: workloads with their units and bytes, baselines, and the setup."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array, Flags, Floats, Ints
from fastroof.checks import whole_number
from fastroof.compiled.jit import jit
from fastroof.config import GpuSpec, load_gpu
from fastroof.models import ModelSpec, load_model
from fastroof.operators.attention import ATTENTION_DECODE
from fastroof.plan import StepPlan, compile_plan
from fastroof.run import StepBatch
from fastroof.tables import Tables

AGREEMENT: Final = 1e-9
"""Maximum relative difference of a baseline's answers from fastroof's; sums are added in another order."""


@dataclass(frozen=True)
class Baseline:
    """Another implementation of a workload's first ``count`` units, timed in the same rounds.

    ``"stream"`` is the loop that only moves the workload's bytes. Without an rtol the answers of ``run`` are
    not compared with fastroof's.
    """

    name: str
    run: Callable[[], Any]
    count: int
    rtol: float | None = AGREEMENT
    reports_seconds: bool = False
    """Whether ``run`` returns the seconds that the units took, which are less than its total time."""


@dataclass(frozen=True)
class Workload:
    """A task whose speed is measured: ``count`` units (steps, requests, lookups, plans, calls) a run.

    ``run`` returns the answers of the units in order. ``bytes_per_unit`` are those of the caller's arrays
    that a unit reads and writes; 0 for workloads without streams.
    """

    name: str
    title: str
    unit: str
    count: int
    run: Callable[[], Any]
    bytes_per_unit: float = 0.0
    baselines: tuple[Baseline, ...] = ()
    reports_seconds: bool = False


@dataclass(frozen=True)
class Setup:
    """The plan that workloads time, and its inputs; baselines run on one thread.

    ``quick`` is for small sizes, so that everything runs once within seconds: for tests, not for results.
    """

    model: ModelSpec
    gpu: GpuSpec
    tables: Tables
    plan: StepPlan
    threads: int
    quick: bool

    def size(self, full: int, quick: int) -> int:
        """Return the number of units for full or quick sizes."""
        return quick if self.quick else full


def new_setup(model: Any, gpu: Any, tables: Tables, *, threads: int = 1, quick: bool = False) -> Setup:
    """Compile the plan that workloads time, from what :func:`fastroof.compile_plan` takes."""
    whole_number("threads", threads)
    model = model if isinstance(model, ModelSpec) else load_model(model)
    gpu = gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu)
    return Setup(model, gpu, tables, compile_plan(model, gpu, tables, engine="kernels"), threads, quick)


MAX_BATCH: Final = 512
MEAN_REQUESTS: Final = 64
LONGEST_CONTEXT: Final = 16_384
LONGEST_CHUNK: Final = 2048
SHORTEST_CHUNK: Final = 16
SEED: Final = 5


def decode_sizes(setup: Setup, count: int, dtype: Any = np.int32) -> tuple[Array, Array]:
    """Return batch sizes up to 512 and kv_len over the measured range, both uniform."""
    rng = np.random.default_rng(SEED)
    kv_len = setup.tables.table(ATTENTION_DECODE.name).columns["kv_len"]
    longest = min(int(kv_len.max()), 65_536)
    most = min(MAX_BATCH, setup.plan.max_num_seqs)
    batch = rng.integers(1, most, count, endpoint=True, dtype=dtype)
    return batch, rng.integers(max(2, int(kv_len.min())), longest, count, endpoint=True, dtype=dtype)


def chunk_sizes(count: int) -> tuple[Array, Array, Array]:
    """Return new_tokens, context_len and batch_size of equal chunks, together at most 8192 tokens."""
    rng = np.random.default_rng(SEED)
    new = rng.integers(SHORTEST_CHUNK, LONGEST_CHUNK, count, endpoint=True, dtype=np.int32)
    context = rng.integers(0, LONGEST_CONTEXT, count, dtype=np.int32)
    return new, context, rng.integers(1, 4, count, endpoint=True, dtype=np.int32)


def ragged_decodes(steps: int, requests: int = MEAN_REQUESTS, dtype: Any = np.int32) -> StepBatch:
    """Return decode steps with half to one and a half times ``requests`` each."""
    rng = np.random.default_rng(SEED)
    sizes = rng.integers(max(1, requests // 2), requests + requests // 2, steps, endpoint=True)
    offsets = np.r_[0, np.cumsum(sizes)]
    context = rng.integers(1, LONGEST_CONTEXT, offsets[-1], dtype=dtype)
    return StepBatch(np.ones(offsets[-1], dtype), context, offsets)


def mixed_batch(steps: int) -> StepBatch:
    """Return steps of about 62 decodes and two prefill chunks at random positions."""
    batch = ragged_decodes(steps)
    rng = np.random.default_rng(SEED + 1)
    new, context = batch.new_tokens.copy(), batch.context_len.copy()
    for _ in range(2):
        at = batch.offsets[:-1] + rng.integers(0, np.diff(batch.offsets))
        new[at] = rng.integers(SHORTEST_CHUNK, LONGEST_CHUNK, steps, endpoint=True, dtype=np.int32)
        context[at] = rng.integers(0, LONGEST_CONTEXT, steps, dtype=np.int32)
    return StepBatch(new, context, batch.offsets)


def sweep_axes(setup: Setup) -> tuple[Array, Array]:
    """Return 256 batch sizes and 128 lengths of a Cartesian grid."""
    batch = np.arange(1, setup.size(256, 32) + 1, dtype=np.int64) * 2
    return batch, np.arange(1, setup.size(128, 16) + 1, dtype=np.int64) * 32


@jit
def stream_decodes(batch_size: Ints, kv_len: Ints, out: Floats) -> None:
    """Read two sizes per step, write one float64."""
    for i in range(len(out)):
        out[i] = batch_size[i] + kv_len[i]


@jit
def stream_prefills(new_tokens: Ints, context_len: Ints, batch_size: Ints, out: Floats) -> None:
    """Read three sizes per step, write one float64."""
    for i in range(len(out)):
        out[i] = new_tokens[i] + context_len[i] + batch_size[i]


@jit
def stream_requests(new_tokens: Ints, context_len: Ints, offsets: Ints, out: Floats) -> None:
    """Read two sizes per request and one offset per step, write one float64 per step."""
    for i in range(len(out)):
        # slice indices start at 0: for others LLVM cannot prove that none is negative,
        # and the loop stays scalar and is four times slower
        new = new_tokens[offsets[i] : offsets[i + 1]]
        context = context_len[offsets[i] : offsets[i + 1]]
        total = 0
        for r in range(len(new)):
            total += new[r] + context[r]
        out[i] = total


@jit
def stream_out(value: float, out: Floats) -> None:
    """Write one float64 per point of a grid, whose axes stay in the cache."""
    for i in range(len(out)):
        out[i] = value


@jit
def stream_lookups(a: Ints, b: Ints, c: Ints, latency_us: Floats, mfu: Floats, origin: Flags) -> None:
    """Read up to three sizes per point (arrays may repeat), write what a lookup returns."""
    for i in range(len(latency_us)):
        total = a[i] + b[i] + c[i]
        latency_us[i] = total
        mfu[i] = total
        origin[i] = 1
