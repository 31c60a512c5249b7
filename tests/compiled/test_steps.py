"""The step loops called directly: exact where two of them time one step, and safe whatever they are given."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import compile_plan
from fastroof.compiled import decode_lines, ragged_steps, request_sums, steps
from fastroof.compiled.layout import LANES
from fastroof.plan.arena import decode_lines as lines_of
from tests.reference.handmade import step_tables

pytestmark = pytest.mark.loops

ANY_INT = st.integers(-(2**63), 2**63 - 1) | st.sampled_from(
    [0, 1, 2, 2**28, 2**28 + 1, 2**31, 2**62, 2**63 - 1]
)


def plan_of(kv_lens):
    grid = {(b, x): 9.0 + b * x / 4096 for b in (1, 8, 64) for x in kv_lens if b * x < 64 * 4096}
    tables = step_tables(grid)
    return compile_plan(
        "llama-3.1-8b", "h100", tables, max_num_batched_tokens=128, max_num_seqs=16, engine="kernels"
    )


@pytest.fixture(scope="module")
def plan():
    return plan_of((64, 512, 4096))


@pytest.fixture(scope="module")
def arena(plan):
    return plan.arena


def decode(plan, batch_size, kv_len):
    """The code of both tabulated loops and of the general one, which agree, and their times."""
    line_at = np.empty(decode_lines.CHUNK, np.uint32)
    fast, general = np.full(len(batch_size), np.nan), np.full(len(batch_size), np.nan)
    code = decode_lines.decode_steps_us(plan.decode_lines, batch_size, kv_len, line_at, fast, None)
    assert code == steps.general_decode_steps_us(plan.arena, batch_size, kv_len, general)
    streamed = np.full(len(batch_size) + LANES, np.nan)
    streamed = streamed[-streamed.ctypes.data // streamed.itemsize % LANES :][: len(batch_size)]
    assert code == decode_lines.decode_steps_us(
        plan.decode_lines, batch_size, kv_len, line_at, streamed, True
    )
    np.testing.assert_array_equal(fast, streamed)
    return code, fast, general


@pytest.mark.slow
@settings(max_examples=200)
@given(
    values=st.lists(st.tuples(ANY_INT, ANY_INT, ANY_INT), min_size=1, max_size=8),
    kind=st.sampled_from([np.int64, np.int32]),
)
def test_step_loops_survive_any_sizes(plan, values, kind):
    with np.errstate(all="ignore"):
        a, b, c = np.array(values, np.int64).astype(kind).T.copy()
        code, fast, general = decode(plan, a, b)
        assert (code == 0) == bool(((a >= 1) & (a <= 16) & (b >= 1) & (b <= 2**28)).all())
        if code == 0:
            np.testing.assert_array_equal(fast, general)
        out = np.full(len(a), np.nan)
        code = steps.prefill_steps_us(plan.arena, a, b, c, out)
    legal = [
        new >= 1 and context >= 0 and 1 <= batch <= 16 and context + new <= 2**28 and batch * new <= 128
        for new, context, batch in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    assert (code == 0) == all(legal)
    assert np.isfinite(out).all() == all(legal)


@settings(max_examples=30)
@given(
    count=st.integers(0, 3 * decode_lines.CHUNK),
    kind=st.sampled_from([np.int64, np.int32]),
    seed=st.integers(0, 99),
)
def test_tabulated_decodes_are_the_general_ones_for_any_number_of_steps(plan, count, kind, seed):
    rng = np.random.default_rng(seed)
    batch = rng.integers(1, 17, count).astype(kind)
    kv_len = (2 ** rng.uniform(0, 28, count)).astype(kind)
    code, fast, general = decode(plan, batch, kv_len)
    assert code == 0
    np.testing.assert_array_equal(fast, general)
    assert (fast > 0).all()
    if count > LANES:
        batch[count // 2] = 17
        assert decode(plan, batch, kv_len)[0] == steps.CODE_SIZES


def test_plans_whose_kv_nodes_have_no_simple_keys_have_no_table():
    for kv_lens, has_table in (((64, 512), True), ((64, 1536, 4096), True), ((64, 1000, 4096), False)):
        plan = plan_of(kv_lens)
        assert (plan.decode_lines is not None) == has_table
        assert (lines_of(plan.arena) is not None) == has_table
        kv_len = np.arange(1, 5000, 7)
        singles = [plan.prefill_us(1, kv - 1, 3) for kv in kv_len[1:].tolist()]
        assert plan.decode_us(3, kv_len)[1:].tolist() == singles


@settings(max_examples=200)
@given(
    requests=st.lists(st.tuples(ANY_INT, ANY_INT), max_size=8),
    offsets=st.lists(ANY_INT | st.integers(-1, 9), min_size=1, max_size=6),
)
def test_ragged_loops_survive_any_requests_and_offsets(arena, requests, offsets):
    new, context = np.array(requests, np.int64).reshape(-1, 2).T.copy()
    offsets = np.array(offsets, np.int64)
    count = len(offsets) - 1
    out, again, origin = np.full(count, np.nan), np.full(count, np.nan), np.full(count, 9, np.uint8)
    parts = [np.full(count, np.nan) for _ in range(5)]
    with np.errstate(all="ignore"):
        code = ragged_steps.ragged_steps_us(arena, new, context, offsets, out)
        assert code == ragged_steps.ragged_step_parts(
            arena, new, context, offsets, tuple(parts), again, origin
        )
    np.testing.assert_array_equal(out, again)
    done = np.isfinite(out)
    assert (origin[done] <= 4).all()
    assert done.all() == (code == 0)
    fits = all(0 <= i <= j <= len(new) for i, j in itertools.pairwise(offsets.tolist()))
    assert fits or code != 0
    if code == ragged_steps.CODE_OFFSETS:
        assert not fits


def test_each_error_has_its_code(plan):
    arena = plan.arena

    def ragged(new, context, offsets=None):
        arrays = [np.array(a) for a in (new, context, offsets or [0, len(new)])]
        out = np.empty(len(arrays[2]) - 1)
        return ragged_steps.ragged_steps_us(arena, *arrays, out)

    def one_decode(batch, kv_len):
        return decode(plan, np.array([batch]), np.array([kv_len]))[0]

    def prefill(new, context, batch):
        arrays = [np.array([a]) for a in (new, context, batch)]
        return steps.prefill_steps_us(arena, *arrays, np.empty(1))

    assert ragged([5, 1], [0, 7]) == one_decode(16, 2**28) == prefill(8, 5, 16) == 0
    impossible = [
        *((ragged([new], [context]), prefill(new, context, 1)) for new, context in [(0, 5), (5, -1)]),
        (ragged([5], [2**28]), prefill(5, 2**28, 1), one_decode(1, 2**28 + 1)),
        *((one_decode(0, 5), prefill(1, 5, 0)), (one_decode(17, 5), ragged([1] * 17, [5] * 17))),
        (ragged([129], [0]), ragged([64, 65], [0, 0]), prefill(129, 0, 1), prefill(10, 0, 13)),
        (ragged([0, 1], [-1, 2**28]), ragged([1, 1], [5, 2**28]), ragged([1, 1], [5, -5])),
    ]
    for context in (2**31, 2**62, 2**63 - 2, 2**63 - 1):
        with np.errstate(all="ignore"):
            impossible += [(ragged([new], [context]), prefill(new, context, 1)) for new in (1, 2, 128)]
    assert {code for codes in impossible for code in codes} == {steps.CODE_SIZES}
    for offsets in ([0, 2], [1, 0], [-1, 1]):
        assert ragged([5], [0], offsets) == ragged_steps.CODE_OFFSETS


def test_steps_without_requests_or_of_one_kind(arena):
    new, context = np.array([1, 1, 5, 1]), np.array([3, 4, 0, 0])
    for offsets in ([0, 0, 2, 3], [0, 3, 3, 3], [0, 2, 4, 4], [0, 1, 2, 4]):
        out, origin = np.empty(3), np.empty(3, np.uint8)
        parts = [np.empty(3) for _ in range(5)]
        arrays = (arena, new, context, np.array(offsets))
        assert ragged_steps.ragged_step_parts(*arrays, tuple(parts), out, origin) == 0
        again = np.empty(3)
        assert ragged_steps.ragged_steps_us(*arrays, again) == 0
        np.testing.assert_array_equal(out, again)
        assert [us == 0 for us in out] == [a == b for a, b in itertools.pairwise(offsets)]


def test_origins_of_decodes_are_those_of_the_step(plan):
    from fastroof import StepBatch

    batch, kv_len = np.array([1, 8, 3, 16]), np.array([64, 512, 100, 2**20])
    origin = np.empty(4, np.uint8)
    steps.decode_origins(plan.arena, batch, kv_len, origin)
    requests = [[(1, kv - 1)] * b for b, kv in zip(batch.tolist(), kv_len.tolist(), strict=True)]
    assert origin.tolist() == plan.run(StepBatch.from_requests(requests)).origin.tolist()


@pytest.mark.parametrize("requests", [[(1, 5)] * 3, [(7, 0), (1, 9)], [(7, 4), (3, 0)], [(1, 0)]])
def test_a_step_of_sums_is_the_step_of_its_requests(arena, requests):
    new, context = (np.array(column) for column in zip(*requests, strict=True))
    out = np.empty(1)
    assert ragged_steps.ragged_steps_us(arena, new, context, np.array([0, len(new)]), out) == 0
    is_decode = (new == 1) & (context > 0)
    chunk, before = new[~is_decode], context[~is_decode]
    sums = [is_decode.sum(), (context[is_decode] + 1).sum(), chunk.sum(), (chunk * (chunk + 1) // 2).sum()]
    sums += [(chunk * before).sum(), before.sum()]
    plan = steps.open_plan(arena)
    assert steps.summed_step_us(arena, plan, len(new), request_sums.StepSums(*map(int, sums))) == out[0]
