"""Kinds of layers, and how many of each a model has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fastroof.models.attention import Attention
from fastroof.models.exchange import shares_tokens
from fastroof.models.execution import Execution, Formats, check_formats, weight_bytes
from fastroof.models.experts import RoutedExperts
from fastroof.models.hf import checked_fields
from fastroof.models.layout import Layout, check_sizes
from fastroof.models.lora import adapter_bytes
from fastroof.models.mlp import Mlp
from fastroof.models.residuals import AttentionResiduals, HyperConnections
from fastroof.operators.calls import Call, Gemm


@dataclass(frozen=True)
@checked_fields
class LayerKind:
    """A kind of layer: an attention and an MLP, with the sizes and calls of one such layer.

    Attributes
    ----------
    attention : Attention
        A dataclass of :mod:`fastroof.models.attention`, or an object with the same methods.
    mlp : Mlp
        A dataclass of :mod:`fastroof.models.mlp`, or an object with the same methods.
    name : str
        Label of the kind in a model with several kinds: ``"windowed"``.
    formats : Formats
        Modules that the checkpoint does not store in bf16, by the role of their call.
    connections : HyperConnections, AttentionResiduals or None
        Residual streams and their mixing; None for a plain residual.
    """

    attention: Attention
    mlp: Mlp
    name: str = "dense"
    formats: Formats = ()
    connections: HyperConnections | AttentionResiduals | None = None

    def __post_init__(self) -> None:
        """Reject unknown formats."""
        check_formats(name for _, name in self.formats)

    @property
    def residual_rows(self) -> int:
        """Rows of the residual per token."""
        return 1 if self.connections is None else self.connections.streams

    @property
    def embedded_rows(self) -> int:
        """Rows of the residual that a token's embedding is written to."""
        return 1 if self.connections is None else self.connections.embedded_rows

    def obstacles(self, layout: Layout) -> list[str]:
        """Return why this layout cannot split a layer; empty if it can."""
        return [*self.attention.obstacles(layout), *self.mlp.obstacles(layout)]

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of one layer on one GPU, in the order in which a step's time is summed."""
        execution = self.run_as(execution)
        attends_as = self._attends_as(execution, layout)
        attention = self.attention.calls(hidden, layout, attends_as)
        calls = (*attention, *self.mlp.calls(hidden, layout, execution))
        if execution.adapters is not None:
            parts = self.attention.calls(hidden, layout, attends_as._replace(whole_blocks=()))
            of_block = execution.adapters.of_block(parts, _roles(parts) - _roles(attention))
            both = (*attention, *of_block, *calls[len(attention) :])
            calls = execution.adapters.beside(both)
        if self.connections is None:
            return calls
        before, *after = self.connections.calls(hidden)
        return (before, *calls, *after)

    def adapter_bytes(self, hidden: int, layout: Layout, execution: Execution) -> int:
        """Return the bytes of LoRA adapters of one layer on one GPU."""
        adapters = execution.adapters
        return 0 if adapters is None else adapter_bytes(self.calls(hidden, layout, execution), adapters.held)

    def without_adapters(self, hidden: int, layout: Layout, execution: Execution) -> set[str]:
        """Return the layers that should have adapters, and are part of a block without sizes of its parts."""
        if execution.adapters is None:
            return set()
        parts = self.attention.calls(hidden, layout, execution._replace(whole_blocks=()))
        return set(self.attention.linear_weights(hidden, layout)) & execution.adapters.roles - _roles(parts)

    def _attends_as(self, execution: Execution, layout: Layout) -> Execution:
        """Return how attention runs before this MLP: reduce-scatter if experts share tokens."""
        rules = execution.exchange
        if rules.attention_sum == "all_reduce" or not isinstance(self.mlp, RoutedExperts):
            return execution
        return execution._replace(scatters_attention=shares_tokens(layout, rules, self.mlp.topk))

    def kv_bytes_per_token(self, layout: Layout, kv_dtype: str) -> float:
        """Return the KV-cache bytes per token of one layer on one GPU."""
        return self.attention.kv_bytes_per_token(layout, kv_dtype)

    def state_bytes(self, layout: Layout) -> float:
        """Return the fixed state bytes per sequence of one layer on one GPU."""
        return self.attention.state_bytes(layout)

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Return the linear weights of one layer on one GPU, by the role of their call."""
        return self.attention.linear_weights(hidden, layout) | self.mlp.linear_weights(hidden, layout)

    def weight_bytes(self, hidden: int, layout: Layout, execution: Execution) -> float:
        """Return the bytes of one layer's linear weights on one GPU, replicated experts included."""
        weights = self.linear_weights(hidden, layout)
        if execution.num_slots and isinstance(self.mlp, RoutedExperts):
            weights["experts"] = weights["experts"] * execution.num_slots // self.mlp.num_experts
        return weight_bytes(weights, self.run_as(execution))

    def run_as(self, execution: Execution) -> Execution:
        """Return the execution with this kind's formats, if the checkpoint's formats are requested."""
        return execution if execution.formats is None else execution._replace(formats=self.formats)

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights of one layer on one GPU that stay in bf16: norms, biases, stream mixing."""
        mixing = 0 if self.connections is None else self.connections.weights(hidden)
        return self.attention.other_weights(hidden, layout) + self.mlp.other_weights(hidden, layout) + mixing

    def num_parameters(self, hidden: int) -> int:
        """Return the number of weights of one whole layer."""
        one_gpu = Layout()
        return sum(self.linear_weights(hidden, one_gpu).values()) + self.other_weights(hidden, one_gpu)

    def active_parameters(self, hidden: int) -> int:
        """Return the number of weights of one whole layer that a token passes."""
        idle = self.mlp.idle_weights(hidden) if isinstance(self.mlp, RoutedExperts) else 0
        return self.num_parameters(hidden) - idle - getattr(self.attention, "idle_weights", 0)

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Return the elements per token that the widest kernel reads and writes on one GPU."""
        attention, mlp = self.attention, self.mlp
        return max(attention.activation_width(hidden, layout), mlp.activation_width(hidden, layout))


def _roles(calls: Iterable[Call]) -> set[str]:
    return {call.role for call in calls if isinstance(call, Gemm)}


@dataclass(frozen=True)
@checked_fields
class LayerGroup:
    """A number of layers of one kind; their position in the model does not affect a step's time."""

    kind: LayerKind
    count: int

    def __post_init__(self) -> None:
        """Reject invalid counts."""
        check_sizes(self, "count")


@dataclass(frozen=True)
@checked_fields
class _Skipped:
    """A part of a layer that has no calls, weights or cache."""

    def obstacles(self, layout: Layout) -> list[str]:
        """Return why this layout cannot split it: always empty."""
        return []

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of one layer on one GPU: none."""
        return ()

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Return the linear weights of one layer on one GPU: none."""
        return {}

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights on one GPU that stay in bf16: 0, since the norm is skipped too."""
        return 0

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Return the elements per token that the widest kernel reads and writes on one GPU."""
        return 0


@dataclass(frozen=True)
@checked_fields
class NoAttention(_Skipped, Attention):
    """A layer without attention, which caches nothing."""

    window = None
    heads_text = ""


@dataclass(frozen=True)
@checked_fields
class NoMlp(_Skipped):
    """A layer without an MLP."""

    has_experts = False
