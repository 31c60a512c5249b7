"""Columns of the results of a sweep over capacities."""

from __future__ import annotations

from typing import Final

from fastroof.columns import DTYPE, KV_DTYPE, Column
from fastroof.sweep.capacities.spec import CapacitySpec
from fastroof.sweep.columns import GPU, KERNELS, MODEL, RUNTIME, SPLIT, WEIGHT_BYTES

__all__ = ["COLUMNS", "capacity_columns"]

COLUMNS: Final = (
    MODEL,
    GPU,
    Column("tp", "int", "GPUs", "tensor-parallel size of a replica"),
    *SPLIT,
    Column("replicas", "int", "", "replicas that share the requests"),
    Column("total_gpus", "int", "GPUs", "GPUs of the whole deployment"),
    DTYPE,
    KV_DTYPE,
    RUNTIME,
    KERNELS,
    Column("max_batched_tokens", "int", "tokens", "tokens that a step holds at most"),
    Column("max_seqs", "int", "", "requests that a replica runs at once at most"),
    Column("requests_per_s_per_gpu", "float", "1/s", "requests_per_s / total_gpus", 0),
    Column(
        "requests_per_s", "float", "1/s", "largest rate that keeps all limits; 0 where none does", 0
    ),
    Column(
        "limit", "text", "",
        "what breaks first beyond it: a limit's name, goodput, throughput; none where all at once keep all",
    ),
    Column("low", "float", "1/s", "requests_per_s with all steps one standard error longer", 0),
    Column("high", "float", "1/s", "requests_per_s with all steps one standard error shorter", 0),
    Column("relative_error", "float", "", "that error of a step's time, in ln; empty where unknown"),
    Column(
        "sampling_error", "float", "",
        "relative standard error of requests_per_s by what was drawn; empty with one draw", 0,
    ),
    Column("simulations", "int", "", "how often the requests were simulated"),
    WEIGHT_BYTES,
    Column("max_kv_tokens", "int", "tokens", "KV tokens that fit beside the weights of a replica", 0),
)  # fmt: skip
"""A row a deployment, whatever the limits."""


def capacity_columns(spec: CapacitySpec) -> tuple[Column, ...]:
    """Return the columns of a spec: each percentile that has a limit is one, at the capacity."""
    limited = tuple(
        Column(
            limit.name, "float", "ms",
            f"at requests_per_s, at most {limit.most_ms:g}; empty where that is 0", 0,
        )
        for limit in spec.limits.percentiles
    )  # fmt: skip
    return (*COLUMNS, *limited)
