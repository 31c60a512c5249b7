"""Steps with prompts that an engine pads to a captured number of tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import fastroof
from fastroof.backends.llmservingsim import export_llmservingsim
from fastroof.engines import load_engine
from fastroof.errors import BackendError
from fastroof.plan.step_plan import StepPlan

CAPTURED, EAGER = "sglang-0.5.14", "sglang-0.5.9"


def compiled(engine: object, model: str = "llama-3.1-8b", **options: object) -> StepPlan:
    return fastroof.compile_plan(model, "h100", fastroof.load_tables("h100"), engine=engine, **options)


@pytest.fixture(scope="module")
def plans() -> tuple[StepPlan, StepPlan]:
    """The same plan with and without graphs."""
    return compiled(CAPTURED, tp=2, dtype="fp8"), compiled(EAGER, tp=2, dtype="fp8")


def components(plan: StepPlan, *requests: tuple[int, int]):
    return plan.run(fastroof.StepBatch.from_requests([requests])).components


def tokens_us(plan: StepPlan, tokens: int) -> float:
    """What runs for each token of a step with prompts, of one prompt."""
    return float(components(plan, (tokens, 0)).tokens_us[0])


def test_a_prompt_runs_as_many_tokens_as_the_next_graph(plans):
    padded, plain = plans
    for tokens, runs in ((1, 4), (5, 8), (33, 48), (257, 288), (513, 576), (1025, 1280), (4097, 4608)):
        assert tokens_us(padded, tokens) == tokens_us(plain, runs)
    for tokens in (4, 256, 288, 512, 8192):
        assert tokens_us(padded, tokens) == tokens_us(plain, tokens)


def test_attention_and_decodes_are_not_padded(plans):
    padded, plain = plans
    batch = np.arange(1, 1025)
    np.testing.assert_array_equal(padded.decode_us(batch, 500), plain.decode_us(batch, 500))
    one, other = (components(plan, (300, 200)) for plan in plans)
    assert one.prefill_attention_us == other.prefill_attention_us
    assert components(padded, (300, 0), (1, 50), (1, 60)).tokens_us[0] == tokens_us(plain, 320)


def test_an_explanation_adds_up_to_the_step(plans):
    padded, plain = plans
    for requests in ([(300, 0)], [(257, 16), (1, 50)], [(1, 50), (1, 60)]):
        explained = padded.explain(requests, with_error=True)
        parts = sum(part.total_us for part in explained.operators)
        assert parts == pytest.approx(explained.total_us, rel=1e-12)
        assert explained.total_us == padded.run(fastroof.StepBatch.from_requests([requests])).latency_us[0]
        assert [p.name for p in explained.operators] == [p.name for p in plain.explain(requests).operators]
        assert explained.relative_error is not None
        assert 0.0 < explained.relative_error < 1.0


def test_the_last_tokens_of_a_plan_are_padded_beyond_it(plans):
    padded, plain = plans
    short = compiled(CAPTURED, tp=2, dtype="fp8", max_num_batched_tokens=700)
    assert tokens_us(short, 700) == tokens_us(padded, 700) == tokens_us(plain, 704)


@pytest.mark.parametrize("cp", [1, 2])
def test_an_allreduce_is_counted_once(cp):
    engine = load_engine(CAPTURED)
    priced = dataclasses.replace(engine, costs=dataclasses.replace(engine.costs, allreduce_us=10.0))
    without = compiled(engine, tp=2, cp=cp)
    added_us = compiled(priced, tp=2, cp=cp).decode_us(8, 100) - without.decode_us(8, 100)
    assert added_us == pytest.approx(10.0 * 2 * without.model.num_layers, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama-3.1-8b", {"pp": 2}),
        ("llama-3.1-8b", {"cp": 2, "tp": 2}),
        ("qwen3-30b-a3b", {"dp": 2}),
        ("qwen3-30b-a3b", {"tp": 4, "ep": 4, "exchange": "alltoall"}),
        ("qwen3-vl-8b", {}),
    ],
    ids=["stages", "context parallelism", "ranks", "all-to-all", "vision encoder"],
)
def test_uncaptured_sizes_are_not_padded(model, options):
    captured, eager = (compiled(engine, model, **options) for engine in (CAPTURED, EAGER))
    tokens = np.array([1, 5, 257, 300, 513, 1025, 5000])
    np.testing.assert_array_equal(captured.prefill_us(tokens), eager.prefill_us(tokens))


@pytest.mark.slow
def test_replicas_of_a_dense_model_are_captured_but_not_padded():
    captured, eager = (compiled(engine, dp=2) for engine in (CAPTURED, EAGER))
    assert tokens_us(captured, 300) == tokens_us(eager, 300)
    assert captured.prefill_us(20) < eager.prefill_us(20)


def test_latent_attention_is_padded_up_to_the_captured_tokens():
    captured, eager = (compiled(engine, "deepseek-v3", tp=8) for engine in (CAPTURED, EAGER))
    assert tokens_us(captured, 300) == tokens_us(eager, 320)
    assert tokens_us(captured, 2048) == tokens_us(eager, 2048)
    assert tokens_us(captured, 2050) == tokens_us(eager, 2050)


def test_without_graphs_a_step_takes_the_host_its_kernels(plans):
    padded, plain = plans
    launch_us = plain.profile.costs.prefill_floor_kernel_us
    # of each layer: norms, rope, KV write, attention, activation, two all-reduces, four GEMMs that quantise
    kernels = plain.model.num_layers * (2 + 2 + 1 + 1 + 2 + 4 * 2) + 3
    assert plain.prefill_us(5) == pytest.approx(kernels * launch_us, rel=1e-12)
    assert plain.prefill_us(8192) > kernels * launch_us > padded.prefill_us(5)
    wanted = compiled(load_engine(EAGER).started_with({"graphs"}), tp=2, dtype="fp8")
    assert wanted.prefill_us(5) == padded.prefill_us(5)


def test_experts_of_one_group_are_padded_too():
    captured, eager = (compiled(engine, "qwen3-30b-a3b", tp=4, ep=4) for engine in (CAPTURED, EAGER))
    assert tokens_us(captured, 300) == tokens_us(eager, 320)


def test_a_program_that_has_one_time_for_both_kinds_of_steps_is_refused(tmp_path):
    plan = compiled(CAPTURED)
    with pytest.raises(BackendError, match=r"no place for steps with prompts that sglang pads"):
        export_llmservingsim(plan, tmp_path / "bundle")
