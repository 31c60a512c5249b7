"""Mean steps of ranks that start their steps together: the longest rank's, with experts for all tokens.

The other ranks are alike and independent: each has prompts in a share of its steps, so the number of ranks
with prompts in a step is binomial.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from fastroof.arrays import Floats
from fastroof.compiled.expert_rows import RankRules, seen_tokens, wait_for_others_us
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.steps import PlanParts


class OtherRanks(NamedTuple):
    """The ranks that step together with the estimated one."""

    active: float
    share: float
    prompt_tokens: float
    decode_tokens: float
    idle_tokens: float
    prompt_us: float
    full_tokens: float
    full_us: float


NO_OTHERS: Final = OtherRanks(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@jit_inline
def waits_for_others(rules: RankRules) -> bool:
    """Whether a rank waits for prompts of other ranks."""
    return rules.in_lockstep > 0 and rules.balance_steps == 0


@jit
def rules_of_load(clients: float, rules: RankRules) -> RankRules:
    """Return the rules for ``clients`` of a rank: prompts start at once while some rank has no client."""
    if clients >= 1.0:
        return rules
    return RankRules(
        rules.ranks,
        rules.in_lockstep,
        rules.prompt_padding,
        rules.decode_padding,
        rules.graph_tokens,
        rules.idle_tokens,
        rules.assignment,
        0,
    )


@jit
def others_with_requests(clients: float, rules: RankRules) -> float:
    """Return the number of other ranks with requests, 0 if a rank does not wait for others."""
    if not waits_for_others(rules):
        return 0.0
    return max(min(clients, float(rules.ranks)), 1.0) - 1.0


@jit
def others_idle(others: OtherRanks) -> float:
    """Return the share of steps in which no other rank has prompts."""
    ranks = math.ceil(others.active - 1e-9)
    if ranks <= 0.0:
        return 1.0
    return (1.0 - others.share * others.active / ranks) ** ranks


@jit
def together_us(
    arena: Floats,
    plan: PlanParts,
    rules: RankRules,
    others: OtherRanks,
    own_us: float,
    own_tokens: float,
    is_decode: bool,
) -> float:
    """Time the mean step of all ranks, us, if one has ``own_tokens`` and takes ``own_us`` alone."""
    # a fraction of a rank has requests in that fraction of the steps
    ranks = math.ceil(others.active - 1e-9)
    share = min(others.share * others.active / ranks, 1.0) if ranks > 0 else 0.0
    total = 0.0
    chance = (1.0 - share) ** ranks
    for prompts in range(ranks + 1):
        if prompts > 0:
            if share >= 1.0:
                chance = 1.0 if prompts == ranks else 0.0
            else:
                chance *= (ranks - prompts + 1) / prompts * (share / (1.0 - share))
        if chance <= 0.0:
            continue
        decoding = max(others.active - prompts, 0.0)
        tokens = own_tokens + others.idle_tokens
        tokens += prompts * others.prompt_tokens + decoding * others.decode_tokens
        fullest = max(own_tokens, others.prompt_tokens if prompts > 0 else 0.0)
        if decoding > 0.0:
            fullest = max(fullest, others.decode_tokens, others.full_tokens)
        of_decodes = is_decode and prompts == 0
        seen = seen_tokens(rules, tokens, fullest, of_decodes)
        step_us = own_us + wait_for_others_us(arena, plan, own_tokens, is_decode, seen, of_decodes)
        if prompts > 0:
            waits_us = wait_for_others_us(arena, plan, others.prompt_tokens, False, seen, False)
            step_us = max(step_us, others.prompt_us + waits_us)
        if of_decodes and others.full_tokens > 0.0:
            waits_us = wait_for_others_us(arena, plan, others.full_tokens, True, seen, True)
            step_us = max(step_us, others.full_us + waits_us)
        total += chance * step_us
    return total
