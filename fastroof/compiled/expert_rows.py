"""What ranks of attention data parallelism share: experts, priced by the tokens of all ranks.

A plan's step is that of a rank whose fellows have as many tokens each. Of it the calls that follow the tokens
of all ranks are summed once more in the arena, by the tokens that each rank has where all have as many:

    step of all ranks = max over ranks of (own step + experts(all tokens) - experts(ranks x own tokens))

which is the own step, to the last bit, where all have as many. Between whole numbers of tokens a rank the
price is a straight line. Fewer tokens than ranks cost as one each.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fastroof.arrays import Floats
from fastroof.compiled.jit import jit_inline
from fastroof.compiled.steps import DECODE_EXPERT_AT, EXPERT_AT, RANKS, PlanParts

PADDED_NEVER, PADDED_TO_FULLEST, PADDED_IN_GRAPHS, PADDED_BY_HALF = range(4)
"""What experts compute, in the order of fastroof.engines.data_parallel.PADDINGS."""

LEAST_LOADED, TAKES_TURNS, FEWEST_TOKENS = range(3)
"""The rank of a request, in the order of fastroof.engines.data_parallel.ASSIGNMENTS."""


class RankRules(NamedTuple):
    """How the ranks of a plan step (:class:`fastroof.engines.DataParallel`); flags are 0 or 1."""

    ranks: int = 1
    in_lockstep: int = 0
    prompt_padding: int = PADDED_NEVER
    decode_padding: int = PADDED_NEVER
    graph_tokens: int = 0
    idle_tokens: int = 1
    assignment: int = LEAST_LOADED
    balance_steps: int = 0


ONE_RANK: Final = RankRules()


@jit_inline
def expert_rows_us(arena: Floats, plan: PlanParts, total_tokens: float, is_decode: bool) -> float:
    """Time of all calls that follow the tokens of all ranks, us; 0 in a plan without such a part."""
    header_at = plan.header_at
    at = int(arena[header_at + (DECODE_EXPERT_AT if is_decode else EXPERT_AT)])
    if at == 0:
        return 0.0
    tokens = min(max(total_tokens / arena[header_at + RANKS], 1.0), float(plan.max_tokens))
    below = min(int(tokens), plan.max_tokens - 1)
    below_us: float = arena[header_at + at + below]
    above_us: float = arena[header_at + at + below + 1]
    us: float = below_us + (above_us - below_us) * (tokens - float(below))
    return us


@jit_inline
def seen_tokens(rules: RankRules, total_tokens: float, fullest: float, is_decode: bool) -> float:
    """Tokens that experts compute in a step of ranks with so many in all, and so many on the fullest."""
    padding = rules.decode_padding if is_decode else rules.prompt_padding
    padded = float(rules.ranks) * fullest
    if (
        padding == PADDED_TO_FULLEST
        or (padding == PADDED_IN_GRAPHS and fullest <= float(rules.graph_tokens))
        or (padding == PADDED_BY_HALF and 2.0 * total_tokens >= padded)
    ):
        return padded
    return total_tokens


@jit_inline
def wait_for_others_us(
    arena: Floats, plan: PlanParts, own_tokens: float, is_own_decode: bool, seen: float, is_decode: bool
) -> float:
    """What a rank's own step takes more (or less) in a step whose experts compute ``seen`` tokens, us."""
    own_us = expert_rows_us(arena, plan, arena[plan.header_at + RANKS] * own_tokens, is_own_decode)
    return expert_rows_us(arena, plan, seen, is_decode) - own_us
