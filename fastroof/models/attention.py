"""Grouped-query attention of a layer: its calls, weights and KV cache on one GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fastroof.errors import ModelError
from fastroof.models.exchange import after_attention
from fastroof.models.execution import Execution
from fastroof.models.hf import checked_fields
from fastroof.models.layout import Layout, check_sizes, linear_calls
from fastroof.operators.calls import AllReduce, AttentionCall, Call, Elementwise, Gemm, RowOperator
from fastroof.units import ACTIVATION_BYTES, KV_BYTES, KV_SCALE_BYTES

VARIANCE_BYTES = 4


class Attention(Protocol):
    """Interface of a layer kind's attention; ``hidden`` is the width of the residual stream."""

    @property
    def heads_text(self) -> str:
        """Return the heads as model lists show them; empty if the layer has none."""

    @property
    def window(self) -> int | None:
        """Tokens that a query attends to; None for all."""

    def obstacles(self, layout: Layout) -> list[str]:
        """Return why this layout cannot split it; empty if it can."""

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of one layer on one GPU, in execution order."""

    def kv_bytes_per_token(self, layout: Layout, kv_dtype: str) -> float:
        """Return the KV-cache bytes per token of one layer on one GPU; 0.0 without a cache."""
        return 0.0

    def state_bytes(self, layout: Layout) -> float:
        """Return the fixed state bytes per sequence of one layer on one GPU; 0.0 without a state."""
        return 0.0

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Return the linear weights of one layer on one GPU, by the role of their call."""

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights of one layer on one GPU that stay in bf16: norms and biases."""

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Return the elements per token that the widest kernel reads and writes on one GPU."""


class AttentionShard(NamedTuple):
    """One GPU's share of grouped-query attention."""

    num_q_heads: int
    num_kv_heads: int
    qkv_out: int
    o_in: int


def check_kv_heads(q_heads: int, kv_heads: int) -> None:
    """Reject query heads that KV heads cannot share evenly."""
    if q_heads % kv_heads:
        raise ModelError(f"{q_heads} query heads do not divide by {kv_heads} KV heads")


def head_obstacles(q_heads: int, kv_heads: int, tp: int) -> list[str]:
    """Return why tensor parallelism cannot split the heads; empty if it can."""
    reasons = [f"{q_heads} query heads do not divide by {tp}"] if q_heads % tp else []
    if kv_heads % tp and tp % kv_heads:
        reasons.append(f"{kv_heads} KV heads neither divide by {tp} nor can be replicated evenly")
    return reasons


