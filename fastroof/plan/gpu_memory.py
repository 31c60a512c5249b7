"""What one GPU's memory holds, and what fits beside it: what a plan says of it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fastroof.arrays import Longs
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.errors import BatchError
from fastroof.run.arrays import int_array

__all__ = ["PlanMemory"]


class PlanMemory(NamedTuple):
    """One GPU's memory, in bytes."""

    weight_bytes: int
    kv_bytes_per_token: int
    activation_bytes: int
    reserve_bytes: int
    max_kv_tokens: int
    window: int = 0
    window_kv_bytes_per_token: int = 0
    state_bytes_per_sequence: int = 0
    context_bytes: int = 0

    def explain(self) -> dict[str, int]:
        """Return where a GPU's memory goes, bytes: weights, workspace, context, reserve and KV cache."""
        return {
            "weights": self.weight_bytes,
            "workspace": self.activation_bytes,
            "context": self.context_bytes,
            "reserve": self.reserve_bytes,
            "kv_cache": self.max_kv_tokens * self.token_bytes,
        }

    @property
    def token_bytes(self) -> int:
        """Bytes of each of ``max_kv_tokens``: a token's, or 1 where no layer keeps any of a token."""
        return max(self.kv_bytes_per_token, 1)

    @property
    def window_share(self) -> float:
        """Share of a token's KV cache that is kept within the window alone; 1 where there is none."""
        if not self.kv_bytes_per_token:
            return 1.0
        return self.window_kv_bytes_per_token / self.kv_bytes_per_token

    @property
    def state_tokens(self) -> float:
        """Tokens' worth of KV cache of a sequence's state."""
        return self.state_bytes_per_sequence / self.token_bytes

    @property
    def kv_room(self) -> tuple[int, int, int, int, int]:
        """Room for KV cache as loops count it, see :mod:`fastroof.compiled.kv_room`."""
        whole, within = self.kv_bytes_per_token, self.window_kv_bytes_per_token
        state = self.state_bytes_per_sequence
        common = math.gcd(whole, within, state) or 1
        parts = self.max_kv_tokens * self.token_bytes // common
        window = self.window if within else 0
        return parts, (whole - within) // common, within // common, window, state // common

    def kv_bytes(self, kv_len: Any) -> Any:
        """KV cache and state of one sequence, bytes."""
        length = _lengths(kv_len, 0)
        beyond = np.maximum(length - self.window, 0) * self.window_kv_bytes_per_token
        held = length * self.kv_bytes_per_token - beyond + self.state_bytes_per_sequence
        return held if held.ndim else int(held)

    def held_tokens(self, kv_len: float) -> float:
        """Tokens' worth of KV cache and state of one sequence, of those that ``max_kv_tokens`` counts."""
        return kv_len - self.window_share * max(kv_len - self.window, 0.0) + self.state_tokens

    def tokens_beside_states(self, sequences: int) -> int:
        """Of ``max_kv_tokens``, those that the states of so many sequences leave, 0 where they do not fit."""
        room = self.max_kv_tokens * self.token_bytes - sequences * self.state_bytes_per_sequence
        return max(room, 0) // self.token_bytes

    def max_sequences(self, kv_len: Any) -> Any:
        """How many sequences of a length fit."""
        parts, whole, within, window, state = self.kv_room
        length = _lengths(kv_len, 1)
        fit = parts // (whole * length + within * np.minimum(length, window) + state)
        return fit if fit.ndim else int(fit)


def _lengths(kv_len: Any, least: int) -> Longs:
    """Lengths of sequences as int64, of which no product here is beyond it."""
    lengths = int_array("kv_len", kv_len)
    wrong = lengths[(lengths < least) | (lengths > MAX_KV_LEN)]
    if wrong.size:
        raise BatchError(f"kv_len must be from {least} to {MAX_KV_LEN:,}, got {wrong[0]}")
    return lengths.astype(np.int64)
