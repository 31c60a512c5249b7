"""Steps that verify draft tokens, as a plan times them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import compile_plan
from fastroof.compiled.steps import LOGITS_AT
from fastroof.compiled.verification import HEAD_LAST, SPECULATION_HEADER
from fastroof.errors import BatchError, PlanRangeError
from fastroof.plan.arena import verification_arena
from tests.reference.verification import verify_us


@pytest.fixture(scope="module")
def plans(h100):
    return {
        name: compile_plan("llama-3.1-8b", "h100", h100, **{"engine": "kernels", **options})
        for name, options in {
            "kernels": {},
            "vllm": {"engine": "vllm-0.12", "tp": 2, "dtype": "fp8", "kv_dtype": "fp8"},
            "nearest": {"method": "nearest", "max_num_batched_tokens": 512, "max_num_seqs": 64},
        }.items()
    }


@pytest.fixture(scope="module")
def plan(plans):
    return plans["kernels"]


@pytest.mark.parametrize("name", ["kernels", "vllm", "nearest"])
@settings(max_examples=50)
@given(batch=st.integers(1, 64), kv=st.integers(1, 40_000))
def test_one_token_is_a_decode_to_the_last_bit(plans, name, batch, kv):
    assert plans[name].verify_us(batch, kv, 1) == plans[name].decode_us(batch, kv)


def test_steps_are_the_naive_ones(plans):
    for batch, kv, tokens in ((1, 8, 8), (7, 4000, 3), (60, 20_000, 2), (32, 1024, 8), (500, 2000, 2)):
        for name in ("kernels", "vllm"):
            got = plans[name].verify_us(batch, kv, tokens)
            assert got == pytest.approx(verify_us(plans[name], batch, kv, tokens), rel=1e-12)


def test_shapes_out_and_threads(plan):
    batch = np.arange(1, 200, dtype=np.int32)[:, None]
    grid = plan.verify_us(batch, [1000, 5000], np.uint8(4))
    assert grid.shape == (199, 2)
    assert grid[6, 1] == plan.verify_us(7, 5000, 4)
    out = np.empty((199, 2))
    assert plan.verify_us(batch, [1000, 5000], 4, out=out, threads=3) is out
    np.testing.assert_array_equal(out, grid)
    many = np.tile(batch.ravel(), 300)
    np.testing.assert_array_equal(
        plan.verify_us(many, 1000, 4, threads=4), plan.verify_us(many, 1000, 4, threads=1)
    )
    assert isinstance(plan.verify_us(1, 10, 2), float)


def test_the_head_has_a_row_a_token(h100, plan):
    """Rows beyond max_num_seqs are those of a plan that times as many sequences."""
    wide = compile_plan("llama-3.1-8b", "h100", h100, max_num_seqs=8192, engine="kernels")
    few = compile_plan("llama-3.1-8b", "h100", h100, max_num_seqs=64, engine="kernels")
    for batch, tokens in ((64, 16), (64, 128), (30, 2)):
        assert few.verify_us(batch, 4096, tokens) == wide.verify_us(batch, 4096, tokens)
    at, most = len(few.arena) + SPECULATION_HEADER, few.max_num_batched_tokens
    logits = wide.arena[int(wide.arena[LOGITS_AT]) :][: most + 1]
    arena = verification_arena(few)
    np.testing.assert_array_equal(arena[at : at + most + 1], logits)
    # and none that no step has: mean steps are held at the last
    assert arena[len(few.arena) + HEAD_LAST] == most


def test_more_tokens_cost_less_than_steps_of_their_own(plan):
    batch, kv = np.array([1, 8, 64])[:, None], np.array([1024, 8192, 32_768])
    one = plan.decode_us(batch, kv)
    for tokens in (2, 4, 8):
        step = plan.verify_us(batch, kv, tokens)
        assert (step < tokens * one).all()
        # measured GEMMs are jagged: two rows may take less than one
        assert (step > 0.97 * one).all()


def test_as_prompts_after_a_prefix_verifications_would_cost_more(plan):
    """Prefill's rate for the prefix is another kernel's: a quarter more where attention is most of a step."""
    batch, kv = np.array([1, 8, 64, 256]), np.array([1024, 8192])[:, None]
    ratio = plan.prefill_us(4, kv - 4, batch) / plan.verify_us(batch, kv, 4)
    # the larger the share of attention
    assert (np.diff(ratio, axis=0) > 0.0).all()
    assert (np.diff(ratio, axis=1) > 0.0).all()
    assert 1.2 < ratio.max() < 1.4
    assert (ratio.ravel()[1:] > 1.0).all()
    # one short sequence is a launch: measured calls of 14.5 us, which jitter
    assert ratio[0, 0] == pytest.approx(1.0, rel=0.005)


@pytest.mark.parametrize("name", ["kernels", "vllm"])
def test_a_verification_is_the_sum_of_its_operators(plans, name):
    plan = plans[name]
    for batch, kv, tokens in ((1, 8, 8), (40, 5000, 4), (40, 5000, 1)):
        explained = plan.explain_verification(batch, kv, tokens)
        assert explained.total_us == plan.verify_us(batch, kv, tokens)
        costs = plan.profile.costs
        parts_us = sum(part.total_us for part in explained.operators)
        assert parts_us == pytest.approx(explained.total_us, rel=1e-9)
        added_us = [part.total_us for part in explained.operators if part.role == "runtime"]
        assert sum(added_us) == pytest.approx(costs.step_us + costs.of_sequence_us(plan.model.vocab) * batch)
        assert explained.origin == (4 if tokens > 1 else plan.explain([(1, kv - 1)] * batch).origin)
    found = {part.name: part for part in plan.explain_verification(40, 5000, 4).operators}
    one = {part.name: part for part in plan.explain([(1, 4999)] * 40).operators}
    assert found["lm_head"].flops == 4 * one["lm_head"].flops
    # the cache is read once
    assert found["decode attention"].moved_bytes < 1.01 * one["decode attention"].moved_bytes
    assert found["decode attention"].flops == pytest.approx(4 * one["decode attention"].flops, rel=1e-3)
    with pytest.raises(BatchError, match="kv_len includes the"):
        plan.explain_verification(1, 3, 4)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((1, 3, 4), BatchError, "kv_len includes the 4 tokens that a step verifies .* got 3 at position 0"),
        ((0, 3, 1), BatchError, "batch_size must be at least 1, got 0 at position 0"),
        ((1, 3, 0), BatchError, "tokens must be at least 1, got 0"),
        ((1, 3.5, 1), BatchError, "kv_len must"),
        ((300, 4096, 64), PlanRangeError, "19200 tokens, the plan times up to 8192"),
        ((2000, 10, 1), PlanRangeError, "2000 sequences, the plan times up to 1024"),
        ((1, 2**40, 2), BatchError, "kv_len must be at most"),
    ],
)
def test_wrong_arguments_are_refused(plan, sizes, error, message):
    with pytest.raises(error, match=message):
        plan.verify_us(*sizes)
    with pytest.raises(error, match=message.replace("position 0", "position 1")):
        plan.verify_us(*(np.array([5, size]) for size in sizes))


def test_an_unpickled_plan_verifies_too(plan):
    before = plan.verify_us(8, 4096, 3)
    there = pickle.loads(pickle.dumps(plan))
    assert "verification_arena" not in there.__dict__
    assert there.verify_us(8, 4096, 3) == before
