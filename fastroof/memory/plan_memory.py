"""Memory of one GPU of a plan: weights, workspace, reserve, and how many KV tokens fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Longs
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.compiled.serving_options import longest_held
from fastroof.errors import BatchError
from fastroof.run.batch import int_array

_OF_PARTS: Final = (
    "parts", "part_bytes", "parts_per_block", "full_parts", "window_parts", "state_parts", "spare_parts",
    "windows", "in_flight", "checked_bytes", "prints_shares", "null_parts",
)  # fmt: skip
"""Attributes of a memory that count parts, in which no engine prints anything."""


class WindowGroups(NamedTuple):
    """Groups of layers with a window in blocks of a size of their own, any of which is an engine's block.

    Attributes
    ----------
    groups, block_tokens, window : int
        Their number, and the tokens of a block and of a window.
    share : float
        Bytes of such a block relative to those of the first group's.
    """

    groups: int
    block_tokens: int
    window: int
    share: float

    def blocks(self, length: Any, in_flight: int) -> Any:
        """Return the blocks of a request with the tokens of steps in flight; not aligned to the window."""
        held = np.minimum(self.window - 1 + in_flight, length)
        return self.groups * (-(-held // self.block_tokens) + 1)


class PlanMemory(NamedTuple):
    """One GPU's memory, in bytes.

    Attributes
    ----------
    weight_bytes : int
        Weights in their formats, with scales.
    kv_bytes_per_token : int
        KV cache of one token over all layers, within the window.
    activation_bytes : int
        Workspace of the largest step; 0 if the engine's reserve covers it.
    reserve_bytes : int
        Left unused, by default or by the engine's profile.
    max_kv_tokens : int
        Tokens that fit besides all that, in whole blocks; bytes if no layer caches tokens.
    window : int
        Tokens of a sequence that windowed layers keep; 0 without such layers.
    window_kv_bytes_per_token : int
        Part of ``kv_bytes_per_token`` in windowed layers.
    state_bytes_per_sequence : int
        State of recurrent layers.
    context_bytes : int
        CUDA contexts and collectives.
    total_bytes, requested_bytes : int
        What CUDA reports, and what the engine may use of it.
    forward_bytes, sampler_bytes : int
        The parts of the profiling run; the larger is ``activation_bytes``.
    graphs_bytes, graphs_low_bytes, graphs_high_bytes : int
        What the engine takes off for CUDA graphs, and the range of logged estimates.
    kv_cache_bytes : int
        Left for blocks of KV cache.
    missing_bytes : int
        By how much the GPU is too small to hold a part; 0 if it holds one.
    parts, part_bytes : int
        The KV cache in parts of which every layer takes a whole number: blocks in vLLM, smaller elsewhere.
    parts_per_block : int
        Parts of one of the engine's blocks; 0 if these are unknown.
    block_tokens, full_parts : int
        Tokens of a block, and the parts that they take in layers that keep all tokens.
    window_parts, window_block_tokens, window_tokens : int
        The same of windowed layers, and the tokens that a running request keeps in them at most.
    reserved_tokens : int
        Tokens of windowed layers that an engine reserves for one request before it starts: with the steps in
        flight, whose parts are free again afterwards.
    state_parts, spare_parts : int
        Parts of a request's states, and of windows that need not be aligned.
    groups : int
        Groups of layers that share the parts.
    state_pool_bytes, state_slots : int
        Separate pool of states, and the states in it.
    max_running : int
        Requests that run at once, by the engine's own limits besides its blocks; 0 without one.
    adapter_bytes : int
        Buffers of LoRA adapters, for as many as a GPU holds at their largest rank.
    workspace_bytes : int
        Buffer of attention with an indexer, which grows with the longest context.
    windows, in_flight, checked_bytes, prints_shares : tuple of WindowGroups, int, int, bool
        Groups of DeepSeek-V4 besides the first, tokens of steps in flight that they reserve, bytes of a block
        when the engine checks one request, and whether it prints by the groups' widths.
    null_parts : int
        Blocks that no request gets.
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
    total_bytes: int = 0
    requested_bytes: int = 0
    forward_bytes: int = 0
    sampler_bytes: int = 0
    graphs_bytes: int = 0
    graphs_low_bytes: int = 0
    graphs_high_bytes: int = 0
    kv_cache_bytes: int = 0
    missing_bytes: int = 0
    parts: int = 0
    part_bytes: int = 1
    parts_per_block: int = 0
    block_tokens: int = 1
    full_parts: int = 0
    window_parts: int = 0
    window_block_tokens: int = 1
    window_tokens: int = 0
    reserved_tokens: int = 0
    state_parts: int = 0
    spare_parts: int = 0
    groups: int = 1
    state_pool_bytes: int = 0
    state_slots: int = 0
    max_running: int = 0
    adapter_bytes: int = 0
    workspace_bytes: int = 0
    windows: tuple[WindowGroups, ...] = ()
    in_flight: int = 0
    checked_bytes: int = 0
    prints_shares: bool = False
    null_parts: int = 0

    @classmethod
    def of_sequence(
        cls, kv_bytes: int, window: int = 0, within_bytes: int = 0, state_bytes: int = 0, *, parts: int = 0
    ) -> PlanMemory:
        """Return the bytes of a sequence without a GPU, in parts of one byte."""
        return cls(
            0,
            kv_bytes,
            0,
            0,
            parts // max(kv_bytes, 1),
            window,
            within_bytes,
            state_bytes,
            kv_cache_bytes=parts,
            parts=parts,
            full_parts=kv_bytes - within_bytes,
            window_parts=within_bytes,
            window_tokens=window,
            reserved_tokens=window,
            state_parts=state_bytes,
        )

    def explain(self) -> dict[str, int]:
        """Return a GPU's memory by use, bytes: weights, workspace, context, graphs, reserve and KV cache."""
        uses = {
            "weights": self.weight_bytes,
            "adapters": self.adapter_bytes,
            "workspace": self.activation_bytes + self.workspace_bytes,
            "context": self.context_bytes,
            "graphs": self.graphs_bytes,
            "states": self.state_pool_bytes,
            "reserve": self.reserve_bytes,
            "kv_cache": self.parts * self.part_bytes,
        }
        return {
            name: size for name, size in uses.items() if size or name not in ("adapters", "graphs", "states")
        }

    @property
    def blocks(self) -> int | None:
        """Blocks of KV cache as the engine counts them; None if its blocks are unknown."""
        return self.parts // self.parts_per_block if self.parts_per_block else None

    @property
    def block_bytes(self) -> int | None:
        """Bytes of one of ``blocks``."""
        return self.parts_per_block * self.part_bytes or None

    def facts(self) -> dict[str, int | None]:
        """Return the attributes in bytes, tokens and the engine's own blocks, without parts."""
        parts = {name: int(value) for name, value in self._asdict().items() if name not in _OF_PARTS}
        tokens = self.block_tokens if self.parts_per_block else None
        return parts | {"blocks": self.blocks, "block_bytes": self.block_bytes, "block_tokens": tokens}

    @property
    def fraction(self) -> float:
        """Share of the GPU's memory that the engine may use."""
        return self.requested_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def request_parts(self) -> int:
        """Parts that a request takes whatever its length."""
        return self.state_parts + self.spare_parts

    @property
    def token_parts(self) -> float:
        """Parts of one token within the window."""
        full, within = self.full_parts / self.block_tokens, self.window_parts / self.window_block_tokens
        return full + within

    @property
    def token_bytes(self) -> float:
        """Bytes of each of ``max_kv_tokens``: a token's with its padding, or 1 if no layer caches tokens."""
        return self.token_parts * self.part_bytes or 1

    @property
    def window_share(self) -> float:
        """Share of a token's KV cache in windowed layers; 1 without a cache."""
        if not self.token_parts:
            return 1.0
        return self.window_parts / self.window_block_tokens / self.token_parts

    @property
    def state_tokens(self) -> float:
        """Return what a sequence takes whatever its length, in tokens of KV cache."""
        return self._in_tokens(self.request_parts)

    @property
    def open_tokens(self) -> float:
        """Return what a sequence takes of a last block beyond its tokens: half of one on average."""
        full = self.full_parts * (self.block_tokens - 1) / self.block_tokens
        within = self.window_parts * (self.window_block_tokens - 1) / self.window_block_tokens
        return self._in_tokens(0.5 * (full + within))

    def _in_tokens(self, parts: float) -> float:
        return parts / self.token_parts if self.token_parts else float(parts * self.part_bytes)

    @property
    def kv_room(self) -> tuple[int, int, int, int, int, int, int, int]:
        """Room for KV cache as loops count it, see :mod:`fastroof.compiled.serving_options`."""
        return (
            self.parts, self.full_parts, self.window_parts, self.window_tokens, self.request_parts,
            self.block_tokens, self.window_block_tokens, self.max_running or MAX_KV_LEN,
        )  # fmt: skip

    def kv_bytes(self, kv_len: Any) -> Any:
        """Return the KV cache and state of one sequence, bytes."""
        length = _lengths(kv_len, 0)
        beyond = np.maximum(length - self.window, 0) * self.window_kv_bytes_per_token
        held = length * self.kv_bytes_per_token - beyond + self.state_bytes_per_sequence
        return held if held.ndim else int(held)

    def held_tokens(self, kv_len: float) -> float:
        """Return what one sequence takes on average, in the tokens that ``max_kv_tokens`` counts."""
        beyond = max(kv_len - self.window_tokens, 0.0)
        return kv_len - self.window_share * beyond + self.state_tokens + self.open_tokens

    def tokens_beside_states(self, sequences: int) -> int:
        """Return how many of ``max_kv_tokens`` the states of some sequences leave; 0 if they do not fit."""
        left = max(self.parts - sequences * self.request_parts, 0)
        full, within = self.block_tokens, self.window_block_tokens
        per_both = self.full_parts * within + self.window_parts * full
        return left * full * within // per_both if per_both else left * self.part_bytes

    def parts_per_request(self, kv_len: Any) -> Any:
        """Return the parts that one running request of a length holds, over all groups of layers."""
        return self._blocks(kv_len, self.window_tokens)

    def reserved_parts(self, kv_len: Any) -> Any:
        """Return the parts that an engine reserves for one request of a length before it starts."""
        if self.windows:
            # loops count whole windows, of shorter requests too
            held = np.maximum(
                self._reserved_windows(_lengths(kv_len, 1), shares=False), self.parts_per_request(kv_len)
            )
            return held if held.ndim else int(held)
        return self._blocks(kv_len, self.reserved_tokens)

    def _blocks(self, kv_len: Any, window: int) -> Any:
        length = _lengths(kv_len, 1)
        held = self.full_parts * -(-length // self.block_tokens) + self.request_parts
        within = np.minimum(length, window)
        held = held + self.window_parts * -(-within // self.window_block_tokens)
        return held if held.ndim else int(held)

    def _reserved_windows(self, length: Longs, *, shares: bool) -> Any:
        """Return the blocks of a request, or their bytes in blocks of the first group."""
        held: Any = self.full_parts * -(-length // self.block_tokens)
        for one in self.windows:
            held = held + one.blocks(length, self.in_flight) * (one.share if shares else 1)
        return held

    def printed_parts(self, kv_len: int) -> int:
        """Return the parts of a request that an engine's printed concurrency counts."""
        if self.prints_shares:
            return math.ceil(float(self._reserved_windows(_lengths(kv_len, 1), shares=True)))
        return max(int(self.reserved_parts(kv_len)), 1)

    def max_concurrency(self, kv_len: int) -> float:
        """Return how many requests of a length an engine prints that fit, as it reserves them."""
        return self.parts / self.printed_parts(kv_len)

    def needed_bytes(self, kv_len: int) -> int:
        """Return the bytes of one request of a length that an engine checks before it starts."""
        return int(self.reserved_parts(kv_len)) * (self.checked_bytes or self.part_bytes)

    @property
    def offered_bytes(self) -> int:
        """Bytes with which it compares these."""
        if self.checked_bytes:
            return self.kv_cache_bytes
        return max(self.parts - self.null_parts, 0) * self.part_bytes

    def holds(self, kv_len: int) -> bool:
        """Return whether an engine starts with requests of a length."""
        return self.needed_bytes(kv_len) <= self.offered_bytes

    def largest_context(self) -> int:
        """Return the longest length of one request that this room holds; 0 if there is none."""
        return most_that_holds(self.holds, MAX_KV_LEN)

    def largest_length(self, sequences: int = 1) -> int:
        """Return the longest length of which some sequences run at once; 0 if none do."""
        return int(longest_held(self.kv_room, sequences))

    def most_running(self, max_num_seqs: float) -> float:
        """Return how many requests run at most, with an engine's maximum of them."""
        return min(max_num_seqs, self.max_running) if self.max_running else max_num_seqs

    def max_sequences(self, kv_len: Any) -> Any:
        """Return how many sequences of a length fit."""
        fit = self.parts // np.maximum(self.parts_per_request(kv_len), 1)
        if self.max_running:
            fit = np.minimum(fit, self.max_running)
        return fit if np.ndim(fit) else int(fit)


def most_that_holds(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to ``most`` for which something holds; 0 if for none."""
    low, high = 0, most
    while low < high:
        number = (low + high + 1) // 2
        low, high = (number, high) if holds(number) else (low, number - 1)
    return low


def _lengths(kv_len: Any, least: int) -> Longs:
    """Lengths of sequences as int64, small enough that no product here overflows."""
    lengths = int_array("kv_len", kv_len)
    wrong = lengths[(lengths < least) | (lengths > MAX_KV_LEN)]
    if wrong.size:
        raise BatchError(f"kv_len must be from {least} to {MAX_KV_LEN:,}, got {wrong[0]}")
    return lengths.astype(np.int64)
