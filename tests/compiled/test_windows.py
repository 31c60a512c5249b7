"""Step loops of plans with a window: the naive step, and the same bits from every entry point."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import StepBatch, StepPlan, compile_plan, load_model
from fastroof.compiled import callers, mean_steps, plan_files, ragged_steps, steps
from fastroof.compiled import request_sums as request_sums_module
from fastroof.compiled import request_sums as windows
from fastroof.compiled import serving_options as kv_room
from fastroof.compiled.request_sums import request_sums
from fastroof.compiled.verification import one_token
from fastroof.models import LayerGroup, LayerKind
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.mlp import GatedMlp
from fastroof.serving import estimate
from tests.reference import windows as naive
from tests.reference.handmade import attention_rows, gemm_rows, handmade_tables
from tests.reference.mixed_attention import saved_us

pytestmark = pytest.mark.loops

WINDOW = 64
MLP = GatedMlp(14336)
DECODE = {(b, x): 9.0 + b * x / 900 + 0.002 * (x % 7) for b in (1, 4, 16) for x in (2, 16, 64, 512, 4096)}
PREFILL = {(b, x): 7.0 + b * x * (x + 300) / 9e5 for b in (1, 2, 8) for x in (1, 32, 64, 256, 1024)}
IN_WINDOW = {(b, x): 8.0 + b * min(x, 70) / 500 + b * x * 1e-6 for b, x in DECODE}
CHUNK_IN_WINDOW = {(b, x): 6.0 + b * x * min(x + 300, 400) / 9e5 for b, x in PREFILL}
TABLES = handmade_tables(
    gemm=gemm_rows({(1, 64, 64): 3.0, (16, 64, 64): 4.0, (8, 256, 64): 5.0, (16, 128, 512): 6.0}),
    attention_decode=[*attention_rows(DECODE), *attention_rows(IN_WINDOW, window=WINDOW)],
    attention_prefill=[
        *attention_rows(PREFILL, is_decode=False),
        *attention_rows(CHUNK_IN_WINDOW, is_decode=False, window=WINDOW),
    ],
    elementwise=[("copy", 1, 2**28, 2**30, 400.0)],
)


def model(windowed: int, full: int, window: int = WINDOW):
    """Layers of both kinds; of one where the other has none."""
    kinds = (
        (LayerKind(GroupedQueryAttention(32, 8, 128, window=window), MLP, "windowed"), windowed),
        (LayerKind(GroupedQueryAttention(32, 8, 128), MLP, "full"), full),
    )
    layers = tuple(LayerGroup(kind, count) for kind, count in kinds if count)
    return replace(load_model("llama-3.1-8b"), layers=layers, name="windowed")


PLANS = {
    name: compile_plan(
        model(*counts), "h100", TABLES, max_num_batched_tokens=512, max_num_seqs=16, engine="vllm"
    )
    for name, counts in {"alternating": (12, 12), "windowed": (24, 0)}.items()
}
REQUEST = (
    st.tuples(st.just(1), st.sampled_from([1, 20, 62, 63, 64, 200, 5000]) | st.integers(1, 6000))
    | st.tuples(st.sampled_from([1, 30, 64, 65]), st.just(0))
    | st.tuples(st.integers(1, 100), st.sampled_from([0, 30, 63, 64]) | st.integers(0, 400))
)
REQUESTS = st.lists(REQUEST, min_size=1, max_size=16).filter(lambda r: sum(q for q, _ in r) <= 512)


@pytest.fixture(scope="module", params=PLANS)
def plan(request) -> StepPlan:
    return PLANS[request.param]


def arrays(requests):
    new, context = (np.array(column) for column in zip(*requests, strict=True))
    return new, context


@settings(max_examples=80)
@given(name=st.sampled_from(list(PLANS)), requests=REQUESTS, seed=st.integers(0, 99))
def test_a_step_is_the_naive_one_whoever_times_it(name, requests, seed):
    plan = PLANS[name]
    new, context = arrays(requests)
    batch = StepBatch(new, context, np.array([0, len(new)]))
    found = float(plan.step_us(batch)[0])
    times = plan.run(batch)
    parts = times.components
    attention_us = float(parts.decode_attention_us[0] + parts.prefill_attention_us[0])
    expected_us = naive.attention_of_step_us(plan, TABLES, requests) - saved_us(plan, requests)
    assert attention_us == pytest.approx(expected_us, rel=1e-9)
    assert sum(float(part[0]) for part in parts) == pytest.approx(found, rel=1e-12)
    assert times.latency_us[0] == found
    assert callers.requests_step_us(plan.arena, new, context) == found
    assert plan.step_scalar(new.tolist(), context.tolist()) == found
    assert plan.step_scalar(new, context) == found
    order = np.random.default_rng(seed).permutation(len(new))
    assert plan.step_us(StepBatch(new[order], context[order], batch.offsets))[0] == found


@given(requests=st.lists(REQUESTS, min_size=1, max_size=6))
def test_a_batch_of_steps_is_its_steps(requests):
    plan = PLANS["alternating"]
    one_by_one = [float(plan.step_us(StepBatch.from_requests([step]))[0]) for step in requests]
    assert plan.step_us(StepBatch.from_requests(requests)).tolist() == one_by_one
    assert plan.run(StepBatch.from_requests(requests)).latency_us.tolist() == one_by_one


@given(requests=REQUESTS)
def test_explained_kinds_add_up_to_the_step(requests):
    for plan in PLANS.values():
        explained = plan.explain(requests)
        total = sum(o.total_us for o in explained.operators)
        assert total == pytest.approx(explained.total_us, rel=1e-12)


@given(
    batch=st.integers(1, 16), kv_len=st.integers(2, 9000), new=st.integers(1, 32), context=st.integers(0, 500)
)
def test_equal_requests_are_timed_alike_to_the_last_bit(plan, batch, kv_len, new, context):
    us = plan.decode_us(np.array([batch]), np.array([kv_len]))[0]
    decodes = StepBatch.from_requests([[(1, kv_len - 1)] * batch])
    assert us == plan.scalar(batch, kv_len) == plan.step_us(decodes)[0] == plan.run(decodes).latency_us[0]
    assert callers.sums_step_us(plan.arena, batch, batch, batch * kv_len, 0, 0, 0, 0) == us
    us = plan.prefill_us(new, context, batch)
    chunks = StepBatch.from_requests([[(new, context)] * batch])
    assert us == plan.step_us(chunks)[0] == plan.run(chunks).latency_us[0]
    assert us == callers.equal_chunks_us(plan.arena, new, context, batch)
    if not (new == 1 and context):
        sums = [
            batch,
            0,
            0,
            batch * new,
            batch * new * (new + 1) // 2,
            batch * new * context,
            batch * context,
        ]
        assert callers.sums_step_us(plan.arena, *sums) == us
    assert plan.run(decodes).origin[0] == plan.run(decodes, threads=2).origin[0]


def test_equal_decodes_take_the_tabulated_lines(plan):
    assert plan.decode_lines is not None
    assert plan.arena[steps.WINDOW] == WINDOW
    assert plan_files.arena_fits(plan.arena)


@given(requests=st.lists(st.integers(1, 3000), min_size=2, max_size=16))
def test_unequal_decodes_cost_no_more_than_equal_ones(plan, requests):
    """The tables here rise with kv_len, and the mean of min(kv, window) is at most the mean's."""
    mean = sum(requests) / len(requests)
    unequal = plan.run(StepBatch.from_requests([[(1, kv - 1) if kv > 1 else (1, 1) for kv in requests]]))
    low, high = plan.decode_us(len(requests), [max(int(mean), 2), int(mean) + 2])
    assert unequal.latency_us[0] <= max(low, high) * (1 + 1e-12)


