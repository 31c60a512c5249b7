"""Plans of models whose layers attend within a window, from the H100's tables."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import ModelSpec, StepBatch, StepPlan, Tables, compile_plan, compile_plans, load_model
from fastroof.compiled.plan_files import arena_fits
from fastroof.errors import PlanError
from fastroof.models import LayerGroup, LayerKind
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.mlp import GatedMlp
from fastroof.pack.keys import MOST_KEY_BITS, key_start_above
from tests.reference import windows as naive

pytestmark = pytest.mark.loops

BASE = load_model("llama-3.1-8b")
LIMITS = {"max_num_batched_tokens": 2048, "max_num_seqs": 64}


def alternating(heads: tuple[int, int, int], window: int, windowed: int, full: int) -> ModelSpec:
    """A model of windowed and full layers with these heads; of full ones alone without windowed ones."""
    kinds = ((window, windowed, "windowed"), (None, full, "full"))
    layers = tuple(
        LayerGroup(LayerKind(GroupedQueryAttention(*heads, window=size), GatedMlp(2880), name), count)
        for size, count, name in kinds
        if count
    )
    return replace(BASE, hidden=2880, layers=layers, name="alternating")


# heads and windows of gpt-oss-20b, Gemma-3-27b, Llama-4-Scout, Mistral 7B v0.1, MiMo-V2-Flash, Step-3.7-Flash
LIKE_PRESETS = {
    "gpt-oss": ((64, 8, 64), 128, 12, 12),
    "gemma-3": ((32, 16, 128), 1024, 52, 10),
    "llama-4": ((40, 8, 128), 8192, 36, 12),
    "mistral": ((32, 8, 128), 4096, 32, 0),
    "mimo": ((64, 8, 192), 128, 39, 9),
    "step": ((64, 8, 128), 512, 33, 12),
    "gemma-3-1b": ((4, 1, 256), 512, 22, 4),
}
REQUESTS = st.lists(
    st.tuples(st.just(1), st.integers(1, 9000)) | st.tuples(st.integers(1, 90), st.integers(0, 3000)),
    min_size=1,
    max_size=20,
)


@pytest.fixture(scope="module")
def plan(h100: Tables) -> StepPlan:
    return compile_plan(
        alternating(*LIKE_PRESETS["gpt-oss"]), "h100", h100, **{"engine": "kernels", **LIMITS}
    )


@settings(max_examples=30)
@given(requests=REQUESTS)
def test_attention_is_the_naive_sum_of_kinds(h100, plan, requests):
    batch = StepBatch.from_requests([requests])
    parts = plan.run(batch).components
    found = float(parts.decode_attention_us[0] + parts.prefill_attention_us[0])
    assert found == pytest.approx(naive.attention_of_step_us(plan, h100, requests), rel=1e-9)
    explained = plan.explain(requests, with_error=True)
    assert explained.total_us == plan.step_us(batch)[0]
    assert sum(o.total_us for o in explained.operators) == pytest.approx(explained.total_us, rel=1e-12)
    assert 0.0 < explained.relative_error < 0.5


@pytest.mark.parametrize(
    "requests", [[(300, 0), (50, 0)], [(129, 0), (2, 0), (700, 40)], [(1500, 0), (1, 77), (200, 1000)]]
)
def test_kinds_add_up_for_chunks_longer_than_the_window(h100, plan, requests):
    explained = plan.explain(requests)
    found = [part.total_us for part in explained.operators if part.role.endswith("attention")]
    assert sum(found) == pytest.approx(naive.attention_of_step_us(plan, h100, requests), rel=1e-9)
    assert sum(part.total_us for part in explained.operators) == pytest.approx(explained.total_us, rel=1e-9)


@pytest.mark.parametrize("name", LIKE_PRESETS)
def test_plans_like_the_presets_keep_the_fast_decode_lines(h100, name):
    for model in (load_model("llama-3.1-8b"), alternating(*LIKE_PRESETS[name])):
        plan = compile_plan(model, "h100", h100, max_num_batched_tokens=64, max_num_seqs=64, engine="kernels")
        assert plan.decode_lines is not None
        assert arena_fits(plan.arena)
    batch, kv_len = np.array([1, 8, 64]), np.array([100, 2000, 30000])
    assert plan.decode_us(batch, kv_len).tolist() == [
        plan.scalar(int(b), int(kv)) for b, kv in zip(batch, kv_len, strict=True)
    ]


def test_a_measured_point_of_both_kinds_comes_back(h100, plan):
    heads = {"num_q_heads": 64, "num_kv_heads": 8, "head_dim": 64}
    for batch, kv_len in ((1, 128), (64, 1024), (32, 8192)):
        sizes = {"batch_size": batch, "kv_len": kv_len, **heads}
        one, other = (h100.lookup("attention_decode", **sizes, window=w) for w in (128, 0))
        assert (int(one.origin), int(other.origin)) == (0, 0)
        run = plan.run(StepBatch.from_requests([[(1, kv_len - 1)] * batch]))
        expected = 12 * (float(one.latency_us) + float(other.latency_us))
        assert run.components.decode_attention_us[0] == pytest.approx(expected, rel=1e-12)
        assert plan.decode_us(batch, kv_len) == run.latency_us[0]


def test_explain_counts_what_is_within_the_window(plan):
    decodes = [(1, 99), (1, 9999)]
    chunks = [(200, 0), (100, 1000)]
    for requests, role in ((decodes, "decode_attention"), (chunks, "prefill_attention")):
        windowed, full = (o for o in plan.explain(requests).operators if o.role == role)
        for part, window in ((windowed, 128), (full, 0)):
            counted = naive.sums(requests, window)
            pairs = counted.seen + counted.own_pairs + counted.prefix_pairs
            assert part.flops == 12 * 4 * 64 * 64 * pairs
            read = counted.seen + sum(q for q, _ in requests if q > 1) + counted.prefix_tokens
            new = sum(q for q, _ in requests)
            assert part.moved_bytes == 12 * 2 * 64 * (2 * 64 * new + 2 * 8 * read)


def test_a_window_that_all_lengths_are_within_is_full_attention_where_it_is_borrowed(h100):
    heads = LIKE_PRESETS["mistral"][0]
    wide = compile_plan(alternating(heads, 4096, 20, 12), "h100", h100, **{"engine": "kernels", **LIMITS})
    full = compile_plan(alternating(heads, 0, 0, 32), "h100", h100, **{"engine": "kernels", **LIMITS})
    steps = StepBatch.from_requests(
        [[(1, 99), (1, 4000)], [(1, 4095)] * 8, [(2000, 0)], [(700, 0), (30, 0), (1, 17)]]
    )
    np.testing.assert_allclose(wide.step_us(steps), full.step_us(steps), rtol=1e-12)
    assert wide.run(steps).origin.tolist() == [3, 3, 3, 3]
    # a prefix is priced from a longer table than a window's
    assert wide.prefill_us(100, 3000) == pytest.approx(full.prefill_us(100, 3000), rel=0.02)
    assert wide.decode_us(8, 20000) < full.decode_us(8, 20000)


def test_a_plan_travels_and_is_one_of_many(plan, h100):
    again = pickle.loads(pickle.dumps(plan))
    (of_set,) = compile_plans([{"model": plan.model, "engine": "kernels", **LIMITS}], "h100", h100)
    steps = StepBatch.from_requests([[(1, 99), (1, 4000)], [(300, 700), (1, 5)]])
    for other in (again, of_set):
        assert np.array_equal(other.arena, plan.arena)
        assert other.step_us(steps).tolist() == plan.step_us(steps).tolist()
    for threads in (1, 3):
        assert plan.step_us(steps, threads=threads).tolist() == plan.run(steps).latency_us.tolist()


def test_errors_are_those_of_both_kinds(plan):
    batch, kv_len = np.array([1, 8, 64]), np.array([100, 3000, 20000])
    steps = StepBatch.from_requests([[(1, kv - 1)] * b for b, kv in zip(batch, kv_len, strict=True)])
    assert plan.step_error(steps) == pytest.approx(plan.decode_error(batch, kv_len), rel=1e-9)
    ragged = plan.step_error(StepBatch.from_requests([[(1, 20), (1, 5000)], [(300, 2000), (20, 0)]]))
    assert ((ragged > 0.0) & (ragged < 0.3)).all()


@pytest.mark.parametrize("method", ["linear_mfu", "nearest", "floor"])
def test_mfu_knows_no_windows(h100, method):
    with pytest.raises(PlanError, match="interpolates MFU, which does not fit alternating's window"):
        compile_plan(
            alternating(*LIKE_PRESETS["gpt-oss"]),
            "h100",
            h100,
            method=method,
            **{"engine": "kernels", **LIMITS},
        )


def test_two_sizes_of_windows_are_refused(h100):
    one = alternating((32, 8, 128), 1024, 4, 4)
    kind: Any = one.layers[0].kind
    other = replace(kind, attention=replace(kind.attention, window=128), name="short")
    both = replace(one, layers=(*one.layers, LayerGroup(other, 2)))
    with pytest.raises(PlanError, match=r"windows of 128 and 1024 tokens.*with_full_attention\(\)"):
        compile_plan(both, "h100", h100, engine="kernels")
    assert (
        compile_plan(both.with_full_attention(), "h100", h100, **{"engine": "kernels", **LIMITS}).decode_us(
            1, 64
        )
        > 0
    )


@given(x=st.integers(1, 2**28))
def test_simple_numbers_above_another(x):
    found = key_start_above(float(x))
    assert x <= found <= x * (1 + 2**-MOST_KEY_BITS)
    mantissa = int(found) >> max(int(found).bit_length() - 1 - MOST_KEY_BITS, 0)
    assert mantissa << max(int(found).bit_length() - 1 - MOST_KEY_BITS, 0) == int(found) or found < 16
