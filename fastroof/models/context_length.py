"""The longest context of a config.json: its positions, and what its rope scaling makes of them."""

from __future__ import annotations

import math
from typing import Final

from fastroof.checks import is_number, shown
from fastroof.models.checked_fields import MOST
from fastroof.models.hf import Fields

__all__ = ["longest_context"]

_POSITIONS: Final = "max_position_embeddings"
_ORIGINAL: Final = "original_max_position_embeddings"
_SCALED: Final = ("linear", "dynamic", "ntk", "yarn")
"""Types of scaling whose factor counts; with others (llama3, longrope) the positions have it already."""


def longest_context(fields: Fields, family: str) -> int:
    """Tokens that a sequence may have."""
    positions = fields.size(_POSITIONS)
    # transformers 5 writes rope_parameters where 4 wrote rope_scaling
    scaling = fields.part("rope_scaling") or fields.part("rope_parameters")
    if scaling is None or family.startswith("gemma3"):
        return positions
    kind = scaling.text("rope_type") or scaling.text("type")
    factor = scaling.config.get("factor")
    if kind not in _SCALED or factor is None:
        return positions
    if not is_number(factor) or not math.isfinite(factor) or factor <= 0.0:
        raise scaling.error(f"field factor must be a number above 0, got {shown(factor)}")
    own = scaling.size(_ORIGINAL) if kind == "yarn" and scaling.has(_ORIGINAL) else positions
    # bounded before it becomes an integer: a product beyond floats is inf
    return max(positions, int(min(own * factor, MOST)))
