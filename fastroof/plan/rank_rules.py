"""How the ranks of a plan's attention data parallelism step, as compiled loops read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastroof.compiled.expert_rows import RankRules
from fastroof.engines.data_parallel import ASSIGNMENTS, PADDINGS

if TYPE_CHECKING:
    from fastroof.plan.step_plan import StepPlan


def rank_rules(plan: StepPlan) -> RankRules:
    """Return how the ranks of a plan step together, by its engine's profile."""
    rules, ranks = plan.engine.data_parallel, int(plan.layout.dp)
    return RankRules(
        ranks=ranks,
        in_lockstep=int(ranks > 1 and (rules.lockstep == "all" or plan.model.has_experts)),
        prompt_padding=PADDINGS.index(rules.prompt_tokens),
        decode_padding=PADDINGS.index(rules.decode_tokens),
        graph_tokens=rules.graph_tokens,
        idle_tokens=rules.idle_tokens,
        assignment=ASSIGNMENTS.index(rules.assignment),
        balance_steps=rules.balance_steps,
    )
