"""What a plan holds in one GPU's memory, and how many KV tokens are left room for."""

from __future__ import annotations

from typing import NamedTuple

from fastroof.config import GpuSpec
from fastroof.models import Layout, ModelSpec
from fastroof.models.execution import Execution, weight_bytes
from fastroof.units import ACTIVATION_BYTES

__all__ = ["MEMORY_SHARE", "PlanMemory", "plan_memory"]

MEMORY_SHARE = 0.9
"""Share of the GPU's memory that serving engines use by default; the rest is the driver's and theirs."""


class PlanMemory(NamedTuple):
    """One GPU's memory, in bytes.

    Attributes
    ----------
    weight_bytes : int
        Linear layers and experts in their formats, with their scales; embedding, norms and biases in bf16,
        as nearly every LM head.
    kv_bytes_per_token : int
        KV cache of one token over all layers.
    activation_bytes : int
        Working set of a step of max_tokens: the widest layer's inputs and outputs, and the residual.
    reserve_bytes : int
        What is left untouched: a tenth of the GPU's memory.
    max_kv_tokens : int
        Tokens that fit beside all that; 0 where the weights alone do not fit.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    activation_bytes: int
    reserve_bytes: int
    max_kv_tokens: int


def plan_memory(
    model: ModelSpec, layout: Layout, gpu: GpuSpec, execution: Execution, max_tokens: int
) -> PlanMemory:
    """Work out :class:`PlanMemory` of one GPU's share of a model."""
    hidden = model.hidden
    vocab_rows = model.padded_vocab(layout.tp) // layout.tp
    linear_bytes = model.sum_layers(lambda kind: kind.weight_bytes(hidden, layout, execution))
    other = vocab_rows * hidden + hidden
    if not model.tie_embeddings or execution.head_dtype != "bf16":
        linear_bytes += weight_bytes({"lm_head": vocab_rows * hidden}, execution.of_head())
    other += int(model.sum_layers(lambda kind: kind.other_weights(hidden, layout)))
    held_bytes = int(linear_bytes) + other * ACTIVATION_BYTES
    kv_bytes = model.kv_bytes_per_token(layout, execution.kv_dtype)
    widest = max(kind.activation_width(hidden, layout) for kind in model.kinds)
    activation_bytes = max_tokens * (2 * hidden + widest) * ACTIVATION_BYTES
    usable = int(gpu.hbm_bytes * MEMORY_SHARE)
    room = max(0, usable - held_bytes - activation_bytes)
    return PlanMemory(held_bytes, kv_bytes, activation_bytes, gpu.hbm_bytes - usable, room // kv_bytes)
