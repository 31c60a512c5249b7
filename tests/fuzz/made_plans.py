"""Tables and plans that several targets need, made once a process."""

from __future__ import annotations

from functools import cache
from typing import Any

import fastroof


@cache
def h100() -> fastroof.Tables:
    return fastroof.load_tables("h100")


@cache
def plan_of(model: str = "llama-3.1-8b", **options: Any) -> fastroof.StepPlan:
    return fastroof.compile_plan(model, "h100", h100(), **{"engine": "kernels", **options})
