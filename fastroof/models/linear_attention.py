"""Linear attention in place of softmax attention: layers that keep a state of fixed size, no KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fastroof.errors import ModelError
from fastroof.models.checked_fields import checked_fields
from fastroof.models.exchange import after_attention
from fastroof.models.execution import Execution
from fastroof.models.layout import Layout
from fastroof.models.linear import linear_calls
from fastroof.models.mamba import STATE_DTYPES
from fastroof.models.sizes import check_sizes
from fastroof.operators.calls import Call, Elementwise, Gemm, MixerCall, MixerKernel
from fastroof.units import ACTIVATION_BYTES

__all__ = ["DeltaRule", "DeltaShard", "GatedDeltaNet", "KimiDeltaAttention"]


class DeltaShard(NamedTuple):
    """What one GPU runs of a layer."""

    num_k_heads: int
    num_v_heads: int
    values: int
    channels: int


@dataclass(frozen=True)
@checked_fields
class DeltaRule(ABC):
    """A short causal convolution and a recurrence that corrects its state, between two projections."""

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
        """Refuse sizes no layer has, in layers that were built or changed by hand too."""
        check_sizes(self, "num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim", "conv_width")
        if self.num_v_heads % self.num_k_heads:
            raise ModelError(
                f"{self.num_v_heads} heads of values do not divide by {self.num_k_heads} of keys"
            )
        if self.state_dtype not in STATE_DTYPES:
            known = ", ".join(STATE_DTYPES)
            raise ModelError(f"a state in {self.state_dtype!r} is unknown: {known} would do")

    @property
    def heads_text(self) -> str:
        """Heads, as lists of models show them."""
        return f"{self.num_v_heads} {self.operator.upper()} {self.head_k_dim}x{self.head_v_dim}"

    def obstacles(self, layout: Layout) -> list[str]:
        """What keeps it from being split so: GPUs share whole heads."""
        of = {"keys": self.num_k_heads, "values": self.num_v_heads}
        return [
            f"{heads} heads of {what} of linear attention do not divide by {layout.tp}"
            for what, heads in of.items()
            if heads % layout.tp
        ]

    def shard(self, layout: Layout) -> DeltaShard:
        """What one GPU runs."""
        k_heads, v_heads = self.num_k_heads // layout.tp, self.num_v_heads // layout.tp
        values = v_heads * self.head_v_dim
        return DeltaShard(k_heads, v_heads, values, 2 * k_heads * self.head_k_dim + values)

    @abstractmethod
    def state_in(self, shard: DeltaShard) -> int:
        """Outputs of the projection to queries, keys, values and their gate."""

    @abstractmethod
    def decay_gemms(self, hidden: int, shard: DeltaShard) -> list[tuple[int, int]]:
        """Outputs and inputs of the small projections to decays and steps, in bf16."""

    @abstractmethod
    def decay_weights(self, shard: DeltaShard) -> int:
        """Weights of decays by themselves: their scales and biases."""

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Calls of one layer on one GPU, in their order."""
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

    def kv_bytes_per_token(self, layout: Layout, kv_dtype: str) -> float:
        """Bytes that one GPU keeps of a token, of one layer: none."""
        return 0.0

    def state_bytes(self, layout: Layout) -> float:
        """Bytes that one GPU keeps of a sequence, of one layer: the last taps and the state of every head."""
        shard = self.shard(layout)
        taps = (self.conv_width - 1) * shard.channels * ACTIVATION_BYTES
        return float(taps + shard.values * self.head_k_dim * STATE_DTYPES[self.state_dtype])

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Weights of the linear layers on one GPU, of one layer, by the role of their call."""
        shard = self.shard(layout)
        return {"state_in": self.state_in(shard) * hidden, "state_out": hidden * shard.values}

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Weights that stay in bf16 on one GPU, of one layer: norms, the convolution, decays and steps."""
        shard = self.shard(layout)
        small = sum(n * k for n, k in self.decay_gemms(hidden, shard))
        convolution = shard.channels * self.conv_width
        return hidden + self.head_v_dim + convolution + small + self.decay_weights(shard)

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Elements a token that its widest kernel reads and writes on one GPU."""
        shard = self.shard(layout)
        return self.state_in(shard) + shard.values


@dataclass(frozen=True)
@checked_fields
class GatedDeltaNet(DeltaRule):
    """A gated delta rule with one decay and one step a head of values (arXiv:2412.06464)."""

    operator = "gdn"
    title = "gated delta net"

    def state_in(self, shard: DeltaShard) -> int:
        """Queries, keys, values, and a gate as wide as these."""
        return shard.channels + shard.values

    def decay_gemms(self, hidden: int, shard: DeltaShard) -> list[tuple[int, int]]:
        """A decay and a step a head, which checkpoints in fp8 and nvfp4 leave in bf16."""
        return [(2 * shard.num_v_heads, hidden)]

    def decay_weights(self, shard: DeltaShard) -> int:
        """A scale and a bias a head."""
        return 2 * shard.num_v_heads


@dataclass(frozen=True)
@checked_fields
class KimiDeltaAttention(DeltaRule):
    """Kimi delta attention (arXiv:2510.26692): a delta rule with a decay a channel of the keys."""

    gate_rank: int | None = None
    operator = "kda"
    title = "Kimi delta attention"

    def __post_init__(self) -> None:
        """Refuse sizes no layer has."""
        super().__post_init__()
        if self.gate_rank is not None:
            check_sizes(self, "gate_rank")

    def state_in(self, shard: DeltaShard) -> int:
        """Queries, keys, values, and their gate where it has full rank."""
        return shard.channels + (shard.values if self.gate_rank is None else 0)

    def decay_gemms(self, hidden: int, shard: DeltaShard) -> list[tuple[int, int]]:
        """Decays through a head's width, which every GPU has whole, and a step a head; a gate alike."""
        rank = self.gate_rank or 0
        through = [(self.head_k_dim + shard.num_v_heads + rank, hidden)]
        decays = (shard.num_k_heads * self.head_k_dim, self.head_k_dim)
        return [*through, decays, *([(shard.values, rank)] if rank else [])]

    def decay_weights(self, shard: DeltaShard) -> int:
        """A scale a head, and a bias a channel."""
        return shard.num_v_heads + shard.num_k_heads * self.head_k_dim
