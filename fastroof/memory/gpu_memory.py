"""The memory of one GPU of a plan, from its model, layout, engine and card."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from fastroof.config import GpuSpec
from fastroof.engines import KvMemory
from fastroof.engines.memory import DATASHEET_MEMORY, ModelKind
from fastroof.engines.memory_by_card import first_row
from fastroof.memory.kv_blocks import (
    blocks_of_bytes,
    blocks_of_groups,
    blocks_of_pools,
    held_layers,
)
from fastroof.memory.kv_room import Footprint, left_for_kv
from fastroof.memory.plan_memory import PlanMemory, most_that_holds
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
from fastroof.units import ACTIVATION_BYTES


class Drafts(NamedTuple):
    """A draft that shares the memory of a model: its layers, its weights, and the tokens it drafts."""

    models: tuple[tuple[ModelSpec, Layout, str], ...] = ()
    weight_bytes: int = 0
    tokens: int = 0


NO_DRAFTS: Final = Drafts()


class MemoryUse(NamedTuple):
    """Limits and settings of an engine that its memory depends on."""

    max_num_batched_tokens: int
    max_num_seqs: int = 1024
    has_max_num_seqs: bool = True
    """Whether the user set it."""
    prefix_caching: bool | None = None
    """Whether states are cached with prefixes; None for the engine's default."""
    drafts: Drafts = NO_DRAFTS
    max_model_len: int | None = None
    """Tokens of the longest sequence; None for the model's."""


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

    return most_that_holds(starts, most)


def longest_that_starts(memory: Callable[[int], PlanMemory], most: int) -> int:
    """Return the longest context, up to ``most``, with which an engine starts; 0 if with none.

    The room depends on it: workspaces grow with the longest context.
    """
    found = memory(most)
    if found.holds(most):
        return most
    if not found.workspace_bytes:
        return min(found.largest_context(), most)
    return most_that_holds(lambda length: memory(length).holds(length), most)


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
    row_bytes = (2 * hidden * model.residual_rows + widest) * ACTIVATION_BYTES
    activation_bytes = use.max_num_batched_tokens * row_bytes
    stored = cache_format(rule, gpu, model.architecture, execution.kv_dtype)
    sparse = workspace(
        rule,
        gpu,
        model,
        layout,
        stored,
        tokens=use.max_num_batched_tokens,
        requests=use.max_num_seqs * (1 + use.drafts.tokens),
        length=use.max_model_len or model.max_position,
    )
    seqs = rule.seqs(gpu.name, gpu.hbm_bytes, use.max_num_seqs)
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
    left = left_for_kv(rule, gpu, layout, held, use.max_num_batched_tokens)
    memory = left._replace(weight_bytes=held_bytes, window=model.window or 0, adapter_bytes=adapters)
    drafts = (
        (one, own, cache_format(rule, gpu, one.architecture, kv_dtype))
        for one, own, kv_dtype in use.drafts.models
    )
    return _with_blocks(memory, ((model, layout, stored), *drafts), gpu, rule, use)


def _with_blocks(
    memory: PlanMemory,
    models: tuple[tuple[ModelSpec, Layout, CacheFormat], ...],
    gpu: GpuSpec,
    rule: KvMemory,
    use: MemoryUse,
) -> PlanMemory:
    """Divide what is left into blocks of a model, the first, and its drafts."""
    model, ranks, left_bytes = models[0][0], models[0][1].dp, memory.kv_cache_bytes
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
        tokens = use.max_num_batched_tokens * rule.step_batches
        block = blocks_of_groups(memory, held, rule, gpu, tokens, slots + drafts * rule.draft_slots)
    elif rule.kv_cache == "pools":
        # compressors of DeepSeek-V4 are in its pools of tokens
        state = 0 if held.rings else int(sum(one * count for one, count in held.states.items()))
        if state and rule.state_pool:
            pool = int(left * rule.state_pool / (1 + rule.state_pool))
            share = 1 + drafts / slots if rule.draft_share else 1.0
            state_slots = max(int(pool / (state * share)) - rule.padding_slots, 0)
            limits.append(state_slots // slots)
            missing = max(slots - state_slots, 0) * state
        block = blocks_of_pools(memory, held, rule)
    else:
        block = blocks_of_bytes(memory, held, rule)
    parts = (left - pool) // block.part_bytes
    if block.full_parts and rule.kv_cache != "groups":
        # in whole blocks of tokens
        per_block = block.full_parts + block.window_parts
        parts = parts // per_block * per_block
    if missing:
        # no request runs
        parts = 0
    result = block._replace(
        kv_cache_bytes=left - pool,
        missing_bytes=max(block.part_bytes - left_bytes, missing, 0) if parts < 1 else 0,
        parts=parts,
        state_pool_bytes=pool,
        state_slots=state_slots,
        null_parts=int(rule.null_block),
    )
    result = result._replace(max_kv_tokens=result.tokens_beside_states(0))
    if rule.running is not None and result.token_parts:
        running = rule.running
        if use.has_max_num_seqs:
            limits.append(max(result.max_kv_tokens // running.tokens_per_seq, 1))
        else:
            limits.append(running.seqs(result.max_kv_tokens, model.max_position, ranks, drafts))
    return result._replace(max_running=min(limits, default=0))
