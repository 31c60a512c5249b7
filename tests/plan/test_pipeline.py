"""Pipeline stages: what each takes and holds, and micro-batches on their way through them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import StepBatch, compile_plan, compile_plans, load_model
from fastroof.columns import ORIGIN_MODELLED
from fastroof.compiled.plan_files import arena_fits
from fastroof.errors import PlanError, PlanRangeError
from fastroof.models.spec import stages_of
from fastroof.plan.pipeline import makespan_us
from fastroof.serving import estimate

LIMITS = {"max_num_batched_tokens": 512, "max_num_seqs": 64}
STEPS = ([(1, 99)] * 8, [(200, 0)] * 2, [(1, 40)] * 3 + [(100, 0)])
KERNELS = {"name": "mine", "costs": {"step_us": 100.0, "sequence_us": 3.0, "prefill_us": 7.0}}


@pytest.fixture(scope="module")
def four(h100):
    return compile_plan("qwen3-8b", "h100", h100, pp=4, **{"engine": "kernels", **LIMITS})


def test_layers_of_stages():
    """36 layers in 5 stages; 61 of which three are dense, in 4."""
    assert [s.counts for s in stages_of(load_model("qwen3-8b"), 5)] == [(8,), (7,), (7,), (7,), (7,)]
    for name, pp in (("gpt-oss-120b", 8), ("qwen3-8b", 36), ("llama-3.1-70b", 3)):
        model = load_model(name)
        stages = stages_of(model, pp)
        layers = [sum(stage.counts) for stage in stages]
        assert np.sum([stage.counts for stage in stages], axis=0).tolist() == [g.count for g in model.layers]
        assert layers == sorted(layers, reverse=True)
        assert max(layers) - min(layers) <= 1
    # alternating kinds stay even in every stage
    for stage in stages_of(load_model("gpt-oss-120b"), 6):
        assert max(stage.counts) - min(stage.counts) <= 1


@pytest.mark.loops
@pytest.mark.parametrize(("name", "pp"), [("qwen3-8b", 4), ("llama-3.1-8b", 3), ("gpt-oss-20b", 5)])
def test_stages_add_up_to_the_plan(h100, name, pp):
    """Kernels of the plan are those of its stages, and of the plan without stages but for what is sent."""
    options = {"dtype": "bf16", "allow_modelled": True, **LIMITS}
    plan, alone = (
        compile_plan(name, "h100", h100, pp=size, **{"engine": "kernels", **options}) for size in (pp, 1)
    )
    assert len(plan.stages) == pp
    assert alone.stages == (alone,)
    for requests in STEPS:
        batch = StepBatch.from_requests([requests])
        parts = [float(stage.step_us(batch)[0]) for stage in plan.stages]
        whole = float(plan.step_us(batch)[0])
        assert sum(parts) == pytest.approx(whole, rel=1e-12)
        explained = plan.explain(requests)
        (sent,) = [part for part in explained.operators if part.role == "stage_send"]
        assert (sent.calls, sent.origin) == (pp - 1, ORIGIN_MODELLED)
        assert explained.origin == ORIGIN_MODELLED
        assert whole - sent.total_us == pytest.approx(float(alone.step_us(batch)[0]), rel=1e-12)
        for stage, us in zip(plan.stages, parts, strict=True):
            found = stage.explain(requests)
            assert found.total_us == us
            assert sum(part.total_us for part in found.operators) == pytest.approx(us, rel=1e-12)
    roles = [{part.role for part in stage.explain(STEPS[0]).operators} for stage in plan.stages]
    assert [("embedding" in r, "lm_head" in r, "stage_send" in r) for r in roles] == [
        (number == 0, number == pp - 1, number < pp - 1) for number in range(pp)
    ]
    assert all(arena_fits(stage.arena) for stage in plan.stages)


@pytest.mark.loops
def test_each_host_adds_its_own_costs(h100):
    plan = compile_plan("qwen3-8b", "h100", h100, pp=4, engine=KERNELS, **LIMITS)
    kernels = compile_plan("qwen3-8b", "h100", h100, pp=4, **{"engine": "kernels", **LIMITS})
    for requests in STEPS:
        batch = StepBatch.from_requests([requests])
        prefill = 7.0 * any(new > 1 for new, _ in requests)
        added = plan.stage_times_us(batch) - kernels.stage_times_us(batch)
        sampled = 3.0 * len(requests)
        assert added[0] == pytest.approx([100.0 + prefill] * 3 + [100.0 + prefill + sampled], rel=1e-6)
        whole = plan.step_us(batch) - kernels.step_us(batch)
        assert whole[0] == pytest.approx(100.0 + prefill + sampled, rel=1e-6)


@pytest.mark.loops
def test_micro_batches_fill_the_stages(four):
    for count in (1, 2, 4, 7):
        batch = StepBatch.from_requests([STEPS[0]] * count)
        stage_us = four.stage_times_us(batch)
        assert stage_us.shape == (count, 4)
        slowest, through = stage_us[0].max(), stage_us[0].sum()
        # equal micro-batches: one through all stages, the others behind the slowest
        assert four.pipeline_us(batch) == pytest.approx(through + (count - 1) * slowest, rel=1e-12)
        assert four.cycle_us(batch) == pytest.approx(max(through, count * slowest), rel=1e-12)
    assert four.pipeline_us(StepBatch.from_requests([])) == 0.0
    assert four.cycle_us(StepBatch.from_requests([])) == 0.0


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.data())
def test_the_recurrence_is_the_longest_path(batches, stages, data):
    """Through the grid of micro-batches and stages, from the first of both to the last."""
    times = st.lists(st.floats(0.1, 100.0), min_size=stages, max_size=stages)
    times_us = np.array(data.draw(st.lists(times, min_size=batches, max_size=batches)))

    def longest(batch: int, stage: int) -> float:
        before = [longest(b, s) for b, s in ((batch - 1, stage), (batch, stage - 1)) if b >= 0 and s >= 0]
        return float(times_us[batch, stage]) + max(before, default=0.0)

    assert makespan_us(times_us) == pytest.approx(longest(batches - 1, stages - 1), rel=1e-12)


def test_memory_is_that_of_the_stage_with_least_room(h100):
    """70 B parameters in bf16 on four GPUs, worked out by hand."""
    plan = compile_plan("llama-3.1-70b", "h100", h100, pp=4, **{"engine": "kernels", **LIMITS})
    layer = (64 + 2 * 8) * 128 * 8192 + 8192 * 8192 + 3 * 28672 * 8192 + 2 * 8192
    vocab = 128256 * 8192
    weights = [stage.memory.weight_bytes for stage in plan.stages]
    assert weights == [
        2 * (20 * layer + vocab),
        2 * 20 * layer,
        2 * 20 * layer,
        2 * (20 * layer + vocab + 8192),
    ]
    assert plan.memory == plan.stages[3].memory
    assert plan.memory.kv_bytes_per_token == 20 * 2 * 8 * 128 * 2
    assert sum(weights) == 2 * load_model("llama-3.1-70b").num_parameters
    uneven = compile_plan("qwen3-8b", "h100", h100, pp=5, **{"engine": "kernels", **LIMITS})
    assert uneven.memory.kv_bytes_per_token == 8 * 2 * 8 * 128 * 2
    # what is tied is held by the first and by the last
    tied = compile_plan("qwen3-0.6b", "h100", h100, pp=2, **{"engine": "kernels", **LIMITS})
    first, last = (stage.memory.weight_bytes for stage in tied.stages)
    assert last - first == 2 * tied.model.hidden


def test_stages_without_any_room_have_a_memory_too(h100):
    """Half of 405 B parameters, 405 GB, on each of two GPUs."""
    plan = compile_plan("llama-3.1-405b", "h100", h100, pp=2, **{"engine": "kernels", **LIMITS})
    assert plan.memory.max_kv_tokens == 0
    assert plan.memory.weight_bytes == pytest.approx(405e9, rel=0.02)
    with pytest.raises(PlanRangeError, match="KV cache"):
        estimate(plan, isl=100, osl=10, clients=1)


def test_stages_travel_with_their_plan(four):
    again = pickle.loads(pickle.dumps(four))
    batch = StepBatch.from_requests(list(STEPS))
    assert np.array_equal(again.stage_times_us(batch), four.stage_times_us(batch))
    assert again.memory == four.memory
    assert [stage.stage for stage in again.stages] == [0, 1, 1, 3]


def test_many_plans_have_stages_too(h100, four):
    request = {"model": "qwen3-8b", "pp": 4, "engine": "kernels", **LIMITS}
    (plan,) = compile_plans([request], "h100", h100)
    batch = StepBatch.from_requests(list(STEPS))
    assert np.array_equal(plan.stage_times_us(batch), four.stage_times_us(batch))


def test_more_stages_than_layers(h100):
    with pytest.raises(PlanError, match=r"pp 37: qwen3-8b has 36 layers"):
        compile_plan("qwen3-8b", "h100", h100, pp=37, **{"engine": "kernels", **LIMITS})


def test_errors_of_stages(four):
    assert 0.0 < four.decode_error(8, 1000) < 0.5
    assert 0.0 < four.stages[1].decode_error(8, 1000) < 0.5


@pytest.mark.loops
@pytest.mark.parametrize(("name", "pp"), [("qwen3-8b", 4), ("llama-3.1-8b", 3), ("gpt-oss-20b", 5)])
def test_the_pace_is_that_of_the_slowest_stage(h100, name, pp):
    plan = compile_plan(
        name, "h100", h100, pp=pp, dtype="bf16", allow_modelled=True, engine=KERNELS, **LIMITS
    )
    paced = plan.bottleneck
    assert (paced.memory, paced.layout) == (plan.memory, plan.layout)
    slowest = max(plan.stages, key=lambda stage: stage.decode_us(64, 2048))
    for requests in STEPS:
        batch = StepBatch.from_requests([requests] * pp)
        us = paced.step_us(batch)
        assert us == pytest.approx(pp * slowest.step_us(batch), rel=1e-12)
        explained = paced.explain(requests)
        assert sum(part.total_us for part in explained.operators) == pytest.approx(
            explained.total_us, rel=1e-9
        )
    decodes = StepBatch.from_requests([[(1, 2047)] * 64] * pp)
    assert paced.step_us(decodes)[0] == pytest.approx(plan.cycle_us(decodes), rel=1e-12)
    assert paced.decode_us(64, 2048) == paced.step_us(decodes)[0]
    assert paced.decode_us(64, 2048) > plan.decode_us(64, 2048)
    assert arena_fits(paced.arena)
    alone = compile_plan("llama-3.1-8b", "h100", h100, **{"engine": "kernels", **LIMITS})
    assert alone.bottleneck is alone


@pytest.mark.loops
@pytest.mark.parametrize(("name", "pp"), [("gemma-3-27b", 4), ("gpt-oss-20b", 5), ("qwen3-8b", 4)])
def test_the_pace_holds_for_windows_prefixes_and_mixed_steps(h100, name, pp):
    """Lengths are equal and unequal, within and beyond the window, of decodes, chunks and both."""
    mixed = {"kernels": {"mixed_attention": [{"gpu": "h100", "ns": 5.0}]}}
    plan = compile_plan(
        name, "h100", h100, pp=pp, dtype="bf16", allow_modelled=True, engine={**KERNELS, **mixed}, **LIMITS
    )
    slowest = max(plan.stages, key=lambda stage: stage.decode_us(64, 2048))
    steps = (
        [(1, 5000)] * 3,
        [(1, 20), (1, 300), (1, 9000)],
        [(20, 0), (400, 0)],
        [(100, 60)],
        [(100, 4000)],
        [(7, 1500), (100, 4000)],
        [(1, 9000), (1, 20), (100, 4000)],
    )
    for requests in steps:
        batch = StepBatch.from_requests([requests])
        assert plan.bottleneck.step_us(batch) == pytest.approx(pp * slowest.step_us(batch), rel=1e-12), (
            requests
        )


def test_estimates_keep_the_pace_of_the_slowest_stage(h100):
    """As many clients as stages, one each: a token every round of the stages."""
    plan = compile_plan(
        "llama-3.1-8b", "h100", h100, pp=4, max_num_batched_tokens=4096, max_num_seqs=256, engine="kernels"
    )
    found = estimate(plan, isl=1000, osl=400, clients=4)
    kv_len = float(found.kv_len)
    round_us = 4 * max(stage.decode_us(1, int(kv_len)) for stage in plan.stages)
    assert float(found.decode_step_us) == pytest.approx(round_us, rel=1e-3)
    assert float(found.decode_step_us) > 1.1 * plan.decode_us(1, int(kv_len))


def test_estimates_of_ranks_with_uneven_loads(h100):
    """The most loaded of eight has twice the mean: half as many with its load do the same work."""
    even, uneven = (
        compile_plan(
            "llama-3.1-8b",
            "h100",
            h100,
            dp=8,
            dp_imbalance=load,
            max_num_batched_tokens=4096,
            max_num_seqs=256,
            engine="kernels",
        )
        for load in (1.0, 2.0)
    )
    assert (even.batches_in_flight, uneven.batches_in_flight) == (8, 4.0)
    loaded = estimate(even, isl=1000, osl=100, clients=64, requests_per_client="steady")
    found = estimate(uneven, isl=1000, osl=100, clients=32, requests_per_client="steady")
    assert float(found.tpot_ms) == float(loaded.tpot_ms)
    assert float(found.tokens_per_s_per_gpu) == pytest.approx(float(loaded.tokens_per_s_per_gpu) / 2)
