"""The loop of engines that run prompts first: equal to the naive closed form, whatever it is given."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import compile_plan
from fastroof.compiled import prefill_first, serving, serving_options, steps
from fastroof.compiled.serving_options import AT_RANDOM
from fastroof.compiled.verification import open_speculation
from fastroof.plan.arena import verification_arena
from tests.compiled.test_serving import ANY, PROFILE, SIZE
from tests.reference.handmade import step_tables
from tests.reference.prefill_first import closed_form, same_step
from tests.reference.serving import ONE_TOKEN, Verified

pytestmark = pytest.mark.loops


def made_plan(model, faster=1.0, engine=PROFILE):
    grid = {(b, x): (9.0 + b * x / 4096 + x / 700) / faster for b in (1, 8, 64) for x in (64, 512, 4096)}
    tables = step_tables(grid)
    return compile_plan(model, "h100", tables, max_num_batched_tokens=1024, max_num_seqs=256, engine=engine)


@pytest.fixture(scope="module")
def plan():
    return made_plan("llama-3.1-8b")


@pytest.fixture(scope="module")
def windowed():
    return made_plan("mistral-7b-v0.1")


@pytest.fixture(scope="module")
def draft():
    return made_plan("llama-3.1-8b", 4.0, "kernels")


def options(
    max_kv_tokens=1e6, max_num_seqs=math.inf, osl_reserved=0.5, is_chunked=True, rounds=0.0, spread=0.2,
    looks=0, steps_met=None,
):  # fmt: skip
    unused = (serving_options.NO_FRONT_END, 0.0, 0.0, 0.0)
    met = AT_RANDOM if steps_met is None else steps_met
    # for an int the loops would be compiled once more
    return serving_options.ServingOptions(
        float(max_kv_tokens), float(max_num_seqs), osl_reserved, is_chunked, rounds, *unused, True, spread,
        float(looks), met,
    )  # fmt: skip


def one(arena, sizes, chosen=None):
    """Code, what was needed, and the column of one scenario: isl, new, osl, clients, budget."""
    out = np.full((serving_options.ESTIMATE_ROWS, 1), np.nan)
    arrays = (np.array([float(x)]) for x in sizes)
    code, _, needed = serving.serving_estimates(arena, *arrays, chosen or options(), out)
    return code, needed, out[:, 0]


ROWS = [
    serving_options.TTFT_US,
    serving_options.TPOT_US,
    serving_options.DECODE_STEP_US,
    serving_options.MIXED_STEP_US,
    serving_options.MIXED_SHARE,
    serving_options.EFFECTIVE_CONCURRENCY,
    serving_options.TOKENS_PER_US,
]


@pytest.mark.parametrize(
    ("isl", "osl", "clients", "budget"),
    [
        (100, 20, 1, 512), (100, 20, 2, 512), (100, 20, 1.5, 512), (100, 20, 16, 512), (700, 50, 1, 512),
        (700, 50, 12, 512), (100, 1, 1, 512), (100, 1, 6, 512), (100, 2, 6, 512), (400, 4, 40, 512),
        (512, 1, 40, 512), (30, 500, 60, 128), (1, 1, 1, 1), (5, 9, 100, 64), (64, 100, 200, 256),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize("met", [None, 0.0, 1.0])
@pytest.mark.parametrize(
    ("kv", "reserved", "rounds", "spread"),
    [(1e6, 0.5, 0, 0.2), (1e6, 1.0, 1, 0.2), (2000, 0.5, 4, 0.2), (1200, 1.0, 0, 0.0), (1e6, 0.5, 90, 0.01)],
)
def test_the_loop_is_the_closed_form(
    plan, isl, osl, clients, budget, is_chunked, met, kv, reserved, rounds, spread
):
    chosen = options(
        kv, osl_reserved=reserved, is_chunked=is_chunked, rounds=float(rounds), spread=spread, steps_met=met
    )
    code, _, got = one(plan.arena, (isl, isl, osl, clients, budget), chosen)
    if not is_chunked and isl > budget:
        assert code == serving_options.CODE_WHOLE_PROMPT
        return
    assert code == 0
    expected = closed_form(
        plan, isl, osl, clients, budget, is_chunked=is_chunked, osl_reserved=reserved, max_kv_tokens=kv,
        rounds=rounds or None, spread=spread, steps_met=met,
    )  # fmt: skip
    np.testing.assert_allclose(got[ROWS], expected, rtol=1e-5, atol=1e-12)
    request_us = expected.ttft_us + (osl - 1) * (expected.tpot_us if osl > 1 else 0.0)
    assert got[serving_options.REQUEST_US] == pytest.approx(request_us, rel=1e-5)


@pytest.mark.parametrize("looks", [3, 10, 400])
@pytest.mark.parametrize("spread", [0.0, 0.2])
def test_an_engine_that_looks_seldom_takes_more_at_once(plan, looks, spread):
    for clients in (1, 2, 40):
        for rounds, met in ((0, None), (5, None), (5, 0.0), (0, 1.0)):
            chosen = options(looks=looks, rounds=float(rounds), spread=spread, steps_met=met)
            code, _, got = one(plan.arena, (64, 64, 300, clients, 512), chosen)
            assert code == 0
            expected = closed_form(
                plan, 64, 300, clients, 512, looks=looks, rounds=rounds or None, spread=spread, steps_met=met
            )
            np.testing.assert_allclose(got[ROWS], expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("isl", [200, 900])
@pytest.mark.parametrize("has_draft", [False, True])
def test_drafts_and_what_is_cached_take_their_part(plan, draft, isl, has_draft):
    verified = Verified(4, 2.5, draft if has_draft else None)
    arena = verification_arena(plan, 4, 2.5, draft if has_draft else None)
    for cached in (0.0, 100.0):
        expected = closed_form(plan, isl, 60, 9, 512, cached=cached, verified=verified)
        code, _, got = one(arena, (isl + cached, isl, 60, 9, 512))
        assert code == 0
        np.testing.assert_allclose(got[ROWS], expected, rtol=1e-3)


def test_a_cached_prefix_is_attended_to(plan):
    for isl, cached in ((200.0, 100.0), (900.0, 64.0), (900.0, 3000.0)):
        expected = closed_form(plan, isl, 60, 9, 512, cached=cached)
        code, _, got = one(plan.arena, (isl + cached, isl, 60, 9, 512))
        assert code == 0
        np.testing.assert_allclose(got[ROWS], expected, rtol=1e-5)


def test_prompts_before_a_window_cost_less(plan, windowed):
    for sizes in ((9000, 400, 60, 9, 512), (9000, 900, 60, 9, 512)):
        long = one(windowed.arena, sizes, options())[2]
        longer = one(windowed.arena, (30_000, *sizes[1:]), options())[2]
        assert long[serving_options.TTFT_US] == pytest.approx(longer[serving_options.TTFT_US], rel=1e-6)
        assert (
            one(plan.arena, (30_000, *sizes[1:]))[2][serving_options.TTFT_US] > long[serving_options.TTFT_US]
        )


@given(st.floats(1.0, 5000.0), st.floats(0.001, 0.99), st.integers(1, 100))
def test_requests_that_end_together_are_a_share(steps_out, spread, rounds):
    got = prefill_first.same_step_share(steps_out, spread, float(rounds))
    assert got == pytest.approx(same_step(steps_out, spread, rounds), rel=1e-9)
    assert 0 < got <= 1
    # the longer a run, the fewer
    assert prefill_first.same_step_share(steps_out, spread, rounds + 1.0) <= got * (1 + 1e-12) or rounds == 1
    assert prefill_first.same_step_share(steps_out, 0.0, float(rounds)) == 1.0


def test_one_client_sees_the_mean_of_its_steps(plan):
    for isl, osl in ((10, 5000), (500, 40), (60, 10)):
        got = one(plan.arena, (isl, isl, osl, 1, 1024))[2]
        steps_us = plan.decode_us(1, np.arange(isl + 1, isl + osl))
        assert got[serving_options.TPOT_US] == pytest.approx(steps_us.mean(), rel=1e-4)
        assert got[serving_options.TTFT_US] == pytest.approx(plan.prefill_us(isl), rel=1e-9)
        assert got[serving_options.MIXED_SHARE] == 0.0


@settings(max_examples=100)
@given(
    isl=SIZE, osl=SIZE, clients=SIZE, budget=SIZE, kv=SIZE, is_chunked=st.booleans(),
    rounds=st.integers(0, 3), spread=st.sampled_from([0.0, 0.01, 0.2, 0.9]),
)  # fmt: skip
def test_estimates_keep_to_what_an_engine_can_do(
    plan, isl, osl, clients, budget, kv, is_chunked, rounds, spread
):
    chosen = options(40.0 * kv, 200.0, is_chunked=is_chunked, rounds=float(rounds), spread=spread)
    code, needed, got = one(plan.arena, (isl, isl, osl, clients, budget), chosen)
    if code == serving_options.CODE_KV:
        assert isl + osl > 40.0 * kv
    elif code == serving_options.CODE_WHOLE_PROMPT:
        assert isl > budget
    elif code == serving_options.CODE_TOKENS:
        assert plan.max_num_batched_tokens < needed <= budget * (1 + 1e-12)
    elif code == serving_options.CODE_SEQS:
        assert plan.max_num_seqs < needed
    else:
        assert code == 0
        finite = np.delete(got, serving_options.TPOT_US)
        assert np.isfinite(finite).all()
        assert (finite >= 0).all()
        assert 0 <= got[serving_options.MIXED_SHARE] <= 1
        assert got[serving_options.DECODES] <= min(clients, 200) * (1 + 1e-12)
        assert got[serving_options.PREFILL_TOKENS] <= budget * (1 + 1e-12)
        assert got[serving_options.TTFT_US] >= PROFILE.costs.prefill_floor_layer_us * plan.model.num_layers
        if osl > 1 and not rounds:
            # steps of prompts alone bring no decoding request a token
            alone = (1 - got[serving_options.MIXED_SHARE]) * got[serving_options.DECODE_STEP_US]
            mean = alone + got[serving_options.MIXED_SHARE] * got[serving_options.MIXED_STEP_US]
            assert got[serving_options.TPOT_US] == pytest.approx(
                mean / (1 - got[serving_options.MIXED_SHARE]), rel=1e-9
            )
            assert got[serving_options.TPOT_US] >= got[serving_options.DECODE_STEP_US] * (1 - 1e-12)


@settings(max_examples=200)
@given(st.tuples(ANY, ANY, ANY, ANY), st.booleans(), st.sampled_from([0.0, 0.2]))
def test_the_loop_survives_any_numbers(plan, sizes, is_chunked, spread):
    with np.errstate(all="ignore"):
        code, _, got = one(
            plan.arena, (sizes[0], *sizes), options(is_chunked=is_chunked, rounds=2.0, spread=spread)
        )
    legal = all(1.0 <= x <= 2.0**28 for x in sizes)
    assert (code == serving_options.CODE_SIZES) == (not legal)
    assert code != 0 or np.isfinite(np.delete(got, serving_options.TPOT_US)).all()


def test_what_the_plan_cannot_time_is_a_code(plan):
    assert one(plan.arena, (2000, 2000, 20, 3, 1500))[:2] == (serving_options.CODE_TOKENS, 1500.0)
    assert one(plan.arena, (5, 5, 20, 300, 512))[0] == serving_options.CODE_SEQS
    # decodes leave the budget to prompts
    assert one(plan.arena, (5, 5, 20, 100, 8))[0] == 0
    assert serving_options.most_admitted(5.0, 8.0, True, 1.0, True) == math.inf
    assert serving_options.most_admitted(9.0, 8.0, False, 1.0, True) == 0.0


def test_waves_take_their_groups_of_prompts(plan):
    """Equal lengths: all prompts one after the other, then all decodes."""
    parts = steps.open_plan(plan.arena)
    assert open_speculation(plan.arena, parts).tokens == ONE_TOKEN.tokens
    got = one(plan.arena, (512, 512, 100, 16, 512), options(spread=0.0))[2]
    prompt_us = plan.prefill_us(512)
    assert got[serving_options.TTFT_US] == pytest.approx(prompt_us * 17 / 2, rel=1e-9)
    after_us = got[serving_options.TPOT_US] - got[serving_options.DECODE_STEP_US]
    assert after_us == pytest.approx(prompt_us * 15 / 2 / 99, rel=1e-9)
    assert got[serving_options.DECODES] == 16.0
