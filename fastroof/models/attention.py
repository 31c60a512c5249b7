"""Attention of a layer: what one GPU runs of it, what it weighs, and what it keeps of a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fastroof.errors import ModelError
from fastroof.models.execution import Execution
from fastroof.models.layout import Layout
from fastroof.models.linear import linear_calls
from fastroof.models.sizes import check_sizes
from fastroof.operators.calls import AllReduce, AttentionCall, Call, Elementwise
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES

__all__ = ["Attention", "AttentionShard", "GroupedQueryAttention"]


class Attention(Protocol):
    """What a layer kind asks of its attention. ``hidden`` is the width of the residual stream."""

    @property
    def window(self) -> int | None:
        """Tokens that a query attends within; None for all."""

    def obstacles(self, layout: Layout) -> list[str]:
        """What keeps it from being split so; empty where nothing does."""

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Calls of one layer on one GPU, in their order."""

    def kv_bytes_per_token(self, layout: Layout, kv_dtype: str) -> float:
        """Bytes that one GPU keeps of a token, of one layer."""

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Weights of the linear layers on one GPU, of one layer, by the role of their call."""

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Weights that stay in bf16 on one GPU, of one layer: norms and biases."""

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Elements a token that its widest kernel reads and writes on one GPU."""


class AttentionShard(NamedTuple):
    """What one GPU runs of grouped-query attention.

    Attributes
    ----------
    num_q_heads, num_kv_heads : int
        Heads on one GPU; KV heads are replicated where there are fewer than GPUs.
    qkv_out, o_in : int
        Outputs of the fused QKV projection, inputs of the output projection.
    """

    num_q_heads: int
    num_kv_heads: int
    qkv_out: int
    o_in: int


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Softmax attention whose query heads share KV heads; as many of both is multi-head attention.

    Attributes
    ----------
    num_q_heads, num_kv_heads, head_dim : int
        Heads of the whole layer, and the width of one.
    qkv_bias, o_bias : bool
        Whether those projections add a bias.
    qk_norm : bool
        Whether queries and keys are normalised per head.
    window : int or None
        Tokens that a query attends within; None for full attention.
    sinks : bool
        Whether every query head has a learned logit that no key stands behind.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes no layer has, in layers that were built or changed by hand too."""
        check_sizes(self, "num_q_heads", "num_kv_heads", "head_dim")
        if self.num_q_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_q_heads} query heads do not divide by {self.num_kv_heads} KV heads")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    def obstacles(self, layout: Layout) -> list[str]:
        """What keeps it from being split so."""
        q_heads, kv_heads, tp = self.num_q_heads, self.num_kv_heads, layout.tp
        reasons = []
        if q_heads % tp:
            reasons.append(f"{q_heads} query heads do not divide by {tp}")
        if kv_heads % tp and tp % kv_heads:
            reasons.append(f"{kv_heads} KV heads neither divide by {tp} nor can be replicated evenly")
        return reasons

    def shard(self, layout: Layout) -> AttentionShard:
        """What one GPU runs."""
        q_heads = self.num_q_heads // layout.tp
        kv_heads = max(1, self.num_kv_heads // layout.tp)
        qkv_out = (q_heads + 2 * kv_heads) * self.head_dim
        return AttentionShard(q_heads, kv_heads, qkv_out, q_heads * self.head_dim)

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Calls of one layer on one GPU, in their order.

        Notes
        -----
        Compulsory bytes a token: the fused residual-add RMSNorm reads and writes two rows, rotary
        embedding reads and writes queries and keys, the KV write reads bf16 and writes the cache's
        dtype. Biases are part of the GEMM's epilogue.
        """
        shard, kv_dtype = self.shard(layout), execution.kv_dtype
        hidden_bytes = float(hidden * ACTIVATION_BYTES)
        head_bytes = float(self.head_dim * ACTIVATION_BYTES)
        qk_bytes = (shard.num_q_heads + shard.num_kv_heads) * head_bytes
        write_bytes = float(self._kv_elements(layout)) * (ACTIVATION_BYTES + DTYPE_BYTES[kv_dtype])
        calls: list[Call] = [Elementwise("attention_norm", "attention rmsnorm", 1, 4.0 * hidden_bytes)]
        calls += linear_calls("qkv", "qkv_quantise", shard.qkv_out, hidden, execution)
        if self.qk_norm:
            calls.append(Elementwise("qk_norm", "qk rmsnorm", 1, 2.0 * qk_bytes))
        calls.append(Elementwise("rope", "rope", 1, 2.0 * qk_bytes))
        calls.append(Elementwise("kv_write", "kv write", 1, write_bytes))
        heads = (shard.num_q_heads, shard.num_kv_heads, self.head_dim)
        calls.append(AttentionCall(1, *heads, kv_dtype, window=self.window or 0))
        calls += linear_calls("o", "o_quantise", hidden, shard.o_in, execution)
        if layout.tp > 1:
            calls.append(AllReduce("attention_allreduce", "attention all-reduce", 1, layout.tp, hidden_bytes))
        return tuple(calls)

    def kv_bytes_per_token(self, layout: Layout, kv_dtype: str) -> float:
        """Bytes that one GPU keeps of a token, of one layer: its keys and values."""
        return self._kv_elements(layout) * DTYPE_BYTES[kv_dtype]

    def _kv_elements(self, layout: Layout) -> int:
        """Keys and values of a token, on one GPU."""
        return 2 * self.shard(layout).num_kv_heads * self.head_dim

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Weights of the linear layers on one GPU, of one layer, by the role of their call."""
        shard = self.shard(layout)
        return {"qkv": shard.qkv_out * hidden, "o": hidden * shard.o_in}

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Weights that stay in bf16 on one GPU, of one layer: norms and biases."""
        shard = self.shard(layout)
        norms = hidden + 2 * self.head_dim * self.qk_norm + shard.num_q_heads * self.sinks
        return norms + shard.qkv_out * self.qkv_bias + hidden * self.o_bias

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Elements a token that its widest kernel reads and writes on one GPU."""
        shard = self.shard(layout)
        return shard.qkv_out + shard.o_in
