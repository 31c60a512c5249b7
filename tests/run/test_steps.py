"""Times of steps: against the direct sum of lookups, and the same bits from every entry point."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import StepBatch, compile_plan
from tests.reference import steps as naive

# hypothesis prints the tables that a failing test was given, and warns of their length instead of failing
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

PLANS = {
    "llama": ("llama-3.1-8b", {}),
    "llama tp4 fp8": ("llama-3.1-8b", {"tp": 4, "dtype": "fp8", "kv_dtype": "fp8"}),
    "qwen2.5 (group 7)": ("qwen2.5-7b", {}),
    "qwen3 (qk norm) tp8": ("qwen3-32b", {"tp": 8, "dtype": "fp8_block"}),
    "llama-2 (borrowed decode)": ("llama-2-7b", {}),
}


@pytest.fixture(scope="module", params=PLANS)
def plan(request, h100):
    model, options = PLANS[request.param]
    return compile_plan(model, "h100", h100, **{"engine": "kernels", **options})


@pytest.fixture(scope="module")
def llama(h100):
    return compile_plan("llama-3.1-8b", "h100", h100, engine="kernels")


@pytest.fixture(scope="module")
def small(h100):
    """A plan that is quick to compile with the JIT off."""
    return compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=512, max_num_seqs=64, engine="kernels"
    )


def lengths(exponent: int, least: int = 1) -> st.SearchStrategy[int]:
    return st.floats(0.0, float(exponent)).map(lambda e: max(least, int(2**e)))


CONTEXTS = st.one_of(st.just(0), lengths(17))


def requests(max_new: int, max_requests: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    decode = st.tuples(st.just(1), lengths(17))
    chunk = st.tuples(st.integers(1, max_new), CONTEXTS)
    return st.lists(st.one_of(decode, chunk), max_size=max_requests)


# Against the sum of lookups


@given(batch=lengths(10), kv_len=lengths(18))
def test_a_decode_step_is_the_sum_of_its_lookups(plan, h100, batch, kv_len):
    batch = min(batch, 1024)
    expected = naive.decode_us(plan, h100, batch, kv_len)
    assert plan.decode_us(batch, kv_len) == pytest.approx(expected, rel=1e-12)


@given(new=lengths(13), context=CONTEXTS, batch=lengths(6))
def test_a_prefill_step_is_the_sum_of_its_lookups(plan, h100, new, context, batch):
    batch = max(1, min(batch, 8192 // new))
    expected = naive.prefill_us(plan, h100, new, context, batch)
    assert plan.prefill_us(new, context, batch) == pytest.approx(expected, rel=1e-12)


@given(step=requests(1000, 8))
def test_a_mixed_step_is_the_naive_one(llama, h100, step):
    (got,) = llama.step_us(StepBatch.from_requests([step]))
    assert got == pytest.approx(naive.ragged_us(llama, h100, step), rel=1e-12)


METHODS = ("linear_mfu", "floor", "nearest")


@pytest.fixture(scope="module", params=METHODS)
def mfu_plan(request, h100):
    return compile_plan(
        "llama-3.1-8b", "h100", h100, method=request.param, max_num_batched_tokens=2048, engine="kernels"
    )


@given(batch=lengths(6), kv_len=lengths(12), new=lengths(10))
def test_plans_of_the_mfu_methods_are_sums_of_their_lookups(mfu_plan, h100, batch, kv_len, new):
    """Up to 64 x 4096 no hole of the decode table is near."""
    expected = naive.decode_us(mfu_plan, h100, batch, kv_len)
    assert mfu_plan.decode_us(batch, kv_len) == pytest.approx(expected, rel=1e-12)
    expected = naive.prefill_us(mfu_plan, h100, new, 0, 2)
    assert mfu_plan.prefill_us(new, 0, 2) == pytest.approx(expected, rel=1e-12)


def test_a_prefix_costs_a_plan_what_it_costs_a_lookup(mfu_plan, h100):
    expected = naive.prefill_us(mfu_plan, h100, 128, 8192, 1)
    assert mfu_plan.prefill_us(128, 8192, 1) == pytest.approx(expected, rel=1e-12)


def test_next_to_holes_a_plan_picks_the_measured_point_of_a_lookup(mfu_plan, h100):
    # with "nearest" a plan picks once for a hole's whole box, a lookup for the point itself
    rtol = 0.05 if mfu_plan.method == "nearest" else 1e-12
    batch, kv_len = np.meshgrid([70, 100, 200, 300, 500, 700, 1000], [3000, 6000, 12_000, 30_000, 100_000])
    got = mfu_plan.decode_us(batch, kv_len)
    expected = [naive.decode_us(mfu_plan, h100, b, kv) for b, kv in zip(batch.flat, kv_len.flat, strict=True)]
    np.testing.assert_allclose(got.ravel(), expected, rtol=rtol)


# The same step through every entry point, to the last bit


@pytest.mark.loops
@settings(max_examples=100)
@given(batch=st.integers(1, 64), context=lengths(18))
def test_equal_decodes_are_one_step(small, batch, context):
    step = StepBatch.from_requests([[(1, context)] * batch])
    homogeneous = small.decode_us(batch, context + 1)
    assert homogeneous == small.step_us(step)[0]
    assert homogeneous == small.run(step).latency_us[0]
    assert homogeneous == small.prefill_us(1, context, batch)
    assert homogeneous == small.explain([(1, context)] * batch).total_us


@pytest.mark.loops
@settings(max_examples=100)
@given(new=lengths(9), context=CONTEXTS, batch=st.integers(1, 64))
def test_equal_chunks_are_one_step(small, new, context, batch):
    batch = max(1, min(batch, 512 // new))
    step = StepBatch.from_requests([[(new, context)] * batch])
    homogeneous = small.prefill_us(new, context, batch)
    assert homogeneous == small.step_us(step)[0]
    assert homogeneous == small.run(step).latency_us[0]
    assert homogeneous == small.explain([(new, context)] * batch).total_us


@pytest.mark.loops
def test_one_new_token_without_a_context_is_a_prefill(small):
    times = small.run(StepBatch.from_requests([[(1, 0)], [(1, 1)]]))
    assert times.components.decode_attention_us[0] == 0
    assert times.components.prefill_attention_us[0] > 0
    assert times.components.decode_attention_us[1] > 0
    assert times.components.prefill_attention_us[1] == 0
    assert small.prefill_us(1) == times.latency_us[0]
    assert small.prefill_us(1, 1) == times.latency_us[1] == small.decode_us(1, 2)
    assert [o.name for o in small.explain([(1, 0)]).operators if "attention" in o.name.split()] == [
        "attention rmsnorm", "prefill attention",
    ]  # fmt: skip


@pytest.mark.loops
@settings(max_examples=100)
@given(step=requests(40, 12), order=st.randoms())
def test_the_order_of_requests_changes_no_bit(small, step, order):
    shuffled = order.sample(step, len(step))
    one, other = (small.run(StepBatch.from_requests([s])) for s in (step, shuffled))
    assert one.latency_us == other.latency_us
    assert one.origin == other.origin
    assert one.components == other.components


@pytest.mark.loops
@given(steps=st.lists(requests(40, 12), max_size=6), threads=st.sampled_from([1, 2, 3, 8, 50]))
def test_a_batch_equals_its_singles_for_any_number_of_threads(small, steps, threads):
    batch = StepBatch.from_requests(steps)
    times = small.run(batch, threads=threads)
    assert times.latency_us.shape == times.origin.shape == (len(steps),)
    np.testing.assert_array_equal(times.latency_us, small.step_us(batch, threads=threads))
    for i, step in enumerate(steps):
        one = small.run(StepBatch.from_requests([step]))
        assert one.latency_us[0] == times.latency_us[i]
        assert one.origin[0] == times.origin[i]
        for part, parts in zip(one.components, times.components, strict=True):
            assert part[0] == parts[i]
    # a step's lines are added before they are evaluated: the parts add up but for that rounding
    np.testing.assert_allclose(sum(times.components), times.latency_us, rtol=1e-15 * 4)


def test_large_batches_have_the_same_bits_for_any_number_of_threads(llama):
    rng = np.random.default_rng(1)
    batch, kv_len = rng.integers(1, 1024, 100_001), rng.integers(1, 200_000, 100_001)
    one = llama.decode_us(batch, kv_len)
    for threads in (2, 5, 16):
        np.testing.assert_array_equal(one, llama.decode_us(batch, kv_len, threads=threads))
    new = rng.integers(1, 200, 64_000)
    context = rng.integers(0, 9000, 64_000)
    steps = StepBatch(new, context, np.arange(0, 64_001, 16))
    first = llama.run(steps)
    for threads in (2, 5, 16):
        again = llama.run(steps, threads=threads)
        np.testing.assert_array_equal(first.latency_us, again.latency_us)
        np.testing.assert_array_equal(first.origin, again.origin)


@pytest.mark.loops
def test_broadcast_steps_equal_their_singles(small):
    batch, kv_len = np.array([[1], [7], [64]], np.int32), np.array([1, 100, 5000, 2**28])
    got = small.decode_us(batch, kv_len)
    assert got.shape == (3, 4)
    assert got.dtype == np.float64
    for i, j in np.ndindex(3, 4):
        one = small.decode_us(int(batch[i, 0]), int(kv_len[j]))
        assert type(one) is float
        assert one == got[i, j]
    new = np.array([1, 5, 60])
    got = small.prefill_us(new[:, None, None], [[0], [9]], np.array([1, 8], np.int32))
    assert got.shape == (3, 2, 2)
    for i, j, k in np.ndindex(3, 2, 2):
        assert got[i, j, k] == small.prefill_us(int(new[i]), (0, 9)[j], (1, 8)[k])


# Origins of steps


@pytest.mark.loops
def test_a_step_without_requests_takes_no_time(small):
    times = small.run(StepBatch.from_requests([[], [(1, 5)], []]))
    assert times.latency_us[[0, 2]].tolist() == [0.0, 0.0]
    assert times.origin[[0, 2]].tolist() == [0, 0]
    assert all(part[0] == 0 for part in times.components)
    assert small.explain([]).total_us == 0
    assert len(small.step_us(StepBatch.from_requests([]))) == 0


@pytest.mark.loops
@given(step=requests(100, 5))
def test_a_step_carries_the_largest_origin_of_its_operators(small, step):
    explained = small.explain(step)
    assert explained.origin == max((o.origin for o in explained.operators), default=0)
    assert explained.origin == small.run(StepBatch.from_requests([step])).origin[0]
    if any(context > 0 and new > 1 for new, context in step):
        assert explained.origin == 4


@pytest.mark.slow
@settings(max_examples=200)
@given(batch=st.integers(1, 1024), kv_len=lengths(28), new=st.integers(1, 8192), context=lengths(27, 0))
def test_every_step_in_range_is_finite_and_positive(plan, batch, kv_len, new, context):
    for us in (plan.decode_us(batch, kv_len), plan.prefill_us(new, context, 8192 // new if new > 8 else 1)):
        assert np.isfinite(us)
        assert us > 0
