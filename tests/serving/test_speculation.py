"""Estimates with speculative decoding and prefix-cache hits: what they keep to, beside a simulation."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastroof
from fastroof import SpeculativeDecoding, compile_plan
from fastroof.engines import EngineProfile, StepCosts
from fastroof.errors import BatchError, FastroofError, PlanError, PlanRangeError
from fastroof.plan.arena import verification_arena
from fastroof.plan.speculation import speculated
from fastroof.serving import estimate, estimate_disaggregated, mtp_draft
from tests.command_line import run as command
from tests.reference.serving import simulate_closed_loop


@pytest.fixture(scope="module")
def plan(h100):
    return compile_plan("llama-3.1-8b", "h100", h100, engine="vllm", front_end=0)


@pytest.fixture(scope="module")
def large(h100):
    return compile_plan("llama-3.1-70b", "h100", h100, tp=8, engine="vllm", front_end=0)


@pytest.fixture(scope="module")
def draft(h100):
    return compile_plan("llama-3.1-8b", "h100", h100, tp=4, engine="kernels")


def fields(found):
    return {name: value for name, value in found.columns().items() if value is not None}


LENGTHS = {"isl": st.integers(1, 6000), "osl": st.integers(1, 2000), "clients": st.integers(1, 400)}


# -- against a simulation ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("isl", "osl", "clients", "drafts", "accepted", "hit"),
    [
        (1024, 128, 1, 3, 2.2, 0.0), (1024, 128, 8, 3, 2.2, 0.0), (1024, 128, 32, 3, 2.2, 0.0),
        (128, 512, 64, 3, 2.2, 0.0), (1024, 128, 32, 1, 1.6, 0.0), (2048, 128, 32, 0, 1.0, 0.5),
        (4096, 128, 16, 0, 1.0, 0.8), (8192, 128, 8, 0, 1.0, 0.9), (2048, 128, 32, 3, 2.2, 0.5),
    ],
)  # fmt: skip
def test_estimates_are_near_a_simulation(plan, isl, osl, clients, drafts, accepted, hit):
    room = {"max_kv_tokens": 460_000}
    speculation = SpeculativeDecoding(drafts, accepted)
    got = estimate(
        plan, isl, osl, clients, kv_reservation="full", speculation=speculation, prefix_hit=hit,
        arrivals="random", async_scheduling=False, **room,
    )  # fmt: skip
    seen = simulate_closed_loop(
        plan, isl, osl, clients, tokens=drafts + 1, accepted=accepted, prefix_hit=hit, **room
    )
    assert got.ttft_ms == pytest.approx(seen.ttft_ms, rel=0.15)
    assert got.tpot_ms == pytest.approx(seen.tpot_ms, rel=0.06)
    # 6.2 % low with short prompts at 64 clients
    assert got.tokens_per_s_per_gpu == pytest.approx(seen.tokens_per_s, rel=0.065)


# -- speculative decoding ------------------------------------------------------------------------


@settings(max_examples=60)
@given(**LENGTHS)
def test_zero_draft_tokens_turn_speculation_off(plan, isl, osl, clients):
    plain = estimate(plan, isl, osl, clients)
    none = estimate(plan, isl, osl, clients, speculation=SpeculativeDecoding(0, 1.0, draft="mtp"))
    np.testing.assert_equal(fields(none), fields(plain))
    if osl > 1 and isl > 8:
        apart = estimate_disaggregated(plan, plan, isl, osl, clients)
        none = estimate_disaggregated(
            plan, plan, isl, osl, clients, speculation=SpeculativeDecoding(0, (), draft="mtp")
        )
        np.testing.assert_equal(fields(none), fields(apart))


@pytest.mark.parametrize("osl", [100, 3000])
def test_one_client_sees_the_mean_of_its_verifications(plan, osl):
    isl, drafts, accepted = 700, 3, 2.5
    got = estimate(plan, isl, osl, 1, speculation=SpeculativeDecoding(drafts, accepted))
    starts = np.arange(isl, isl + osl - accepted, accepted).astype(np.int64)
    mean_us = plan.verify_us(1, starts + drafts + 1, drafts + 1).mean()
    assert got.tpot_ms * 1e3 == pytest.approx(mean_us / accepted, rel=1e-3)
    assert got.decode_step_us == pytest.approx(mean_us, rel=1e-3)
    assert got.ttft_ms * 1e3 == pytest.approx(plan.prefill_us(isl), rel=1e-9)


@settings(max_examples=40)
@given(
    isl=st.integers(1, 4000), osl=st.integers(100, 900), clients=st.integers(1, 100), drafts=st.integers(1, 7)
)
def test_what_is_accepted_is_gained(plan, isl, osl, clients, drafts):
    lengths = np.linspace(1.0, drafts + 1, 4)
    found = [
        estimate(
            plan,
            isl,
            osl,
            clients,
            speculation=SpeculativeDecoding(drafts, float(length)),
            requests_per_client="steady",
        )
        for length in lengths
    ]
    rates = np.array([one.tokens_per_s_per_gpu for one in found])
    # requests that end sooner bring prompts sooner, and measured steps with prompts are jagged
    assert (np.diff(rates) > (0.0 if clients == 1 else -0.04 * rates[:-1])).all()
    assert rates[-1] > rates[0]
    for one in found:
        # Little's law, and tokens produced are those requested
        assert one.tokens_per_s_per_gpu == pytest.approx(clients * osl / one.request_latency_ms * 1e3)
        assert one.request_latency_ms == pytest.approx(one.ttft_ms + one.tpot_ms * (osl - 1))


def test_rates_by_position_are_their_length(plan):
    by_position = SpeculativeDecoding(3, (0.75, 0.5, 0.125))
    assert by_position.acceptance_length == 2.375
    assert SpeculativeDecoding(2, [1, 0]).acceptance_length == 2.0
    assert SpeculativeDecoding(2, [1, 0]) == SpeculativeDecoding(2, (1, 0))
    assert len({SpeculativeDecoding(2, [1, 0]), SpeculativeDecoding(2, (1, 0))}) == 1
    lists = estimate(plan, 900, 300, [1, 50], speculation=by_position)
    number = estimate(plan, 900, 300, [1, 50], speculation=SpeculativeDecoding(3, 2.375))
    np.testing.assert_equal(fields(lists), fields(number))
    assert lists.made_from["fastroof.speculative_decoding"] == "3 draft tokens, 2.375 tokens accepted a step"


def test_drafts_take_their_steps(large, draft):
    free, own, second = (
        estimate(large, 1024, 256, [1, 16, 64], speculation=SpeculativeDecoding(3, 2.2, drafter))
        for drafter in (None, "mtp", draft)
    )
    for cheap, dear in ((free, own), (own, second)):
        assert (cheap.tpot_ms < dear.tpot_ms).all()
        assert (cheap.ttft_ms < dear.ttft_ms).all()
    # one client: three steps of the draft, without what an engine adds to them
    drafted_us = second.decode_step_us[0] - free.decode_step_us[0]
    lengths = np.arange(1024, 1024 + 256)
    assert drafted_us == pytest.approx(3 * draft.decode_us(1, lengths + 2).mean(), rel=1e-3)
    costs = StepCosts(step_us=500.0, sequence_us=50.0, prefill_us=100.0, prefill_floor_layer_us=1000.0)
    slow = compile_plan(
        draft.model, "h100", draft.error_source.tables, tp=4, engine=EngineProfile("slow", costs=costs)
    )
    same = estimate(large, 1024, 256, [1, 16, 64], speculation=SpeculativeDecoding(3, 2.2, slow))
    np.testing.assert_array_equal(same.decode_step_us, second.decode_step_us)
    # the prompt goes through the draft as well, which goes on twice after it
    prompt_us = draft.prefill_us(1024) + 2 * draft.decode_us(1, 1024 + 128)
    assert (second.ttft_ms[0] - free.ttft_ms[0]) * 1e3 == pytest.approx(prompt_us, rel=1e-2)


def test_a_draft_takes_room(large, draft):
    none, own, second = (
        estimate(large, 8000, 1000, 2000, max_num_seqs=2000, speculation=SpeculativeDecoding(2, 2.0, drafter))
        for drafter in (None, "mtp", draft)
    )
    room = large.memory_of(max_num_seqs=2000)
    a_token = room.kv_bytes_per_token + draft.memory.kv_bytes_per_token
    both = speculated(large, SpeculativeDecoding(2, 2.0, draft)).memory(max_num_seqs=2000)
    left = room.kv_cache_bytes - draft.memory.weight_bytes
    assert both.parts == left // (a_token * both.block_tokens)
    assert second.effective_concurrency == pytest.approx(both.max_kv_tokens / both.held_tokens(8500))
    assert second.effective_concurrency < own.effective_concurrency < none.effective_concurrency


def test_a_models_own_layer_is_one_of_its_layers(large):
    drafter = mtp_draft(large)
    assert drafter.model.num_layers == 1
    assert (drafter.tp, drafter.dtype, drafter.max_num_batched_tokens) == (
        8,
        "bf16",
        large.max_num_batched_tokens,
    )
    parts = {part.name: part for part in drafter.explain([(1, 2000)] * 4).operators}
    of_model = {part.name: part for part in large.explain([(1, 2000)] * 4).operators}
    assert parts["lm_head"].total_us == of_model["lm_head"].total_us
    assert parts["qkv"].total_us * 80 == pytest.approx(of_model["qkv"].total_us)
    # the projection is on every GPU whole
    assert parts["mtp projection"].total_us > 0
    assert drafter.model.num_parameters > large.model.num_parameters / 80
    again = pickle.loads(pickle.dumps(large))
    with pytest.raises(PlanError, match=r"unpickled plan has no tables; use draft=mtp_draft\(plan, tab"):
        mtp_draft(again)
    there = mtp_draft(again, large.error_source.tables)
    np.testing.assert_array_equal(there.arena, drafter.arena)


def test_the_datasheet_drafts_too():
    with pytest.warns(UserWarning, match="no measured tables"):
        plan = compile_plan("llama-3.1-8b", "b200", None, engine="kernels")
    assert mtp_draft(plan).decode_us(1, 100) < plan.decode_us(1, 100)


def test_apart_decode_workers_verify(large, draft):
    clients = np.array([1, 16, 32])
    plain = estimate_disaggregated(large, large, 1024, 256, clients, 4)
    found = estimate_disaggregated(
        large, large, 1024, 256, clients, 4, speculation=SpeculativeDecoding(3, 2.2, draft)
    )
    assert (found.tpot_ms < plain.tpot_ms).all()
    assert (found.prefill_ms > plain.prefill_ms).all()
    # the draft's cache is sent too: 128 KiB a token beside 320
    np.testing.assert_allclose(found.transfer_ms / plain.transfer_ms, 448 / 320)
    alone = estimate(large, 1024, 256, 1, speculation=SpeculativeDecoding(3, 2.2, draft))
    assert found.tpot_ms[0] == pytest.approx(alone.tpot_ms)
    assert found.kv_load[0] > plain.kv_load[0] * 0.4


# -- prefix-cache hits ---------------------------------------------------------------------------


@settings(max_examples=40)
@given(**LENGTHS)
def test_a_hit_rate_of_zero_equals_no_prefix(plan, isl, osl, clients):
    plain = fields(estimate(plan, isl, osl, clients))
    np.testing.assert_equal(fields(estimate(plan, isl, osl, clients, prefix_hit=0.0)), plain)


def test_hits_are_computed_no_more(plan):
    hits = np.array([0.0, 0.25, 0.5, 0.9, 1.0])
    for clients in (1, 8, 64):
        found = estimate(plan, 4096, 256, clients, prefix_hit=hits)
        assert (np.diff(found.ttft_ms) < 0).all()
        assert (np.diff(found.tpot_ms) <= 1e-9).all()
        assert (np.diff(found.tokens_per_s_per_gpu) > 0).all()
        np.testing.assert_array_equal(found.kv_len, 4096 + 128)
        # what is cached is attended to: more than a prompt without it takes
        short = estimate(plan, 4096 * (1 - hits[1:4]), 256, clients)
        assert (found.tpot_ms[1:4] > short.tpot_ms).all()
        assert (found.ttft_ms[1:4] > short.ttft_ms).all()
    one = estimate(plan, 4096, 256, 1, prefix_hit=0.75)
    assert one.ttft_ms * 1e3 == pytest.approx(plan.prefill_us(1024, 3072), rel=1e-9)
    assert one.tpot_ms == pytest.approx(estimate(plan, 4096, 256, 1).tpot_ms, rel=1e-9)


def test_hits_take_room(plan):
    """A request holds its whole prompt, whoever else has the same."""
    cached = estimate(plan, 8000, 500, 500, prefix_hit=0.5)
    assert cached.effective_concurrency == pytest.approx(estimate(plan, 8000, 500, 500).effective_concurrency)


def test_hits_and_drafts_go_together(large, draft):
    speculation = SpeculativeDecoding(3, 2.2, draft)
    none, half = (
        estimate(large, 4096, 256, 16, speculation=speculation, prefix_hit=hit) for hit in (0.0, 0.5)
    )
    assert half.ttft_ms < 0.7 * none.ttft_ms
    plain = estimate(large, 4096, 256, 16, speculation=SpeculativeDecoding(3, 2.2), prefix_hit=0.5)
    assert half.ttft_ms > plain.ttft_ms
    assert half.tpot_ms > plain.tpot_ms


# -- by the commands --------------------------------------------------------


SERVING = ("serving", "--model", "llama-3.1-70b", "--tp", "8", "--isl", "2048", "--osl", "64")


@pytest.mark.slow
def test_the_command_gives_the_same_numbers(h100):
    args = ("--clients", "1,16", "--num-draft-tokens", "2", "--accepted", "0.75,0.5")
    code, out, err = command(*SERVING, *args, "--draft", "llama-3.1-8b,tp=4", "--prefix-hit", "0.5", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    found = {key: document[key] for key in ("num_draft_tokens", "accepted", "draft", "prefix_hit")}
    assert found == {
        "num_draft_tokens": 2, "accepted": 2.25, "draft": "llama-3.1-8b", "prefix_hit": 0.5,
    }  # fmt: skip
    plan, draft = (
        compile_plan(model, "h100", h100, tp=tp, engine=document["engine"])
        for model, tp in (("llama-3.1-70b", 8), ("llama-3.1-8b", 4))
    )
    speculation = SpeculativeDecoding(2, (0.75, 0.5), draft)
    expected = estimate(plan, 2048, 64, [1, 16], speculation=speculation, prefix_hit=0.5)
    assert [row["tpot_ms"] for row in document["rows"]] == expected.tpot_ms.tolist()
    assert [row["ttft_ms"] for row in document["rows"]] == expected.ttft_ms.tolist()
    words = command(*SERVING, *args, "--draft", "mtp", "--disaggregated", "1:1")[1]
    assert "2 draft tokens (mtp), 2.25 tokens a step" in words.replace("\n", " ")
    plain = json.loads(command(*SERVING, "--clients", "1", "--json")[1])
    assert not {"num_draft_tokens", "prefix_hit"} & set(plain)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--accepted", "2"), "--accepted needs --num-draft-tokens"),
        (("--draft", "mtp"), "--draft needs --num-draft-tokens"),
        (("--num-draft-tokens", "3"), "--num-draft-tokens needs --accepted"),
        (("--num-draft-tokens", "3", "--accepted", "x"), "--accepted needs a number"),
        (("--num-draft-tokens", "3", "--accepted", "9"), "accepted must be a number from 1 to 4"),
        (("--num-draft-tokens", "3", "--accepted", "2", "--draft", "eagle"), "eagle"),
        (("--prefix-hit", "0.5", "--disaggregated", "1:1"), "--prefix-hit does not apply to --disaggregated"),
    ],
)
def test_the_command_refuses_in_a_line(arguments, message):
    code, out, err = command(*SERVING, "--clients", "1", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


# -- wrong input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1, 1.0), BatchError, "num_draft_tokens must be a whole number"),
        ((2.0, 1.0), BatchError, "num_draft_tokens must be a whole number"),
        (
            (3, 4.5),
            BatchError,
            r"accepted must be a number from 1 to 4, the mean tokens per step, .* got 4.5",
        ),
        ((3, 0.8), BatchError, "accepted must be a number from 1 to 4"),
        ((3, "2"), BatchError, "accepted must be a number from 1 to 4"),
        (
            (3, (0.5, 0.4)),
            BatchError,
            "accepted must be 3 rates from 0 to 1, one per draft token, got 2 rates",
        ),
        ((2, (0.5, 1.4)), BatchError, "2 rates from 0 to 1, one per draft token, got the rate 1.4"),
        ((2, (0.5, 0.6)), BatchError, "accepted must not rise from one position to the next"),
        ((True, 1.0), BatchError, "num_draft_tokens must be a whole number"),
        ((10**30, 1.0), BatchError, "num_draft_tokens must be a whole number"),
        ((2, float("nan")), BatchError, "accepted must be a number from 1 to 3"),
        ((2, True), BatchError, "accepted must be a number from 1 to 3"),
        ((2, np.array([0.5, 0.4])), BatchError, "accepted must be a number from 1 to 3"),
        ((2, (0.5, "a")), BatchError, "2 rates from 0 to 1"),
        ((2, None), BatchError, "accepted must be a number from 1 to 3"),
        ((2, 1.5, np.zeros(3)), PlanError, "draft must be a StepPlan"),
        ((2, 1.5, "eagle"), PlanError, "draft must be a StepPlan, 'mtp' .* or None; got 'eagle'"),
    ],
)
def test_wrong_speculations_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        SpeculativeDecoding(*arguments)


def test_drafts_have_to_fit_their_target(h100, plan, large, draft):
    four = SpeculativeDecoding(3, 2.0, draft)
    with pytest.raises(PlanError, match="got a draft on 4 x h100 for 1 x h100"):
        estimate(plan, 9, 9, 9, speculation=four)
    small = compile_plan("llama-3.1-8b", "h100", h100, max_num_batched_tokens=100, engine="kernels")
    with pytest.raises(
        PlanRangeError, match=r"draft's plan times up to 100 tokens and its target's 8192: use com"
    ):
        estimate(large, 9, 9, 9, speculation=SpeculativeDecoding(3, 2.0, small))
    few = compile_plan("llama-3.1-8b", "h100", h100, max_num_seqs=100, engine="kernels")
    with pytest.raises(
        PlanRangeError, match=r"draft's plan times up to 100 seqs and its target's 1024: use com"
    ):
        estimate(large, 9, 9, 9, speculation=SpeculativeDecoding(3, 2.0, few))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": 3}, "speculation must be a SpeculativeDecoding or None, got 3"),
        ({"prefix_hit": 1.5}, "prefix_hit must be from 0 to 1, got 1.5 at position 0"),
        ({"prefix_hit": [0.5, -0.5]}, "prefix_hit must be from 0 to 1, got -0.5 at position 1"),
        ({"prefix_hit": float("nan")}, "prefix_hit must be from 0 to 1, got nan"),
        ({"prefix_hit": "5"}, "prefix_hit must hold numbers"),
    ],
)
def test_wrong_options_are_refused(plan, options, message):
    with pytest.raises(BatchError, match=message):
        estimate(plan, 90, 5, 5, **options)


def test_what_steps_cannot_hold_is_refused(plan):
    speculation = SpeculativeDecoding(7, 2.0)
    with pytest.raises(
        BatchError, match="max_num_batched_tokens must be at least 8, which one request verifies"
    ):
        estimate(plan, 90, 5, 5, max_num_batched_tokens=[100, 7], speculation=speculation)
    for estimated in (
        lambda **more: estimate(plan, 90, 5, 5, **more),
        lambda **more: estimate_disaggregated(plan, plan, 90, 5, 5, **more),
    ):
        for drafting in (speculation, SpeculativeDecoding(1, 1.5)):
            with pytest.raises(BatchError, match="with_error requires speculation=None"):
                estimated(speculation=drafting, with_error=True)
        assert estimated(speculation=SpeculativeDecoding(0, 1.0), with_error=True).relative_error >= 0.0
    with pytest.raises(FastroofError, match="does not fit"):
        estimate(plan, 90, 5, 5, prefix_hit=0.9, max_kv_tokens=94)
    assert fastroof.SpeculativeDecoding is SpeculativeDecoding
    assert verification_arena(plan).flags.writeable is False
