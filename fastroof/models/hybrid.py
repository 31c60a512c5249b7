"""Mixers of hybrid models: Mamba-2 next to attention in one layer, and gated short convolutions."""

from __future__ import annotations

from dataclasses import dataclass

from fastroof.models.attention import Attention, GroupedQueryAttention
from fastroof.models.exchange import after_attention
from fastroof.models.execution import Execution
from fastroof.models.hf import checked_fields
from fastroof.models.layout import Layout, check_sizes, linear_calls
from fastroof.models.linear_attention import Mamba2
from fastroof.operators.calls import Call, Elementwise
from fastroof.units import ACTIVATION_BYTES


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
