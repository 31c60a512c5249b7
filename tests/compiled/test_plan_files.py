"""The bytes of plan files: the loops that check them, on every way to be wrong."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import compile_plan
from fastroof.backends.c.plan_file import plan_bytes
from fastroof.compiled import grids, plan_files, ragged_steps, steps, verification
from fastroof.compiled import plan_files as plan_parts
from fastroof.compiled.plan_files import BODY
from fastroof.plan.pipeline import makespan_us
from fastroof.simulation.pools import Link, takes_us, whole_kv_bytes
from fastroof.units import US_PER_S
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
    """The bytes with the CRC that fits them, as an attacker would make them."""
    crc = zlib.crc32(content[plan_files.CRC_FROM :])
    return content[:12] + crc.to_bytes(4, "little") + content[plan_files.CRC_FROM :]


def with_word(content, word, value):
    changed = bytearray(content)
    changed[8 * word : 8 * word + 8] = int(value).to_bytes(8, "little", signed=True)
    return with_crc(bytes(changed))


def text_room(content):
    """Bytes that a file has after its header and arena."""
    return len(content) - 64 - 8 * int(np.frombuffer(content, np.int64)[plan_files.ARENA_FLOATS])


@given(octets=st.binary(max_size=200), start=st.integers(0, 16))
def test_crc32_is_zlibs(octets, start):
    assert plan_files.crc32(np.frombuffer(octets, np.uint8), start) == zlib.crc32(octets[start:])


def test_a_plans_file_is_whole(content):
    assert len(content) % 8 == 0
    assert code_of(content) == 0


WRONG = [
    (lambda c: b"", plan_files.CODE_FOREIGN),
    (lambda c: b"FASTROO", plan_files.CODE_FOREIGN),
    (lambda c: b"PAR1" + c[4:], plan_files.CODE_FOREIGN),
    (lambda c: c[:16], plan_files.CODE_TRUNCATED),
    (lambda c: c[:63], plan_files.CODE_TRUNCATED),
    (lambda c: c[:8] + b"\x03" + c[9:], plan_files.CODE_VERSION),
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
    (lambda c: with_word(c, plan_files.TEXT_BYTES, text_room(c) + 1), plan_files.CODE_CORRUPT),
    (lambda c: with_word(c, plan_files.ARENA_FLOATS, 3), plan_files.CODE_CORRUPT),
]


def test_what_is_wrong_has_a_code(content):
    for number, (content_of, code) in enumerate(WRONG):
        assert code_of(content_of(content)) == code, number


def older(content):
    """The file of version 1 of a plan: it ends with the description."""
    words = np.frombuffer(content, np.int64)
    arena, text = int(words[plan_files.ARENA_FLOATS]), int(words[plan_files.TEXT_BYTES])
    size = 64 + 8 * arena + text
    size += -size % 8
    header = np.array([words[0], 1, size, arena, text, 0, 0, 0], np.int64)
    return with_crc(header.tobytes() + content[64:size])


def test_files_of_version_1_are_read(content):
    first = older(content)
    assert code_of(first) == 0
    assert code_of(with_word(first, plan_files.FACTS_AT, 8)) == plan_files.CODE_CORRUPT
    assert code_of(first[:-8]) == plan_files.CODE_TRUNCATED


def facts_at(content, start=0):
    return start + BODY + int(np.frombuffer(content, np.int64)[start + plan_files.FACTS_AT])


WRONG_FACTS = {
    0: (-1, plan_parts.FACTS_WORDS - 1),
    plan_parts.VERIFICATION_AT: (-1, 2**40, 2**62),
    plan_parts.VERIFICATION_SIZE: (-1, 1, 2**40, 2**62),
    plan_parts.STAGES_AT: (-1, 2**40),
    plan_parts.STAGES: (-1, 10**9),
    plan_parts.KV_BYTES: (-1, 2**33),
    plan_parts.MODEL_KV_BYTES: (-1, 2**33),
    plan_parts.WEIGHT_BYTES: (-1, 2**50),
    plan_parts.NVLINK_BYTES_PER_S: (-1, 0x7FF0000000000000),
}


def test_facts_that_cannot_be(content):
    for slot, values in WRONG_FACTS.items():
        for value in values:
            wrong = with_word(content, facts_at(content) + slot, value)
            assert code_of(wrong) == plan_files.CODE_CORRUPT, (slot, value)


def test_facts_that_lie_beyond_the_file(content):
    for value in (-1, len(content) // 8 - BODY - 3, 2**40):
        assert code_of(with_word(content, plan_files.FACTS_AT, value)) == plan_files.CODE_CORRUPT


def test_verification_is_read_within_the_file(plan, content):
    facts = facts_at(content)
    words = np.frombuffer(content, np.int64)
    at = BODY + int(words[facts + plan_parts.VERIFICATION_AT])
    size = int(words[facts + plan_parts.VERIFICATION_SIZE])
    body = np.frombuffer(content, np.float64)[BODY:]
    header = steps.open_plan(body)
    any_tokens = verification.speculation_at(body, at - BODY)
    for batch, kv, queries in ((1, 9, 3), (3, 500, 2), (8, 8, 8), (2, 700, 1)):
        us = verification.verified_us(body, header, any_tokens, batch, kv, queries)
        assert us == plan.verify_us(batch, kv, queries)
    for slot in (
        verification.HEAD_AT,
        verification.HEAD_LAST,
        verification.BOUNDS_AT,
        verification.BOUNDS,
        verification.SPECULATION_HEADER + 3,
    ):
        for value in (np.nan, -1.0, 0.5, 1e300):
            if slot >= verification.SPECULATION_HEADER and np.isfinite(value):
                continue
            wrong = with_word(content, at + slot, np.float64(value).view(np.int64))
            assert code_of(wrong) == plan_files.CODE_CORRUPT, (slot, value)
    gone = with_word(content, facts + plan_parts.VERIFICATION_SIZE, 0)
    assert (code_of(gone), size > 0) == (0, True)


@pytest.fixture(scope="module")
def staged():
    """A plan of three stages, two of which are one, by hand."""
    whole = plan_of((64, 512, 4096))
    first, last = replace(whole, stage=0), replace(whole, stage=1)
    return replace(whole, stage_plans=(first, first, last))


def test_a_plan_of_stages_has_their_files_in_its_own(staged):
    content = plan_bytes(staged, "staged")
    assert code_of(content) == 0
    words = np.frombuffer(content, np.int64)
    facts = facts_at(content)
    at, count = (int(words[facts + slot]) for slot in (plan_parts.STAGES_AT, plan_parts.STAGES))
    places = words[BODY + at : BODY + at + count].tolist()
    assert (count, len(set(places)), places[0]) == (3, 2, places[1])
    for place, stage in zip(places, staged.stages, strict=True):
        start = 8 * (BODY + place)
        size = int(words[BODY + place + plan_files.FILE_BYTES])
        inner = content[start : start + size]
        assert inner == plan_bytes(stage, f"staged stage {stage.stage}")
        assert code_of(inner) == 0


def test_stages_that_cannot_be(staged):
    content = plan_bytes(staged, "staged")
    words = np.frombuffer(content, np.int64)
    facts = facts_at(content)
    list_at = BODY + int(words[facts + plan_parts.STAGES_AT])
    stage = BODY + int(words[list_at + 2])
    wrong = [(list_at + 1, value) for value in (-1, 2**40, len(words) - 12, 1)]
    wrong += [(stage, 5), (stage + plan_files.VERSION_AND_CRC, 1)]
    wrong += [(stage + plan_files.FILE_BYTES, value) for value in (-8, 8, 2**40, int(words[2]) - 4)]
    wrong += [(stage + plan_files.FACTS_AT, 2**40), (stage + BODY, -1)]
    # no stage has stages
    inner = facts_at(content, stage)
    wrong += [(inner + plan_parts.STAGES, 1), (facts + plan_parts.STAGES, plan_parts.MAX_STAGES + 1)]
    for word, value in wrong:
        assert code_of(with_word(content, word, value)) == plan_files.CODE_CORRUPT, (word, value)


def test_more_stages_than_a_program_has_room_for(staged):
    """A list of that many that lies within the file: refused for its length alone."""
    content = plan_bytes(staged, "staged")
    words, facts = np.frombuffer(content, np.int64)[BODY:].copy(), facts_at(content) - BODY
    for count, fits in ((plan_parts.MAX_STAGES, True), (plan_parts.MAX_STAGES + 1, False)):
        words[facts + plan_parts.STAGES_AT], words[facts + plan_parts.STAGES] = 0, count
        assert plan_parts.facts_fit(words, words.view(np.float64), facts) == fits


def test_kv_cache_and_transfers_are_those_of_python(plan):
    memory = plan.memory
    for kv_len in (0, 1, 63, 64, 65, 5000):
        held = plan_parts.held_bytes(
            memory.kv_bytes_per_token,
            memory.window_kv_bytes_per_token,
            memory.window,
            memory.state_bytes_per_sequence,
            kv_len,
        )
        assert held == memory.kv_bytes(kv_len)
    lasts_us = takes_us(plan, plan, [1000], Link(50e9, 5.0))[0]
    sent = int(whole_kv_bytes(plan).kv_bytes(1000))
    assert plan_parts.transfer_us(sent, 50e9, plan.tp, 5.0) == lasts_us
    assert plan_parts.US_PER_S == US_PER_S


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(0.0, 1e6), min_size=3, max_size=3), max_size=6))
def test_micro_batches_end_as_in_python(times):
    ends, last = np.zeros(3), 0.0
    for of_batch in times:
        last = 0.0
        for stage, us in enumerate(of_batch):
            last = plan_parts.makespan_us(ends, stage, last, us)
    assert last == makespan_us(np.array(times).reshape(-1, 3))


@pytest.mark.slow
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
    for slot in (steps.MIXED_KV_US, steps.MIXED_WINDOW_KV_US):
        assert not plan_files.arena_fits(changed(arena, slot, -1.0))
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


def test_decode_steps_with_own_tokens_are_at_the_arenas_offset(h100):
    """Prompts that several GPUs share: the cost of a token in a decode step is another section."""
    plan = compile_plan(
        "llama-3.1-8b", "h100", h100, cp=2, max_num_batched_tokens=64, max_num_seqs=8, engine="kernels"
    )
    arena = plan.arena
    assert arena[steps.DECODE_TOKENS_AT] != arena[steps.TOKENS_AT]
    assert plan_files.arena_fits(arena)
    for slot in (steps.DECODE_TOKENS_AT, steps.DECODE_TOKENS_ORIGIN_AT):
        for by in (-1.0, 1.0):
            assert not plan_files.arena_fits(changed(arena, slot, arena[slot] + by))


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_what_fits_is_timed_within_the_arena(plan, data):
    """An arena that passes the check times every step; bounds are checked in one run."""
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
