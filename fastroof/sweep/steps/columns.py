"""Columns of the results of a sweep over steps."""

from __future__ import annotations

from typing import Final, Literal

from fastroof.columns import DTYPE, KV_DTYPE, Column
from fastroof.sweep.columns import GPU, KERNELS, MODEL, RUNTIME, SPLIT, WEIGHT_BYTES

__all__ = ["COLUMNS", "step_columns"]

COLUMNS: Final = (
    MODEL,
    GPU,
    Column("tp", "int", "GPUs", "tensor-parallel size"),
    *SPLIT,
    DTYPE,
    KV_DTYPE,
    RUNTIME,
    KERNELS,
    Column("kv_len", "int", "tokens", "tokens that each request attends to, the new one included"),
    Column(
        "batch_size",
        "int",
        "sequences",
        "decodes of a rank; 0 where no batch is within the limits",
        0,
    ),
    Column("step_us", "float", "us", "time of one decode step, which is the time per output token"),
    Column("tokens_per_s", "float", "tokens/s", "output tokens, every rank and stage busy with a batch"),
    Column("tokens_per_s_per_gpu", "float", "tokens/s", "tokens_per_s over the tp x pp x dp GPUs"),
    Column(
        "limited_by",
        "text",
        "",
        "what stops the next larger batch (the smallest, where batch_size is 0): memory, tpot, throughput "
        "(it fits and gives fewer tokens/s) or batch grid (there is none)",
    ),
    Column("exceeds", "text", "", "limit that the step breaks: memory or tpot; empty where it keeps both"),
    Column("origin", "text", "", "how the step's latency was made: measured to modelled"),
    Column(
        "relative_error",
        "float",
        "",
        "standard error of the step's time over it (80 % are within 1.28 of them); empty where not asked for",
        0,
    ),
    WEIGHT_BYTES,
    Column("max_kv_tokens", "int", "tokens", "KV tokens that fit on one GPU beside the weights"),
)
"""A row a step: ``limited_by`` is there where the best are kept, ``exceeds`` where all are."""


def step_columns(keep: Literal["best", "all"]) -> tuple[Column, ...]:
    """Columns of the results that keep the best steps, or all of them."""
    left_out = "exceeds" if keep == "best" else "limited_by"
    return tuple(column for column in COLUMNS if column.name != left_out)
