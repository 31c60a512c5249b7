"""Blocks of KV cache: how an engine cuts it, and how many of them one request takes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Final, NamedTuple

from fastroof.engines import KvMemory
from fastroof.models import Layout, ModelSpec
from fastroof.models.compressed import CompressedAttention

RING_BYTES: Final = 236.0
"""Compressor states of DeepSeek-V4 a token and CSA layer in SGLang: what its logged 28.9 kB leave."""


class KvBlocks(NamedTuple):
    """A block, and the parts of a block and of a request; fields as of a plan's memory."""

    part_bytes: int = 1
    block_tokens: int = 1
    full_parts: int = 0
    window_parts: int = 0
    window_block_tokens: int = 1
    window_tokens: int = 0
    reserved_tokens: int = 0
    state_parts: int = 0
    spare_parts: int = 0
    groups: int = 1
    ring_parts: int = 0
    parts_per_block: int = 0


class HeldLayers(NamedTuple):
    """What a GPU's layers keep of a request: number of layers by their bytes."""

    full: Counter[float]
    """By the bytes of a token."""
    windowed: Counter[tuple[float, int, bool]]
    """By the bytes of a token, the window, and whether it is a chunk."""
    states: Counter[float]
    """By the bytes of a state."""
    rings: Counter[tuple[float, float]]
    """Compressed layers, whose state is a window of entries and open ones, by both bytes of a token."""


def held_layers(models: tuple[tuple[ModelSpec, Layout, str], ...]) -> HeldLayers:
    """Count the layers of a model and its draft, each with its layout and KV format."""
    held = HeldLayers(Counter(), Counter(), Counter(), Counter())
    for model, layout, kv_dtype in models:
        for group in model.layers:
            attention = group.kind.attention
            token_bytes = attention.kv_bytes_per_token(layout, kv_dtype)
            state_bytes = attention.state_bytes(layout)
            if isinstance(attention, CompressedAttention) and attention.compressor_bytes:
                open_bytes = float(attention.compressor_bytes)
                held.rings[float(attention.entry_bytes(kv_dtype)), open_bytes] += group.count
            if token_bytes and attention.window:
                chunked = bool(getattr(attention, "is_chunked", False))
                held.windowed[token_bytes, attention.window, chunked] += group.count
            elif token_bytes:
                held.full[token_bytes] += group.count
            if state_bytes:
                held.states[state_bytes] += group.count
    return held


def blocks_of_bytes(held: HeldLayers, rule: KvMemory, step_tokens: int = 0) -> KvBlocks:
    """Return parts of any bytes: every layer takes what it needs of one room.

    ``step_tokens`` are those of steps in flight that admitted requests reserve.
    """
    size = rule.block_tokens
    full = int(sum(one * count for one, count in held.full.items()))
    within = int(sum(one * count for (one, _, _), count in held.windowed.items()))
    state = int(sum(one * count for one, count in held.states.items()))
    unit = math.gcd(full * size, within * size, state) or 1
    window = min((window for _, window, _ in held.windowed), default=0)
    rings = int(sum(sum(both) * count for both, count in held.rings.items())) if step_tokens else 0
    unit = math.gcd(unit, rings) if rings else unit
    # layers with other windows have blocks of their own, and those of DeepSeek-V4 are not known
    extra = 0 if held.rings or len(held.windowed) + bool(held.full) > 1 else (full + within) * size // unit
    return KvBlocks(
        unit, size, full * size // unit, within * size // unit, size, window, window + step_tokens,
        state // unit, 0, 1, rings // unit, extra,
    )  # fmt: skip


def blocks_of_groups(held: HeldLayers, rule: KvMemory, step_tokens: int, slots: int) -> KvBlocks:
    """Return vLLM's blocks: groups of layers whose pages have one size, any of which takes any block."""
    size = rule.block_tokens
    attention = [(one, count) for one, count in held.full.items()]
    attention += [(one, count) for (one, _, _), count in held.windowed.items()]
    if not attention:
        state_bytes = int(sum(one * count for one, count in held.states.items()))
        return KvBlocks(state_bytes, size, state_parts=slots)
    page = size * max(one for one, _ in attention)
    if held.states:
        state = max(held.states)
        widest = max(held.full or [one for one, _ in attention])
        page = max(size * math.ceil(state / (size * widest)) * widest, page)
    kinds = 0 if held.states else len(held.windowed) + bool(held.full)
    if kinds == 1:
        # layers that are alike are one group, and layers that differ in size only
        block = KvBlocks(
            int(size * sum(one * count for one, count in attention)),
            size,
            full_parts=int(bool(held.full)),
            parts_per_block=1,
        )
        return _with_window(block, held, step_tokens, size, 1)
    counts = [*held.full.values(), *held.windowed.values(), *held.states.values()]
    fewest, most = min(counts), max(counts)
    layers = most if most < 1.5 * fewest else fewest

    def groups(parts: Counter[float] | Counter[tuple[float, int, bool]]) -> int:
        return sum(-(-count // layers) for count in parts.values())

    def tokens(widths: list[float]) -> int:
        return min((int(page // (size * one)) * size for one in widths), default=1)

    block = KvBlocks(
        int(page * layers),
        tokens(list(held.full)),
        groups(held.full),
        state_parts=groups(held.states) * slots,
        groups=groups(held.full) + groups(held.states) + groups(held.windowed),
        parts_per_block=1,
    )
    window_size = tokens([one for one, _, _ in held.windowed])
    return _with_window(block, held, step_tokens, window_size, groups(held.windowed))


def _with_window(
    block: KvBlocks, held: HeldLayers, step_tokens: int, window_size: int, groups: int
) -> KvBlocks:
    """Add the groups of windowed layers."""
    if not held.windowed:
        return block
    _, window, is_chunk = max(held.windowed, key=lambda kind: kind[1])
    return block._replace(
        block_tokens=block.block_tokens if block.full_parts else window_size,
        window_parts=groups,
        window_block_tokens=window_size,
        window_tokens=window,
        reserved_tokens=window + step_tokens - (not is_chunk),
        spare_parts=0 if is_chunk else groups,
    )


def blocks_of_pools(held: HeldLayers, rule: KvMemory) -> KvBlocks:
    """Return SGLang's tokens: windowed layers have a pool of a share of them; states have a pool elsewhere.

    With 0.8 tokens in the windowed pool, a request takes four parts of each token and a fifth within the
    window, so that those shorter than it run out of that pool first.
    """
    size = rule.block_tokens
    full = sum(one * count for one, count in held.full.items())
    within = sum(one * count for (one, _, _), count in held.windowed.items())
    if held.rings:
        within += sum(entry * count for (entry, _), count in held.rings.items())
        open_bytes = RING_BYTES * held.rings[max(held.rings, key=lambda both: both[1])]
        token_bytes = int(full + rule.window_pool * within + open_bytes)
        return KvBlocks(token_bytes, size, size, parts_per_block=size)
    if not full or not within or rule.window_pool >= 1.0:
        token_bytes = int(full + within)
        parts = size * bool(token_bytes)
        return KvBlocks(max(token_bytes, 1), size, parts, parts_per_block=parts)
    stored = full + rule.window_pool * within
    window = max(window for _, window, _ in held.windowed)
    share = round(1.0 / (1.0 / rule.window_pool - 1.0))
    return KvBlocks(int(stored / share), size, share * size, size, size, window, window)
