"""Experts that ranks of attention data parallelism share, timed by the tokens of all ranks.

A plan's step is that of a rank when all ranks have as many tokens. The calls that depend on the tokens of all
ranks are also summed separately in the arena, by tokens per rank when all have as many:

    step of all ranks = max over ranks of (own step + experts(all tokens) - experts(ranks x own tokens))

which is the own step, to the last bit, if all have as many. Between integer tokens per rank the time is
linear. Fewer tokens than ranks cost as much as one each.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fastroof.arrays import Floats
from fastroof.compiled.jit import jit_inline
from fastroof.compiled.steps import DECODE_EXPERT_AT, EXPERT_AT, RANKS, PlanParts

PADDED_NEVER, PADDED_TO_FULLEST, PADDED_IN_GRAPHS, PADDED_BY_HALF = range(4)
"""How experts' tokens are padded, in the order of fastroof.engines.data_parallel.PADDINGS."""

LEAST_LOADED, TAKES_TURNS, FEWEST_TOKENS = range(3)
"""How a request's rank is chosen, in the order of fastroof.engines.data_parallel.ASSIGNMENTS."""


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

    @property
    def together(self) -> int:
        """Ranks that start their steps together: GPUs of all are busy while any has requests."""
        return self.ranks if self.in_lockstep else 1


ONE_RANK: Final = RankRules()


@jit_inline
def expert_rows_us(arena: Floats, plan: PlanParts, total_tokens: float, is_decode: bool) -> float:
    """Time the calls that depend on the tokens of all ranks, us; 0 in plans without them."""
    header_at = plan.header_at
    at = int(arena[header_at + (DECODE_EXPERT_AT if is_decode else EXPERT_AT)])
    if at == 0:
        return 0.0
    tokens = min(max(total_tokens / arena[header_at + RANKS], 1.0), float(plan.max_num_batched_tokens))
    below = min(int(tokens), plan.max_num_batched_tokens - 1)
    below_us: float = arena[header_at + at + below]
    above_us: float = arena[header_at + at + below + 1]
    us: float = below_us + (above_us - below_us) * (tokens - float(below))
    return us


@jit_inline
def seen_tokens(rules: RankRules, total_tokens: float, fullest: float, is_decode: bool) -> float:
    """Return the tokens that experts compute, from those of all ranks and of the fullest."""
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
    """Return the change of a rank's own step time if experts compute ``seen`` tokens, us."""
    own_us = expert_rows_us(arena, plan, arena[plan.header_at + RANKS] * own_tokens, is_own_decode)
    return expert_rows_us(arena, plan, seen, is_decode) - own_us
