"""Memory of one GPU of a plan: weights, workspace, reserve, and how many KV tokens fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Longs
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.compiled.serving_options import longest_held
from fastroof.config import GpuSpec
from fastroof.engines import KvMemory
from fastroof.engines.memory import DATASHEET_MEMORY, ModelKind
from fastroof.engines.memory_by_card import first_row
from fastroof.errors import BatchError
from fastroof.memory.kv_blocks import (
    WindowGroups,
    blocks_of_bytes,
    blocks_of_groups,
    blocks_of_pools,
    held_layers,
)
from fastroof.memory.kv_room import Footprint, left_for_kv
from fastroof.memory.workspaces import (
    CacheFormat,
    cache_format,
    copied_bytes,
    model_kv_bytes,
    padded_bytes,
    workspace,
)
from fastroof.models import Layout, ModelSpec
from fastroof.models.execution import Execution, weight_bytes
from fastroof.models.latent import LatentAttention
from fastroof.models.sparse import SparseLatentAttention
from fastroof.models.spec import adapter_buffers, stages_of
from fastroof.run.batch import int_array
from fastroof.units import ACTIVATION_BYTES


class Drafts(NamedTuple):
    """A draft that shares the memory of a model: its layers, its weights, and the tokens it drafts."""

    models: tuple[tuple[ModelSpec, Layout, str], ...] = ()
    weight_bytes: int = 0
    tokens: int = 0


NO_DRAFTS: Final = Drafts()

_OF_PARTS: Final = (
    "parts", "part_bytes", "parts_per_block", "full_parts", "window_parts", "state_parts", "spare_parts",
    "windows", "in_flight", "checked_bytes", "prints_shares", "null_parts",
)  # fmt: skip
"""Attributes of a memory that count parts, in which no engine prints anything."""


class MemoryUse(NamedTuple):
    """Limits and settings of an engine that its memory depends on."""

    max_tokens: int
    max_seqs: int = 1024
    has_max_seqs: bool = True
    """Whether the user set it."""
    prefix_caching: bool | None = None
    """Whether states are cached with prefixes; None for the engine's default."""
    drafts: Drafts = NO_DRAFTS
    max_model_len: int | None = None
    """Tokens of the longest sequence; None for the model's."""


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
        return _most(self.holds, MAX_KV_LEN)

    def largest_length(self, sequences: int = 1) -> int:
        """Return the longest length of which some sequences run at once; 0 if none do."""
        return int(longest_held(self.kv_room, sequences))

    def most_running(self, max_seqs: float) -> float:
        """Return how many requests run at most, with an engine's maximum of them."""
        return min(max_seqs, self.max_running) if self.max_running else max_seqs

    def max_sequences(self, kv_len: Any) -> Any:
        """Return how many sequences of a length fit."""
        fit = self.parts // np.maximum(self.parts_per_request(kv_len), 1)
        if self.max_running:
            fit = np.minimum(fit, self.max_running)
        return fit if np.ndim(fit) else int(fit)


def _most(holds: Callable[[int], bool], most: int) -> int:
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


def plan_memory(
    model: ModelSpec,
    layout: Layout,
    gpu: GpuSpec,
    execution: Execution,
    use: MemoryUse,
    *,
    stage: int | None = None,
    rule: KvMemory = DATASHEET_MEMORY,
) -> PlanMemory:
    """Return the memory of one GPU, in the pipeline stage with the least room."""
    rule = rule.of_model(model.architecture, is_dense=model.is_dense)
    if stage is not None or layout.pp == 1:
        return _gpu_memory(model, layout, gpu, execution, use, stage or 0, rule)
    parts = [
        _gpu_memory(one.model(model), layout, gpu, execution, use, one.number, rule)
        for one in stages_of(model, layout.pp)
    ]
    return _fullest(parts)


def most_that_start(memory: Callable[[int], PlanMemory], most: int, kv_len: int = 1) -> int:
    """Return the most requests, up to ``most``, with which an engine starts; 0 if it does with none.

    Each of them needs a block of states, and one request of ``kv_len`` tokens must fit.
    """

    def starts(seqs: int) -> bool:
        found = memory(seqs)
        return found.parts >= (seqs if found.state_parts else 1) and found.holds(kv_len)

    return _most(starts, most)


