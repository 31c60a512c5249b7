"""What other programs get of a plan, and who refuses a plan that it has no place for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fastroof
from fastroof.backends.dynamo import dynamo_profile
from fastroof.backends.llmservingsim import export_llmservingsim
from fastroof.backends.plan_facts import check_dense, plan_facts
from fastroof.engines import EngineProfile, KernelChoices, MixedAttention
from fastroof.errors import BackendError
from tests.backends.llmservingsim_reader import Bundle

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
        model,
        "h100",
        h100,
        **{"engine": "kernels", **options},
        max_num_batched_tokens=2048,
        allow_modelled=True,
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
    plan = fastroof.compile_plan(
        "llama-3.1-70b", "h100", h100, tp=2, pp=3, max_num_batched_tokens=2048, engine="kernels"
    )
    assert [plan_facts(stage)["stages"] for stage in plan.stages] == [[s] for s in plan_facts(plan)["stages"]]


# -- programs that know dense models alone

LIMITS = {"max_num_batched_tokens": 512, "max_num_seqs": 32}


def dense_plan(model, **options):
    return fastroof.compile_plan(
        model, "h100", fastroof.load_tables("h100"), **{"engine": "kernels", **LIMITS, **options}
    )


@pytest.mark.parametrize(
    ("model", "options", "lacks"),
    [
        ("mixtral-8x7b", {"tp": 2}, "experts of mixtral-8x7b"),
        ("gpt-oss-20b", {}, r"experts and layers of several kinds \(12 moe windowed, 12 moe full\)"),
        ("llama-3.1-8b", {"dp": 2}, r"ranks and stages \(tp 1, dp 2\)"),
    ],
)
def test_a_profile_of_layers_refuses_what_it_would_lose(tmp_path, model, options, lacks):
    with pytest.raises(BackendError, match=lacks):
        export_llmservingsim(dense_plan(model, **options), tmp_path / "profile")
    assert not (tmp_path / "profile").exists()


def test_dense_plans_pass():
    check_dense(dense_plan("llama-3.1-8b", tp=2), "a program")
    check_dense(dense_plan("qwen3-8b", dtype="fp8"), "a program")


def test_tables_of_whole_steps_have_room_for_any_plan():
    of_experts = dense_plan("qwen3-30b-a3b", tp=2, ep=2)
    arrays = dynamo_profile(of_experts, max_batch_size=32)
    assert arrays


# -- decodes that take longer beside prompts

SLOWER = EngineProfile("made up", kernels=KernelChoices(mixed_attention=(MixedAttention(0.3),)))


@pytest.fixture(scope="module")
def slower(h100: fastroof.Tables) -> fastroof.StepPlan:
    return fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, engine=SLOWER, max_num_batched_tokens=512, max_num_seqs=64
    )


def test_a_program_that_adds_up_both_refuses_it(slower: fastroof.StepPlan) -> None:
    with pytest.raises(BackendError, match=r"Dynamo's mocker adds .* use an engine without it"):
        dynamo_profile(slower)


def test_rows_of_both_have_it(slower: fastroof.StepPlan, tmp_path: Path) -> None:
    bundle = Bundle(export_llmservingsim(slower, tmp_path).folder, slower.tp)
    chunk, decodes = [(256, 0)], [(1, 3000)] * 16
    batch = fastroof.StepBatch.from_requests([chunk, decodes, chunk + decodes])
    alone_us, slower_us = slower.run(batch).components.decode_attention_us[1:]
    assert slower_us > 1.5 * alone_us
    layers = slower.model.num_layers
    got_ns = [bundle.step_ns(step, layers) for step in (chunk, decodes, chunk + decodes)]
    np.testing.assert_allclose(got_ns, slower.step_us(batch) * 1e3, rtol=2e-3)


def test_dynamos_profile_with_decodes_has_the_added_time(slower: fastroof.StepPlan) -> None:
    with pytest.raises(BackendError, match="mixed_attention"):
        dynamo_profile(slower, max_batch_size=64)
    added = dynamo_profile(slower, max_batch_size=64, points=1, beside=(8, 1000))["prefill_ttft_ms"]
    step = fastroof.StepBatch([100] + [1] * 8, [0] + [999] * 8, [0, 9])
    assert added[99] == (slower.step_us(step)[0] - slower.decode_us(8, 1000)) / 1e3
