"""The serving loops called directly: equal to the naive closed form, and safe whatever they are given."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import compile_plan
from fastroof.compiled import disaggregated, mean_steps, serving, serving_options, steps, verification
from fastroof.compiled.serving_options import AT_RANDOM
from fastroof.engines import EngineProfile, KernelChoices, MixedAttention, StepCosts
from tests.reference.handmade import step_tables
from tests.reference.serving import closed_form, mean_step_us

pytestmark = pytest.mark.loops

ANY = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 1.0, 1.5, 2.0, 2.0**28, 2.0**40])
SIZE = st.integers(0, 12).flatmap(lambda power: st.integers(2**power, 2 ** (power + 1)))

ONE = verification.one_token

PROFILE = EngineProfile(
    "made up",
    costs=StepCosts(step_us=200.0, sequence_us=9.0, prefill_us=70.0, prefill_floor_layer_us=40.0),
)


@pytest.fixture(scope="module", params=["decodes alike", "slower beside prefill"])
def plan(request):
    profile = PROFILE
    if request.param != "decodes alike":
        profile = replace(PROFILE, kernels=KernelChoices(mixed_attention=(MixedAttention(0.3),)))
    grid = {(b, x): 9.0 + b * x / 4096 + x / 700 for b in (1, 8, 64) for x in (64, 512, 4096)}
    tables = step_tables(grid)
    return compile_plan(
        "llama-3.1-8b", "h100", tables, max_num_batched_tokens=1024, max_num_seqs=256, engine=profile
    )


def options(
    max_kv_tokens=1e6, max_num_seqs=math.inf, osl_reserved=0.5, is_chunked=True, rounds=0.0, wait_steps=0.0,
    steps_met=None, interval=1.0, spread=0.2,
):  # fmt: skip
    # for an int the loops would be compiled once more
    return serving_options.ServingOptions(
        float(max_kv_tokens), float(max_num_seqs), osl_reserved, is_chunked, rounds, wait_steps=wait_steps,
        steps_met=AT_RANDOM if steps_met is None else steps_met, pause_steps=interval - 1.0,
        length_spread=spread,
    )  # fmt: skip


def one(plan, sizes, chosen=None):
    """Code, what was needed, and the column of one scenario."""
    out = np.full((serving_options.ESTIMATE_ROWS, 1), np.nan)
    isl, *others = (np.array([float(x)]) for x in sizes)
    code, _, needed = serving.serving_estimates(plan.arena, isl, isl, *others, chosen or options(), out)
    return code, needed, out[:, 0]


@pytest.mark.parametrize(
    ("isl", "osl", "clients", "budget"),
    [
        (100, 20, 1, 512), (100, 20, 2, 512), (100, 20, 16, 512), (700, 50, 1, 512), (700, 50, 12, 512),
        (100, 1, 1, 512), (100, 1, 6, 512), (100, 2, 6, 512), (400, 4, 40, 512), (512, 1, 40, 512),
        (30, 500, 60, 128), (1, 1, 1, 1), (5, 9, 100, 64), (1000, 3, 9, 4), (64, 100, 200, 256),
        (8, 90, 90, 90),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize(
    ("met", "kv", "reserved", "rounds"),
    [
        # each with each of the others once
        pytest.param(met, *memory, marks=[] if i == j else [pytest.mark.release])
        for i, met in enumerate([None, -2.0, 0.0, 1.0])
        for j, memory in enumerate([(1e6, 0.5, 0), (1e6, 1.0, 1), (2000, 0.5, 4), (1200, 1.0, 0)])
    ],
)
def test_the_loop_is_the_closed_form(plan, isl, osl, clients, budget, is_chunked, met, kv, reserved, rounds):
    assert_closed_form(plan, (isl, osl, clients, budget), is_chunked, met, kv, reserved, rounds, 0.2)


@pytest.mark.parametrize("rounds", [0, 3])
@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize("met", [None, -2.0, 0.0, 1.0])
def test_equal_requests_are_the_closed_form(plan, is_chunked, met, rounds):
    for sizes in ((100, 20, 2, 512), (100, 20, 16, 512), (700, 50, 12, 768), (64, 100, 200, 256)):
        assert_closed_form(plan, sizes, is_chunked, met, 1e6, 0.5, rounds, 0.0)


def assert_closed_form(plan, sizes, is_chunked, met, kv, reserved, rounds, spread):
    isl, osl, clients, budget = sizes
    chosen = options(
        kv, osl_reserved=reserved, is_chunked=is_chunked, rounds=float(rounds), steps_met=met, spread=spread
    )
    code, _, got = one(plan, sizes, chosen)
    if not is_chunked and isl > budget:
        assert code == serving_options.CODE_WHOLE_PROMPT
        return
    assert code == 0
    expected = closed_form(
        plan, isl, osl, clients, budget,
        is_chunked=is_chunked, osl_reserved=reserved, max_kv_tokens=kv, rounds=rounds or None, steps_met=met,
        spread=spread,
    )  # fmt: skip
    rows = (
        serving_options.TTFT_US,
        serving_options.TPOT_US,
        serving_options.DECODE_STEP_US,
        serving_options.MIXED_STEP_US,
        serving_options.MIXED_SHARE,
        serving_options.EFFECTIVE_CONCURRENCY,
        serving_options.TOKENS_PER_US,
    )
    np.testing.assert_allclose(got[list(rows)], expected, rtol=1e-5)
    request_us = expected.ttft_us + (osl - 1) * (expected.tpot_us if osl > 1 else 0.0)
    assert got[serving_options.REQUEST_US] == pytest.approx(request_us, rel=1e-5)


@pytest.mark.parametrize("wait_steps", [1, 20, 500])
@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize("rounds", [0, 3])
def test_prompts_held_back_are_the_closed_form(plan, wait_steps, is_chunked, rounds):
    chosen = options(is_chunked=is_chunked, rounds=float(rounds), wait_steps=float(wait_steps))
    for sizes in ((100, 200, 1, 512), (100, 200, 30, 512), (100, 1, 30, 512), (30, 20, 100, 512)):
        code, _, got = one(plan, sizes, chosen)
        assert code == 0
        expected = closed_form(
            plan, *sizes, is_chunked=is_chunked, rounds=rounds or None, wait_steps=wait_steps
        )
        assert got[serving_options.TTFT_US] == pytest.approx(expected.ttft_us, rel=1e-5)
        assert got[serving_options.TPOT_US] == pytest.approx(expected.tpot_us, rel=1e-5, nan_ok=True)
        assert got[serving_options.MIXED_SHARE] == pytest.approx(expected.mixed_share, rel=1e-9)


@pytest.mark.parametrize("interval", [2, 8, 100])
@pytest.mark.parametrize("met", [None, 0.0, 1.0])
def test_prompts_every_few_steps_are_the_closed_form(plan, interval, met):
    chosen = options(steps_met=met, interval=float(interval))
    for sizes in ((100, 200, 1, 512), (100, 200, 30, 512), (100, 1, 30, 512), (30, 20, 100, 512)):
        code, _, got = one(plan, sizes, chosen)
        assert code == 0
        expected = closed_form(plan, *sizes, steps_met=met, interval=interval)
        assert got[serving_options.TTFT_US] == pytest.approx(expected.ttft_us, rel=1e-5)
        assert got[serving_options.TPOT_US] == pytest.approx(expected.tpot_us, rel=1e-5, nan_ok=True)
        assert got[serving_options.MIXED_SHARE] == pytest.approx(expected.mixed_share, rel=1e-9)


def test_an_unfilled_budget_may_exceed_the_plan(plan):
    assert plan.max_num_batched_tokens < 4096
    for isl, clients in ((100, 1), (100, 4), (1000, 1)):
        code, needed, got = one(plan, (isl, 20, clients, 4096))
        assert (code, needed) == (0, 0.0)
        if clients == 1:
            np.testing.assert_array_equal(got, one(plan, (isl, 20, 1, plan.max_num_batched_tokens))[2])


@pytest.mark.parametrize(("new", "budget"), [(100.0, 512.0), (900.0, 512.0), (900.0, 100.0)])
def test_each_chunk_after_a_cached_prefix_runs_with_the_longer_decodes(plan, new, budget):
    cached, clients = 2000.0, 6.0

    def estimated(isl):
        out = np.full((serving_options.ESTIMATE_ROWS, 1), np.nan)
        sizes = [np.array([x]) for x in (isl, new, 60.0, clients, budget)]
        assert serving.serving_estimates(plan.arena, *sizes, options(), out)[0] == 0
        return out[:, 0]

    without, got = estimated(new), estimated(cached + new)
    assert got[serving_options.WAIT_US] == without[serving_options.WAIT_US] == 0.0
    parts = steps.open_plan(plan.arena)
    chunks = math.ceil(new / (budget - got[serving_options.DECODES]))
    # what a mixed step takes more beside the prompts' own reading
    mixed_us = got[serving_options.MIXED_STEP_US] - without[serving_options.MIXED_STEP_US]
    mixed_us -= parts.prefix_pair_us * got[serving_options.PREFILL_TOKENS] * cached
    mixed_us -= parts.prefix_token_us * cached * max(got[serving_options.PROMPTS], 1.0)
    assert mixed_us > 0

    def mean_us(row):
        share = row[serving_options.MIXED_SHARE]
        return (1.0 - share) * row[serving_options.DECODE_STEP_US] + share * row[
            serving_options.MIXED_STEP_US
        ]

    own_us = parts.prefix_pair_us * new * cached + parts.prefix_token_us * cached * chunks
    # and half a step of others before it
    more_us = own_us + chunks * mixed_us + 0.5 * (mean_us(got) - mean_us(without))
    assert got[serving_options.TTFT_US] - without[serving_options.TTFT_US] == pytest.approx(more_us, rel=1e-9)


def test_mean_steps_of_whole_numbers_are_steps(plan):
    parts = steps.open_plan(plan.arena)
    for batch, kv in ((1, 70), (8, 512), (30, 1000)):
        # two tokens out: one decode, at isl + 1
        got = mean_steps.mean_decode_step_us(plan.arena, parts, ONE(parts), float(batch), kv - 1.0, 2.0)
        between = (plan.decode_us(batch, kv - 1), plan.decode_us(batch, kv + 1))
        assert min(between) <= got <= max(between)
        assert got == pytest.approx(mean_step_us(plan, batch, kv - 1, 2, [], batch, batch), rel=1e-6)
    for new, context in ((100, 0), (300, 200)):
        got = mean_steps.prompt_steps_us(
            plan.arena, parts, ONE(parts), float(new + context), 512.0, 0.0, 0.0, 0.0
        )
        assert got.us == pytest.approx(plan.prefill_us(new + context), rel=1e-12)
    assert mean_steps.mean_decode_attention_us(plan.arena, parts, ONE(parts), 0.0, 5.0, 5.0) == 0.0
    assert mean_steps.mean_decode_attention_us(plan.arena, parts, ONE(parts), 3.0, 5.0, 1.0) == 0.0


def test_a_prompt_in_chunks_takes_its_steps(plan):
    parts = steps.open_plan(plan.arena)
    got = mean_steps.prompt_steps_us(plan.arena, parts, ONE(parts), 1000.0, 300.0, 0.0, 0.0, 0.0)
    chunks = [plan.prefill_us(300, 300 * i) for i in range(3)] + [plan.prefill_us(100, 900)]
    # the plan samples a token after each chunk, the engine after the last
    logits = plan.arena[int(plan.arena[steps.LOGITS_AT]) + 1] + PROFILE.costs.sequence_us
    assert got.us == pytest.approx(sum(chunks) - 3 * logits, rel=1e-9)
    assert (got.tokens, got.seqs) == (300.0, 1.0)


def test_one_client_sees_the_mean_of_its_steps(plan):
    for isl, osl in ((10, 5000), (500, 40), (60, 10)):
        got = one(plan, (isl, osl, 1, 1024))[2][serving_options.TPOT_US]
        steps_us = plan.decode_us(1, np.arange(isl + 1, isl + osl))
        assert got == pytest.approx(steps_us.mean(), rel=1e-4)


@settings(max_examples=100)
@given(
    isl=SIZE, osl=SIZE, clients=SIZE, budget=SIZE, kv=SIZE, is_chunked=st.booleans(),
    rounds=st.integers(0, 3), spread=st.sampled_from([0.0, 0.2]),
)  # fmt: skip
def test_estimates_keep_to_what_an_engine_can_do(
    plan, isl, osl, clients, budget, kv, is_chunked, rounds, spread
):
    kv_tokens = 40.0 * kv
    chosen = options(
        kv_tokens, max_num_seqs=200.0, is_chunked=is_chunked, rounds=float(rounds), spread=spread
    )
    code, needed, got = one(plan, (isl, osl, clients, budget), chosen)
    if code == serving_options.CODE_KV:
        assert isl + osl > kv_tokens
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
        assert got[serving_options.EFFECTIVE_CONCURRENCY] <= min(clients, 200) * (1 + 1e-12)
        assert got[serving_options.DECODES] <= min(clients, 200) * (1 + 1e-12)
        tokens = got[serving_options.DECODES] + got[serving_options.PREFILL_TOKENS]
        assert tokens <= budget * (1 + 1e-12) + 1e-9
        if osl > 1:
            kinds = [got[serving_options.DECODE_STEP_US], got[serving_options.MIXED_STEP_US]]
            kinds = kinds if got[serving_options.MIXED_SHARE] > 0 else kinds[:1]
            assert min(kinds) * (1 - 1e-12) <= got[serving_options.TPOT_US] <= max(kinds) * (1 + 1e-12)
        # more clients than one is no reason for a first token before its prompt is read
        assert got[serving_options.TTFT_US] >= PROFILE.costs.prefill_floor_layer_us * plan.model.num_layers


@settings(max_examples=200)
@given(st.tuples(ANY, ANY, ANY, ANY), st.booleans())
def test_the_loop_survives_any_numbers(plan, sizes, is_chunked):
    with np.errstate(all="ignore"):
        code, _, got = one(plan, sizes, options(is_chunked=is_chunked, rounds=2.0))
    legal = all(1.0 <= x <= 2.0**28 for x in sizes)
    assert (code == serving_options.CODE_SIZES) == (not legal)
    assert code != 0 or np.isfinite(np.delete(got, serving_options.TPOT_US)).all()


def test_it_stops_at_the_first_scenario_that_cannot_be_timed(plan):
    def stop(isl, **more):
        arrays = [np.array(isl, float), *(np.full(len(isl), x, float) for x in (20, 8, 512))]
        out = np.empty((serving_options.ESTIMATE_ROWS, len(isl)))
        return serving.serving_estimates(plan.arena, arrays[0], *arrays, options(**more), out)

    assert stop([5, 6, 7]) == (0, 0, 0.0)
    assert stop([5, 0, 7]) == (serving_options.CODE_SIZES, 1, 0.0)
    assert stop([5, 6, 999_990]) == (serving_options.CODE_KV, 2, 1_000_010.0)
    assert stop([5, 600, 700], is_chunked=False) == (serving_options.CODE_WHOLE_PROMPT, 1, 600.0)
    assert one(plan, (2000, 20, 3, 1500))[:2] == (serving_options.CODE_TOKENS, 1500.0)
    assert one(plan, (5, 20, 300, 512))[0] == serving_options.CODE_SEQS


# -- disaggregated -------------------------------------------------------------------------------


def apart(plan, sizes, transfer=0.5, kv=1e5, prefill_kv=1e5, max_num_seqs=math.inf, is_chunked=True):
    out = np.full((disaggregated.DISAGGREGATED_ROWS, 1), np.nan)
    scenarios = np.array([[float(x)] for x in sizes])
    chosen = disaggregated.LinkOptions(prefill_kv, kv, max_num_seqs, 0.5, is_chunked, transfer)
    code, _, needed = disaggregated.disaggregated_estimates(plan.arena, plan.arena, scenarios, chosen, out)
    return code, needed, out[:, 0]


def test_one_client_alone_goes_through_prefill_link_and_decode(plan):
    code, _, got = apart(plan, (700, 40, 1, 1, 1, 512))
    assert code == 0
    prefill_us = plan.prefill_us(512) + plan.prefill_us(188, 512)
    assert got[disaggregated.PREFILL_US] == pytest.approx(prefill_us, rel=0.01)
    assert got[disaggregated.TRANSFER_US] == 350.0
    assert got[disaggregated.WAIT_US] == pytest.approx(0.0, abs=1e-3)
    sum_us = got[disaggregated.PREFILL_US] + 350.0
    assert got[disaggregated.TTFT_US] == pytest.approx(sum_us, rel=1e-7)
    assert got[disaggregated.TPOT_US] == pytest.approx(
        plan.decode_us(1, np.arange(701, 740)).mean(), rel=1e-4
    )


@pytest.mark.parametrize(
    ("sizes", "limit"),
    [
        ((100, 100, 30, 1, 2, 512), None),
        ((100, 10, 180, 1, 4, 512), disaggregated.PREFILL_LOAD),
        ((100, 300, 200, 4, 1, 512), disaggregated.KV_LOAD),
        ((100, 30, 200, 1, 4, 512), disaggregated.LINK_LOAD),
    ],
)
def test_what_limits_is_at_one(plan, sizes, limit):
    link = disaggregated.LINK_LOAD
    code, _, got = apart(plan, sizes, transfer=400.0 if limit == link else 0.0, kv=5000.0)
    assert code == 0
    loads = {row: got[row] for row in (disaggregated.PREFILL_LOAD, disaggregated.KV_LOAD, link)}
    for row, load in loads.items():
        assert load == pytest.approx(1.0, rel=1e-6) if row == limit else load < 0.999
    # Little's law: clients are everywhere together
    isl, osl, clients, _, workers, _ = sizes
    rate = got[disaggregated.TOKENS_PER_US] / osl
    decoding = rate * (osl - 1) * got[disaggregated.TPOT_US]
    assert rate * got[disaggregated.TTFT_US] + decoding == pytest.approx(clients, rel=1e-9)
    if limit == disaggregated.KV_LOAD:
        assert decoding / workers * (isl + osl / 2) == pytest.approx(5000.0, rel=1e-6)


@settings(max_examples=100)
@given(
    isl=SIZE,
    osl=SIZE,
    clients=SIZE,
    x=st.integers(1, 9),
    y=st.integers(1, 9),
    budget=SIZE,
    transfer=st.just(0.0) | st.floats(1e-3, 1e3),
)
def test_disaggregated_estimates_add_up(plan, isl, osl, clients, x, y, budget, transfer):
    code, _, got = apart(plan, (isl, osl + 1, clients, x, y, budget), transfer, max_num_seqs=200.0)
    if code:
        assert code == (
            serving_options.CODE_SEQS if budget // isl > plan.max_num_seqs else serving_options.CODE_TOKENS
        )
        assert budget > min(plan.max_num_batched_tokens, plan.max_num_seqs)
        return
    assert np.isfinite(got).all()
    assert (got >= 0).all()
    for row in (disaggregated.PREFILL_LOAD, disaggregated.LINK_LOAD, disaggregated.KV_LOAD):
        assert got[row] <= 1 + 1e-6
    parts = got[disaggregated.WAIT_US] + got[disaggregated.PREFILL_US] + got[disaggregated.TRANSFER_US]
    assert got[disaggregated.TTFT_US] == pytest.approx(parts, rel=1e-9)
    assert 1 <= got[disaggregated.PREFILL_BATCH] <= max(budget // isl, 1)


@settings(max_examples=200)
@given(st.tuples(*[ANY] * 6))
def test_the_disaggregated_loop_survives_any_numbers(plan, sizes):
    with np.errstate(all="ignore"):
        code, _, got = apart(plan, sizes)
    legal = all(1.0 <= x <= 2.0**28 for x in sizes) and sizes[1] >= 2.0
    assert (code == serving_options.CODE_SIZES) == (not legal)
    assert code != 0 or np.isfinite(got).all()


def test_many_more_prompts_than_prefill_takes_wait(plan):
    code, _, got = apart(plan, (300, 2, 250, 1, 16, 900), transfer=0.0)
    assert code == 0
    assert got[disaggregated.PREFILL_BATCH] == 3
    assert got[disaggregated.PREFILL_LOAD] == pytest.approx(1.0, rel=1e-6)
    a_batch_us = plan.prefill_us(300, 0, 3)
    assert got[disaggregated.TOKENS_PER_US] == pytest.approx(2 * 3 / a_batch_us, rel=1e-6)
    assert got[disaggregated.REQUEST_US] == pytest.approx(250 / 3 * a_batch_us, rel=1e-6)


def test_each_disaggregated_code(plan):
    assert apart(plan, (100, 1, 1, 1, 1, 512))[0] == serving_options.CODE_SIZES
    assert apart(plan, (100, 9, 1, 0, 1, 512))[0] == serving_options.CODE_SIZES
    assert apart(plan, (100, 9, 0, 1, 1, 512))[0] == serving_options.CODE_SIZES
    assert apart(plan, (100, 9, 1, 1, 1, 512), kv=108.0)[:2] == (serving_options.CODE_KV, 109.0)
    assert apart(plan, (100, 9, 1, 1, 1, 512), prefill_kv=99.0)[:2] == (disaggregated.CODE_PREFILL_KV, 100.0)
    assert apart(plan, (2, 9, 1, 1, 1, 1024))[:2] == (serving_options.CODE_SEQS, 512.0)
    assert apart(plan, (2000, 9, 1, 1, 1, 1500))[:2] == (serving_options.CODE_TOKENS, 1500.0)
    whole = apart(plan, (600, 9, 1, 1, 1, 512), is_chunked=False)
    assert whole[:2] == (serving_options.CODE_WHOLE_PROMPT, 600.0)
    code, needed, _ = apart(plan, (8, 900, 2000, 2, 1, 512), kv=1e6)
    assert code == disaggregated.CODE_DECODE_SEQS
    assert needed > plan.max_num_seqs
