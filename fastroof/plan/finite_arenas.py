"""A plan's arena is finite and its times are times, or it is not made."""

from __future__ import annotations

from typing import Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.compiled import steps
from fastroof.compiled.grids import cells_of
from fastroof.errors import FastroofError, PlanError

__all__ = ["MOST_US", "check_arena"]

MOST_US: Final = 1e12
"""No part of a step takes longer, eleven days: sums of so many parts as there are stay finite."""

_MOST_OF_A_NODE: Final = 1e60
"""Of attention: padded nodes lie far beyond what any step asks for, at 1e22 us and at 1e34."""

_LEAST_US: Final = 1e-30
"""What runs takes a time; a stage without the LM head has nothing for a sequence."""

_ORIGIN: Final = "the tables, GPU or engine's profile that it is made of have a number that none has"
_ROWS: Final = {
    "what runs for each token": (steps.TOKENS_AT, steps.MAX_TOKENS, _LEAST_US),
    "what runs for each token of decodes alone": (steps.DECODE_TOKENS_AT, steps.MAX_TOKENS, _LEAST_US),
    "what runs for the tokens of all ranks": (steps.EXPERT_AT, steps.MAX_TOKENS, _LEAST_US),
    "what runs for the tokens of all ranks in decodes alone": (
        steps.DECODE_EXPERT_AT,
        steps.MAX_TOKENS,
        _LEAST_US,
    ),
    "what runs for each sequence": (steps.LOGITS_AT, steps.MAX_SEQS, 0.0),
}
_BLOCKS: Final = {
    "decode attention": steps.DECODE_AT,
    "prefill attention": steps.PREFILL_AT,
    "decode attention within a window": steps.WINDOW_DECODE_AT,
    "prefill attention within a window": steps.WINDOW_PREFILL_AT,
}
_PRICES: Final = {
    "a pair of tokens of a prefix": steps.PREFIX_PAIR_US,
    "a token of a prefix": steps.PREFIX_TOKEN_US,
    "a pair of tokens of a prefix within a window": steps.WINDOW_PAIR_US,
    "a token of a prefix within a window": steps.WINDOW_TOKEN_US,
    "a KV token beside prefill": steps.MIXED_KV_US,
    "a KV token within a window beside prefill": steps.MIXED_WINDOW_KV_US,
    "the engine's least time of a step with prefill": steps.PREFILL_FLOOR_US,
}
_CORRECTIONS: Final = {
    "what the engine adds to a step": steps.STEP_US,
    "what the engine adds to a sequence": steps.SEQUENCE_US,
    "what the engine adds to a step with prefill": steps.PREFILL_US,
}


def check_arena(arena: Floats, what: str, error: type[FastroofError] = PlanError) -> None:
    """Refuse an arena whose loops would answer with infinities, NaN or times below 0."""
    header = arena[: steps.HEADER_SIZE].tolist()
    for name, slot in _CORRECTIONS.items():
        _check(header[slot], header[slot], name, what, error, least=-MOST_US)
    for name, slot in _PRICES.items():
        _check(header[slot], header[slot], name, what, error)
    for name, (slot, limit, least) in _ROWS.items():
        if header[slot] == 0.0:
            continue
        # the first is of none
        rows = arena[int(header[slot]) + 1 :][: int(header[limit])]
        _check(rows.min(), rows.max(), name, what, error, least)
    for name, slot in _BLOCKS.items():
        block = arena[int(header[slot]) :]
        # the first of a cell's six coefficients is the value at its node: us, or us over the roofline's
        values = block[cells_of(block)][::6]
        _check(values.min(), values.max(), name, what, error, most=_MOST_OF_A_NODE)
    if not np.isfinite(arena).all():
        raise error(f"{what} holds a number that is not finite; {_ORIGIN}")


def _check(
    low: float,
    high: float,
    name: str,
    what: str,
    error: type[FastroofError],
    least: float = 0.0,
    most: float = MOST_US,
) -> None:
    # NaN is in no range
    if not (least <= low and high <= most):
        wrong = low if not least <= low else high
        raise error(f"{what}: {name} takes {wrong:g} us, need {least:g} to {most:g}; {_ORIGIN}")
