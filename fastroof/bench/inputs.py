"""Random sizes within the measured range, the same at every run."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fastroof.arrays import Array
from fastroof.bench.workload import Setup
from fastroof.operators.attention import ATTENTION_DECODE
from fastroof.run import StepBatch

__all__ = ["chunk_sizes", "decode_sizes", "mixed_batch", "ragged_decodes", "sweep_axes"]


MAX_BATCH: Final = 512
MEAN_REQUESTS: Final = 64
LONGEST_CONTEXT: Final = 16_384
LONGEST_CHUNK: Final = 2048
SHORTEST_CHUNK: Final = 16
SEED: Final = 5


def decode_sizes(setup: Setup, count: int, dtype: Any = np.int32) -> tuple[Array, Array]:
    """Batch sizes up to 512 and kv_len over the measured range, uniform."""
    rng = np.random.default_rng(SEED)
    kv_len = setup.tables.table(ATTENTION_DECODE.name).columns["kv_len"]
    longest = min(int(kv_len.max()), 65_536)
    most = min(MAX_BATCH, setup.plan.max_seqs)
    batch = rng.integers(1, most, count, endpoint=True, dtype=dtype)
    return batch, rng.integers(max(2, int(kv_len.min())), longest, count, endpoint=True, dtype=dtype)


def chunk_sizes(count: int, dtype: Any = np.int32) -> tuple[Array, Array, Array]:
    """new_tokens, context_len and batch_size of equal chunks, together at most 8192 tokens."""
    rng = np.random.default_rng(SEED)
    new = rng.integers(SHORTEST_CHUNK, LONGEST_CHUNK, count, endpoint=True, dtype=dtype)
    context = rng.integers(0, LONGEST_CONTEXT, count, dtype=dtype)
    return new, context, rng.integers(1, 4, count, endpoint=True, dtype=dtype)


def ragged_decodes(steps: int, requests: int = MEAN_REQUESTS, dtype: Any = np.int32) -> StepBatch:
    """Steps of decodes, half to one and a half times ``requests`` of them."""
    rng = np.random.default_rng(SEED)
    sizes = rng.integers(max(1, requests // 2), requests + requests // 2, steps, endpoint=True)
    offsets = np.r_[0, np.cumsum(sizes)]
    context = rng.integers(1, LONGEST_CONTEXT, offsets[-1], dtype=dtype)
    return StepBatch(np.ones(offsets[-1], dtype), context, offsets)


def mixed_batch(steps: int, dtype: Any = np.int32) -> StepBatch:
    """Steps of about 62 decodes and two prefill chunks, at random places among them."""
    batch = ragged_decodes(steps, dtype=dtype)
    rng = np.random.default_rng(SEED + 1)
    new, context = batch.new_tokens.copy(), batch.context_len.copy()
    for _ in range(2):
        at = batch.offsets[:-1] + rng.integers(0, np.diff(batch.offsets))
        new[at] = rng.integers(SHORTEST_CHUNK, LONGEST_CHUNK, steps, endpoint=True, dtype=dtype)
        context[at] = rng.integers(0, LONGEST_CONTEXT, steps, dtype=dtype)
    return StepBatch(new, context, batch.offsets)


def sweep_axes(setup: Setup) -> tuple[Array, Array]:
    """256 batch sizes and 128 lengths of a cartesian grid."""
    batch = np.arange(1, setup.size(256, 32) + 1, dtype=np.int64) * 2
    return batch, np.arange(1, setup.size(128, 16) + 1, dtype=np.int64) * 32
