"""Attention in steps that decode and prefill: a maximum, one launch less, the same from every entry point."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import StepBatch, compile_plan, load_model
from fastroof.compiled import callers, mean_steps, plan_files, steps, verification
from fastroof.engines import EngineProfile, KernelChoices, MixedAttention, StepCosts, load_engine
from fastroof.errors import PlanError
from fastroof.models import LayerGroup, LayerKind
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.mlp import GatedMlp
from fastroof.serving import estimate
from tests.reference import mixed_attention as naive
from tests.reference.handmade import attention_rows, gemm_rows, handmade_tables

pytestmark = pytest.mark.loops

WINDOW = 64
NS = 0.6
DECODE = {(b, x): 9.0 + b * x / 900 + 0.002 * (x % 7) for b in (1, 4, 16) for x in (2, 16, 64, 512, 4096)}
PREFILL = {(b, x): 7.0 + b * x * (x + 300) / 9e5 for b in (1, 2, 8) for x in (1, 32, 64, 256, 1024)}
TABLES = handmade_tables(
    gemm=gemm_rows({(1, 64, 64): 3.0, (16, 64, 64): 4.0, (8, 256, 64): 5.0, (16, 128, 512): 6.0}),
    attention_decode=[*attention_rows(DECODE), *attention_rows(DECODE, window=WINDOW)],
    attention_prefill=[
        *attention_rows(PREFILL, is_decode=False),
        *attention_rows(PREFILL, is_decode=False, window=WINDOW),
    ],
    elementwise=[("copy", 1, 2**28, 2**30, 400.0)],
)
COSTS = StepCosts(step_us=200.0, sequence_us=9.0, prefill_us=70.0, prefill_floor_layer_us=40.0)


def engine(*figures: MixedAttention, one_call: tuple[str, ...] = ()) -> EngineProfile:
    kernels = KernelChoices(mixed_attention=figures, one_attention_call=one_call)
    return EngineProfile("made up", costs=COSTS, kernels=kernels)


def model(windowed: int, full: int):
    """Layers of both kinds; of one where the other has none."""
    kinds = (
        (LayerKind(GroupedQueryAttention(32, 8, 128, window=WINDOW), GatedMlp(14336), "windowed"), windowed),
        (LayerKind(GroupedQueryAttention(32, 8, 128), GatedMlp(14336), "full"), full),
    )
    layers = tuple(LayerGroup(kind, count) for kind, count in kinds if count)
    return replace(load_model("llama-3.1-8b"), layers=layers, name="windowed")


LAYERS = {"full": (0, 24), "alternating": (12, 12), "windowed": (24, 0)}


def compiled(counts, *figures: MixedAttention, one_call: tuple[str, ...] = ()):
    profile = engine(*figures, one_call=one_call)
    return compile_plan(
        model(*counts), "h100", TABLES, max_num_batched_tokens=512, max_num_seqs=16, engine=profile
    )


FIGURE = MixedAttention(NS, gpu="h100", head_dim=128, kv_dtype="bf16")
PLANS = {name: [compiled(counts), compiled(counts, FIGURE)] for name, counts in LAYERS.items()}
ONE_CALL = {
    name: [compiled(counts, *figures, one_call=("h100",)) for figures in ((), (MixedAttention(NS),))]
    for name, counts in LAYERS.items()
}
DECODES = st.lists(st.tuples(st.just(1), st.integers(1, 6000)), min_size=1, max_size=10)
CHUNKS = st.lists(st.tuples(st.integers(2, 60), st.integers(0, 400)), max_size=4)


@settings(max_examples=80)
@given(
    name=st.sampled_from(list(PLANS)),
    choice=st.integers(0, 2),
    decodes=DECODES,
    chunks=CHUNKS,
    seed=st.integers(0, 99),
)
def test_a_step_takes_the_longer_of_kernel_and_price_and_launches_once(name, choice, decodes, chunks, seed):
    alone, priced = PLANS[name]
    plan = (priced, *ONE_CALL[name])[choice]
    requests = [
        (*decodes, *chunks)[i] for i in np.random.default_rng(seed).permutation(len(decodes + chunks))
    ]
    batch = StepBatch.from_requests([requests])
    expected_us, attention_us, prefill_us = naive.step_us(alone, plan, requests)
    times = plan.run(batch)
    found = float(times.latency_us[0])
    assert found == pytest.approx(expected_us, rel=1e-12)
    assert float(times.components.decode_attention_us[0]) == pytest.approx(attention_us, rel=1e-12)
    assert float(times.components.prefill_attention_us[0]) == pytest.approx(prefill_us, rel=1e-12)
    assert sum(float(part[0]) for part in times.components) == pytest.approx(found, rel=1e-12)
    new, context = (np.array(column) for column in zip(*requests, strict=True))
    assert plan.step_us(batch)[0] == found
    assert plan.step_scalar(new.tolist(), context.tolist()) == found
    assert plan.step_scalar(new, context) == found
    assert callers.requests_step_us(plan.arena, new, context) == found
    explained = plan.explain(requests)
    assert explained.total_us == found
    parts = [part for part in explained.operators if part.role == "decode_attention"]
    assert sum(part.total_us for part in parts) == pytest.approx(attention_us, rel=1e-9)
    of_chunks = [part.total_us for part in explained.operators if part.role == "prefill_attention"]
    assert sum(of_chunks) == pytest.approx(prefill_us, rel=1e-9)
    if naive.least_us(plan, requests) > float(alone.run(batch).components.decode_attention_us[0]) * 1.001:
        assert times.origin[0] == 4
        assert {part.origin for part in parts} == {4}


@settings(max_examples=40)
@given(name=st.sampled_from(list(PLANS)), decodes=DECODES, chunks=CHUNKS)
def test_steps_of_one_sort_are_untouched(name, decodes, chunks):
    alone, plan = PLANS[name][0], ONE_CALL[name][1]
    batch = StepBatch.from_requests([decodes, chunks])
    mine, others = plan.run(batch), alone.run(batch)
    assert mine.latency_us.tolist() == others.latency_us.tolist()
    assert mine.origin.tolist() == others.origin.tolist()
    assert plan.decode_us(4, 999) == alone.decode_us(4, 999)
    assert plan.prefill_us(40, 30, 2) == alone.prefill_us(40, 30, 2)
    assert plan.verify_us(4, 999, 3) == alone.verify_us(4, 999, 3)


SMALL = {"max_num_batched_tokens": 512, "max_num_seqs": 16}


@pytest.mark.parametrize("name", list(LAYERS))
def test_a_chunk_with_decodes_saves_the_shorter_launch_of_every_layer(name):
    alone, plan = PLANS[name][0], ONE_CALL[name][0]
    launch_us = 24 * min(min(DECODE.values()), min(PREFILL.values()))
    assert plan.arena[steps.SHARED_LAUNCH_US] == pytest.approx(launch_us, rel=0.01)
    mixed = StepBatch.from_requests([[(1, 500)] * 3 + [(200, 0)]])
    saved_us = alone.step_us(mixed)[0] - plan.step_us(mixed)[0]
    assert saved_us == pytest.approx(plan.arena[steps.SHARED_LAUNCH_US], rel=1e-9)


def test_a_launch_is_shared_on_the_named_gpus_by_grouped_heads_alone(h100):
    elsewhere = engine(one_call=("h200",))
    plan = compile_plan("llama-3.1-8b", "h100", h100, engine=elsewhere, **SMALL)
    assert plan.arena[steps.SHARED_LAUNCH_US] == 0.0
    latent = compile_plan("deepseek-v3", "h100", h100, tp=8, engine=engine(one_call=("h100",)), **SMALL)
    assert latent.arena[steps.SHARED_LAUNCH_US] == 0.0
    whole, piped = (
        compile_plan("llama-3.1-8b", "h100", h100, pp=pp, engine=engine(one_call=("h100",)), **SMALL)
        for pp in (1, 4)
    )
    assert piped.bottleneck.arena[steps.SHARED_LAUNCH_US] == pytest.approx(
        whole.arena[steps.SHARED_LAUNCH_US], rel=1e-12
    )


@pytest.mark.parametrize("name", ["full", "alternating"])
def test_an_estimate_shares_a_launch_in_mixed_steps_alone(name):
    alone, plan = PLANS[name][0], ONE_CALL[name][0]
    sizes = {"isl": [300, 1500], "osl": 40, "clients": 12, "max_num_batched_tokens": 256}
    mine, others = (estimate(one, **sizes) for one in (alone, plan))
    np.testing.assert_array_equal(mine.decode_step_us, others.decode_step_us)
    np.testing.assert_allclose(
        mine.mixed_step_us - others.mixed_step_us, plan.arena[steps.SHARED_LAUNCH_US], rtol=1e-9
    )
    # a client by itself shares nothing
    single = [estimate(one, isl=300, osl=40, clients=1, max_num_batched_tokens=256) for one in (alone, plan)]
    assert single[0].ttft_ms == single[1].ttft_ms


@pytest.mark.parametrize("given", ["h100", [1]])
def test_gpus_of_one_call_are_names(given):
    with pytest.raises(PlanError, match="one_attention_call"):
        KernelChoices(one_attention_call=given)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="one_attention_call"):
        load_engine({"name": "mine", "kernels": {"one_attention_call": given}})


def test_a_plan_without_a_figure_has_none():
    for figures in (
        (),
        (MixedAttention(NS, gpu="b200"),),
        (MixedAttention(NS, head_dim=64),),
        (MixedAttention(NS, kv_dtype="fp8"),),
    ):
        plan = compile_plan(model(0, 24), "h100", TABLES, engine=engine(*figures), **SMALL)
        np.testing.assert_array_equal(plan.arena, PLANS["full"][0].arena)


def test_the_first_figure_that_applies_counts(h100):
    figures = MixedAttention(0.9, gpu="b200"), MixedAttention(0.5, gpu="h100"), MixedAttention(0.7)
    plan = compile_plan("llama-3.1-8b", "h100", h100, tp=4, engine=engine(*figures), **SMALL)
    assert plan.arena[steps.MIXED_KV_US] == pytest.approx(0.5e-3 * 8 * 32, rel=1e-12)


def test_heads_of_several_widths_need_a_figure_each(h100):
    """Gemma 4 attends with heads of 256, and of 512 in every sixth layer."""
    one, every = (
        compile_plan("gemma-4-31b", "h100", h100, engine=engine(figure), allow_modelled=True, **SMALL)
        for figure in (MixedAttention(NS, head_dim=512), MixedAttention(NS))
    )
    prices = [steps.MIXED_KV_US, steps.MIXED_WINDOW_KV_US]
    assert one.arena[prices].tolist() == [0.0, 0.0]
    assert min(every.arena[prices]) > 0.0


def test_latent_attention_has_no_figure(h100):
    plan = compile_plan("deepseek-v3", "h100", h100, tp=8, engine=engine(MixedAttention(NS)), **SMALL)
    assert plan.arena[steps.MIXED_KV_US] == 0.0


def test_a_plan_of_a_file_has_a_price_or_none():
    for _, plan in (*PLANS.values(), *ONE_CALL.values()):
        assert plan_files.arena_fits(plan.arena)
        for slot in (steps.MIXED_KV_US, steps.MIXED_WINDOW_KV_US, steps.SHARED_LAUNCH_US):
            changed = plan.arena.copy()
            changed[slot] = -1e-9
            assert not plan_files.arena_fits(changed)


def test_stages_at_one_pace_have_it_as_often(h100):
    figure = engine(MixedAttention(0.5))
    whole, piped = (
        compile_plan(
            "llama-3.1-8b", "h100", h100, pp=pp, max_num_batched_tokens=512, max_num_seqs=16, engine=figure
        )
        for pp in (1, 4)
    )
    for plan in (piped, piped.bottleneck):
        assert plan.arena[steps.MIXED_KV_US] == pytest.approx(whole.arena[steps.MIXED_KV_US], rel=1e-12)
    requests = [(100, 0), *[(1, 5000)] * 10]
    explained = piped.bottleneck.explain(requests)
    parts = [part.total_us for part in explained.operators if part.role == "decode_attention"]
    assert parts == [pytest.approx(0.5e-3 * 32 * 32 * 10 * 5001, rel=1e-12)]


@pytest.mark.parametrize("name", ["full", "alternating"])
def test_an_estimate_has_it_in_mixed_steps_alone(name):
    alone, plan = PLANS[name]
    sizes = {"isl": [300, 1500], "osl": 40, "clients": 12, "max_num_batched_tokens": 256}
    mine, others = (estimate(one, **sizes) for one in (alone, plan))
    np.testing.assert_array_equal(mine.decode_step_us, others.decode_step_us)
    np.testing.assert_array_equal(mine.mixed_share, others.mixed_share)
    assert (others.mixed_step_us > mine.mixed_step_us).all()
    assert (others.ttft_ms > mine.ttft_ms).all()


def mean_attention_us(plan, decodes: float, isl: float, osl: float) -> float:
    parts = steps.open_plan(plan.arena)
    one = verification.one_token(parts)
    return mean_steps.mean_decode_attention_us(plan.arena, parts, one, decodes, isl, osl)


def test_a_mean_step_has_the_price_of_its_mean_lengths():
    """Within a window too: over all that a request grows through."""
    alone, plan = PLANS["alternating"]
    isl, osl = 40.0, 61.0  # the window lies within
    mine, others = (
        estimate(one, isl=isl, osl=osl, clients=8, max_num_batched_tokens=512) for one in (alone, plan)
    )
    lengths = isl + 0.5 + (osl - 1.0) * (np.arange(60_000) + 0.5) / 60_000
    price_us = naive.kv_token_us(plan) * lengths.mean()
    price_us += naive.kv_token_us(plan, WINDOW) * np.minimum(lengths, WINDOW).mean()
    decodes = float(mine.decodes)
    longer_us = decodes * price_us - mean_attention_us(alone, decodes, isl, osl)
    assert longer_us > 0.0
    assert others.mixed_step_us - mine.mixed_step_us == pytest.approx(longer_us, rel=1e-6)


def test_a_mean_step_of_equal_decodes_is_the_step():
    _, plan = PLANS["full"]
    parts = steps.open_plan(plan.arena)
    one = verification.one_token(parts)
    # two tokens out: one decode each, at isl + 1
    attention_us = mean_attention_us(plan, 6.0, 999.0, 2.0)
    mixed_us = mean_steps.mixed_decode_attention_us(plan.arena, parts, one, attention_us, 6.0, 999.0, 2.0)
    times = plan.run(StepBatch.from_requests([[(1, 999)] * 6 + [(30, 0)]]))
    assert mixed_us == pytest.approx(float(times.components.decode_attention_us[0]), rel=1e-12)
    for none in ((0.0, 50.0, 9.0), (3.0, 50.0, 1.0)):
        assert mean_steps.mixed_decode_attention_us(plan.arena, parts, one, 5.0, *none) == 5.0


def test_a_cached_prefix_is_attended_to_at_the_price():
    alone, plan = PLANS["full"]
    sizes = {"isl": 4000, "osl": 200, "clients": 12, "max_num_batched_tokens": 512, "prefix_hit": 0.9}
    sizes |= {"requests_per_client": "steady"}  # steps of the start have other decodes
    mine, others = (estimate(one, **sizes) for one in (alone, plan))
    assert others.decode_step_us == mine.decode_step_us
    decodes = float(mine.decodes)
    whole_us = naive.kv_token_us(plan) * decodes * (4000 + 100)
    own_us = mean_attention_us(alone, decodes, 4000.0, 200.0)
    assert whole_us > own_us
    assert others.mixed_step_us - mine.mixed_step_us == pytest.approx(whole_us - own_us, rel=1e-9)
    assert others.ttft_ms > mine.ttft_ms
