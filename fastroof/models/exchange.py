"""What GPUs send each other for a layer: after its attention, and before and after its experts.

By what the layout and the engine's rules (:class:`ExchangeRules`) say:

* attention by tp alone: every GPU has every token, and both sums of a layer are all-reduced;
* ranks of attention data parallelism: the tokens of all are gathered before the experts, and their sums
  scattered after them. Where a rank is split by tp as well, either each of its GPUs gathers over the ranks
  and the sums are all-reduced over tp too, or each takes a share of the rank's tokens there and gathers the
  rank's afterwards;
* all-to-all: each GPU sends its share of tokens to the GPUs of their experts, and gets their outputs back.
"""

from __future__ import annotations

from typing import Final, Protocol

from fastroof.models.execution import SENDING_EXPERTS, ExchangeRules, Execution
from fastroof.models.layout import Layout
from fastroof.operators.calls import AllReduce, Collective, Dispatch, Role, RowOperator, Steps
from fastroof.units import ACTIVATION_BYTES

UNASKED: Final = "default"
"""Format that a library sends by default."""

SENT_AS: Final = {
    ("trtllm_deepep_ht", "dispatch"): (("fp8", "bf16"),),
    ("trtllm_deepep_ht", "combine"): (("fp8", "bf16"),),
    ("trtllm_deepep_ll", "combine"): (("nvfp4", "fp4"),),
}
"""Formats that a library sends in place of the experts': as aiconfigurator-core 0.12.0 collects and reads its
rows (communication_dtype_for of its operations/moe_comm.py)."""

PREPARING: Final = ("nvlink_two_sided",)
"""Libraries whose GPUs first exchange counts in a separate kernel."""


class Routed(Protocol):
    """The options of expert parallelism."""

    @property
    def num_experts(self) -> int:
        """Experts of the layer."""

    @property
    def topk(self) -> int:
        """How many of them a token is routed to."""


def sends_to_experts(layout: Layout, rules: ExchangeRules, topk: int) -> bool:
    """Whether tokens are sent to the GPUs of their experts alone."""
    if layout.ep == 1 or layout.moe_tp > 1 or (rules.alltoall_needs_dp and layout.dp == 1):
        return False
    return rules.alltoall == "always" or (rules.alltoall == "over_topk" and layout.ep > topk)


def experts_send(layout: Layout, rules: ExchangeRules, topk: int) -> bool:
    """Whether the experts' own kernel sends their tokens."""
    return SENDING_EXPERTS in rules.libraries and sends_to_experts(layout, rules, topk)


def shares_tokens(layout: Layout, rules: ExchangeRules, topk: int) -> bool:
    """Whether each GPU of a rank takes a share of its tokens to the experts."""
    if layout.sharers == 1:
        return False
    if sends_to_experts(layout, rules, topk):
        return True
    with_ep = rules.token_shares == "with_ep" and layout.ep > 1
    return layout.dp > 1 and (with_ep or rules.token_shares == "always")


def after_attention(hidden: int, layout: Layout, execution: Execution) -> list[RowOperator]:
    """What adds up the parts of a layer's attention."""
    if layout.tp == 1:
        return []
    row_bytes = float(hidden * ACTIVATION_BYTES)
    if execution.scatters_attention:
        name = "attention reduce-scatter"
        return [Collective("attention_scatter", name, 1, "reduce_scatter", layout.tp, row_bytes)]
    return [AllReduce("attention_allreduce", "attention all-reduce", 1, layout.tp, row_bytes)]


def before_experts(hidden: int, layout: Layout, execution: Execution, experts: Routed) -> list[RowOperator]:
    """What brings the tokens of every attention-data-parallel rank to the GPUs of their experts."""
    rules = execution.exchange
    if sends_to_experts(layout, rules, experts.topk):
        return _exchange("dispatch", hidden, layout, execution, experts)
    if layout.dp == 1:
        return []
    element = dict(rules.gathered_bytes).get(execution.kernel("experts"), float(ACTIVATION_BYTES))
    gpus, stride, share = _group(layout, rules, experts.topk)
    row_bytes = hidden * element / share
    gather = Collective(
        "experts_gather", "experts all-gather", 1, "all_gather", gpus, row_bytes, stride=stride
    )
    return [gather]


