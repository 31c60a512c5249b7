"""Which measured tables a plan's kernels come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastroof.operators.attention import ATTENTION_DECODE, ATTENTION_PREFILL

if TYPE_CHECKING:
    from fastroof.plan.plan_facts import PlanFacts

__all__ = ["kernel_sources", "source_words"]


def kernel_sources(plan: PlanFacts) -> dict[str, tuple[str, ...]]:
    """Sources by operator, in the order of the step."""
    sources: dict[str, dict[str, None]] = {}
    for curve in plan.row_curves:
        sources.setdefault(curve.operator.operator, {})[curve.source] = None
    for part in plan.attention:
        for operator, source in zip((ATTENTION_DECODE, ATTENTION_PREFILL), part.sources, strict=True):
            sources.setdefault(operator.name, {})[source] = None
    return {operator: tuple(names) for operator, names in sources.items()}


def source_words(plan: PlanFacts) -> str:
    """The source of most operators, and by name the operators that come from another."""
    by_operator = {operator: " and ".join(names) for operator, names in kernel_sources(plan).items()}
    names = list(by_operator.values())
    most = max(dict.fromkeys(names), key=names.count)
    others = [f"{operator} from {name}" for operator, name in by_operator.items() if name != most]
    return "; ".join([most, *others])
