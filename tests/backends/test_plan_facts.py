"""What other programs get of a plan's layout, memory and stages."""

from __future__ import annotations

import json

import pytest

import fastroof
from fastroof.backends.plan_facts import plan_facts

PLANS = {
    "dense": ("llama-3.1-8b", {}),
    "stages": ("llama-3.1-70b", {"tp": 2, "pp": 3}),
    "experts": ("qwen3-235b-a22b", {"tp": 1, "dp": 4, "ep": 4}),
    "latent attention": ("deepseek-v3", {"tp": 8, "ep": 8, "dtype": "fp8"}),
    "windows": ("gpt-oss-120b", {}),
    "linear attention": ("qwen3-next-80b-a3b", {"tp": 2}),
    "an engine": ("llama-3.1-8b", {"engine": "vllm-0.19.0"}),
}


@pytest.mark.parametrize("name", PLANS)
def test_facts_are_the_plans_own(h100, name):
    model, options = PLANS[name]
    plan = fastroof.compile_plan(
        model, "h100", h100, **{"engine": "kernels", **options}, max_tokens=2048, allow_modelled=True
    )
    facts = plan_facts(plan)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["memory"] == plan.memory.facts()
    assert facts["layout"]["gpus"] == plan.layout.world_size
    assert [facts["layout"][name] for name in ("tp", "pp", "dp", "ep")] == [
        getattr(plan.layout, name) for name in ("tp", "pp", "dp", "ep")
    ]
    assert len(facts["stages"]) == plan.layout.pp
    assert [stage["stage"] for stage in facts["stages"]] == list(range(plan.layout.pp))
    assert sum(stage["layers"] for stage in facts["stages"]) == plan.model.num_layers
    assert [stage["memory"] for stage in facts["stages"]] == [s.memory.facts() for s in plan.stages]
    rooms = [s["memory"]["max_kv_tokens"] for s in facts["stages"] if s["memory"]["kv_bytes_per_token"]]
    assert facts["memory"]["max_kv_tokens"] == min(rooms)


def test_facts_of_a_stage_are_its_own(h100):
    plan = fastroof.compile_plan("llama-3.1-70b", "h100", h100, tp=2, pp=3, max_tokens=2048, engine="kernels")
    assert [plan_facts(stage)["stages"] for stage in plan.stages] == [[s] for s in plan_facts(plan)["stages"]]
