"""What a plan file of version 2 holds beside its plan, and what has to hold before a loop reads it.

Places are counted in words of 8 bytes from the start of the arena on. The header's FACTS_AT points at a list
of int64, at least FACTS_WORDS of them, in the order of the slots below: where the other parts are, the memory
of one GPU, what the whole model keeps of a sequence, and the layout. A part whose size is 0 is not there.

    verification   as fastroof.compiled.verification reads it, see fastroof.plan.verification
    stages         words: where the file of each pipeline stage starts, itself one of version 2 without stages
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fastroof.arrays import Floats
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.steps import MAX_TOKENS
from fastroof.compiled.verification import (
    BOUND_SIZE,
    BOUNDS,
    BOUNDS_AT,
    HEAD_AT,
    HEAD_LAST,
    SPECULATION_HEADER,
)

__all__ = [
    "FACTS_WORDS",
    "MAX_STAGES",
    "all_finite",
    "facts_fit",
    "held_bytes",
    "is_whole",
    "makespan_us",
    "transfer_us",
    "verification_fits",
]

Words = npt.NDArray[np.int64]

# Slots of the facts. Places and sizes of other parts:
VERIFICATION_AT, VERIFICATION_SIZE = 1, 2
STAGES_AT, STAGES = 3, 4
# 5 to 8 are 0; memory of one GPU, bytes and tokens, as fastroof_memory of fastroof_step.h has it
WEIGHT_BYTES, KV_BYTES, ACTIVATION_BYTES, RESERVE_BYTES, CONTEXT_BYTES = 9, 10, 11, 12, 13
MAX_KV_TOKENS, KV_WINDOW, WINDOW_KV_BYTES, STATE_BYTES = 14, 15, 16, 17
# what the layers of the whole model keep, on all GPUs together
MODEL_KV_BYTES, MODEL_WINDOW_KV_BYTES, MODEL_STATE_BYTES = 18, 19, 20
TP, PP, DP, EP, MOE_TP, CP = 21, 22, 23, 24, 25, 26
NVLINK_BYTES_PER_S = 27
"""float64: from one GPU to the others of its node."""
FACTS_WORDS = 32

US_PER_S = 1e6
"""That of fastroof.units, which compiled loops do not import; a test holds them together."""

MAX_STAGES = 256
"""As many numbers as the C functions keep on their stack."""

LARGEST_SIZE = 2**48
"""No size or place is larger; bytes a token times the longest sequence fit an int64."""
LARGEST_TOKEN = 2**32
"""No token of KV cache is larger, bytes."""


@jit
def is_whole(value: float, least: float, largest: float) -> bool:
    """Whether a float64 is a whole number within bounds."""
    return least <= value <= largest and float(int(value)) == value


@jit
def all_finite(floats: Floats, at: int, stop: int) -> bool:
    """Whether all float64s of a part are numbers."""
    for i in range(at, stop):  # noqa: SIM110  Numba takes no generator here
        if not np.isfinite(floats[i]):
            return False
    return True


@jit
def _part_fits(words: Words, facts_at: int, at: int, size: int) -> bool:
    """Whether a part that the facts name lies within the file."""
    start, count = words[facts_at + at], words[facts_at + size]
    return bool(0 <= count <= len(words) and 0 <= start <= len(words) - count)


@jit
def facts_fit(words: Words, floats: Floats, facts_at: int) -> bool:
    """Whether the facts at ``facts_at`` are whole, and name parts that lie within the file."""
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
    """Whether what verification reads, if it is there, lies within the file."""
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
        and is_whole(head_last, floats[MAX_TOKENS], stop)
        and head_at + head_last < stop
        and is_whole(bounds_at, at, stop)
        and is_whole(bounds, 0.0, stop)
        and bounds_at + BOUND_SIZE * bounds <= stop
    )


@jit_inline
def held_bytes(kv_bytes: int, window_kv_bytes: int, window: int, state_bytes: int, kv_len: int) -> int:
    """KV cache and state of one sequence, bytes, as :meth:`fastroof.plan.memory.PlanMemory.kv_bytes`."""
    return kv_len * kv_bytes - max(kv_len - window, 0) * window_kv_bytes + state_bytes


@jit_inline
def transfer_us(sent_bytes: int, bytes_per_s: float, gpus: int, latency_us: float) -> float:
    """What a transfer takes, us, as :func:`fastroof.simulation.disaggregated.takes_us`."""
    return float(sent_bytes) / (bytes_per_s * float(gpus)) * US_PER_S + latency_us


@jit_inline
def makespan_us(end_us: Any, stage: int, before_us: float, stage_us: float) -> float:
    """When a micro-batch leaves a stage, us, that left the one before at ``before_us``."""
    ended: float = max(end_us[stage], before_us) + stage_us
    end_us[stage] = ended
    return ended
