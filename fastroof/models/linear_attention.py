"""Linear attention instead of softmax attention, or next to it, and short convolutions.

Layers have a state of fixed size; only attention next to Mamba-2 has a KV cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from fastroof.errors import ModelError
from fastroof.models.attention import Attention, GroupedQueryAttention
from fastroof.models.exchange import after_attention
from fastroof.models.execution import Execution
from fastroof.models.hf import checked_fields
from fastroof.models.layout import Layout, check_sizes, linear_calls
from fastroof.operators.calls import Call, Elementwise, Gemm, MixerCall, MixerKernel
from fastroof.units import ACTIVATION_BYTES

STATE_DTYPES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a state element, by its dtype's name in config.json."""

_OPERATOR: Final = "mamba2"


class MambaShard(NamedTuple):
    """One GPU's share of a layer."""

    num_heads: int
    num_groups: int
    inner: int
    channels: int
    in_out: int


def _check_state_dtype(dtype: str) -> None:
    if dtype not in STATE_DTYPES:
        raise ModelError(f"unknown state dtype {dtype!r}; valid: {', '.join(STATE_DTYPES)}")


@dataclass(frozen=True)
@checked_fields
class Mamba2(Attention):
    """Mamba-2: state space duality (arXiv:2405.21060) between two projections, with a gated norm."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int = 1
    conv_width: int = 4
    chunk_size: int = 128
    state_dtype: str = "float32"
    bias: bool = False
    conv_bias: bool = True
    norm: bool = True
    window = None

    def __post_init__(self) -> None:
        """Reject invalid sizes, also in layers built or modified by hand."""
        check_sizes(self, "num_heads", "head_dim", "state_dim", "num_groups", "conv_width", "chunk_size")
        if self.num_heads % self.num_groups:
            raise ModelError(f"{self.num_heads} heads do not divide into {self.num_groups} groups")
        _check_state_dtype(self.state_dtype)

    @property
    def heads_text(self) -> str:
        """Return the heads as model lists show them."""
        return f"{self.num_heads} SSM {self.head_dim}x{self.state_dim}"

    def obstacles(self, layout: Layout) -> list[str]:
        """Return why this layout cannot split it: GPUs take whole groups, or all have the only one."""
        reasons = []
        if self.num_heads % layout.tp:
            reasons.append(f"{self.num_heads} heads of Mamba do not divide by {layout.tp}")
        if self.num_groups > 1 and self.num_groups % layout.tp:
            reasons.append(f"{self.num_groups} groups of heads of Mamba do not divide by {layout.tp}")
        return reasons

    def shard(self, layout: Layout) -> MambaShard:
        """Return one GPU's share of the layer."""
        heads = self.num_heads // layout.tp
        groups = max(1, self.num_groups // layout.tp)
        inner = heads * self.head_dim
        channels = inner + 2 * groups * self.state_dim
        return MambaShard(heads, groups, inner, channels, inner + channels + heads)

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of one layer on one GPU, in execution order."""
        shard = self.shard(layout)
        calls: list[Call] = [
            Elementwise("attention_norm", "mamba rmsnorm", 1, 4.0 * hidden * ACTIVATION_BYTES)
        ]
        calls += linear_calls("state_in", "state_in_quantise", shard.in_out, hidden, execution)
        recurrence = "recurrence" if STATE_DTYPES[self.state_dtype] == 4 else "recurrence_16bit"
        for name, part in (("mamba convolution", "convolution"), ("mamba recurrence", recurrence)):
            decode, prefill = (self._kernel(phase, part, shard) for phase in ("generation", "context"))
            calls.append(MixerCall(1, decode, prefill, execution.kv_dtype, name=name))
        row_bytes = 3.0 * shard.inner * ACTIVATION_BYTES
        gate = "mamba gated rmsnorm" if self.norm else "mamba gate"
        calls.append(Elementwise("state_gate", gate, 1, row_bytes))
        calls += linear_calls("state_out", "state_out_quantise", hidden, shard.inner, execution)
        return (*calls, *after_attention(hidden, layout, execution))

    def _kernel(self, phase: str, part: str, shard: MambaShard) -> MixerKernel:
        sizes = (shard.num_heads, self.head_dim, self.state_dim, shard.num_groups, self.chunk_size)
        return MixerKernel(_OPERATOR, (phase, part, self.conv_width, *sizes))

    def state_bytes(self, layout: Layout) -> float:
        """Return the state bytes per sequence of one layer on one GPU: convolution taps and head states."""
        shard = self.shard(layout)
        taps = (self.conv_width - 1) * shard.channels * ACTIVATION_BYTES
        return float(taps + shard.inner * self.state_dim * STATE_DTYPES[self.state_dtype])

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Return the linear weights of one layer on one GPU, by the role of their call."""
        shard = self.shard(layout)
        return {"state_in": shard.in_out * hidden, "state_out": hidden * shard.inner}

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights of one layer on one GPU that stay in bf16: norms, convolution, A, D, biases."""
        shard = self.shard(layout)
        convolution = shard.channels * (self.conv_width + self.conv_bias)
        # A and D of a head, and the bias of its time step
        heads = 3 * shard.num_heads
        biases = (shard.in_out + hidden) * self.bias
        return hidden + shard.inner * self.norm + convolution + heads + biases

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Return the elements per token that the widest kernel reads and writes on one GPU."""
        shard = self.shard(layout)
        return shard.in_out + shard.inner


class DeltaShard(NamedTuple):
    """One GPU's share of a layer."""

    num_k_heads: int
    num_v_heads: int
    values: int
    channels: int


@dataclass(frozen=True)
@checked_fields
class DeltaRule(Attention, ABC):
    """A short causal convolution and a delta-rule recurrence between two projections."""

    num_k_heads: int
    head_k_dim: int
    num_v_heads: int
    head_v_dim: int
    conv_width: int = 4
    state_dtype: str = "float32"
    window = None
    operator: ClassVar[str]
    title: ClassVar[str]

    def __post_init__(self) -> None:
        """Reject invalid sizes, also in layers built or modified by hand."""
        check_sizes(self, "num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim", "conv_width")
        if self.num_v_heads % self.num_k_heads:
            raise ModelError(
                f"{self.num_v_heads} heads of values do not divide by {self.num_k_heads} of keys"
            )
        _check_state_dtype(self.state_dtype)

    @property
    def heads_text(self) -> str:
        """Return the heads as model lists show them."""
        return f"{self.num_v_heads} {self.operator.upper()} {self.head_k_dim}x{self.head_v_dim}"

    def obstacles(self, layout: Layout) -> list[str]:
        """Return why this layout cannot split it: GPUs take whole heads."""
        head_counts = {"keys": self.num_k_heads, "values": self.num_v_heads}
        return [
            f"{heads} heads of {what} of linear attention do not divide by {layout.tp}"
            for what, heads in head_counts.items()
            if heads % layout.tp
        ]

    def shard(self, layout: Layout) -> DeltaShard:
        """Return one GPU's share of the layer."""
        k_heads, v_heads = self.num_k_heads // layout.tp, self.num_v_heads // layout.tp
        values = v_heads * self.head_v_dim
        return DeltaShard(k_heads, v_heads, values, 2 * k_heads * self.head_k_dim + values)

    @abstractmethod
    def state_in(self, shard: DeltaShard) -> int:
        """Return the outputs of the projection to queries, keys, values and their gate."""

    @abstractmethod
    def decay_gemms(self, hidden: int, shard: DeltaShard) -> list[tuple[int, int]]:
        """Return the outputs and inputs of the small bf16 projections to decays and steps."""

    @abstractmethod
    def decay_weights(self, shard: DeltaShard) -> int:
        """Return the weights of the decays outside projections: scales and biases."""

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of one layer on one GPU, in execution order."""
        shard = self.shard(layout)
        calls: list[Call] = [
            Elementwise("attention_norm", "attention rmsnorm", 1, 4.0 * hidden * ACTIVATION_BYTES)
        ]
        calls += linear_calls("state_in", "state_in_quantise", self.state_in(shard), hidden, execution)
        calls += [
            Gemm("state_gate", f"decays {number}", 1, n, k, "bf16")
            for number, (n, k) in enumerate(self.decay_gemms(hidden, shard), 1)
        ]
        sizes = (shard.num_k_heads, self.head_k_dim, shard.num_v_heads, self.head_v_dim)
        decode, prefill = (
            MixerKernel(self.operator, (phase, "all", self.conv_width, *sizes))
            for phase in ("generation", "context")
        )
        calls.append(MixerCall(1, decode, prefill, execution.kv_dtype, name=self.title))
        row_bytes = 3.0 * shard.values * ACTIVATION_BYTES
        calls.append(Elementwise("state_gate", "gated rmsnorm", 1, row_bytes))
        calls += linear_calls("state_out", "state_out_quantise", hidden, shard.values, execution)
        return (*calls, *after_attention(hidden, layout, execution))

    def state_bytes(self, layout: Layout) -> float:
        """Return the state bytes per sequence of one layer on one GPU: convolution taps and head states."""
        shard = self.shard(layout)
        taps = (self.conv_width - 1) * shard.channels * ACTIVATION_BYTES
        return float(taps + shard.values * self.head_k_dim * STATE_DTYPES[self.state_dtype])

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Return the linear weights of one layer on one GPU, by the role of their call."""
        shard = self.shard(layout)
        return {"state_in": self.state_in(shard) * hidden, "state_out": hidden * shard.values}

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights of one layer on one GPU that stay in bf16: norms, convolution, decays, steps."""
        shard = self.shard(layout)
        small = sum(n * k for n, k in self.decay_gemms(hidden, shard))
        convolution = shard.channels * self.conv_width
        return hidden + self.head_v_dim + convolution + small + self.decay_weights(shard)

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Return the elements per token that the widest kernel reads and writes on one GPU."""
        shard = self.shard(layout)
        return self.state_in(shard) + shard.values


@dataclass(frozen=True)
@checked_fields
class GatedDeltaNet(DeltaRule):
    """A gated delta rule with one decay and one step per value head (arXiv:2412.06464)."""

    operator = "gdn"
    title = "gated delta net"

    def state_in(self, shard: DeltaShard) -> int:
        """Return the width of queries, keys, values and an equally wide gate."""
        return shard.channels + shard.values

    def decay_gemms(self, hidden: int, shard: DeltaShard) -> list[tuple[int, int]]:
        """Return one decay and one step per head, which fp8 and nvfp4 checkpoints leave in bf16."""
        return [(2 * shard.num_v_heads, hidden)]

    def decay_weights(self, shard: DeltaShard) -> int:
        """Return the weights of decays: one scale and one bias per head."""
        return 2 * shard.num_v_heads


@dataclass(frozen=True)
@checked_fields
class KimiDeltaAttention(DeltaRule):
    """Kimi delta attention (arXiv:2510.26692): a delta rule with one decay per key channel."""

    gate_rank: int | None = None
    operator = "kda"
    title = "Kimi delta attention"

    def __post_init__(self) -> None:
        """Reject invalid sizes."""
        super().__post_init__()
        if self.gate_rank is not None:
            check_sizes(self, "gate_rank")

    def state_in(self, shard: DeltaShard) -> int:
        """Return the width of queries, keys, values, and of their gate if it has full rank."""
        return shard.channels + (shard.values if self.gate_rank is None else 0)

    def decay_gemms(self, hidden: int, shard: DeltaShard) -> list[tuple[int, int]]:
        """Return low-rank decays (through a head's width, whole on every GPU), steps, and a low-rank gate."""
        rank = self.gate_rank or 0
        through = [(self.head_k_dim + shard.num_v_heads + rank, hidden)]
        decays = (shard.num_k_heads * self.head_k_dim, self.head_k_dim)
        return [*through, decays, *([(shard.values, rank)] if rank else [])]

    def decay_weights(self, shard: DeltaShard) -> int:
        """Return the weights of decays: one scale per head and one bias per channel."""
        return shard.num_v_heads + shard.num_k_heads * self.head_k_dim


@dataclass(frozen=True)
@checked_fields
class AttentionAndMamba:
    """Attention and Mamba-2 on the same normed input, one after the other; their outputs are summed."""

    attention: GroupedQueryAttention
    mamba: Mamba2

    @property
    def window(self) -> int | None:
        """Tokens that a query attends to; None for all."""
        return self.attention.window

    @property
    def heads_text(self) -> str:
        """Return the heads as model lists show them."""
        return f"{self.attention.heads_text} + {self.mamba.heads_text}"

    def obstacles(self, layout: Layout) -> list[str]:
        """Return why this layout cannot split it; empty if it can."""
        return [*self.attention.obstacles(layout), *self.mamba.obstacles(layout)]

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of one layer on one GPU, in execution order."""
        attention = self.attention.calls(hidden, layout, execution)
        # the norm before both runs once
        _, *mamba = self.mamba.calls(hidden, layout, execution)
        added = Elementwise("state_gate", "sum with attention", 1, 3.0 * hidden * ACTIVATION_BYTES)
        return (*attention, *mamba, added)

    def kv_bytes_per_token(self, layout: Layout, kv_dtype: str) -> float:
        """Return the KV-cache bytes per token of one layer on one GPU: attention's."""
        return self.attention.kv_bytes_per_token(layout, kv_dtype)

    def state_bytes(self, layout: Layout) -> float:
        """Return the state bytes per sequence of one layer on one GPU: Mamba's."""
        return self.mamba.state_bytes(layout)

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Return the linear weights of one layer on one GPU, by the role of their call."""
        return self.attention.linear_weights(hidden, layout) | self.mamba.linear_weights(hidden, layout)

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights of one layer on one GPU that stay in bf16, the norm before both once."""
        return (
            self.attention.other_weights(hidden, layout) + self.mamba.other_weights(hidden, layout) - hidden
        )

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Return the elements per token that the widest kernel reads and writes on one GPU."""
        attention, mamba = self.attention, self.mamba
        return max(attention.activation_width(hidden, layout), mamba.activation_width(hidden, layout))


@dataclass(frozen=True)
@checked_fields
class ShortConvolution(Attention):
    """A gated causal convolution over a few tokens between two projections (LFM2); timed by its bytes."""

    width: int
    taps: int = 3
    bias: bool = False
    window = None

    def __post_init__(self) -> None:
        """Reject invalid sizes, also in layers built or modified by hand."""
        check_sizes(self, "width", "taps")

    @property
    def heads_text(self) -> str:
        """Return the size as model lists show it."""
        return f"convolution {self.width}x{self.taps}"

    def obstacles(self, layout: Layout) -> list[str]:
        """Return why this layout cannot split it; empty if it can."""
        if self.width % layout.tp:
            return [f"a convolution's width of {self.width} does not divide by {layout.tp}"]
        return []

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of one layer on one GPU, in execution order."""
        width = self.width // layout.tp
        row_bytes = float(width * ACTIVATION_BYTES)
        calls: list[Call] = [
            Elementwise("attention_norm", "attention rmsnorm", 1, 4.0 * hidden * ACTIVATION_BYTES)
        ]
        calls += linear_calls("state_in", "state_in_quantise", 3 * width, hidden, execution)
        # two products of two rows each; a decode token also reads and writes the taps of its sequence
        calls.append(Elementwise("state_gate", "convolution gates", 2, 3.0 * row_bytes))
        with_taps = (2.0 + 2.0 * (self.taps - 1)) * row_bytes
        name = "short convolution"
        calls.append(Elementwise("state_gate", name, 1, with_taps, steps="decode_only"))
        calls.append(Elementwise("state_gate", name, 1, 2.0 * row_bytes, steps="with_prefill"))
        calls += linear_calls("state_out", "state_out_quantise", hidden, width, execution)
        return (*calls, *after_attention(hidden, layout, execution))

    def state_bytes(self, layout: Layout) -> float:
        """Return the state bytes per sequence of one layer on one GPU: the last inputs of the convolution."""
        return float((self.taps - 1) * (self.width // layout.tp) * ACTIVATION_BYTES)

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Return the linear weights of one layer on one GPU, by the role of their call."""
        width = self.width // layout.tp
        return {"state_in": 3 * width * hidden, "state_out": hidden * width}

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights of one layer on one GPU that stay in bf16: the norm, the taps, biases."""
        width = self.width // layout.tp
        return hidden + width * self.taps + (4 * width + hidden) * self.bias

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Return the elements per token that the widest kernel reads and writes on one GPU."""
        return 4 * (self.width // layout.tp)
