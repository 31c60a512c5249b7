"""How many kernels a step launches, by kind of layer."""

from __future__ import annotations

import pytest

import fastroof
from fastroof.engines import EngineProfile, StepCosts, load_engine
from fastroof.plan.kernel_counts import num_kernels
from fastroof.plan.step_plan import StepPlan


def compiled(model: str, **options: object) -> StepPlan:
    engine = options.pop("engine", "kernels")
    return fastroof.compile_plan(model, "h100", fastroof.load_tables("h100"), engine=engine, **options)


def counts(plan: StepPlan) -> tuple[float, float]:
    return tuple(num_kernels(plan.row_curves, plan.attention, prefill) for prefill in (False, True))


ONCE = 3
"""Embedding, final norm and LM head."""


@pytest.mark.parametrize(
    ("model", "options", "decode", "prefill"),
    [
        # two norms, rope, KV write, attention, activation and four GEMMs; decodes combine parts of attention
        ("llama-3.1-8b", {}, 11, 10),
        ("llama-3.1-8b", {"tp": 2}, 13, 12),
        ("llama-3.1-8b", {"dtype": "fp8_block"}, 15, 14),
        # norms of q and k; a router and seven kernels of experts instead of an MLP's three
        ("qwen3-30b-a3b", {}, 17, 16),
        ("qwen3-30b-a3b", {"tp": 2, "dtype": "fp8_block"}, 23, 22),
    ],
)
def test_kernels_of_a_layer(model, options, decode, prefill):
    plan = compiled(model, **options)
    layers = plan.model.num_layers
    assert counts(plan) == (decode * layers + ONCE, prefill * layers + ONCE)


def test_latent_attention_pauses_between_kernels_unless_they_are_fused():
    engine = EngineProfile("paused", costs=StepCosts(kernel_us=2.0))
    plain, plan = compiled("deepseek-v3", tp=8), compiled("deepseek-v3", tp=8, engine=engine)
    decode, prefill = counts(plan)
    assert 25 * 61 < decode < prefill < 40 * 61
    assert plan.decode_us(8, 100) - plain.decode_us(8, 100) == pytest.approx(2.0 * decode, rel=1e-9)
    fused = compiled("deepseek-v3", tp=8, engine=engine.started_with({"fused"}))
    assert fused.decode_us(8, 100) == plain.decode_us(8, 100)


def test_stages_share_the_kernels_of_a_plan():
    plan = compiled("llama-3.1-8b", pp=2)
    sends = 1
    assert sum(counts(stage)[0] for stage in plan.stages) == counts(plan)[0] + sends - sends
    assert sum(counts(stage)[1] for stage in plan.stages) == counts(plan)[1]


def test_a_pause_before_each_kernel_is_added_to_every_step():
    engine = EngineProfile("paused", costs=StepCosts(kernel_us=2.0))
    plan, plain = compiled("llama-3.1-8b", engine=engine), compiled("llama-3.1-8b")
    added_us = 2.0 * counts(plan)[0]
    assert plan.decode_us(8, 100) - plain.decode_us(8, 100) == pytest.approx(added_us, rel=1e-9)
    assert plan.prefill_us(500) - plain.prefill_us(500) == pytest.approx(added_us, rel=1e-9)
    fused = compiled("llama-3.1-8b", engine=engine.started_with({"fused"}))
    assert fused.decode_us(8, 100) == plain.decode_us(8, 100)


def test_what_an_architecture_lacks_includes_its_pauses():
    engine = load_engine("sglang-0.5.9")
    (own,) = [one for one in engine.costs.layers if one.architecture.startswith("Qwen3_5Moe")]
    costs = engine.costs
    few, many = own.layer_us * 40.0 * 0.5 / costs.kernel_us, own.layer_us * 40.0 * 2.0 / costs.kernel_us
    without = costs.of_step_us("LlamaForCausalLM", 40.0, 0.0, 0.0)
    assert costs.of_step_us(own.architecture, 40.0, 0.0, few) == pytest.approx(without + own.layer_us * 40.0)
    assert costs.of_step_us(own.architecture, 40.0, 0.0, many) == pytest.approx(
        without + costs.kernel_us * many
    )
