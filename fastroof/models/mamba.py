"""Mamba-2 in place of attention: a layer that keeps a state of fixed size instead of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from fastroof.errors import ModelError
from fastroof.models.checked_fields import checked_fields
from fastroof.models.exchange import after_attention
from fastroof.models.execution import Execution
from fastroof.models.layout import Layout
from fastroof.models.linear import linear_calls
from fastroof.models.sizes import check_sizes
from fastroof.operators.calls import Call, Elementwise, MixerCall, MixerKernel
from fastroof.units import ACTIVATION_BYTES

__all__ = ["STATE_DTYPES", "Mamba2", "MambaShard"]

STATE_DTYPES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element of the state, by the name that a config.json has for it."""

_OPERATOR: Final = "mamba2"


class MambaShard(NamedTuple):
    """What one GPU runs of a layer."""

    num_heads: int
    num_groups: int
    inner: int
    channels: int
    in_out: int


@dataclass(frozen=True)
@checked_fields
class Mamba2:
    """State space duality (arXiv:2405.21060) between two projections, with a gated norm after it."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int = 1
    conv_width: int = 4
    chunk_size: int = 128
    state_dtype: str = "float32"
    bias: bool = False
    conv_bias: bool = True
    window = None

    def __post_init__(self) -> None:
        """Refuse sizes no layer has, in layers that were built or changed by hand too."""
        check_sizes(self, "num_heads", "head_dim", "state_dim", "num_groups", "conv_width", "chunk_size")
        if self.num_heads % self.num_groups:
            raise ModelError(f"{self.num_heads} heads do not divide into {self.num_groups} groups")
        if self.state_dtype not in STATE_DTYPES:
            known = ", ".join(STATE_DTYPES)
            raise ModelError(f"a state in {self.state_dtype!r} is unknown: {known} would do")

    @property
    def heads_text(self) -> str:
        """Heads, as lists of models show them."""
        return f"{self.num_heads} SSM {self.head_dim}x{self.state_dim}"

    def obstacles(self, layout: Layout) -> list[str]:
        """What keeps it from being split so: GPUs share whole groups, or all have the only one."""
        reasons = []
        if self.num_heads % layout.tp:
            reasons.append(f"{self.num_heads} heads of Mamba do not divide by {layout.tp}")
        if self.num_groups > 1 and self.num_groups % layout.tp:
            reasons.append(f"{self.num_groups} groups of heads of Mamba do not divide by {layout.tp}")
        return reasons

    def shard(self, layout: Layout) -> MambaShard:
        """What one GPU runs."""
        heads = self.num_heads // layout.tp
        groups = max(1, self.num_groups // layout.tp)
        inner = heads * self.head_dim
        channels = inner + 2 * groups * self.state_dim
        return MambaShard(heads, groups, inner, channels, inner + channels + heads)

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Calls of one layer on one GPU, in their order."""
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
        calls.append(Elementwise("state_gate", "mamba gated rmsnorm", 1, row_bytes))
        calls += linear_calls("state_out", "state_out_quantise", hidden, shard.inner, execution)
        return (*calls, *after_attention(hidden, layout, execution))

    def _kernel(self, phase: str, part: str, shard: MambaShard) -> MixerKernel:
        sizes = (shard.num_heads, self.head_dim, self.state_dim, shard.num_groups, self.chunk_size)
        return MixerKernel(_OPERATOR, (phase, part, self.conv_width, *sizes))

    def kv_bytes_per_token(self, layout: Layout, kv_dtype: str) -> float:
        """Bytes that one GPU keeps of a token, of one layer: none."""
        return 0.0

    def state_bytes(self, layout: Layout) -> float:
        """Bytes that one GPU keeps of a sequence, of one layer: the last taps and the state of every head."""
        shard = self.shard(layout)
        taps = (self.conv_width - 1) * shard.channels * ACTIVATION_BYTES
        return float(taps + shard.inner * self.state_dim * STATE_DTYPES[self.state_dtype])

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Weights of the linear layers on one GPU, of one layer, by the role of their call."""
        shard = self.shard(layout)
        return {"state_in": shard.in_out * hidden, "state_out": hidden * shard.inner}

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Weights that stay in bf16 on one GPU, of one layer: norms, the convolution, A, D and biases."""
        shard = self.shard(layout)
        convolution = shard.channels * (self.conv_width + self.conv_bias)
        # a head's A and D, and the bias of its time step
        heads = 3 * shard.num_heads
        biases = (shard.in_out + hidden) * self.bias
        return hidden + shard.inner + convolution + heads + biases

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Elements a token that its widest kernel reads and writes on one GPU."""
        shard = self.shard(layout)
        return shard.in_out + shard.inner