def back_from_experts(width: int, layout: Layout, execution: Execution, experts: Routed) -> list[RowOperator]:
    """What brings each rank the experts' outputs of its tokens; ``width`` is that which experts have."""
    rules = execution.exchange
    if sends_to_experts(layout, rules, experts.topk):
        return _exchange("combine", width, layout, execution, experts)
    if layout.dp == 1:
        return []
    gpus, stride, _ = _group(layout, rules, experts.topk)
    row_bytes = float(width * ACTIVATION_BYTES)
    return [
        Collective(
            "experts_scatter", "experts reduce-scatter", 1, "reduce_scatter", gpus, row_bytes,
            "expert_tokens", stride=stride,
        )
    ]  # fmt: skip


def add_up_experts(hidden: int, layout: Layout, execution: Execution, experts: Routed) -> list[RowOperator]:
    """What adds up the experts' outputs over a rank's GPUs, or gathers the tokens that these share."""
    if layout.sharers == 1:
        return []
    row_bytes = float(hidden * ACTIVATION_BYTES)
    # without ranks and without an all-to-all no tokens are shared
    if shares_tokens(layout, execution.exchange, experts.topk):
        share = row_bytes / layout.sharers
        return [Collective("tokens_gather", "tokens all-gather", 1, "all_gather", layout.sharers, share)]
    return [AllReduce("mlp_allreduce", "mlp all-reduce", 1, layout.sharers, row_bytes)]


def after_shared(hidden: int, layout: Layout) -> list[RowOperator]:
    """The call that adds the outputs of shared experts outside the routed experts' sum."""
    if layout.tp == 1:
        return []
    row_bytes = float(hidden * ACTIVATION_BYTES)
    return [AllReduce("mlp_allreduce", "shared experts all-reduce", 1, layout.tp, row_bytes)]


def _group(layout: Layout, rules: ExchangeRules, topk: int) -> tuple[int, int, int]:
    """GPUs that gather and scatter, how far apart they are, and how many share a rank's tokens."""
    if shares_tokens(layout, rules, topk):
        return layout.stage_gpus, 1, layout.sharers
    return layout.dp, layout.sharers, 1


def _exchange(
    phase: str, hidden: int, layout: Layout, execution: Execution, experts: Routed
) -> list[RowOperator]:
    """One phase of the all-to-all, as the libraries of both kinds of steps send it."""
    rules = execution.exchange
    if SENDING_EXPERTS in rules.libraries:
        return []
    shapes = (hidden, experts.topk, experts.num_experts, layout.ep, layout.sharers)
    role: Role = "experts_dispatch" if phase == "dispatch" else "experts_combine"
    decodes, prompts = rules.libraries
    kinds: list[tuple[str, Steps]] = [(decodes, "decode_only"), (prompts, "with_prefill")]
    if decodes == prompts:
        kinds = [(decodes, "all")]
    calls: list[RowOperator] = []
    for library, steps in kinds:
        dtype = _sent_as(execution.kernel("experts"), library, phase, rules)
        if phase == "dispatch" and library in PREPARING:
            calls.append(
                Dispatch(
                    "experts_dispatch", "experts prepare", 1, library, "prepare", dtype, *shapes, steps=steps
                )
            )
        calls.append(Dispatch(role, f"experts {phase}", 1, library, phase, dtype, *shapes, steps=steps))
    return calls


def _sent_as(experts: str, library: str, phase: str, rules: ExchangeRules) -> str:
    """Format in which a library sends tokens of experts in a format."""
    dtype = "fp8" if experts == "fp8_block" else experts
    if dtype not in rules.comm_dtypes:
        return UNASKED
    return dict(SENT_AS.get((library, phase), ())).get(dtype, dtype)