def longest_that_starts(memory: Callable[[int], PlanMemory], most: int) -> int:
    """Return the longest context, up to ``most``, with which an engine starts; 0 if with none.

    The room depends on it: workspaces grow with the longest context.
    """
    found = memory(most)
    if found.holds(most):
        return most
    if not found.workspace_bytes:
        return min(found.largest_context(), most)
    return _most(lambda length: memory(length).holds(length), most)


def _fullest(parts: list[PlanMemory]) -> PlanMemory:
    """Memory of the pipeline stage with room for the fewest tokens."""

    def tokens(part: PlanMemory) -> float:
        return part.max_kv_tokens if part.token_parts or not part.parts else math.inf

    least = min(parts, key=lambda part: (tokens(part), -part.weight_bytes))
    room = least.parts * least.part_bytes
    states = [
        -(-part.state_bytes_per_sequence * room // (part.parts * part.part_bytes))
        for part in parts
        if part.parts
    ]
    shares = [-(-part.state_parts * least.parts // part.parts) for part in parts if part.parts]
    running = [part.max_running for part in parts if part.max_running]
    return least._replace(
        state_bytes_per_sequence=max([least.state_bytes_per_sequence, *states]),
        state_parts=max([least.state_parts, *shares]),
        max_running=min(running, default=0),
    )


def _gpu_memory(
    model: ModelSpec,
    layout: Layout,
    gpu: GpuSpec,
    execution: Execution,
    use: MemoryUse,
    stage: int,
    rule: KvMemory,
) -> PlanMemory:
    """Memory of one stage's GPU."""
    hidden = model.hidden
    is_first, is_last = stage == 0, stage == layout.pp - 1
    vocab_rows = model.padded_vocab(layout.tp) // layout.tp
    linear_bytes = model.sum_layers(lambda kind: kind.weight_bytes(hidden, layout, execution))
    is_tied = model.tie_embeddings and execution.head_dtype == "bf16"
    other = hidden if is_last else 0
    if is_first:
        is_copied = execution.exchange.copies_embedding and layout.dp > 1
        other += (model.padded_vocab(1) if is_copied else vocab_rows) * hidden
    if is_last and not (is_tied and is_first):
        linear_bytes += weight_bytes({"lm_head": vocab_rows * hidden}, execution.of_head())
    other += int(model.sum_layers(lambda kind: kind.other_weights(hidden, layout)))
    held_bytes = int(linear_bytes) + other * ACTIVATION_BYTES + use.drafts.weight_bytes
    widest = max(kind.activation_width(hidden, layout) for kind in model.kinds)
    activation_bytes = use.max_tokens * (2 * hidden * model.residual_rows + widest) * ACTIVATION_BYTES
    stored = cache_format(rule, gpu, model.architecture, execution.kv_dtype)
    sparse = workspace(
        rule,
        gpu,
        model,
        layout,
        stored,
        tokens=use.max_tokens,
        requests=use.max_seqs * (1 + use.drafts.tokens),
        length=use.max_model_len or model.max_position,
    )
    seqs = rule.seqs(gpu.name, gpu.hbm_bytes, use.max_seqs)
    logits = seqs * model.padded_vocab(1) if is_last else 0
    expert_format, tower = execution.dtype if model.has_experts else "", model.vision
    tower_size = (0, 0) if tower is None else tower.size
    if is_first and tower is not None and rule.room != "datasheet":
        held_bytes += tower.weights(layout.tp) * ACTIVATION_BYTES
    held_bytes += copied_bytes(model, layout) if rule.latent_copies else 0
    held_bytes += padded_bytes(rule, gpu, model, layout, execution)
    adapters = adapter_buffers(model, layout, execution, is_first=is_first, is_last=is_last)
    kinds = {"sparse"} if model.has_sparse_attention else set()
    if model.has_compressed_attention:
        kinds.add("compressed")
    elif any(kind.state_bytes(layout) for kind in model.kinds):
        kinds.add("states")
    is_latent = any(
        isinstance(kind.attention, LatentAttention | SparseLatentAttention) for kind in model.kinds
    )
    held = Footprint(
        held_bytes + adapters,
        activation_bytes,
        logits,
        ModelKind(model.architecture, expert_format, frozenset(kinds), is_latent),
        execution.exchange.alltoall != "never",
        tower_size,
        sparse.buffer_bytes,
        sparse.peak_bytes,
    )
    left = left_for_kv(rule, gpu, layout, held, use.max_tokens)
    uses = left._asdict()
    left_bytes = uses.pop("left_bytes")
    memory = PlanMemory(
        weight_bytes=held_bytes,
        kv_bytes_per_token=0,
        max_kv_tokens=0,
        window=model.window or 0,
        adapter_bytes=adapters,
        **uses,
    )
    drafts = (
        (one, own, cache_format(rule, gpu, one.architecture, kv_dtype))
        for one, own, kv_dtype in use.drafts.models
    )
    return _with_blocks(memory, left_bytes, ((model, layout, stored), *drafts), gpu, rule, use)


def _with_blocks(
    memory: PlanMemory,
    left_bytes: int,
    models: tuple[tuple[ModelSpec, Layout, CacheFormat], ...],
    gpu: GpuSpec,
    rule: KvMemory,
    use: MemoryUse,
) -> PlanMemory:
    """Divide what is left into blocks of a model, the first, and its drafts."""
    model, ranks = models[0][0], models[0][1].dp
    memory = memory._replace(
        kv_bytes_per_token=sum(model_kv_bytes(*of) for of in models),
        # a draft's other window counts as no window
        window_kv_bytes_per_token=sum(
            model_kv_bytes(*of, windowed=True) for of in models if (of[0].window or 0) == memory.window
        ),
        state_bytes_per_sequence=sum(one.state_bytes(layout) for one, layout, _ in models),
    )
    drafts = use.drafts.tokens
    held = held_layers(models)
    is_cached = use.prefix_caching
    if is_cached is None:
        is_cached = rule.caches_prefixes and bool(held.full or held.windowed)
    slots = rule.cached_state_slots if is_cached or drafts else rule.state_slots
    buffers = first_row(rule.state_buffers, gpu, model.architecture)
    if buffers is not None and not drafts:
        slots = round(buffers.slots)
    pool, state_slots, missing, limits = 0, 0, 0, []
    left = max(left_bytes, 0)
    if rule.kv_cache == "groups":
        tokens = use.max_tokens * rule.step_batches
        block = blocks_of_groups(held, rule, gpu, tokens, slots + drafts * rule.draft_slots)
    elif rule.kv_cache == "pools":
        # compressors of DeepSeek-V4 are in its pools of tokens
        state = 0 if held.rings else int(sum(one * count for one, count in held.states.items()))
        if state and rule.state_pool:
            pool = int(left * rule.state_pool / (1 + rule.state_pool))
            share = 1 + drafts / slots if rule.draft_share else 1.0
            state_slots = max(int(pool / (state * share)) - rule.padding_slots, 0)
            limits.append(state_slots // slots)
            missing = max(slots - state_slots, 0) * state
        block = blocks_of_pools(held, rule)
    else:
        block = blocks_of_bytes(held, rule)
    parts = (left - pool) // block.part_bytes
    if block.full_parts and rule.kv_cache != "groups":
        # in whole blocks of tokens
        per_block = block.full_parts + block.window_parts
        parts = parts // per_block * per_block
    if missing:
        # no request runs
        parts = 0
    result = memory._replace(
        kv_cache_bytes=left - pool,
        missing_bytes=max(block.part_bytes - left_bytes, missing, 0) if parts < 1 else 0,
        parts=parts,
        state_pool_bytes=pool,
        state_slots=state_slots,
        null_parts=int(rule.null_block),
        **block._asdict(),
    )
    result = result._replace(max_kv_tokens=result.tokens_beside_states(0))
    if rule.running is not None and result.token_parts:
        running = rule.running
        if use.has_max_seqs:
            limits.append(max(result.max_kv_tokens // running.tokens_per_seq, 1))
        else:
            limits.append(running.seqs(result.max_kv_tokens, model.max_position, ranks, drafts))
    return result._replace(max_running=min(limits, default=0))
