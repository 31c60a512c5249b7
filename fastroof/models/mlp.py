"""The MLP of a layer: its calls and weights on one GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from fastroof.models.execution import Execution
from fastroof.models.hf import checked_fields
from fastroof.models.layout import Layout, check_sizes, linear_calls
from fastroof.operators.calls import AllReduce, Call, Elementwise
from fastroof.units import ACTIVATION_BYTES


class Mlp(Protocol):
    """Interface of a layer kind's MLP; ``hidden`` is the width of the residual stream."""

    @property
    def has_experts(self) -> bool:
        """Return whether the layout's ep and moe_tp split it."""

    def obstacles(self, layout: Layout) -> list[str]:
        """Return why this layout cannot split it; empty if it can."""

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of one layer on one GPU, in execution order."""

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Return the linear weights of one layer on one GPU, by the role of their call."""

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights of one layer on one GPU that stay in bf16: norms and biases."""

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Return the elements per token that the widest kernel reads and writes on one GPU."""


@dataclass(frozen=True)
@checked_fields
class _SplitMlp:
    """An up projection, an activation and a down projection, split over GPUs by their width.

    A parallel one reads attention's norm instead of its own, and sums its output with attention's.
    """

    intermediate: int
    bias: bool = False
    post_norm: bool = False
    parallel: bool = False
    has_experts: ClassVar[bool] = False
    ups: ClassVar[int]
    activation: ClassVar[str]

    def __post_init__(self) -> None:
        """Reject invalid sizes, also in layers built or modified by hand."""
        check_sizes(self, "intermediate")

    def obstacles(self, layout: Layout) -> list[str]:
        """Return why this layout cannot split it; empty if it can."""
        if self.intermediate % layout.tp:
            return [f"an MLP width of {self.intermediate} does not divide by {layout.tp}"]
        return []

    def shard(self, layout: Layout) -> int:
        """Return the width of the MLP on one GPU."""
        return self.intermediate // layout.tp

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of one layer on one GPU, in execution order."""
        width, hidden_bytes = self.shard(layout), float(hidden * ACTIVATION_BYTES)
        row_bytes = (self.ups + 1.0) * width * ACTIVATION_BYTES
        calls: list[Call] = []
        if not self.parallel:
            calls.append(Elementwise("mlp_norm", "mlp rmsnorm", 1, 4.0 * hidden_bytes))
        calls += linear_calls("gate_up", "gate_up_quantise", self.ups * width, hidden, execution)
        calls.append(Elementwise("activation", self.activation, 1, row_bytes))
        calls += linear_calls("down", "down_quantise", hidden, width, execution)
        if self.parallel:
            calls.append(Elementwise("mlp_norm", "sum with attention", 1, 3.0 * hidden_bytes))
        if layout.tp > 1:
            calls.append(AllReduce("mlp_allreduce", "mlp all-reduce", 1, layout.tp, hidden_bytes))
        if self.post_norm:
            calls.append(Elementwise("mlp_norm", "post-mlp rmsnorm", 1, 2.0 * hidden_bytes))
        return tuple(calls)

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Return the linear weights of one layer on one GPU, by the role of their call."""
        weights = hidden * self.shard(layout)
        return {"gate_up": self.ups * weights, "down": weights}

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights of one layer on one GPU that stay in bf16: the norm and biases."""
        norms = hidden * (1 + self.post_norm - self.parallel)
        return norms + (self.ups * self.shard(layout) + hidden) * self.bias

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Return the elements per token that the widest kernel reads and writes on one GPU."""
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
    """One up projection, squared ReLU, and a down projection; attributes as in :class:`GatedMlp`."""

    ups = 1
    activation = "relu2"
