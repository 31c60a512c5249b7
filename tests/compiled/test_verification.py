"""The loops of verification called directly: naive steps and rooflines, and any numbers whatever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import compile_plan
from fastroof.compiled import disaggregated, request_sums, serving, serving_options, steps, verification
from fastroof.compiled import mean_steps as drafts
from fastroof.plan.arena import verification_arena
from fastroof.plan.attention import NO_WINDOW
from tests.compiled.test_serving import PROFILE, one, options
from tests.reference.handmade import attention_rows, gemm_rows, handmade_tables
from tests.reference.serving import Verified, closed_form, draft_us, mean_step_us
from tests.reference.verification import verify_us

pytestmark = pytest.mark.loops


@pytest.fixture(scope="module")
def tables():
    grid = {(b, x): 9.0 + b * x / 4096 + x / 700 for b in (1, 8, 64) for x in (64, 512, 4096)}
    return handmade_tables(
        gemm=gemm_rows({(1, 64, 64): 3.0, (16, 64, 64): 4.0, (8, 256, 64): 5.0, (16, 128, 512): 6.0}),
        attention_decode=attention_rows(grid),
        attention_prefill=attention_rows(grid, is_decode=False),
        elementwise=[("copy", 1, 2**28, 2**30, 400.0)],
    )


@pytest.fixture(scope="module")
def plan(tables):
    return compile_plan(
        "llama-3.1-8b", "h100", tables, max_num_batched_tokens=1024, max_num_seqs=256, engine=PROFILE
    )


@pytest.fixture(scope="module")
def draft(tables):
    return compile_plan(
        "qwen3-8b", "h100", tables, max_num_batched_tokens=1024, max_num_seqs=256, engine=PROFILE
    )


@settings(max_examples=100)
@given(batch=st.integers(1, 256), kv=st.integers(1, 10_000), queries=st.integers(1, 40))
def test_a_step_is_the_naive_one(plan, batch, kv, queries):
    out = np.full(1, np.nan)
    sizes = (np.array([size]) for size in (batch, kv, queries))
    code = verification.verify_steps_us(verification_arena(plan), *sizes, out)
    fits = batch * queries <= plan.max_num_batched_tokens and kv >= queries
    assert (code == 0) == fits
    if fits:
        assert out[0] == pytest.approx(verify_us(plan, batch, kv, queries), rel=1e-12)
        if queries == 1:
            assert out[0] == plan.decode_us(batch, kv)


SIZES = st.integers(-(2**62), 2**62) | st.integers(-3, 2000)


@settings(max_examples=200)
@given(sizes=st.tuples(SIZES, SIZES, SIZES))
def test_sizes_that_cannot_be_timed_are_a_code(plan, sizes):
    batch, kv, queries = sizes
    out = np.full(1, np.nan)
    code = verification.verify_steps_us(verification_arena(plan), *(np.array([s]) for s in sizes), out)
    fits = 1 <= batch <= plan.max_num_seqs and 1 <= queries <= kv <= request_sums.MAX_KV_LEN
    assert (code == 0) == (fits and batch * queries <= plan.max_num_batched_tokens)
    assert np.isfinite(out[0]) == (code == 0)


@settings(max_examples=100)
@given(
    queries=st.integers(1, 12),
    more=st.integers(0, 200),
    window=st.integers(1, 150) | st.just(NO_WINDOW),
    batch=st.integers(1, 64),
)
def test_a_roofline_sums_over_its_queries(queries, more, window, batch):
    launch_us, pair_us, query_us, kv_us = 7.0, 0.3, 0.05, 2.0
    kinds = np.array([launch_us, pair_us, query_us, kv_us, window, 1.0, 0.1, 0.0, 0.5, NO_WINDOW], float)
    speculation = verification.Speculation(float(queries), 1.0, 0.0, 0, 0, 0, 2, 0, float(queries))
    kv = queries + more
    seen = [kv - queries + 1 + i for i in range(queries)]
    pairs = sum(min(past, window) for past in seen)
    read = min(kv, window + queries - 1)
    first = launch_us + batch * (pairs * pair_us + queries * query_us + read * kv_us)
    second = 1.0 + batch * (sum(seen) * 0.1 + kv * 0.5)
    got = verification._bound_us(kinds, speculation, float(batch), float(kv), float(queries))
    assert got == pytest.approx(first + second, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2, 5])
@pytest.mark.parametrize("has_draft", [False, True])
@pytest.mark.parametrize("is_chunked", [True, False])
def test_estimates_are_the_closed_form(plan, draft, tokens, has_draft, is_chunked):
    accepted = 1.0 + 0.6 * (tokens - 1)
    arena = verification_arena(plan, tokens, accepted, draft if has_draft else None)
    rng = np.random.default_rng(tokens)
    for _ in range(8):
        # steps hold the tokens of some requests besides a whole prompt
        budget = int(rng.integers(300, 900))
        isl, osl = int(2 ** rng.uniform(0, 8)), int(2 ** rng.uniform(0, 10))
        clients = int(2 ** rng.uniform(0, 5))
        rounds = float(rng.choice([0.0, 3.0]))
        expected = closed_form(
            plan, isl, osl, clients, budget, is_chunked=is_chunked, rounds=rounds or None,
            verified=Verified(tokens, accepted, draft if has_draft else None),
        )  # fmt: skip
        got = np.full((serving_options.ESTIMATE_ROWS, 1), np.nan)
        sizes = [np.array([float(x)]) for x in (isl, isl, osl, clients, budget)]
        code, _, _ = serving.serving_estimates(
            arena, *sizes, options(is_chunked=is_chunked, rounds=rounds), got
        )
        assert code == 0
        assert got[serving_options.TTFT_US, 0] == pytest.approx(expected.ttft_us, rel=1e-4)
        assert got[serving_options.TPOT_US, 0] == pytest.approx(expected.tpot_us, rel=1e-4, nan_ok=True)
        assert got[serving_options.DECODE_STEP_US, 0] == pytest.approx(expected.decode_us, rel=1e-4)
        assert got[serving_options.MIXED_STEP_US, 0] == pytest.approx(expected.mixed_us, rel=1e-4)


def test_workers_of_both_kinds_draft(plan, draft):
    tokens, accepted = 4, 2.5
    arena = verification_arena(plan, tokens, accepted, draft)
    isl, osl = 300, 40
    expected = closed_form(plan, isl, osl, 1, 512, verified=Verified(tokens, accepted, draft))
    scenario = np.array([[float(x)] for x in (isl, osl, 1, 1, 1, 512)])
    link = disaggregated.LinkOptions(1e5, 1e5, np.inf, 0.5, True, 0.0, 0.0, 0.0, 0.0, 0.0)
    out = np.full((disaggregated.DISAGGREGATED_ROWS, 1), np.nan)
    assert disaggregated.disaggregated_estimates(arena, arena, scenario, link, out)[0] == 0
    assert out[disaggregated.DECODE_STEP_US, 0] == pytest.approx(expected.decode_us, rel=1e-4)
    assert out[disaggregated.TPOT_US, 0] == pytest.approx(expected.tpot_us, rel=1e-4)
    # the prefill worker's draft reads the prompt, and leaves the rest to the decode worker's
    chunks = [(1.0, float(isl), 0.0)]
    prompt_us = mean_step_us(plan, 0.0, isl, osl, chunks, isl, 1.0)
    prompt_us += mean_step_us(draft, 0.0, isl, osl, chunks, isl, 1.0, is_draft=True)
    assert out[disaggregated.PREFILL_US, 0] == pytest.approx(prompt_us, rel=1e-9)


@pytest.mark.parametrize("osl", [1.0, 40.0])
def test_a_draft_attends_to_what_is_cached(plan, draft, osl):
    arena = verification_arena(plan, 3, 2.0, draft)

    def ttft_us(isl):
        out = np.full((serving_options.ESTIMATE_ROWS, 1), np.nan)
        sizes = [np.array([x]) for x in (isl, 100.0, osl, 1.0, 512.0)]
        assert serving.serving_estimates(arena, *sizes, options(), out)[0] == 0
        return out[serving_options.TTFT_US, 0]

    pairs = 100.0 * 200.0
    prefix_us = sum(
        parts.prefix_pair_us * pairs + parts.prefix_token_us * 200.0
        for parts in (steps.open_plan(plan.arena), steps.open_plan(draft.arena))
    )
    assert ttft_us(300.0) == pytest.approx(ttft_us(100.0) + prefix_us, rel=1e-9)


@pytest.mark.parametrize(("tokens", "accepted"), [(2, 1.5), (5, 1.0), (5, 5.0), (9, 3.0)])
def test_a_draft_attends_to_what_lies_half_way_through_its_steps(plan, tokens, accepted):
    # attention that grows by a microsecond a token and layer
    grid = {(b, x): 9.0 + b * x for b in (1, 8, 64) for x in (64, 4096)}
    steep = compile_plan(
        "qwen3-8b", "h100", max_num_batched_tokens=1024, max_num_seqs=256, engine=PROFILE,
        tables=handmade_tables(
            gemm=gemm_rows({(1, 64, 64): 3.0, (16, 64, 64): 4.0, (8, 256, 64): 5.0, (16, 128, 512): 6.0}),
            attention_decode=attention_rows(grid), attention_prefill=attention_rows(grid, is_decode=False),
            elementwise=[("copy", 1, 2**28, 2**30, 400.0)],
        ),
    )  # fmt: skip
    arena = verification_arena(plan, tokens, accepted, steep)
    speculation = verification.open_speculation(arena, steps.open_plan(arena))
    for decodes in (1.0, 3.5):
        expected = draft_us(Verified(tokens, accepted, steep), decodes, 300, 40, [], 0.0)
        got = drafts.draft_decode_us(arena, speculation, decodes, 300.0, 40.0)
        assert got == pytest.approx(expected, rel=1e-9)


ANY = st.floats(allow_nan=True, allow_infinity=True) | st.floats(1.0, 4000.0)


@settings(max_examples=200)
@given(sizes=st.tuples(*[ANY] * 5), is_chunked=st.booleans())
def test_estimates_survive_any_numbers(plan, draft, sizes, is_chunked):
    arena = verification_arena(plan, 4, 2.5, draft)
    out = np.full((serving_options.ESTIMATE_ROWS, 1), np.nan)
    arrays = [np.array([size]) for size in sizes]
    with np.errstate(all="ignore"):
        code, _, _ = serving.serving_estimates(
            arena, *arrays, options(is_chunked=is_chunked, rounds=2.0), out
        )
    legal = all(1.0 <= size <= 2.0**28 for size in sizes) and sizes[1] <= sizes[0]
    assert (code == serving_options.CODE_SIZES) == (not legal)


def test_a_verification_of_one_token_without_a_draft_changes_nothing(plan):
    sizes = (300.0, 300.0, 40.0, 20.0, 512.0)
    out = np.full((serving_options.ESTIMATE_ROWS, 1), np.nan)
    arrays = [np.array([size]) for size in sizes]
    assert serving.serving_estimates(verification_arena(plan), *arrays, options(), out)[0] == 0
    np.testing.assert_array_equal(out[:, 0], one(plan, (300, 40, 20, 512))[2])
