"""The format of plan files, and the checks before a loop reads one.

Little-endian, in this order; a file's size is a multiple of 8, so that it can be mapped and used in place.

    0   8  magic, "FASTROOF"
    8   4  version of this format, uint32: 2, or 1 of files that end with the description
    12  4  CRC-32 of every byte from 16 on, uint32
    16  8  size of the file in bytes
    24  8  float64s of the arena
    32  8  bytes of the description, its closing NUL included
    40  8  where the facts are, in words of 8 bytes from the arena's start on; 0 in version 1
    48 16  0
    64     the arena (see fastroof.compiled.steps), the description (JSON, UTF-8), NULs up to a multiple of 8,
           and of version 2 the facts and what they point at (see fastroof.compiled.plan_files)

The CRC detects damage. Everything that loops rely on is checked as well, so that no file can make them read
beyond its end.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fastroof.arrays import Floats
from fastroof.compiled import steps as S
from fastroof.compiled.grids import BLOCK_HEADER, FIRST_KEY, FORM, KEYS, NODES, SHIFT, X, Y
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.layout import FORM_PREFILL_RATE
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.compiled.verification import (
    BOUND_SIZE,
    BOUNDS,
    BOUNDS_AT,
    HEAD_AT,
    HEAD_LAST,
    SPECULATION_HEADER,
)

# slots of the facts; places and sizes of other parts:
VERIFICATION_AT, VERIFICATION_SIZE = 1, 2
STAGES_AT, STAGES = 3, 4
# 5 to 8 are 0; memory of one GPU, bytes and tokens, as fastroof_memory of fastroof_step.h has it
WEIGHT_BYTES, KV_BYTES, ACTIVATION_BYTES, RESERVE_BYTES, CONTEXT_BYTES = 9, 10, 11, 12, 13
MAX_KV_TOKENS, KV_WINDOW, WINDOW_KV_BYTES, STATE_BYTES = 14, 15, 16, 17
# bytes that all layers keep, on all GPUs together
MODEL_KV_BYTES, MODEL_WINDOW_KV_BYTES, MODEL_STATE_BYTES = 18, 19, 20
TP, PP, DP, EP, MOE_TP, CP = 21, 22, 23, 24, 25, 26
NVLINK_BYTES_PER_S = 27
"""float64: bandwidth from one GPU to the others of its node."""
FACTS_WORDS = 32

US_PER_S = 1e6
"""As in fastroof.units, which compiled loops do not import; a test keeps them equal."""

MAX_STAGES = 256
"""Numbers that the C functions keep on their stack."""

LARGEST_SIZE = 2**48
"""Upper bound of sizes and places; bytes per token times the longest sequence fit an int64."""
LARGEST_TOKEN = 2**32
"""Upper bound of KV bytes per token."""


@jit
def is_whole(value: float, least: float, largest: float) -> bool:
    """Whether a float64 is an integer within bounds."""
    return least <= value <= largest and float(int(value)) == value


@jit
def all_finite(floats: Floats, at: int, stop: int) -> bool:
    """Whether all float64s of a part are finite."""
    for i in range(at, stop):  # noqa: SIM110  Numba takes no generator here
        if not np.isfinite(floats[i]):
            return False
    return True


@jit
def _part_fits(words: Words, facts_at: int, at: int, size: int) -> bool:
    """Whether a part that the facts name is within the file."""
    start, count = words[facts_at + at], words[facts_at + size]
    return bool(0 <= count <= len(words) and 0 <= start <= len(words) - count)


@jit
def facts_fit(words: Words, floats: Floats, facts_at: int) -> bool:
    """Whether the facts at ``facts_at`` are complete and name parts within the file."""
    if facts_at < 0 or facts_at > len(words) - FACTS_WORDS or words[facts_at] < FACTS_WORDS:
        return False
    for at, size in ((VERIFICATION_AT, VERIFICATION_SIZE), (STAGES_AT, STAGES)):
        if not _part_fits(words, facts_at, at, size):
            return False
    if words[facts_at + STAGES] > MAX_STAGES:
        return False
    for slot in range(WEIGHT_BYTES, NVLINK_BYTES_PER_S):
        if words[facts_at + slot] < 0 or words[facts_at + slot] > LARGEST_SIZE:
            return False
    for slot in (KV_BYTES, WINDOW_KV_BYTES, MODEL_KV_BYTES, MODEL_WINDOW_KV_BYTES):
        if words[facts_at + slot] > LARGEST_TOKEN:
            return False
    link = floats[facts_at + NVLINK_BYTES_PER_S]
    return bool(0.0 <= link < np.inf)


@jit
def verification_fits(words: Words, floats: Floats, facts_at: int) -> bool:
    """Whether the verification data, if any, are within the file."""
    at, size = words[facts_at + VERIFICATION_AT], words[facts_at + VERIFICATION_SIZE]
    if size == 0:
        return True
    stop = at + size
    if size < SPECULATION_HEADER or not all_finite(floats, at, stop):
        return False
    head_at, head_last = floats[at + HEAD_AT], floats[at + HEAD_LAST]
    bounds_at, bounds = floats[at + BOUNDS_AT], floats[at + BOUNDS]
    return (
        is_whole(head_at, at, stop)
        and is_whole(head_last, floats[S.MAX_TOKENS], stop)
        and head_at + head_last < stop
        and is_whole(bounds_at, at, stop)
        and is_whole(bounds, 0.0, stop)
        and bounds_at + BOUND_SIZE * bounds <= stop
    )


@jit_inline
def held_bytes(kv_bytes: int, window_kv_bytes: int, window: int, state_bytes: int, kv_len: int) -> int:
    """Return KV cache and state of a sequence, bytes, as :meth:`fastroof.memory.PlanMemory.kv_bytes`."""
    return kv_len * kv_bytes - max(kv_len - window, 0) * window_kv_bytes + state_bytes


@jit_inline
def transfer_us(sent_bytes: int, bytes_per_s: float, gpus: int, latency_us: float) -> float:
    """Time a transfer, us, as :func:`fastroof.simulation.disaggregated.takes_us`."""
    return float(sent_bytes) / (bytes_per_s * float(gpus)) * US_PER_S + latency_us


@jit_inline
def makespan_us(end_us: Any, stage: int, before_us: float, stage_us: float) -> float:
    """Return when a micro-batch that left the stage before at ``before_us`` leaves a stage, us."""
    ended: float = max(end_us[stage], before_us) + stage_us
    end_us[stage] = ended
    return ended


FILE_MAGIC: Final = int.from_bytes(b"FASTROOF", "little")
FILE_VERSION: Final = 2
"""Version that is written; version 1, without facts, is read too."""
FILE_HEADER: Final = 64
"""Bytes before the arena."""
BODY: Final = FILE_HEADER // 8
"""Where the arena starts, in words."""
CRC_FROM: Final = 16
# Words of 8 bytes of the header: the second holds the version and the CRC.
VERSION_AND_CRC, FILE_BYTES, ARENA_FLOATS, TEXT_BYTES, FACTS_AT = 1, 2, 3, 4, 5

# fastroof_step.h names the same codes.
CODE_IO, CODE_FOREIGN, CODE_VERSION, CODE_TRUNCATED, CODE_CORRUPT = 10, 11, 12, 13, 14

LARGEST_INDEX = 2.0**48
"""Upper bound of slots that are indices or sizes."""

Octets = npt.NDArray[np.uint8]
Words = npt.NDArray[np.int64]


def _crc_table() -> npt.NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0xEDB88320), table >> 1)
    return table


_CRC_TABLE: Final = _crc_table()


@jit
def crc32(octets: Octets, start: int) -> int:
    """CRC-32 of the bytes from ``start`` on, as zlib's."""
    crc: Any = np.uint32(0xFFFFFFFF)
    for i in range(start, len(octets)):
        crc = _CRC_TABLE[(crc ^ np.uint32(octets[i])) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    return int(crc ^ np.uint32(0xFFFFFFFF))


@jit
def _axis_fits(arena: Floats, slots: int, nodes_at: int, guide_at: int) -> bool:
    """Whether an axis rises and its guide names existing cells."""
    count = int(arena[slots + NODES])
    for i in range(nodes_at + 1, nodes_at + count):
        if arena[i] <= arena[i - 1]:
            return False
    for i in range(guide_at, guide_at + int(arena[slots + KEYS])):
        if not is_whole(arena[i], 0.0, count - 2.0):
            return False
    return True


@jit
def _block_fits(arena: Floats, at: int, stop: int) -> bool:
    """Whether the grid block of an arena at ``at`` ends at ``stop`` and is consistent."""
    if stop - at < BLOCK_HEADER:
        return False
    for axis in (at + Y, at + X):
        if not (
            is_whole(arena[axis + NODES], 2.0, LARGEST_INDEX)
            and is_whole(arena[axis + KEYS], 1.0, LARGEST_INDEX)
            and is_whole(arena[axis + SHIFT], 0.0, 63.0)
            and is_whole(arena[axis + FIRST_KEY], -LARGEST_INDEX, LARGEST_INDEX)
        ):
            return False
    ny, nx = arena[at + Y + NODES], arena[at + X + NODES]
    y_keys, x_keys = arena[at + Y + KEYS], arena[at + X + KEYS]
    if BLOCK_HEADER + ny + nx + y_keys + x_keys + 7.0 * ny * nx != stop - at:
        return False
    y_at = at + BLOCK_HEADER
    x_at = y_at + int(ny)
    y_guide = x_at + int(nx)
    return (
        is_whole(arena[at + FORM], 0.0, FORM_PREFILL_RATE)
        and _axis_fits(arena, at + Y, y_at, y_guide)
        and _axis_fits(arena, at + X, x_at, y_guide + int(y_keys))
    )


@jit
def _same_axes(arena: Floats, one: int, other: int) -> bool:
    """Whether two valid blocks have the same axes, so that they share cells."""
    header = int(arena[one + Y + NODES] + arena[one + X + NODES]) + BLOCK_HEADER
    for i in range(header):  # noqa: SIM110  Numba takes no generator here
        if arena[one + i] != arena[other + i]:
            return False
    return True


@jit
def arena_fits(arena: Floats) -> bool:
    """Whether an array is a plan's arena and no loop can read beyond it."""
    size = len(arena)
    if size < S.HEADER_SIZE:
        return False
    for i in range(size):
        if not np.isfinite(arena[i]):
            return False
    if arena[S.MAGIC] != S.ARENA_MAGIC or arena[S.FORMAT] != S.ARENA_FORMAT or arena[S.ARENA_SIZE] != size:
        return False
    tokens, seqs = arena[S.MAX_TOKENS], arena[S.MAX_SEQS]
    if not (is_whole(tokens, 1.0, LARGEST_INDEX) and is_whole(seqs, 1.0, LARGEST_INDEX)):
        return False
    at = float(S.HEADER_SIZE)
    for slot, length in (
        (S.TOKENS_AT, tokens + 1.0),
        (S.LOGITS_AT, seqs + 1.0),
        (S.TOKENS_ORIGIN_AT, tokens + 1.0),
        (S.LOGITS_ORIGIN_AT, seqs + 1.0),
    ):
        if arena[slot] != at:
            return False
        at += length
    if arena[S.DECODE_TOKENS_AT] != arena[S.TOKENS_AT]:
        for slot in (S.DECODE_TOKENS_AT, S.DECODE_TOKENS_ORIGIN_AT):
            if arena[slot] != at:
                return False
            at += tokens + 1.0
    elif arena[S.DECODE_TOKENS_ORIGIN_AT] != arena[S.TOKENS_ORIGIN_AT]:
        return False
    expert_at, decode_expert_at = arena[S.EXPERT_AT], arena[S.DECODE_EXPERT_AT]
    if expert_at == 0.0:
        if decode_expert_at != 0.0 or arena[S.RANKS] != 0.0:
            return False
    else:
        if expert_at != at or not is_whole(arena[S.RANKS], 2.0, LARGEST_INDEX):
            return False
        at += tokens + 1.0
        if decode_expert_at != expert_at:
            if decode_expert_at != at:
                return False
            at += tokens + 1.0
    prefill_at = arena[S.PREFILL_AT]
    if arena[S.DECODE_AT] != at or not is_whole(prefill_at, at, size):
        return False
    if not is_whole(arena[S.WINDOW], 0.0, float(MAX_KV_LEN)):
        return False
    if arena[S.MIXED_KV_US] < 0.0 or arena[S.MIXED_WINDOW_KV_US] < 0.0 or arena[S.SHARED_LAUNCH_US] < 0.0:
        return False
    window_at, last_at = arena[S.WINDOW_DECODE_AT], arena[S.WINDOW_PREFILL_AT]
    if not _block_fits(arena, int(at), int(prefill_at)):
        return False
    if window_at == at:
        # the blocks of all layers
        return last_at == prefill_at and _block_fits(arena, int(prefill_at), size)
    if not (is_whole(window_at, prefill_at, size) and is_whole(last_at, window_at, size)):
        return False
    return (
        _block_fits(arena, int(prefill_at), int(window_at))
        and _block_fits(arena, int(window_at), int(last_at))
        and _block_fits(arena, int(last_at), size)
        and _same_axes(arena, int(at), int(window_at))
        and _same_axes(arena, int(prefill_at), int(last_at))
    )


@jit
def _plan_fits(octets: Octets, words: Words, floats: Floats) -> bool:
    """Whether a file's header, arena and description are consistent; that is all of version 1."""
    size = len(octets)
    count, text = words[ARENA_FLOATS], words[TEXT_BYTES]
    room = size - FILE_HEADER
    if count < 0 or count > room // 8 or text < 1 or text > room - 8 * count:
        return False
    if octets[FILE_HEADER + 8 * count + text - 1] != 0 or not arena_fits(floats[BODY : BODY + count]):
        return False
    if words[VERSION_AND_CRC] & 0xFFFFFFFF == 1:
        return bool(words[FACTS_AT] == 0)
    facts_at = words[FACTS_AT]
    body, reals = words[BODY:], floats[BODY:]
    return facts_fit(body, reals, facts_at) and verification_fits(body, reals, facts_at)


@jit
def _stages_fit(octets: Octets, words: Words, floats: Floats) -> bool:
    """Whether each stage of a version-2 file is a valid version-2 file without stages."""
    facts_at = BODY + words[FACTS_AT]
    list_at = BODY + words[facts_at + STAGES_AT]
    for i in range(list_at, list_at + words[facts_at + STAGES]):
        if words[i] < 0 or words[i] > len(words) - 2 * BODY:
            return False
        at = BODY + words[i]
        count = words[at + FILE_BYTES] // 8
        if words[at] != FILE_MAGIC or words[at + VERSION_AND_CRC] & 0xFFFFFFFF != FILE_VERSION:
            return False
        if words[at + FILE_BYTES] % 8 != 0 or count < BODY or count > len(words) - at:
            return False
        inner = words[at : at + count]
        if not _plan_fits(octets[8 * at : 8 * (at + count)], inner, floats[at : at + count]):
            return False
        if inner[BODY + inner[FACTS_AT] + STAGES] != 0:
            return False
    return True


@jit
def plan_bytes_code(octets: Octets, words: Words, floats: Floats) -> int:
    """Check a plan file. Return 0 or the code of the error."""
    size = len(octets)
    if size < 8 or words[0] != FILE_MAGIC:
        return CODE_FOREIGN
    if size < FILE_HEADER:
        return CODE_TRUNCATED
    version = words[VERSION_AND_CRC] & 0xFFFFFFFF
    if version < 1 or version > FILE_VERSION:
        return CODE_VERSION
    if words[FILE_BYTES] != size or size % 8 != 0:
        return CODE_TRUNCATED
    if (words[VERSION_AND_CRC] >> 32) & 0xFFFFFFFF != crc32(octets, CRC_FROM):
        return CODE_CORRUPT
    if not _plan_fits(octets, words, floats):
        return CODE_CORRUPT
    return 0 if version == 1 or _stages_fit(octets, words, floats) else CODE_CORRUPT
