"""Which whole steps are measured: decodes, prefills, mixed batches and batches of unequal lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fastroof.errors import MeasureError
from fastroof.load.steps_file import format_runs, parse_runs
from fastroof.models import DenseModel
from fastroof.models.dense import split
from fastroof.operators.attention_work import attention_flops
from fastroof.units import DTYPE_BYTES, GIB
from kernels_bench.operators.attention import SPREADS
from kernels_bench.providers.paging import PAGE_SIZE, PagedBatch, spread_kv_lens

DECODE_BATCHES: Final = (1, 4, 16, 64, 256)
DECODE_KV_LENS: Final = (128, 1024, 4096, 16384)
PREFILL_TOKENS: Final = (128, 512, 2048, 8192)
PREFILL_CONTEXTS: Final = (0, 4096, 16384)
MIXED_BATCHES: Final = (32, 64)
MIXED_KV_LENS: Final = (1024, 4096)
MIXED_CHUNKS: Final = (512, 2048)
UNEQUAL_BATCHES: Final = ((16, 4096), (64, 2048))
UNEQUAL_CHUNKS: Final = (64, 128, 256, 512, 1024)
SPREAD_SEED: Final = 0
"""Lengths of the unequal batches are part of what a point is, whatever the seed of a run."""

WORKSPACE_BYTES: Final = 2 * GIB
"""CUDA context, cuBLAS and attention workspaces, graphs."""
BYTES_PER_S: Final = 2.4e12
FLOPS_PER_S: Final = 450e12
FP8_FLOPS_PER_S: Final = 800e12
"""A guess until measured: GEMMs reach 1100e12 of an H100, and what quantises inputs comes on top."""
FILL_BYTES_PER_S: Final = 0.5e12
SETUP_S: Final = 0.5
CALLS: Final = 12


@dataclass(frozen=True)
class StepPoint:
    """One step: how many new tokens each request brings, and what it has in the cache."""

    # One of :data:`fastroof.load.steps_file.PHASES`.
    phase: str
    # Of each request; at least 1, at least 0.
    new_tokens: tuple[int, ...]
    context_len: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse batches that no step is."""
        same = len(self.new_tokens) == len(self.context_len) > 0
        if not same or min(self.new_tokens) < 1 or min(self.context_len) < 0:
            raise MeasureError(
                "a step needs as many new_tokens (each at least 1) as context_len (each at least 0): "
                f"got {self.new_tokens} and {self.context_len}"
            )

    @classmethod
    def parse(cls, phase: str, new_tokens: str, context_len: str) -> StepPoint:
        """Read the two columns of steps.csv."""
        return cls(phase, tuple(parse_runs(new_tokens)), tuple(parse_runs(context_len)))

    @property
    def new_text(self) -> str:
        """``new_tokens`` as steps.csv has it."""
        return format_runs(self.new_tokens)

    @property
    def context_text(self) -> str:
        """``context_len`` as steps.csv has it."""
        return format_runs(self.context_len)

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return sum(self.new_tokens)

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Tokens each request attends to."""
        return tuple(n + c for n, c in zip(self.new_tokens, self.context_len, strict=True))

    def batch(self, seed: int | None) -> PagedBatch:
        """Give the requests their pages, in random order or, with None, in a row."""
        return PagedBatch.make(np.array(self.new_tokens), np.array(self.kv_lens), seed)


def _decodes(phase: str, kv_lens: Sequence[int]) -> StepPoint:
    return StepPoint(phase, (1,) * len(kv_lens), tuple(int(kv_len) - 1 for kv_len in kv_lens))


def default_steps() -> list[StepPoint]:
    """Return the grid of whole steps.

    >>> steps = default_steps()
    >>> len(steps), steps[1].new_text, steps[1].context_text
    (47, '1', '1023')
    """
    points = [_decodes("decode", [kv_len] * b) for b in DECODE_BATCHES for kv_len in DECODE_KV_LENS]
    points += [StepPoint("prefill", (q,), (c,)) for q in PREFILL_TOKENS for c in PREFILL_CONTEXTS]
    points += [
        StepPoint("mixed", (*(1,) * b, chunk), (*(kv_len - 1,) * b, 0))
        for b in MIXED_BATCHES
        for kv_len in MIXED_KV_LENS
        for chunk in MIXED_CHUNKS
    ]
    points += [
        _decodes("unequal", spread_kv_lens(spread, b, mean, SPREAD_SEED).tolist())
        for b, mean in UNEQUAL_BATCHES
        for spread in SPREADS
    ]
    points.append(StepPoint("unequal", UNEQUAL_CHUNKS, (0,) * len(UNEQUAL_CHUNKS)))
    return points


def weight_bytes(model: DenseModel, weights: str = "bf16", element_bytes: int = 2) -> int:
    """Device memory of a model's weights on one GPU.

    >>> from fastroof.models import load_model
    >>> model = DenseModel.of(load_model("qwen3-8b"))
    >>> weight_bytes(model) / 2**30, weight_bytes(model, "fp8") / 2**30  # doctest: +ELLIPSIS
    (15.2..., 8.7...)
    """
    if weights == "bf16":
        return element_bytes * model.num_parameters
    linear = _linear_parameters(model)
    return element_bytes * (model.num_parameters - linear) + math.ceil(linear * DTYPE_BYTES[weights])


def _linear_parameters(model: DenseModel) -> int:
    share = split(model, 1)
    return model.num_layers * model.hidden * (share.qkv_out + share.o_in + 3 * share.intermediate)


def step_bytes(point: StepPoint, model: DenseModel, element_bytes: int = 2, weights: str = "bf16") -> int:
    """Device memory that a step takes, weights included."""
    pages = sum(-(-kv_len // PAGE_SIZE) for kv_len in point.kv_lens)
    kv = 2 * model.num_layers * pages * PAGE_SIZE * model.num_kv_heads * model.head_dim
    share = split(model, 1)
    row = 3 * model.hidden + share.qkv_out + share.o_in + 3 * share.intermediate
    logits = len(point.new_tokens) * share.vocab_rows
    quantised = (
        0 if weights == "bf16" else point.num_tokens * (model.hidden + share.o_in + share.intermediate)
    )
    elements = kv + point.num_tokens * row + logits
    weights_bytes = weight_bytes(model, weights, element_bytes)
    return weights_bytes + element_bytes * elements + quantised + WORKSPACE_BYTES


def expected_seconds(point: StepPoint, model: DenseModel, weights: str = "bf16") -> float:
    """Seconds that measuring a step is expected to take: filling the cache and about a dozen replays."""
    moved = step_bytes(point, model, weights=weights) - WORKSPACE_BYTES
    new_tokens, kv_lens = np.array(point.new_tokens), np.array(point.kv_lens)
    attention = attention_flops(model.num_q_heads, model.head_dim, new_tokens, kv_lens).sum()
    linear_flops = 2.0 * model.num_parameters * point.num_tokens
    linear_s = linear_flops / (FLOPS_PER_S if weights == "bf16" else FP8_FLOPS_PER_S)
    step_s = moved / BYTES_PER_S + linear_s + model.num_layers * float(attention) / FLOPS_PER_S
    return SETUP_S + (moved - weight_bytes(model, weights)) / FILL_BYTES_PER_S + CALLS * step_s
