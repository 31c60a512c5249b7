"""What pictures and pages call the components of a step."""

from __future__ import annotations

from typing import Final

from fastroof.operators.calls import RowOperator
from fastroof.plan.components import Component, component_of
from fastroof.report.plots import COLOURS

__all__ = ["ROW_COMPONENTS", "component_words"]

_WORDS: Final[dict[Component, str]] = {
    "linear": "linear layers",
    "experts": "experts",
    "elementwise": "norms, rope, activation",
    "communication": "communication",
    "lm_head": "LM head",
}
ROW_COMPONENTS: Final = {
    "linear layers": COLOURS["blue"],
    "experts": COLOURS["orange"],
    "norms, rope, activation": COLOURS["green"],
    "communication": COLOURS["purple"],
    "LM head": COLOURS["sky"],
}
"""Components that calls over rows make up, and their colours."""


def component_words(call: RowOperator) -> str:
    """Component of a call in words: a key of :data:`ROW_COMPONENTS`."""
    return _WORDS[component_of(call)]
