"""What a plan holds in one GPU's memory, and how many KV tokens are left room for."""

from __future__ import annotations

from typing import NamedTuple

from fastroof.config import GpuSpec
from fastroof.models import ModelSpec
from fastroof.models.layout import ShardedShape
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES

__all__ = ["MEMORY_SHARE", "PlanMemory", "plan_memory"]

MEMORY_SHARE = 0.9
"""Share of the GPU's memory that serving engines use by default; the rest is the driver's and theirs."""


class PlanMemory(NamedTuple):
    """One GPU's memory, in bytes.

    Attributes
    ----------
    weight_bytes : int
        Linear layers in the plan's dtype; embedding, LM head, norms and biases in bf16.
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
    model: ModelSpec, share: ShardedShape, gpu: GpuSpec, dtype: str, kv_dtype: str, max_tokens: int
) -> PlanMemory:
    """Work out :class:`PlanMemory` of one GPU's share of a model."""
    hidden, layers = model.hidden, model.num_layers
    linear = share.qkv_out * hidden + hidden * share.o_in + 3 * hidden * share.intermediate
    embeddings = share.vocab_rows * hidden * (1 if model.tie_embeddings else 2)
    biases = share.qkv_out * model.qkv_bias + hidden * model.o_bias
    biases += (2 * share.intermediate + hidden) * model.mlp_bias
    norms = layers * (2 * hidden + 2 * model.head_dim * model.qk_norm) + hidden
    small = embeddings + layers * biases + norms
    weight_bytes = int(layers * linear * DTYPE_BYTES[dtype]) + small * ACTIVATION_BYTES
    kv_bytes = int(2 * layers * share.num_kv_heads * model.head_dim * DTYPE_BYTES[kv_dtype])
    widest = max(3 * share.intermediate, share.qkv_out + share.o_in)
    activation_bytes = max_tokens * (2 * hidden + widest) * ACTIVATION_BYTES
    usable = int(gpu.hbm_bytes * MEMORY_SHARE)
    room = max(0, usable - weight_bytes - activation_bytes)
    return PlanMemory(weight_bytes, kv_bytes, activation_bytes, gpu.hbm_bytes - usable, room // kv_bytes)
