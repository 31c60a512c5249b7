"""Tables and plans that several targets need, made once a process; ``warm`` makes them before it forks."""

from __future__ import annotations

from functools import cache
from typing import Any

import fastroof

__all__ = ["h100", "plan_of", "warm"]


@cache
def h100() -> fastroof.Tables:
    return fastroof.load_tables("h100")


@cache
def plan_of(model: str = "llama-3.1-8b", **options: Any) -> fastroof.StepPlan:
    return fastroof.compile_plan(model, "h100", h100(), **{"engine": "kernels", **options})


def warm() -> None:
    """Import, load and compile what most targets need, so that their processes begin with it."""
    plan = plan_of(max_tokens=2048, max_seqs=64)
    plan.decode_us(1, 100)
    plan.scalar(1, 100)
