"""Components of a step: what comparisons, pictures and pages sum its calls over rows up to."""

from __future__ import annotations

from typing import Literal

from fastroof.operators.calls import Elementwise, HyperConnection, RowOperator
from fastroof.plan.curves import per_row

Component = Literal["linear", "experts", "communication", "elementwise", "lm_head"]


def component_of(call: RowOperator) -> Component:
    """Component of a call; attention is no call over rows, and a component of its own."""
    if per_row(call).over_link:
        return "communication"
    if isinstance(call, Elementwise | HyperConnection):
        return "elementwise"
    if call.role == "lm_head":
        return "lm_head"
    return "experts" if call.role in ("router", "experts") or call.role.startswith("shared_") else "linear"
