"""What a plan file holds beside its plan, laid out as :mod:`fastroof.compiled.plan_files` reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.compiled import plan_files as parts
from fastroof.compiled import verification as loops
from fastroof.simulation.disaggregated import whole_kv_bytes

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = ["Body", "facts_of", "verification_part"]


class Body:
    """The bytes of a file after its header; parts are added on multiples of 8."""

    def __init__(self, arena: bytes, text: bytes) -> None:
        self._content = bytearray(arena)
        self.add(text)

    @property
    def words(self) -> int:
        """Where the next part starts: eights of bytes from the arena's start on."""
        return len(self._content) // 8

    @property
    def content(self) -> bytes:
        """All of it."""
        return bytes(self._content)

    def add(self, part: bytes) -> int:
        """Append a part and NULs up to a multiple of 8, and return where it starts."""
        at = self.words
        self._content += part + bytes(-len(part) % 8)
        return at

    def replace(self, at: int, part: bytes) -> None:
        """Put other bytes where a part of as many is."""
        self._content[8 * at : 8 * at + len(part)] = part


def facts_of(plan: StepPlan) -> Longs:
    """Memory, KV cache, layout and link of a plan; no other part is there."""
    memory, whole, layout = plan.memory, whole_kv_bytes(plan), plan.layout
    facts = np.zeros(parts.FACTS_WORDS, np.int64)
    facts[0] = parts.FACTS_WORDS
    of_slot = {
        parts.WEIGHT_BYTES: memory.weight_bytes,
        parts.KV_BYTES: memory.kv_bytes_per_token,
        parts.ACTIVATION_BYTES: memory.activation_bytes,
        parts.RESERVE_BYTES: memory.reserve_bytes,
        parts.CONTEXT_BYTES: memory.context_bytes,
        parts.MAX_KV_TOKENS: memory.max_kv_tokens,
        parts.KV_WINDOW: memory.window,
        parts.WINDOW_KV_BYTES: memory.window_kv_bytes_per_token,
        parts.STATE_BYTES: memory.state_bytes_per_sequence,
        parts.MODEL_KV_BYTES: whole.kv_bytes_per_token,
        parts.MODEL_WINDOW_KV_BYTES: whole.window_kv_bytes_per_token,
        parts.MODEL_STATE_BYTES: whole.state_bytes_per_sequence,
        parts.TP: layout.tp,
        parts.PP: layout.pp,
        parts.DP: layout.dp,
        parts.EP: layout.ep,
        parts.MOE_TP: layout.moe_tp,
        parts.CP: layout.cp,
    }
    for slot, value in of_slot.items():
        facts[slot] = value
    facts.view(np.float64)[parts.NVLINK_BYTES_PER_S] = plan.gpu.nvlink_bytes_per_s
    return facts


def verification_part(plan: StepPlan, at: int) -> Floats:
    """What verification reads beside the arena, to be placed ``at`` instead of after it."""
    arena, after = plan.verification_arena, len(plan.arena)
    part = np.array(arena[after:], "<f8")
    part[[loops.HEAD_AT, loops.BOUNDS_AT]] += at - after
    return part
