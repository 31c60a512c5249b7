"""Plan files whose CRC is right and whose description or times are not: refused, in words."""

import json
import struct
import zlib

import numpy as np
import pytest

import fastroof
from fastroof.backends.c import read_plan_file
from fastroof.backends.c.plan_file import description, plan_bytes
from fastroof.compiled import plan_files as loops
from fastroof.compiled import steps
from fastroof.compiled.grids import cells_of
from fastroof.errors import BackendError

TABLES = fastroof.load_tables("h100")
PLAN = fastroof.compile_plan(
    "llama-3.1-8b", "h100", TABLES, max_num_batched_tokens=64, max_num_seqs=16, pp=2, engine="kernels"
)


def first_version(arena: np.ndarray, text: bytes) -> bytes:
    """A file of version 1, the arena and the description alone, whose CRC is right."""
    content = arena.astype("<f8").tobytes() + text + b"\0"
    content += bytes(-len(content) % 8)
    size = loops.FILE_HEADER + len(content)
    checked = struct.pack("<QQQQ16x", size, len(arena), len(text) + 1, 0) + content
    return struct.pack("<8sII", b"FASTROOF", 1, zlib.crc32(checked)) + checked


def with_text(text: bytes) -> bytes:
    return first_version(PLAN.arena, text)


FACTS = description(PLAN, "small")


def described(**changed: object) -> bytes:
    return json.dumps({**FACTS, **changed}).encode()


KINDS = {"a list": [1], "true": True, "a fraction": 0.5, "below 0": -1, "null": None}

WRONG = {
    "nothing": b"",
    "no JSON": b"{",
    "no text": b'{"name": "\xff"}',
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "an empty object": b"{}",
    "lists in lists": b"[" * 100_000 + b"]" * 100_000,
    "an integer of 5,000 digits": described(tp=0).replace(b'"tp": 0', b'"tp": ' + b"9" * 5000),
    "an integer of 4,000 digits": described(tp=10**4000),
    "NaN": described(dp=float("nan")),
    "infinity": described(dp=float("inf")),
    **{f"{name} is {what}": described(**{name: kind}) for name in FACTS for what, kind in KINDS.items()},
    "another max_num_batched_tokens": described(max_num_batched_tokens=65),
    "memory of texts": described(memory={"window": "0"}),
    "memory below 0": described(memory={"window": -1}),
    "stages without memory": described(stages=[{"stage": 0, "layers": 32}]),
    "an invalid stage": described(stages=[0]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_description_with_a_right_crc_is_refused(what, tmp_path):
    path = tmp_path / "small.frplan"
    path.write_bytes(with_text(WRONG[what]))
    with pytest.raises(BackendError, match=r"small\.frplan"):
        read_plan_file(path)


def test_files_of_both_versions_are_read(tmp_path):
    path = tmp_path / "small.frplan"
    for content in (with_text(json.dumps(FACTS).encode()), plan_bytes(PLAN, "small")):
        path.write_bytes(content)
        assert read_plan_file(path).description == FACTS
        assert np.array_equal(read_plan_file(path).arena, PLAN.arena)


@pytest.mark.parametrize(
    ("slot", "time_us"),
    [
        (slot, us)
        for slot in (steps.TOKENS_AT, steps.LOGITS_AT, steps.DECODE_AT, steps.PREFILL_AT)
        for us in (1e308, 1e61, -1e308, -1.0)
    ],
)
def test_invalid_times_are_refused_with_a_valid_crc(slot, time_us, tmp_path):
    arena = PLAN.arena.copy()
    if slot in (steps.DECODE_AT, steps.PREFILL_AT):
        block = arena[int(arena[slot]) :]
        block[cells_of(block)][:6] = time_us
    else:
        arena[int(arena[slot]) + 5] = time_us
    path = tmp_path / "small.frplan"
    path.write_bytes(first_version(arena, json.dumps(FACTS).encode()))
    with pytest.raises(BackendError, match=r"small\.frplan: .* takes"):
        read_plan_file(path)
