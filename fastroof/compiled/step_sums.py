"""One step from the sums over its requests, for callers that know no more of it."""

from __future__ import annotations

import numpy as np

from fastroof.compiled.jit import Floats, jit
from fastroof.compiled.steps import open_plan, summed_step_us

__all__ = ["sums_step_us"]


@jit
def sums_step_us(
    arena: Floats,
    seqs: int,
    decodes: int,
    kv_sum: int,
    new_sum: int,
    causal_pairs: int,
    prefix_pairs: int,
    prefix_sum: int,
) -> float:
    """Time a step of ``seqs`` requests, us; NaN for what no step has or the plan cannot time."""
    plan = open_plan(arena)
    if seqs < 1 or seqs > plan.max_seqs or decodes < 0 or decodes > seqs:
        return np.nan
    if new_sum < 0 or decodes + new_sum < seqs or decodes + new_sum > plan.max_tokens:
        return np.nan
    if min(kv_sum, prefix_pairs, prefix_sum) < 0 or causal_pairs < new_sum:
        return np.nan
    return summed_step_us(
        arena, plan, seqs, decodes, kv_sum, new_sum, causal_pairs, prefix_pairs, prefix_sum
    )
