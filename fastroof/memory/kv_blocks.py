"""Blocks of KV cache: how an engine cuts it, and how many of them one request takes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Final, NamedTuple

from fastroof.engines import KvMemory
from fastroof.engines.memory_by_card import Card
from fastroof.memory.plan_memory import PlanMemory, WindowGroups
from fastroof.memory.workspaces import CacheFormat, latent_bytes
from fastroof.models import Layout, ModelSpec
from fastroof.models.compressed import CompressedAttention
from fastroof.models.latent import LatentAttention
from fastroof.models.sparse import SparseLatentAttention
from fastroof.operators.widths import CSA

SPARSE_BLOCK: Final = 64
"""Tokens of a page of sparse latent attention."""
ENTRY_ALIGNMENT: Final = 576
"""To which vLLM rounds the pages of DeepSeek-V4 up."""
COMPRESSED_BLOCK: Final = 256
"""Tokens of a block of DeepSeek-V4's compressed layers."""
WINDOW_BLOCK: Final = 64
"""Tokens of a block of its windows."""
FP8: Final = "fp8"
"""Format of its cache."""
RING_BYTES: Final = 236.0
"""Compressor states of DeepSeek-V4 a token and CSA layer in SGLang: what its logged 28.9 kB leave."""


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
    latents: dict[float, tuple[float, int]]
    """Layers of latent attention: by the bytes of a token those of its vector, and the tokens of a key."""
    compressed: Counter[CompressedAttention]
    """Layers of DeepSeek-V4."""

    @property
    def is_sparse(self) -> bool:
        """Whether layers of latent attention have an indexer, and others nothing but latent attention."""
        return any(pool for _, pool in self.latents.values())


def held_layers(models: tuple[tuple[ModelSpec, Layout, CacheFormat], ...]) -> HeldLayers:
    """Count the layers of a model and its draft, each with its layout and KV format."""
    held = HeldLayers(Counter(), Counter(), Counter(), Counter(), {}, Counter())
    for model, layout, stored in models:
        for group in model.layers:
            attention = group.kind.attention
            kv_dtype = stored.kv_dtype
            token_bytes = stored.token_bytes(attention, layout)
            if isinstance(attention, SparseLatentAttention | LatentAttention):
                pool = attention.index_pool if isinstance(attention, SparseLatentAttention) else 0
                held.latents[token_bytes] = latent_bytes(attention, kv_dtype), pool
            if isinstance(attention, CompressedAttention):
                held.compressed[attention] += group.count
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


def blocks_of_bytes(memory: PlanMemory, held: HeldLayers, rule: KvMemory) -> PlanMemory:
    """Add parts of any bytes: every layer takes what it needs of one room."""
    size = rule.block_tokens
    full = int(sum(one * count for one, count in held.full.items()))
    within = int(sum(one * count for (one, _, _), count in held.windowed.items()))
    state = int(sum(one * count for one, count in held.states.items()))
    unit = math.gcd(full * size, within * size, state) or 1
    window = min((window for _, window, _ in held.windowed), default=0)
    # layers with other windows have blocks of their own, and those of DeepSeek-V4 are not known
    extra = 0 if held.rings or len(held.windowed) + bool(held.full) > 1 else (full + within) * size // unit
    return memory._replace(
        part_bytes=unit, block_tokens=size, full_parts=full * size // unit,
        window_parts=within * size // unit, window_block_tokens=size, window_tokens=window,
        reserved_tokens=window, state_parts=state // unit, parts_per_block=extra,
    )  # fmt: skip