@dataclass(frozen=True)
@checked_fields
class GroupedQueryAttention(Attention):
    """Softmax attention whose query heads share KV heads; one KV head per query head is MHA."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    sinks: bool = False
    is_chunked: bool = False
    v_head_dim: int | None = None
    has_values: bool = True
    qk_norm_weights: bool = True
    v_norm: bool = False
    qk_norm_spans_heads: bool = False
    rope: bool = True
    head_gate: bool = False
    output_gate: bool = False
    post_norm: bool = False
    sums_over_gpus: bool = True

    def __post_init__(self) -> None:
        """Reject invalid sizes, also in layers built or modified by hand."""
        check_sizes(self, "num_q_heads", "num_kv_heads", "head_dim")
        check_sizes(self, *(name for name in ("window", "v_head_dim") if getattr(self, name) is not None))
        check_kv_heads(self.num_q_heads, self.num_kv_heads)

    @property
    def value_dim(self) -> int:
        """Width of the values of one head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def heads_text(self) -> str:
        """Return the heads as model lists show them."""
        return f"{self.num_q_heads}-{self.num_kv_heads}-{self.head_dim}"

    def obstacles(self, layout: Layout) -> list[str]:
        """Return why this layout cannot split it; empty if it can."""
        return head_obstacles(self.num_q_heads, self.num_kv_heads, layout.tp)

    def shard(self, layout: Layout) -> AttentionShard:
        """Return one GPU's share of the layer."""
        q_heads = self.num_q_heads // layout.tp
        kv_heads = max(1, self.num_kv_heads // layout.tp)
        qkv_out = (q_heads + kv_heads) * self.head_dim + kv_heads * self.value_dim * self.has_values
        qkv_out += q_heads * self.value_dim * self.output_gate
        return AttentionShard(q_heads, kv_heads, qkv_out, q_heads * self.value_dim)

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of one layer on one GPU, in execution order."""
        shard, kv_dtype = self.shard(layout), execution.kv_dtype
        hidden_bytes = float(hidden * ACTIVATION_BYTES)
        head_bytes = float(self.head_dim * ACTIVATION_BYTES)
        qk_bytes = (shard.num_q_heads + shard.num_kv_heads) * head_bytes
        out_bytes = float(shard.o_in * ACTIVATION_BYTES)
        write_bytes = float(self._kv_elements(layout)) * ACTIVATION_BYTES
        write_bytes += self.kv_bytes_per_token(layout, kv_dtype)
        calls: list[Call] = [Elementwise("attention_norm", "attention rmsnorm", 1, 4.0 * hidden_bytes)]
        calls += linear_calls("qkv", "qkv_quantise", shard.qkv_out, hidden, execution)
        calls += self._norms(shard, qk_bytes, layout, execution.fused_norm_tokens)
        if self.rope:
            calls.append(Elementwise("rope", "rope", 1, 2.0 * qk_bytes))
        calls.append(Elementwise("kv_write", "kv write", 1, write_bytes))
        heads = (shard.num_q_heads, shard.num_kv_heads, self.head_dim)
        prompts = execution.sink_prompts if self.sinks and not self.window else None
        calls.append(AttentionCall(1, *heads, kv_dtype, window=self.window or 0, prompts=prompts))
        if self.head_gate:
            calls.append(Gemm("attention_gate", "attention gate", 1, shard.num_q_heads, hidden, "bf16"))
            calls.append(Elementwise("attention_gate", "gated attention", 1, 2.0 * out_bytes))
        if self.output_gate:
            calls.append(Elementwise("attention_gate", "gated attention", 1, 3.0 * out_bytes))
        calls += linear_calls("o", "o_quantise", hidden, shard.o_in, execution)
        if self.sums_over_gpus:
            calls += after_attention(hidden, layout, execution)
        if self.post_norm:
            calls.append(Elementwise("attention_norm", "post-attention rmsnorm", 1, 2.0 * hidden_bytes))
        return tuple(calls)

    def _norms(self, shard: AttentionShard, qk_bytes: float, layout: Layout, fused: int) -> list[RowOperator]:
        """Return the norms of queries, keys and values; ``fused`` is Execution's fused_norm_tokens."""
        calls: list[RowOperator] = []
        if self.qk_norm and self.qk_norm_spans_heads and layout.tp > 1:
            # fused, one kernel takes both queries and keys
            at_once, sums_bytes = 2 if fused else 1, 2.0 * VARIANCE_BYTES
            read_bytes = at_once * (0.5 * qk_bytes + VARIANCE_BYTES)
            calls.append(Elementwise("qk_norm", "qk squares", 2 // at_once, read_bytes, beyond=fused))
            calls.append(AllReduce("qk_norm_allreduce", "qk norm all-reduce", 1, layout.tp, sums_bytes))
            normed_bytes = at_once * qk_bytes
            calls.append(Elementwise("qk_norm", "qk rmsnorm", 2 // at_once, normed_bytes, beyond=fused))
        elif self.qk_norm:
            calls.append(Elementwise("qk_norm", "qk rmsnorm", 1, 2.0 * qk_bytes))
        if self.v_norm:
            v_bytes = float(shard.num_kv_heads * self.value_dim * ACTIVATION_BYTES)
            calls.append(Elementwise("qk_norm", "v rmsnorm", 1, 2.0 * v_bytes))
        return calls

    def kv_bytes_per_token(self, layout: Layout, kv_dtype: str) -> float:
        """Return the KV-cache bytes per token of one layer on one GPU: keys and values."""
        scales_bytes = 2 * self.shard(layout).num_kv_heads * KV_SCALE_BYTES.get(kv_dtype, 0)
        return self._kv_elements(layout) * KV_BYTES[kv_dtype] + scales_bytes

    def _kv_elements(self, layout: Layout) -> int:
        """Return the number of key and value elements of a token on one GPU."""
        return self.shard(layout).num_kv_heads * (self.head_dim + self.value_dim)

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Return the linear weights of one layer on one GPU, by the role of their call."""
        shard = self.shard(layout)
        return {"qkv": shard.qkv_out * hidden, "o": hidden * shard.o_in}

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights of one layer on one GPU that stay in bf16: norms and biases."""
        shard = self.shard(layout)
        heads = shard.num_q_heads + shard.num_kv_heads if self.qk_norm_spans_heads else 2
        norms = hidden * (1 + self.post_norm) + heads * self.head_dim * (
            self.qk_norm and self.qk_norm_weights
        )
        biases = shard.qkv_out * self.qkv_bias + hidden * self.o_bias
        return norms + biases + shard.num_q_heads * (self.sinks + hidden * self.head_gate)

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Return the elements per token that the widest kernel reads and writes on one GPU."""
        shard = self.shard(layout)
        return shard.qkv_out + shard.o_in
