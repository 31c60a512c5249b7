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
    """One GPU's memory, in bytes.

    Attributes
    ----------
    weight_bytes : int
        Linear layers and experts in their formats, with their scales; embedding, norms and biases in bf16,
        as nearly every LM head.
    kv_bytes_per_token : int
        KV cache of one token over all layers, as long as its sequence is within the window; 0 where no layer
        keeps any.
    activation_bytes : int
        Working set of a step of max_tokens: the widest layer's inputs and outputs, and the residual. Of an
        engine's profile, what its profiling run takes; 0 where its reserve holds that.
    reserve_bytes : int
        What is left untouched: a tenth of the GPU's memory, or what an engine's profile leaves.
    max_kv_tokens : int
        Tokens that fit beside all that, in whole blocks, of sequences no longer than the window; 0 where the
        weights alone do not fit. Of longer sequences more tokens fit, and a state takes the room of some: see
        :meth:`max_sequences`. Bytes where no layer keeps any of a token.
    window : int
        Tokens of a sequence that windowed layers keep at most; 0 without such layers.
    window_kv_bytes_per_token : int
        Their part of ``kv_bytes_per_token``.
    state_bytes_per_sequence : int
        What layers keep of a sequence whatever its length: states of linear attention.
    context_bytes : int
        CUDA context, buffers of collectives and CUDA graphs, as an engine's profile counts them.
    """

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
        """Return where a GPU's memory goes, bytes: weights, workspace, context, reserve and KV cache.

        What is less than a block of KV cache is of none of them.

        Examples
        --------
        >>> PlanMemory(70, 2, 10, 8, 6).explain()
        {'weights': 70, 'workspace': 10, 'context': 0, 'reserve': 8, 'kv_cache': 12}
        """
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
        """KV cache and state of one sequence, bytes.

        Parameters
        ----------
        kv_len : int or array_like of int
            Its tokens.

        Raises
        ------
        BatchError
            If they are something else.

        Examples
        --------
        >>> PlanMemory(0, 3000, 0, 0, 10_000, 128, 1000).kv_bytes([100, 1000]).tolist()
        [300000, 2128000]
        """
        length = _lengths(kv_len, 0)
        beyond = np.maximum(length - self.window, 0) * self.window_kv_bytes_per_token
        held = length * self.kv_bytes_per_token - beyond + self.state_bytes_per_sequence
        return held if held.ndim else int(held)

    def held_tokens(self, kv_len: float) -> float:
        """Tokens' worth of KV cache and state of one sequence, of those that ``max_kv_tokens`` counts.

        Parameters
        ----------
        kv_len : number
            Its tokens, or their mean.
        """
        return kv_len - self.window_share * max(kv_len - self.window, 0.0) + self.state_tokens

    def tokens_beside_states(self, sequences: int) -> int:
        """Of ``max_kv_tokens``, those that the states of so many sequences leave, 0 where they do not fit.

        What engines that count blocks of tokens alone, and give every sequence its state, have blocks for.
        """
        room = self.max_kv_tokens * self.token_bytes - sequences * self.state_bytes_per_sequence
        return max(room, 0) // self.token_bytes

    def max_sequences(self, kv_len: Any) -> Any:
        """How many sequences of a length fit.

        Parameters
        ----------
        kv_len : int or array_like of int
            Tokens of each, at least 1.

        Raises
        ------
        BatchError
            If they are something else.

        Examples
        --------
        >>> memory = PlanMemory(0, 3000, 0, 0, 10_000, 128, 1000)
        >>> memory.max_sequences(100), memory.max_sequences(1000), memory.max_kv_tokens // 1000
        (100, 14, 10)
        >>> memory._replace(state_bytes_per_sequence=300_000).max_sequences(100)
        50
        """
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
