"""Sums over a step's requests: the naive ones, in vectors of any length, and what no request is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof.compiled.jit import jit
from fastroof.compiled.layout import TILE
from fastroof.compiled.llvm import bit_count, lowest_bit, request_lanes
from fastroof.compiled.request_sums import MANY_CHUNKS, MAX_KV_LEN, StepSums, decode_sums, request_sums
from tests.reference import windows as naive

pytestmark = pytest.mark.loops

DTYPES = st.sampled_from([np.int32, np.int64])
DECODE = st.tuples(st.just(1), st.integers(1, 6000) | st.just(MAX_KV_LEN - 1))
CHUNK = st.tuples(st.integers(1, 60), st.integers(0, 90)) | st.tuples(
    st.integers(2, 60), st.just(MAX_KV_LEN - 60)
)
# decodes, decodes with some chunks, and chunks: of more requests than a tile has
STEP = st.lists(DECODE, min_size=1, max_size=150) | st.lists(CHUNK, min_size=1, max_size=150)
MIXED = st.tuples(STEP, STEP).map(lambda parts: parts[0][:60] + parts[1][:60])
WINDOW = st.integers(1, 200) | st.sampled_from([4096, MAX_KV_LEN])
BAD = (
    *((0, 0), (0, 5), (-1, 5), (1, -1), (1, MAX_KV_LEN), (2, MAX_KV_LEN - 1), (MAX_KV_LEN + 1, 0)),
    *((2**31 - 1, 2**31 - 1), (-(2**31), -(2**31)), (-(2**31), 2**31 - 1), (1, 2**31 - 1)),
)


@jit
def lanes(new, context, first, count, room):
    return request_lanes(new, context, first, count, room)


@jit
def bits_of(bits):
    return lowest_bit(bits), bit_count(bits)


def arrays(requests, dtype):
    """Requests as columns, with others around them that no sum may see."""
    return (np.array([7, *column, 9], dtype) for column in zip(*requests, strict=True))


def naive_sums(requests) -> StepSums:
    chunks = [r for r in requests if not naive.is_decode(r)]
    decodes = [r for r in requests if naive.is_decode(r)]
    return StepSums(
        len(decodes),
        sum(context + 1 for _, context in decodes),
        sum(new for new, _ in chunks),
        sum(new * (new + 1) // 2 for new, _ in chunks),
        sum(new * context for new, context in chunks),
        sum(context for _, context in chunks),
    )


def assert_impossible(requests, dtype, window):
    # sums of such sizes are any
    with np.errstate(over="ignore"):
        assert not request_sums(*arrays(requests, dtype), 1, len(requests) + 1, window)[2]
        assert not decode_sums(*arrays(requests, dtype), 1, len(requests) + 1, window)[2]


@settings(max_examples=150)
@given(requests=STEP | MIXED, window=WINDOW, dtype=DTYPES, seed=st.integers(0, 9))
def test_sums_are_the_naive_ones_in_any_order(requests, window, dtype, seed):
    expected = naive_sums(requests), tuple(naive.sums(requests, window)), True
    order = np.random.default_rng(seed).permutation(len(requests))
    for some in (requests, [requests[i] for i in order]):
        assert request_sums(*arrays(some, dtype), 1, len(some) + 1, window) == expected
    assert request_sums(*arrays(requests, dtype), 1, len(requests) + 1, 0)[0] == expected[0]
    contexts, seen, are_decodes = decode_sums(*arrays(requests, dtype), 1, len(requests) + 1, window)
    assert are_decodes == all(naive.is_decode(r) for r in requests)
    assert contexts == sum(context for _, context in requests)
    if are_decodes:
        assert seen == expected[1][0]


@pytest.mark.parametrize("chunks", [0, 1, MANY_CHUNKS, MANY_CHUNKS + 1, TILE])
@pytest.mark.parametrize("count", [TILE, TILE + 1, 2 * TILE + 15])
def test_few_and_many_chunks_in_each_tile(chunks, count):
    requests = [(5, 40) if i % TILE < chunks else (1, i + 1) for i in range(count)]
    expected = naive_sums(requests), tuple(naive.sums(requests, 30)), True
    assert request_sums(*arrays(requests, np.int32), 1, count + 1, 30) == expected


@given(
    before=st.lists(DECODE | CHUNK, max_size=70),
    bad=st.sampled_from(BAD),
    dtype=DTYPES,
    window=WINDOW | st.just(0),
)
def test_impossible_requests_are_seen_wherever_they_are(before, bad, dtype, window):
    requests = [*before, bad, (1, 4)]
    assert_impossible(requests, dtype, window)


@pytest.mark.parametrize("huge", [2**62, 2**63 - 1, -(2**63)])
def test_impossible_requests_of_64_bits(huge):
    for requests in ([(huge, 1)], [(1, huge)], [(huge, huge)], [(1, 5)] * 20 + [(huge, 5)]):
        assert_impossible(requests, np.int64, 128)


@given(
    requests=st.lists(DECODE | CHUNK, min_size=1, max_size=TILE),
    room=st.integers(-1, 200) | st.just(MAX_KV_LEN - 1),
    of_new=DTYPES,
    of_context=DTYPES,
)
def test_lanes_of_two_widths(requests, room, of_new, of_context):
    new, context = (np.array(column) for column in zip(*requests, strict=True))
    bits, contexts, rooms, high = lanes(
        new.astype(of_new), context.astype(of_context), 0, len(requests), room
    )
    assert [(bits >> i) & 1 for i in range(len(requests))] == [not naive.is_decode(r) for r in requests]
    assert len(requests) == TILE or bits >> len(requests) == 0
    assert contexts == context.sum()
    assert rooms == sum(max(room - c, 0) for _, c in requests)
    assert high == np.bitwise_or.reduce((new - 1) | context | (new + context - 1))


@given(places=st.sets(st.integers(0, TILE - 1), min_size=1))
def test_bits(places):
    bits = int(np.array([sum(1 << place for place in places)], np.uint64).view(np.int64)[0])
    assert bits_of(bits) == (min(places), len(places))
