"""Mixtures of experts: router, routed and shared experts, and the communication between GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from fastroof.errors import ModelError
from fastroof.models.exchange import (
    add_up_experts,
    after_shared,
    back_from_experts,
    before_experts,
    experts_send,
)
from fastroof.models.execution import ROUTING, Execution
from fastroof.models.hf import checked_fields
from fastroof.models.layout import Layout, check_sizes, linear_calls
from fastroof.operators.calls import Call, Elementwise, Experts, Gemm, Parallel, RowOperator, Steps
from fastroof.units import ACTIVATION_BYTES

PHASES_OF_WIDE_EXPERTS: Final[tuple[tuple[str, Steps], ...]] = (
    ("generation", "decode_only"),
    ("context", "with_prefill"),
)
"""Two ways to run wide experts, with the steps that each applies to."""

GATED_GEMMS = 3
NONGATED_GEMMS = 2
# norms before and after either MLP and after their sum, and the scale of the router's own norm
NORMS_APART = 6


@dataclass(frozen=True)
@checked_fields
class RoutedExperts:
    """Routed experts, of which a router picks some per token, and shared experts, which see every token.

    Zero experts return their input: the router weighs them too, and they have no weights. Without a norm
    of its own, the layer copies its input and adds its output. ``routing`` is how tokens spread if
    a plan does not say.
    """

    num_experts: int
    topk: int
    intermediate: int
    shared_intermediate: int = 0
    is_gated: bool = True
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    apart: bool = False
    latent: int = 0
    latent_norm: bool = False
    adds_residual: bool = True
    zero_experts: int = 0
    norm: bool = True
    routing: str = ROUTING
    has_experts = True

    def __post_init__(self) -> None:
        """Reject invalid sizes, also in layers built or modified by hand."""
        check_sizes(self, "num_experts", "topk", "intermediate")
        check_sizes(self, *(name for name in ("shared_intermediate", "latent") if getattr(self, name)))
        if self.topk > self.num_experts:
            raise ModelError(f"a token cannot be routed to {self.topk} of {self.num_experts} experts")

    @property
    def gemms(self) -> int:
        """Number of GEMMs of an expert."""
        return GATED_GEMMS if self.is_gated else NONGATED_GEMMS

    def width(self, hidden: int) -> int:
        """Return the width of a token as routed experts receive it."""
        return self.latent or hidden

    def obstacles(self, layout: Layout) -> list[str]:
        """Return why this layout cannot split it; empty if it can."""
        reasons = []
        if self.num_experts % layout.ep:
            reasons.append(f"{self.num_experts} experts do not divide by ep {layout.ep}")
        if self.intermediate % layout.moe_tp:
            reasons.append(f"an expert's width of {self.intermediate} does not divide by {layout.moe_tp}")
        if self.shared_intermediate % layout.tp:
            reasons.append(
                f"a shared expert's width of {self.shared_intermediate} does not divide by {layout.tp}"
            )
        return reasons

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of one layer on one GPU, in execution order."""
        row_bytes = float(hidden * ACTIVATION_BYTES)
        norm_rows = 4.0 if self.adds_residual else 2.0
        calls: list[Call] = [Elementwise("mlp_norm", "mlp rmsnorm", 1, norm_rows * row_bytes)]
        if not self.norm:
            calls = [Elementwise("mlp_norm", "copy and sum", 1, 5.0 * row_bytes)]
        routed = self._routed(hidden, layout, execution)
        shared = self._shared(hidden, layout, execution)
        returned = back_from_experts(self.width(hidden), layout, execution, self)
        after = add_up_experts(hidden, layout, execution, self)
        if self.latent:
            up = linear_calls("experts_up", "experts_up_quantise", hidden, self.latent, execution)
            if self.latent_norm:
                norm_bytes = 2.0 * self.latent * ACTIVATION_BYTES
                returned += add_up_experts(self.latent, layout, execution, self)
                returned.append(Elementwise("mlp_norm", "latent rmsnorm", 1, norm_bytes))
                after = after_shared(hidden, layout) if shared else []
            routed += [*returned, *up]
        else:
            after = [*returned, *after]
        if self.apart:
            norm = Elementwise("mlp_norm", "experts rmsnorm", 1, 2.0 * row_bytes)
            # the router's and the experts' norms run first, one after the other
            routed = [norm, norm, *routed, *after, norm]
            shared = [*shared, *after_shared(hidden, layout), norm] if shared else []
            after = [Elementwise("mlp_norm", "post-mlp rmsnorm", 1, 3.0 * row_bytes)]
        # a dense MLP next to the experts, as Gemma 4 has, is not a shared expert to an engine with a limit
        if shared and execution.shared_beside and not (self.apart and execution.shared_most_tokens):
            calls += _in_parallel(routed, shared, execution.shared_most_tokens)
        else:
            calls += [*shared, *routed]
        return (*calls, *after)

    def _routed(self, hidden: int, layout: Layout, execution: Execution) -> list[RowOperator]:
        width, down = self.width(hidden), list[RowOperator]()
        if self.latent:
            down = linear_calls("experts_down", "experts_down_quantise", width, hidden, execution)
        return [
            Gemm("router", "router", 1, self.num_experts + self.zero_experts, hidden, "bf16"),
            *down,
            *before_experts(width, layout, execution, self),
            *self._experts(width, layout, execution),
        ]

    def _experts(self, width: int, layout: Layout, execution: Execution) -> list[RowOperator]:
        """Return the fused kernel; wide and sending experts use different kernels for prompts and decodes."""
        call = Experts(
            "experts", "experts", 1, width, self.intermediate, self.topk, self.num_experts, layout.moe_tp,
            layout.ep, execution.kernel("experts"), execution.routing, self.is_gated,
        )  # fmt: skip
        if experts_send(layout, execution.exchange, self.topk):
            return [
                replace(call, phase=phase, sends=True, steps=steps) for phase, steps in PHASES_OF_WIDE_EXPERTS
            ]
        if not execution.wide_experts or not self.is_gated:
            return [call]
        slots = execution.num_slots or self.num_experts
        return [
            replace(call, phase=phase, num_slots=slots, steps=steps)
            for phase, steps in PHASES_OF_WIDE_EXPERTS
        ]

    def _shared(self, hidden: int, layout: Layout, execution: Execution) -> list[RowOperator]:
        width = self.shared_intermediate // layout.tp
        if not width:
            return []
        up, rows, activation = (2, 3.0, "silu_and_mul") if self.is_gated else (1, 2.0, "relu2")
        calls = linear_calls("shared_gate_up", "shared_gate_up_quantise", up * width, hidden, execution)
        row_bytes = rows * width * ACTIVATION_BYTES
        calls.append(Elementwise("shared_activation", f"shared {activation}", 1, row_bytes))
        calls += linear_calls("shared_down", "shared_down_quantise", hidden, width, execution)
        if self.shared_gate:
            calls.append(Gemm("shared_gate", "shared gate", 1, 1, hidden, "bf16"))
        return calls

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Return the linear weights of one layer on one GPU, by the role of their call."""
        expert = self.gemms * self.width(hidden) * (self.intermediate // layout.moe_tp)
        weights = {"experts": self.num_experts // layout.ep * expert}
        if self.latent:
            weights |= dict.fromkeys(("experts_down", "experts_up"), hidden * self.latent)
        if self.shared_intermediate:
            shared = hidden * (self.shared_intermediate // layout.tp)
            weights |= {"shared_gate_up": (self.gemms - 1) * shared, "shared_down": shared}
        return weights

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights of one layer on one GPU that stay in bf16: the norm, the router, biases."""
        scored = self.num_experts + self.zero_experts
        router = scored * (hidden + self.router_bias) + hidden * self.shared_gate
        width = (self.gemms - 1) * (self.intermediate // layout.moe_tp) + self.width(hidden)
        norms = hidden * (NORMS_APART if self.apart else self.norm) + self.latent * self.latent_norm
        return norms + router + self.num_experts // layout.ep * width * self.expert_bias

    def idle_weights(self, hidden: int) -> int:
        """Return the weights of one whole layer's experts that a token is not routed to."""
        width = self.width(hidden)
        biases = ((self.gemms - 1) * self.intermediate + width) * self.expert_bias
        return (self.num_experts - self.topk) * (self.gemms * width * self.intermediate + biases)

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Return the elements per token that the widest kernel reads and writes on one GPU."""
        width = self.width(hidden)
        routed = self.topk * (width + self.gemms * self.intermediate // layout.moe_tp)
        rows = -(-layout.dp // layout.ep) * routed
        return max(rows, layout.dp * width, self.gemms * self.shared_intermediate // layout.tp)


def _in_parallel(routed: Sequence[RowOperator], shared: Sequence[RowOperator], most: int) -> list[Call]:
    """Run both paths in parallel: in steps of at most ``most`` tokens, or in all decode steps if it is 0."""

    def in_steps(path: Sequence[RowOperator], kind: Steps) -> tuple[RowOperator, ...]:
        return tuple(replace(call, steps=kind) for call in path if call.steps in ("all", kind))

    decodes = Parallel((in_steps(routed, "decode_only"), in_steps(shared, "decode_only")), most)
    prompts = in_steps(routed, "with_prefill"), in_steps(shared, "with_prefill")
    return [decodes, *([Parallel(prompts, most)] if most else [*prompts[1], *prompts[0]])]