def blocks_of_groups(
    memory: PlanMemory, held: HeldLayers, rule: KvMemory, card: Card, step_tokens: int, slots: int
) -> PlanMemory:
    """Add vLLM's blocks: groups of layers whose pages have one size, any of which takes any block."""
    if held.compressed:
        return blocks_of_compressed(memory, held, rule, step_tokens)
    size = max(rule.block_tokens, SPARSE_BLOCK * held.is_sparse)
    attention = [(one, count) for one, count in held.full.items()]
    attention += [(one, count) for (one, _, _), count in held.windowed.items()]
    if not attention:
        state_bytes = int(sum(one * count for one, count in held.states.items()))
        return memory._replace(part_bytes=state_bytes, block_tokens=size, state_parts=slots)
    page, tails = size * max(one for one, _ in attention), 0
    if held.states and held.latents and not held.windowed:
        # blocks are aligned by the bytes of the vector alone, and open keys of a pool have a group
        widest, (latent, pool) = max(held.latents.items())
        size = rule.latent_block_tokens
        if pool > 1 and (card.name in rule.pooled_cards or card.generation in rule.pooled_cards):
            size *= 2
        size *= math.ceil(max(held.states) / (size * latent))
        page, tails = int(size * widest), int(pool > 1)
    elif held.states:
        state = max(held.states)
        widest = max(held.full or [one for one, _ in attention])
        page = max(size * math.ceil(state / (size * widest)) * widest, page)
    kinds = 0 if held.states else len(held.windowed) + bool(held.full)
    if kinds == 1:
        # layers that are alike are one group, and layers that differ in size only
        block = memory._replace(
            part_bytes=int(size * sum(one * count for one, count in attention)),
            block_tokens=size,
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

    block = memory._replace(
        part_bytes=int(page * layers),
        block_tokens=tokens(list(held.full)),
        full_parts=groups(held.full),
        state_parts=groups(held.states) * slots + tails,
        groups=tails + groups(held.full) + groups(held.states) + groups(held.windowed),
        parts_per_block=1,
    )
    window_size = tokens([one for one, _, _ in held.windowed])
    return _with_window(block, held, step_tokens, window_size, groups(held.windowed))


def blocks_of_compressed(
    memory: PlanMemory, held: HeldLayers, rule: KvMemory, step_tokens: int
) -> PlanMemory:
    """Add vLLM's blocks of DeepSeek-V4.

    Five groups: compressed entries and indexer keys, two of windows, and open entries of both ratios.
    """

    def page(content: float) -> int:
        return -(-int(content) // ENTRY_ALIGNMENT) * ENTRY_ALIGNMENT

    by_ratio = {one.ratio: (one, count) for one, count in held.compressed.items()}
    count = sum(held.compressed.values())
    kinds = {ratio: number for ratio, (_, number) in by_ratio.items() if ratio}
    any_one = next(iter(held.compressed))
    entry, window = any_one.entry_bytes(FP8), any_one.widths.window
    counts = [*kinds.values(), count]
    # as many layers to a group as leave the fewest of a group empty
    size = min(
        range(max(kinds.values(), default=count), count + 1),
        key=lambda each: sum(-number % each for number in counts),
    )
    entries = {ratio: COMPRESSED_BLOCK // ratio for ratio in kinds}
    latents = {ratio: page(entries[ratio] * entry) for ratio in kinds}
    indexers = {CSA: page(entries[CSA] * any_one.index_bytes(FP8))} if CSA in kinds else {}
    widest = page(WINDOW_BLOCK * entry)
    # a pipeline stage may have windows alone
    first = sum(kinds[ratio] * (latents[ratio] + indexers.get(ratio, 0)) for ratio in kinds) or size * widest
    block = {
        "layers": size * (sum(latents.values()) + sum(indexers.values())),
        "pages": size * widest
        + sum(
            kinds[ratio] * (indexers.get(ratio, 0) + latents[ratio] * (latents[ratio] < widest))
            for ratio in kinds
        ),
        "widest": max(first, size * widest),
    }
    is_padded = rule.compressed_blocks != "widest"
    windows = [
        WindowGroups(1, WINDOW_BLOCK, window, min(size, count - start) * widest / first)
        for start in range(0, count, size)
    ]
    for ratio, number in kinds.items():
        one, _ = by_ratio[ratio]
        overlap = 2 if ratio == CSA else 1
        tokens = CSA if ratio == CSA else 2 * CSA
        index = tokens * one.index_state_bytes
        state = page(tokens * (one.compressor_bytes - one.index_state_bytes))
        bytes_each = (widest if is_padded else state) + (page(index) if index else 0)
        windows.append(WindowGroups(1, tokens, overlap * ratio, number * bytes_each / first))
    held_when_running = sum(int(one.blocks(one.window, 0)) for one in windows)
    block_bytes = block[rule.compressed_blocks]
    return memory._replace(
        part_bytes=block_bytes,
        block_tokens=COMPRESSED_BLOCK,
        full_parts=1,
        spare_parts=held_when_running,
        groups=1 + len(windows),
        parts_per_block=1,
        windows=tuple(windows),
        in_flight=step_tokens,
        checked_bytes=block["layers"] if is_padded else block_bytes,
        prints_shares=is_padded,
    )


def _with_window(
    block: PlanMemory, held: HeldLayers, step_tokens: int, window_size: int, groups: int
) -> PlanMemory:
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


def blocks_of_pools(memory: PlanMemory, held: HeldLayers, rule: KvMemory) -> PlanMemory:
    """Add SGLang's tokens: windowed layers have a pool of a share of them; states have a pool elsewhere.

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
        return memory._replace(
            part_bytes=token_bytes, block_tokens=size, full_parts=size, parts_per_block=size
        )
    if not full or not within or rule.window_pool >= 1.0:
        token_bytes = int(full + within)
        parts = size * bool(token_bytes)
        return memory._replace(
            part_bytes=max(token_bytes, 1), block_tokens=size, full_parts=parts, parts_per_block=parts
        )
    stored = full + rule.window_pool * within
    window = max(window for _, window, _ in held.windowed)
    share = round(1.0 / (1.0 / rule.window_pool - 1.0))
    return memory._replace(
        part_bytes=int(stored / share), block_tokens=size, full_parts=share * size, window_parts=size,
        window_block_tokens=size, window_tokens=window, reserved_tokens=window,
    )  # fmt: skip
