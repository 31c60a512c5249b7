"""The bytes of plan files: the loops that check them, on every way to be wrong."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof.backends.c.plan_file import plan_bytes
from fastroof.compiled import grids, plan_files, ragged_steps, steps
from tests.compiled.test_steps import plan_of
from tests.compiled.test_windows import PLANS

pytestmark = pytest.mark.loops


@pytest.fixture(scope="module", params=["full", *PLANS])
def plan(request):
    return PLANS.get(request.param) or plan_of((64, 512, 4096))


@pytest.fixture(scope="module")
def content(plan):
    return plan_bytes(plan, "handmade")


def code_of(content):
    octets = np.frombuffer(content, np.uint8)
    eights = octets[: len(octets) // 8 * 8]
    return plan_files.plan_bytes_code(octets, eights.view(np.int64), eights.view(np.float64))


def with_crc(content):
    """The bytes with the CRC that fits them, as somebody would make who is up to no good."""
    crc = zlib.crc32(content[plan_files.CRC_FROM :])
    return content[:12] + crc.to_bytes(4, "little") + content[plan_files.CRC_FROM :]


def with_word(content, word, value):
    changed = bytearray(content)
    changed[8 * word : 8 * word + 8] = int(value).to_bytes(8, "little", signed=True)
    return with_crc(bytes(changed))


@given(octets=st.binary(max_size=200), start=st.integers(0, 16))
def test_crc32_is_zlibs(octets, start):
    assert plan_files.crc32(np.frombuffer(octets, np.uint8), start) == zlib.crc32(octets[start:])


def test_a_plans_file_is_whole(content):
    assert len(content) % 8 == 0
    assert code_of(content) == 0


@pytest.mark.parametrize(
    ("content_of", "code"),
    [
        (lambda c: b"", plan_files.CODE_FOREIGN),
        (lambda c: b"FASTROO", plan_files.CODE_FOREIGN),
        (lambda c: b"PAR1" + c[4:], plan_files.CODE_FOREIGN),
        (lambda c: c[:16], plan_files.CODE_TRUNCATED),
        (lambda c: c[:63], plan_files.CODE_TRUNCATED),
        (lambda c: c[:8] + b"\x02" + c[9:], plan_files.CODE_VERSION),
        (lambda c: c[:-8], plan_files.CODE_TRUNCATED),
        (lambda c: c[:-1], plan_files.CODE_TRUNCATED),
        (lambda c: c + bytes(8), plan_files.CODE_TRUNCATED),
        (lambda c: with_word(c + b"\0", plan_files.FILE_BYTES, len(c) + 1), plan_files.CODE_TRUNCATED),
        (lambda c: c[:500] + bytes([c[500] ^ 1]) + c[501:], plan_files.CODE_CORRUPT),
        (lambda c: with_word(c, plan_files.ARENA_FLOATS, -1), plan_files.CODE_CORRUPT),
        (lambda c: with_word(c, plan_files.ARENA_FLOATS, 2**61), plan_files.CODE_CORRUPT),
        (lambda c: with_word(c, plan_files.ARENA_FLOATS, len(c) // 8), plan_files.CODE_CORRUPT),
        (lambda c: with_word(c, plan_files.TEXT_BYTES, 0), plan_files.CODE_CORRUPT),
        (lambda c: with_word(c, plan_files.TEXT_BYTES, 2**40), plan_files.CODE_CORRUPT),
        (lambda c: with_word(c, plan_files.TEXT_BYTES, 5), plan_files.CODE_CORRUPT),
        (lambda c: with_word(c, plan_files.ARENA_FLOATS, 3), plan_files.CODE_CORRUPT),
    ],
)
def test_what_is_wrong_has_a_code(content, content_of, code):
    assert code_of(content_of(content)) == code


@settings(max_examples=300)
@given(st.data())
def test_no_changed_byte_goes_unseen(content, data):
    at = data.draw(st.integers(0, len(content) - 1))
    changed = content[at] ^ data.draw(st.integers(1, 255))
    assert code_of(content[:at] + bytes([changed]) + content[at + 1 :]) != 0


HEADER_SLOTS = (
    steps.MAGIC,
    steps.FORMAT,
    steps.MAX_TOKENS,
    steps.MAX_SEQS,
    steps.TOKENS_AT,
    steps.LOGITS_AT,
    steps.TOKENS_ORIGIN_AT,
    steps.LOGITS_ORIGIN_AT,
    steps.DECODE_TOKENS_AT,
    steps.DECODE_TOKENS_ORIGIN_AT,
    steps.DECODE_AT,
    steps.PREFILL_AT,
    steps.ARENA_SIZE,
    steps.WINDOW_DECODE_AT,
    steps.WINDOW_PREFILL_AT,
)
BLOCK_SLOTS = (
    grids.Y + grids.NODES,
    grids.Y + grids.SHIFT,
    grids.Y + grids.KEYS,
    grids.X + grids.NODES,
    grids.X + grids.SHIFT,
    grids.X + grids.KEYS,
    grids.FORM,
)


def changed(arena, slot, value):
    copy = arena.copy()
    copy[slot] = value
    return copy


def test_an_arena_that_a_loop_would_read_beyond_does_not_fit(plan):
    arena = plan.arena
    assert plan_files.arena_fits(arena)
    assert not plan_files.arena_fits(arena[: steps.HEADER_SIZE - 1])
    assert not plan_files.arena_fits(np.append(arena, 0.0))
    for slot in HEADER_SLOTS:
        for value in (-1.0, 0.5, arena[slot] + 1.0, arena[slot] - 1.0, 1e300, np.nan, np.inf):
            assert not plan_files.arena_fits(changed(arena, slot, value)), (slot, value)
    for value in (-1.0, 0.5, 2.0**28 + 1.0, 1e300, np.nan):
        assert not plan_files.arena_fits(changed(arena, steps.WINDOW, value))
    blocks = (steps.DECODE_AT, steps.PREFILL_AT, steps.WINDOW_DECODE_AT, steps.WINDOW_PREFILL_AT)
    for at in sorted({int(arena[slot]) for slot in blocks}):
        for slot in BLOCK_SLOTS:
            for value in (-1.0, 0.5, arena[at + slot] + 100.0, 1e300):
                assert not plan_files.arena_fits(changed(arena, at + slot, value)), (slot, value)
        for key in (grids.Y, grids.X):
            assert not plan_files.arena_fits(changed(arena, at + key + grids.FIRST_KEY, 0.5))
        ny, nx = int(arena[at + grids.NODES]), int(arena[at + grids.X + grids.NODES])
        nodes = at + grids.BLOCK_HEADER
        for axis, count in ((nodes, ny), (nodes + ny, nx)):
            assert not plan_files.arena_fits(changed(arena, axis + 1, arena[axis]))
            assert not plan_files.arena_fits(changed(arena, axis + count - 1, arena[axis]))
        y_guide = nodes + ny + nx
        x_guide = y_guide + int(arena[at + grids.KEYS])
        for guide, count in ((y_guide, ny), (x_guide, nx)):
            for value in (-1.0, 0.5, count - 1.0):
                assert not plan_files.arena_fits(changed(arena, guide, value))
    if arena[steps.WINDOW_DECODE_AT] != arena[steps.DECODE_AT]:
        # a cell of all layers is a cell of those within a window
        for slot in (steps.WINDOW_DECODE_AT, steps.WINDOW_PREFILL_AT):
            node = int(arena[slot]) + grids.BLOCK_HEADER + 1
            between = (arena[node] + arena[node + 1]) / 2.0
            assert plan_files.arena_fits(changed(arena, node, arena[node]))
            assert not plan_files.arena_fits(changed(arena, node, between))
    # no room for a block's header
    short = changed(arena, steps.PREFILL_AT, arena[steps.DECODE_AT] + 2.0)
    assert not plan_files.arena_fits(short)


@settings(max_examples=300)
@given(st.data())
def test_what_fits_is_timed_within_the_arena(plan, data):
    """Whatever else an arena holds, what passes the check times every step; bounds are checked in one run."""
    arena, blocks_at = plan.arena.copy(), int(plan.arena[steps.DECODE_AT])
    values = st.sampled_from([0.0, 1.0, 2.0, 7.0, 63.0, -3.0, 1e9]) | st.floats(-1e6, 1e6)
    for _ in range(data.draw(st.integers(1, 4))):
        low = 0 if data.draw(st.booleans()) else blocks_at
        arena[data.draw(st.integers(low, len(arena) - 1))] = data.draw(values)
    if not plan_files.arena_fits(arena):
        return
    largest = int(min(arena[steps.MAX_TOKENS], arena[steps.MAX_SEQS]))
    batch = np.array([1, largest, 3, largest // 2 + 1])
    kv_len = np.array([1, 2**28, 700, 65])
    assert steps.general_decode_steps_us(arena, batch, kv_len, np.empty(4)) == 0
    tokens = int(arena[steps.MAX_TOKENS])
    new = np.array([1, tokens, tokens // 2 + 1])
    assert steps.prefill_steps_us(arena, new, np.array([0, 9, 0]), np.ones(3, np.int64), np.empty(3)) == 0
    steps_of = (np.r_[new[:1], new[:1]], np.array([9, 2**20]), np.array([0, min(largest, 2)]))
    assert ragged_steps.ragged_steps_us(arena, *steps_of, np.empty(1)) == 0