@given(
    new=st.integers(1, 300), context=st.integers(0, 400), window=st.integers(1, 300), count=st.integers(1, 3)
)
def test_sums_are_those_of_single_queries(new, context, window, count):
    requests = [(new, context)] * count + [(1, context + 1)]
    expected = naive.sums(requests, window)
    columns = arrays(requests)
    _, found, possible = request_sums(*columns, 0, count + 1, window)
    assert possible
    assert found == tuple(expected)
    one_by_one = windows.no_window_sums()
    for request in requests:
        one_by_one = windows.with_request(one_by_one, *request, window)
    assert tuple(one_by_one) == tuple(expected)
    if not naive.is_decode((new, context)):
        alike = naive.sums(requests[:-1], window)
        found = windows.equal_window_sums(0, 0, count * new, count, count * context, window)
        assert tuple(found) == tuple(alike)


@settings(max_examples=12)
@given(
    tokens=st.integers(1, 5000),
    chunk=st.integers(1, 900),
    start=st.integers(0, 500),
    window=st.integers(1, 600),
)
def test_mean_sums_are_sums_over_chunks(tokens, chunk, start, window):
    pieces = -(-tokens // chunk)
    isl = pieces * chunk
    whole = naive_chunks(isl, chunk, window)
    got = windows.mean_chunk_sums(float(pieces), float(chunk), float(isl), float(window))
    np.testing.assert_allclose(got[1:], whole, rtol=1e-9, atol=1e-6)
    read = sum(min(start + i * chunk, window - 1) for i in range(pieces))
    found = windows.seen_before(float(pieces), float(chunk), float(start), float(window))
    assert found == pytest.approx(read, rel=1e-12)


def naive_chunks(isl: int, chunk: int, window: int):
    """Own pairs, pairs with what is before and tokens read, over all chunks of a prompt."""
    pairs = list(accumulate(min(i, window) for i in range(isl + 1)))
    own = crossed = read = 0
    for context in range(0, isl, chunk):
        own += pairs[chunk]
        crossed += pairs[context + chunk] - pairs[context] - pairs[chunk]
        read += min(context, window - 1)
    return own, crossed, read


@given(kv_len=st.floats(1, 500), spread=st.floats(0, 400), window=st.integers(1, 500))
def test_the_mean_within_a_window(kv_len, spread, window):
    lengths = kv_len + spread * ((np.arange(4000) + 0.5) / 4000 - 0.5)
    expected = np.minimum(lengths, window).mean()
    assert windows.mean_seen(kv_len, spread, float(window)) == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_a_prompt_in_chunks_takes_its_steps(plan):
    parts = steps.open_plan(plan.arena)
    got = mean_steps.prompt_steps_us(plan.arena, parts, one_token(parts), 1000.0, 300.0, 0.0, 0.0, 0.0)
    chunks = [plan.prefill_us(300, 300 * i) for i in range(3)] + [plan.prefill_us(100, 900)]
    # the plan samples a token after each chunk, the engine after the last
    logits = plan.arena[int(plan.arena[steps.LOGITS_AT]) + 1] + plan.arena[steps.SEQUENCE_US]
    floor = plan.arena[steps.PREFILL_FLOOR_US]
    assert floor == 0.0 or min(chunks) > floor
    assert got.us == pytest.approx(sum(chunks) - 3 * logits, rel=1e-9)


@pytest.mark.parametrize(("isl", "osl", "decodes"), [(10, 200, 1), (10, 200, 8), (40, 60, 16), (500, 99, 4)])
def test_mean_decodes_are_the_mean_of_ragged_steps(plan, isl, osl, decodes):
    """Requests anywhere in their output, each by itself."""
    parts = steps.open_plan(plan.arena)
    sizes = (float(decodes), float(isl), float(osl))
    got = mean_steps.mean_decode_attention_us(plan.arena, parts, one_token(parts), *sizes)
    random = np.random.default_rng(5)
    count = 4000
    context = random.integers(isl, isl + osl - 1, count * decodes)
    batch = StepBatch(np.ones(count * decodes, np.int64), context, np.arange(count + 1) * decodes)
    expected = plan.run(batch).components.decode_attention_us
    assert got == pytest.approx(expected.mean(), rel=0.004)


def test_offsets_and_sizes_have_codes(plan):
    out = np.empty(1)

    def code(new, context, offsets):
        return ragged_steps.ragged_steps_us(
            plan.arena, np.array(new), np.array(context), np.array(offsets), out
        )

    assert code([1], [5], [0, 2]) == ragged_steps.CODE_OFFSETS
    assert code([1] * 17, [5] * 17, [0, 17]) == steps.CODE_SIZES
    assert code([0], [5], [0, 1]) == steps.CODE_SIZES
    assert code([500, 13], [0, 0], [0, 2]) == steps.CODE_SIZES
    assert code([1], [5], [0, 0]) == 0
    assert out[0] == 0.0
    too_many = (np.array([300]), np.array([0]), np.array([2]))
    assert steps.prefill_steps_us(plan.arena, *too_many, out) == steps.CODE_SIZES


@given(
    parts=st.integers(0, 10**7),
    whole=st.integers(0, 5),
    within=st.integers(0, 5),
    window=st.integers(1, 300),
    state=st.just(0) | st.integers(1, 5000),
    sequences=st.integers(1, 50),
    block=st.integers(1, 40),
    within_block=st.integers(1, 40),
    most=st.integers(1, 60),
)
def test_the_longest_sequences_that_fit(
    parts, whole, within, window, state, sequences, block, within_block, most
):
    if whole + within + state == 0:
        return
    room = (parts, whole, within, window, state, block, within_block, most)
    longest = kv_room.longest_held(room, sequences)

    def fits(length):
        held = whole * math.ceil(length / block) + within * math.ceil(min(length, window) / within_block)
        assert kv_room.held_parts(room, length) == held + state
        return sequences <= most and sequences * (held + state) <= parts

    assert longest == 0 or fits(longest)
    assert longest == request_sums_module.MAX_KV_LEN or not fits(longest + 1)
    if whole + within == 0 or block + within_block > 2:
        return
    share = within / (whole + within)
    if parts < 10**6:
        held = kv_room.held_tokens(float(parts), float(window), share, state / (whole + within))
        assert held * (whole + within) == pytest.approx(kv_room.held_parts(room, parts), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("engine", ["kernels", "vllm"])
def test_one_client_sees_its_own_steps(engine):
    plan = compile_plan(
        model(12, 12), "h100", TABLES, max_num_batched_tokens=512, max_num_seqs=16, engine=engine, front_end=0
    )
    for isl, osl in ((20, 300), (100, 40), (400, 30)):
        got = estimate(plan, isl, osl, 1, max_num_batched_tokens=512)
        assert got.tpot_ms * 1e3 == pytest.approx(
            plan.decode_us(1, np.arange(isl + 1, isl + osl)).mean(), rel=1e-4
        )
        assert got.ttft_ms * 1e3 == pytest.approx(plan.prefill_us(isl), rel=1e-9)
    # cached tokens: the rest attends to a prefix, of which windowed layers read no more than their window
    got = estimate(plan, 1000, 2, 1, max_num_batched_tokens=512, prefix_hit=0.9)
    assert got.ttft_ms * 1e3 == pytest.approx(plan.prefill_us(100, 900), rel=1e-9)


@pytest.mark.parametrize(("room", "pieces"), [(40, 5), (100, 4), (64, 2)])
def test_a_mean_mixed_step_is_the_mean_of_its_prompts_steps(room, pieces):
    """A prompt anywhere in its prefill, by itself."""
    plan = compile_plan(
        model(12, 12), "h100", TABLES, max_num_batched_tokens=512, max_num_seqs=16, engine="kernels"
    )
    parts = steps.open_plan(plan.arena)
    isl = float(room * pieces)
    got = mean_steps.mean_mixed_step_us(
        plan.arena, parts, one_token(parts), 0.0, 0.0, float(room), isl, float(room)
    )
    alone = plan.run(StepBatch.from_requests([[(room, room * i)] for i in range(pieces)])).components
    logits = plan.arena[int(plan.arena[steps.LOGITS_AT]) :][:2]
    expected = alone.tokens_us[0] + alone.prefill_attention_us.mean()
    assert got == pytest.approx(expected + logits[0] + (logits[1] - logits[0]) / pieces, rel=1e-9)
