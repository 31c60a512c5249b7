"""Communication between GPUs for a layer: after its attention, and before and after its experts.

It depends on the layout and the engine's rules (:class:`ExchangeRules`):

* attention split by tp only: every GPU has every token, and both sums of a layer are all-reduced;
* attention data parallelism: the tokens of all ranks are gathered before the experts, and their sums
  scattered afterwards. If a rank is split by tp too, either each of its GPUs gathers over the ranks and the
  sums are all-reduced over tp, or each takes a share of the rank's tokens and gathers the rank's tokens
  afterwards;
* all-to-all: each GPU sends its share of tokens to the GPUs of their experts and receives the outputs.
"""

from __future__ import annotations

from typing import Final, Protocol

from fastroof.models.execution import SENDING_EXPERTS, ExchangeRules, Execution
from fastroof.models.layout import Layout
from fastroof.operators.calls import AllReduce, Collective, Dispatch, Role, RowOperator, Steps
from fastroof.units import ACTIVATION_BYTES

UNASKED: Final = "default"
"""Format in which a library sends by default."""

SENT_AS: Final = {
    ("trtllm_deepep_ht", "dispatch"): (("fp8", "bf16"),),
    ("trtllm_deepep_ht", "combine"): (("fp8", "bf16"),),
    ("trtllm_deepep_ll", "combine"): (("nvfp4", "fp4"),),
}
"""Formats that a library sends instead of the experts' format, as aiconfigurator-core 0.12.0 collects and
reads its rows (``communication_dtype_for`` in operations/moe_comm.py)."""

PREPARING: Final = ("nvlink_two_sided",)
"""Libraries whose GPUs exchange counts in a separate kernel first."""


class Routed(Protocol):
    """Sizes of routed experts that their exchange depends on."""

    @property
    def num_experts(self) -> int:
        """Number of experts in the layer."""

    @property
    def topk(self) -> int:
        """Number of experts per token."""


def sends_to_experts(layout: Layout, rules: ExchangeRules, topk: int) -> bool:
    """Return whether tokens are sent only to the GPUs of their experts."""
    if layout.ep == 1 or layout.moe_tp > 1 or (rules.alltoall_needs_dp and layout.dp == 1):
        return False
    return rules.alltoall == "always" or (rules.alltoall == "over_topk" and layout.ep > topk)


def experts_send(layout: Layout, rules: ExchangeRules, topk: int) -> bool:
    """Return whether the experts' own kernel sends their tokens."""
    return SENDING_EXPERTS in rules.libraries and sends_to_experts(layout, rules, topk)


def shares_tokens(layout: Layout, rules: ExchangeRules, topk: int) -> bool:
    """Return whether each GPU of a rank takes a share of the rank's tokens to the experts."""
    if layout.sharers == 1:
        return False
    if sends_to_experts(layout, rules, topk):
        return True
    with_ep = rules.token_shares == "with_ep" and layout.ep > 1
    return layout.dp > 1 and (with_ep or rules.token_shares == "always")


def after_attention(hidden: int, layout: Layout, execution: Execution) -> list[RowOperator]:
    """Return the calls that sum the partial attention outputs of a layer."""
    if layout.tp == 1:
        return []
    row_bytes = float(hidden * ACTIVATION_BYTES)
    if execution.scatters_attention:
        name = "attention reduce-scatter"
        return [Collective("attention_scatter", name, 1, "reduce_scatter", layout.tp, row_bytes)]
    return [AllReduce("attention_allreduce", "attention all-reduce", 1, layout.tp, row_bytes)]


def before_experts(hidden: int, layout: Layout, execution: Execution, experts: Routed) -> list[RowOperator]:
    """Return the calls that bring the tokens of all attention ranks to the GPUs of their experts."""
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
    """Return the calls that bring the expert outputs back to each rank; ``width`` is the experts' width."""
    rules = execution.exchange
    if sends_to_experts(layout, rules, experts.topk):
        return _exchange("combine", width, layout, execution, experts)
    if layout.dp == 1:
        return []
    gpus, stride, _ = _group(layout, rules, experts.topk)
    row_bytes = float(width * ACTIVATION_BYTES)
    return [
        Collective(
            "experts_scatter", "experts reduce-scatter", 1, "reduce_scatter", gpus, row_bytes, stride,
            rows="expert_tokens",
        )
    ]  # fmt: skip


def add_up_experts(hidden: int, layout: Layout, execution: Execution, experts: Routed) -> list[RowOperator]:
    """Return the calls that sum the expert outputs over a rank's GPUs, or gather the tokens they share."""
    if layout.sharers == 1:
        return []
    row_bytes = float(hidden * ACTIVATION_BYTES)
    # without attention ranks and all-to-all no tokens are shared
    if shares_tokens(layout, execution.exchange, experts.topk):
        share = row_bytes / layout.sharers
        return [Collective("tokens_gather", "tokens all-gather", 1, "all_gather", layout.sharers, share)]
    return [AllReduce("mlp_allreduce", "mlp all-reduce", 1, layout.sharers, row_bytes)]


def after_shared(hidden: int, layout: Layout) -> list[RowOperator]:
    """Return the call that sums shared experts which are not part of the routed experts' sum."""
    if layout.tp == 1:
        return []
    row_bytes = float(hidden * ACTIVATION_BYTES)
    return [AllReduce("mlp_allreduce", "shared experts all-reduce", 1, layout.tp, row_bytes)]


def _group(layout: Layout, rules: ExchangeRules, topk: int) -> tuple[int, int, int]:
    """Return the GPUs that gather and scatter, their stride, and how many share a rank's tokens."""
    if shares_tokens(layout, rules, topk):
        return layout.stage_gpus, 1, layout.sharers
    return layout.dp, layout.sharers, 1


def _exchange(
    phase: str, hidden: int, layout: Layout, execution: Execution, experts: Routed
) -> list[RowOperator]:
    """Return one phase of the all-to-all, as the libraries of both kinds of steps send it."""
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
    """Return the format in which a library sends the tokens of experts."""
    dtype = "fp8" if experts == "fp8_block" else experts
    if dtype not in rules.comm_dtypes:
        return UNASKED
    return dict(SENT_AS.get((library, phase), ())).get(dtype, dtype)
