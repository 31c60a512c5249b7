"""Calls: operators as a step uses them, with their shape on one GPU, how often, and over which rows.

Attention aside, each depends on a number of rows alone: the tokens of the step, or its sequences.
Nothing here knows a latency.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

__all__ = [
    "AllReduce",
    "AttentionCall",
    "Call",
    "Elementwise",
    "Gemm",
    "Parallel",
    "Role",
    "RowOperator",
    "Rows",
    "Steps",
]

Rows = Literal["tokens", "sequences", "expert_tokens"]
"""The step's tokens, its sequences, or the tokens of all attention-data-parallel ranks together."""

Steps = Literal["all", "decode_only", "with_prefill"]
"""Which steps a call runs in: some kernels are others in steps of decodes alone."""

Role = Literal[
    "embedding",
    "attention_norm",
    "qkv_quantise",
    "qkv",
    "qk_norm",
    "rope",
    "kv_write",
    "decode_attention",
    "prefill_attention",
    "o_quantise",
    "o",
    "attention_allreduce",
    "mlp_norm",
    "gate_up_quantise",
    "gate_up",
    "activation",
    "down_quantise",
    "down",
    "mlp_allreduce",
    "final_norm",
    "lm_head",
]
"""What a call does in a step: other programs' operators are found by it, never by a call's name."""


@dataclass(frozen=True)
class Gemm:
    """A linear layer on one GPU: rows x n x k, ``times`` a step."""

    operator: ClassVar[str] = "gemm"
    role: Role
    name: str
    times: int
    n: int
    k: int
    dtype: str
    rows: Rows = "tokens"
    steps: Steps = "all"


@dataclass(frozen=True)
class Elementwise:
    """A kernel that only streams: ``row_bytes`` read and written a row, ``times`` a step."""

    operator: ClassVar[str] = "elementwise"
    role: Role
    name: str
    times: int
    row_bytes: float
    rows: Rows = "tokens"
    steps: Steps = "all"


@dataclass(frozen=True)
class AllReduce:
    """A sum over the GPUs of the group: ``row_bytes`` a row from each, ``times`` a step."""

    operator: ClassVar[str] = "allreduce"
    role: Role
    name: str
    times: int
    num_gpus: int
    row_bytes: float
    rows: Rows = "tokens"
    steps: Steps = "all"


RowOperator = Gemm | Elementwise | AllReduce


@dataclass(frozen=True)
class Parallel:
    """Calls on several paths beside each other, as shared experts beside routed ones: the longest counts.

    Attributes
    ----------
    paths : tuple of tuple of RowOperator
        Each in its order; all over tokens, their own or those of every rank.
    """

    paths: tuple[tuple[RowOperator, ...], ...]


@dataclass(frozen=True)
class AttentionCall:
    """Attention of a layer on one GPU, over the keys of the step's requests; ``times`` a step."""

    times: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    name: str = "attention"


Call = RowOperator | Parallel | AttentionCall
