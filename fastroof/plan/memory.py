"""What a plan holds in one GPU's memory, and how many KV tokens are left room for."""

from __future__ import annotations

import math

from fastroof.config import GpuSpec
from fastroof.engines import KvMemory
from fastroof.engines.memory import DATASHEET_MEMORY
from fastroof.models import Layout, ModelSpec
from fastroof.models.execution import Execution, weight_bytes
from fastroof.models.stages import stages_of
from fastroof.plan.gpu_memory import PlanMemory
from fastroof.plan.memory_room import left_for_kv
from fastroof.units import ACTIVATION_BYTES

__all__ = ["PlanMemory", "plan_memory", "window_kv_bytes"]


def plan_memory(
    model: ModelSpec,
    layout: Layout,
    gpu: GpuSpec,
    execution: Execution,
    max_tokens: int,
    *,
    stage: int | None = None,
    rule: KvMemory = DATASHEET_MEMORY,
    max_seqs: int = 1024,
) -> PlanMemory:
    """Work out :class:`PlanMemory` of one GPU's share of a model: of the pipeline stage with least room."""
    if stage is not None or layout.pp == 1:
        return _gpu_memory(model, layout, gpu, execution, max_tokens, stage or 0, rule, max_seqs)
    parts = [
        _gpu_memory(one.model(model), layout, gpu, execution, max_tokens, one.number, rule, max_seqs)
        for one in stages_of(model, layout.pp)
    ]
    return _fullest(parts)


def _fullest(parts: list[PlanMemory]) -> PlanMemory:
    """Memory of the pipeline stage that has room for the fewest tokens."""

    def tokens(part: PlanMemory) -> float:
        holds_any = part.kv_bytes_per_token or not part.max_kv_tokens
        return part.max_kv_tokens if holds_any else math.inf

    least = min(parts, key=lambda part: (tokens(part), -part.weight_bytes))
    room = least.max_kv_tokens * least.token_bytes
    rooms = ((part.max_kv_tokens * part.token_bytes, part.state_bytes_per_sequence) for part in parts)
    shares = [-(-held * room // other) for other, held in rooms if other]
    return least._replace(state_bytes_per_sequence=max([least.state_bytes_per_sequence, *shares]))


def _gpu_memory(
    model: ModelSpec,
    layout: Layout,
    gpu: GpuSpec,
    execution: Execution,
    max_tokens: int,
    stage: int,
    rule: KvMemory,
    max_seqs: int,
) -> PlanMemory:
    """Memory of a GPU of one stage."""
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
    held_bytes = int(linear_bytes) + other * ACTIVATION_BYTES
    kv_bytes = model.kv_bytes_per_token(layout, execution.kv_dtype)
    widest = max(kind.activation_width(hidden, layout) for kind in model.kinds)
    activation_bytes = max_tokens * (2 * hidden * model.residual_rows + widest) * ACTIVATION_BYTES
    seqs = rule.seqs(gpu.name, gpu.hbm_bytes, max_seqs)
    logits = seqs * model.padded_vocab(1) if is_last else 0
    left = left_for_kv(rule, gpu, layout, held_bytes, activation_bytes, max_tokens, logits)
    room = left.room_bytes // max(kv_bytes, 1)
    return PlanMemory(
        held_bytes,
        kv_bytes,
        left.activation_bytes,
        left.reserve_bytes,
        room // rule.block_tokens * rule.block_tokens if kv_bytes else room,
        model.window or 0,
        window_kv_bytes(model, layout, execution.kv_dtype),
        model.state_bytes(layout),
        left.context_bytes,
    )


def window_kv_bytes(model: ModelSpec, layout: Layout, kv_dtype: str) -> int:
    """Bytes of ``model.kv_bytes_per_token`` that layers keep within their window alone."""
    return int(
        model.sum_layers(
            lambda kind: kind.kv_bytes_per_token(layout, kv_dtype) if kind.attention.window else 0
        )
    )
