"""What pictures and pages call the parts of a step."""

from __future__ import annotations

from typing import Final

from fastroof.operators.calls import Elementwise, RowOperator
from fastroof.plan.curves import per_row
from fastroof.report.plots import COLOURS

__all__ = ["ROW_COMPONENTS", "component_of"]

ROW_COMPONENTS: Final = {
    "linear layers": COLOURS["blue"],
    "experts": COLOURS["orange"],
    "norms, rope, activation": COLOURS["green"],
    "communication": COLOURS["purple"],
    "LM head": COLOURS["sky"],
}
"""Components that calls over rows make up, and their colours."""


def component_of(call: RowOperator) -> str:
    """Component of a call: a key of :data:`ROW_COMPONENTS`."""
    if per_row(call).over_link:
        return "communication"
    if isinstance(call, Elementwise):
        return "norms, rope, activation"
    if call.role == "lm_head":
        return "LM head"
    # the router and shared experts are what a mixture of experts costs too
    of_experts = call.role in ("router", "experts") or call.role.startswith("shared_")
    return "experts" if of_experts else "linear layers"
