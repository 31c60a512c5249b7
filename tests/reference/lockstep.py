"""Mean steps of ranks that step together, naively: every number of others with prompts, and its chance."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fastroof.compiled import steps
from fastroof.compiled.expert_rows import PADDED_BY_HALF, PADDED_IN_GRAPHS, PADDED_TO_FULLEST, RankRules


class Others(NamedTuple):
    """The other ranks: so many have requests, each has prompts in a share of its steps."""

    count: float
    share: float
    prompt_tokens: float
    decode_tokens: float
    prompt_us: float
    full_tokens: float = 0.0
    """Share of ranks with one client more than others, if any, in a decode step of full_us."""
    full_us: float = 0.0


def experts_us(plan: Any, total: float, is_decode: bool) -> float:
    """The plan's calls that follow the tokens of all ranks."""
    at = int(plan.arena[steps.DECODE_EXPERT_AT if is_decode else steps.EXPERT_AT])
    if not at:
        return 0.0
    sizes = np.arange(plan.max_num_batched_tokens + 1)
    each = max(total / plan.arena[steps.RANKS], 1.0)
    return float(np.interp(each, sizes, plan.arena[at : at + len(sizes)]))


def seen_tokens(rules: RankRules, total: float, fullest: float, is_decode: bool) -> float:
    """Tokens that experts compute of so many of all ranks, and of the fullest."""
    padded = rules.ranks * fullest
    padding = rules.decode_padding if is_decode else rules.prompt_padding
    is_padded = {
        PADDED_TO_FULLEST: True,
        PADDED_IN_GRAPHS: fullest <= rules.graph_tokens,
        PADDED_BY_HALF: 2 * total >= padded,
    }.get(padding, False)
    return padded if is_padded else total


def together_us(
    plan: Any, rules: RankRules, others: Others, own_us: float, own_tokens: float, is_decode: bool
) -> float:
    """The mean step of all ranks in which one has ``own_tokens``, a step of ``own_us`` by itself."""
    ranks = math.ceil(others.count - 1e-9)
    # part of a rank: all have prompts the less often
    share = others.share * others.count / ranks if ranks else 0.0
    idle = (rules.ranks - 1 - others.count) * rules.idle_tokens
    mean = 0.0
    for m in range(ranks + 1):
        chance = math.comb(ranks, m) * share**m * (1 - share) ** (ranks - m)
        if not chance:
            continue
        decoding = max(others.count - m, 0.0)
        all_decode = is_decode and m == 0
        total = own_tokens + m * others.prompt_tokens + decoding * others.decode_tokens + idle
        decoders = max(others.decode_tokens, others.full_tokens) * (decoding > 0)
        fullest = max(own_tokens, others.prompt_tokens * (m > 0), decoders)
        seen = seen_tokens(rules, total, fullest, all_decode)

        def waiting(
            us: float, tokens: float, is_own: bool, seen: float = seen, of: bool = all_decode
        ) -> float:
            return us + experts_us(plan, seen, of) - experts_us(plan, rules.ranks * tokens, is_own)

        longest = waiting(own_us, own_tokens, is_decode)
        if m:
            longest = max(longest, waiting(others.prompt_us, others.prompt_tokens, False))
        if all_decode and others.full_tokens:
            longest = max(longest, waiting(others.full_us, others.full_tokens, True))
        mean += chance * longest
    return mean
