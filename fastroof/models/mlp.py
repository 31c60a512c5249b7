"""The MLP of a layer: what one GPU runs of it, and what it weighs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from fastroof.models.execution import Execution
from fastroof.models.hf import checked_fields
from fastroof.models.layout import Layout, check_sizes, linear_calls
from fastroof.operators.calls import AllReduce, Call, Elementwise
from fastroof.units import ACTIVATION_BYTES


class Mlp(Protocol):
    """What a layer kind asks of its MLP. ``hidden`` is the width of the residual stream."""

    @property
    def has_experts(self) -> bool:
        """Whether the layout's ep and moe_tp split it."""

    def obstacles(self, layout: Layout) -> list[str]:
        """Why it cannot be split this way; empty if it can."""

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Calls of one layer on one GPU, in their order."""

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Weights of the linear layers on one GPU, of one layer, by the role of their call."""

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Weights that stay in bf16 on one GPU, of one layer: norms and biases."""

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Elements a token that its widest kernel reads and writes on one GPU."""


@dataclass(frozen=True)
@checked_fields
class _SplitMlp:
    """Projections up, an activation, and one down, split over GPUs by their width."""

    intermediate: int
    bias: bool = False
    post_norm: bool = False
    has_experts: ClassVar[bool] = False
    ups: ClassVar[int]
    activation: ClassVar[str]

    def __post_init__(self) -> None:
        """Refuse sizes no layer has, in layers that were built or changed by hand too."""
        check_sizes(self, "intermediate")

    def obstacles(self, layout: Layout) -> list[str]:
        """What keeps it from being split so."""
        if self.intermediate % layout.tp:
            return [f"an MLP width of {self.intermediate} does not divide by {layout.tp}"]
        return []

    def shard(self, layout: Layout) -> int:
        """Width of the MLP on one GPU."""
        return self.intermediate // layout.tp

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Calls of one layer on one GPU, in their order."""
        width, hidden_bytes = self.shard(layout), float(hidden * ACTIVATION_BYTES)
        row_bytes = (self.ups + 1.0) * width * ACTIVATION_BYTES
        calls: list[Call] = [Elementwise("mlp_norm", "mlp rmsnorm", 1, 4.0 * hidden_bytes)]
        calls += linear_calls("gate_up", "gate_up_quantise", self.ups * width, hidden, execution)
        calls.append(Elementwise("activation", self.activation, 1, row_bytes))
        calls += linear_calls("down", "down_quantise", hidden, width, execution)
        if layout.tp > 1:
            calls.append(AllReduce("mlp_allreduce", "mlp all-reduce", 1, layout.tp, hidden_bytes))
        if self.post_norm:
            calls.append(Elementwise("mlp_norm", "post-mlp rmsnorm", 1, 2.0 * hidden_bytes))
        return tuple(calls)

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Weights of the linear layers on one GPU, of one layer, by the role of their call."""
        weights = hidden * self.shard(layout)
        return {"gate_up": self.ups * weights, "down": weights}

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Weights that stay in bf16 on one GPU, of one layer: the norm and biases."""
        return hidden * (1 + self.post_norm) + (self.ups * self.shard(layout) + hidden) * self.bias

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Elements a token that its widest kernel reads and writes on one GPU."""
        return (self.ups + 1) * self.shard(layout)


@dataclass(frozen=True)
@checked_fields
class GatedMlp(_SplitMlp):
    """Gate and up projections, an activation of their product, and a down projection."""

    ups = 2
    activation = "silu_and_mul"


@dataclass(frozen=True)
@checked_fields
class UngatedMlp(_SplitMlp):
    """One projection up, squared ReLU, and one down; attributes as those of :class:`GatedMlp`."""

    ups = 1
    activation = "relu2"
