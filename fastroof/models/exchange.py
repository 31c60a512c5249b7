"""What GPUs send each other for the experts of a layer."""

from __future__ import annotations

from fastroof.models.layout import Layout
from fastroof.operators.calls import AllReduce, Collective, RowOperator
from fastroof.units import ACTIVATION_BYTES

__all__ = ["after_experts", "after_shared", "before_experts"]


def before_experts(hidden: int, layout: Layout) -> list[RowOperator]:
    """What brings the tokens of every attention-data-parallel rank to the GPUs of their experts."""
    if layout.dp == 1:
        return []
    row_bytes = float(hidden * ACTIVATION_BYTES)
    return [Collective("experts_gather", "experts all-gather", 1, "all_gather", layout.dp, row_bytes)]


def after_experts(hidden: int, layout: Layout) -> list[RowOperator]:
    """What adds up the experts' outputs and brings each rank its tokens."""
    row_bytes = float(hidden * ACTIVATION_BYTES)
    if layout.dp == 1:
        if layout.tp == 1:
            return []
        return [AllReduce("mlp_allreduce", "mlp all-reduce", 1, layout.tp, row_bytes)]
    scatter = Collective(
        "experts_scatter",
        "experts reduce-scatter",
        1,
        "reduce_scatter",
        layout.dp,
        row_bytes,
        "expert_tokens",
    )
    return [scatter]


def after_shared(hidden: int, layout: Layout) -> list[RowOperator]:
    """What adds up the outputs of shared experts that are no part of the routed experts' sum."""
    if layout.tp == 1:
        return []
    row_bytes = float(hidden * ACTIVATION_BYTES)
    return [AllReduce("mlp_allreduce", "shared experts all-reduce", 1, layout.tp, row_bytes)]
