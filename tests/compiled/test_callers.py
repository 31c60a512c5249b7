"""One step for compiled callers: the same bits as a plan's own entry points, NaN where those raise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof.backends import numba_callers
from fastroof.compiled import callers, ragged_steps, steps
from tests.compiled.test_steps import ANY_INT, plan_of


@pytest.fixture(scope="module")
def plan():
    return plan_of((64, 512, 4096))


REQUESTS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 5000)), max_size=17)


@pytest.mark.loops
@given(batch=ANY_INT | st.integers(1, 16), kv_len=ANY_INT | st.integers(1, 9999))
def test_equal_decodes(plan, batch, kv_len):
    out = np.empty(1)
    code = steps.general_decode_steps_us(plan.arena, np.array([batch]), np.array([kv_len]), out)
    found = callers.equal_decodes_us(plan.arena, batch, kv_len)
    assert np.isnan(found) if code else found == out[0]


@pytest.mark.loops
@given(
    new=ANY_INT | st.integers(1, 130), context=ANY_INT | st.integers(0, 99), batch=ANY_INT | st.integers(1, 9)
)
def test_equal_chunks(plan, new, context, batch):
    out = np.empty(1)
    code = steps.prefill_steps_us(plan.arena, np.array([new]), np.array([context]), np.array([batch]), out)
    found = callers.equal_chunks_us(plan.arena, new, context, batch)
    assert np.isnan(found) if code else found == out[0]


@pytest.mark.loops
@given(requests=REQUESTS, kind=st.sampled_from([np.int64, np.int32]))
def test_any_requests(plan, requests, kind):
    pairs = np.array(requests, kind).reshape(-1, 2)
    out = np.empty(1)
    new, context = pairs[:, 0].copy(), pairs[:, 1].copy()
    code = ragged_steps.ragged_steps_us(plan.arena, new, context, np.array([0, len(requests)]), out)
    found = callers.requests_step_us(plan.arena, new, context)
    assert np.isnan(found) if code else found == out[0]


@pytest.mark.loops
def test_sizes_that_no_step_has_are_nan(plan):
    for new, context in ([[1], [-1]], [[0], [5]], [[129], [0]], [[1, 1], [5]], [[1] * 17, [5] * 17]):
        assert np.isnan(callers.requests_step_us(plan.arena, np.array(new), np.array(context)))


@pytest.mark.slow
def test_numba_step_inside_a_custom_loop(plan):
    numba = pytest.importorskip("numba")
    step_us, data = fastroof.numba_step(plan)
    decode_us, same = fastroof.numba_decode(plan)
    assert same is data is plan.arena
    assert (fastroof.numba_step, fastroof.numba_decode) == (
        numba_callers.numba_step,
        numba_callers.numba_decode,
    )

    @numba.njit(error_model="numpy")
    def simulated(data, context_len, steps):
        new_tokens, total_us = np.ones_like(context_len), 0.0
        for _ in range(steps):
            total_us += step_us(data, new_tokens, context_len)
            context_len += 1
        return total_us + decode_us(data, 3, 700)

    contexts = np.array([10, 200, 3000])
    expected = 0.0
    for past in range(20):
        expected += plan.step_scalar([1, 1, 1], (contexts + past).tolist())
    assert simulated(data, contexts.copy(), 20) == expected + plan.decode_us(3, 700)
