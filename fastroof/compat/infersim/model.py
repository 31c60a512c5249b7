"""What InferSim reads from a Hugging Face config.json, and what it leaves unread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastroof.checks import shown
from fastroof.errors import ModelError
from fastroof.models.hf import Fields

__all__ = ["GatedDeltaNet", "InfersimModel", "LatentAttention", "read_model"]

NESTED_TYPES: Final = ("qwen3_5", "qwen3_5_moe")
"""Model types whose language model is under ``text_config``."""


@dataclass(frozen=True)
class LatentAttention:
    """Widths of multi-head latent attention (MLA)."""

    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class GatedDeltaNet:
    """The linear-attention layers of a hybrid model; they are not split by tensor parallelism."""

    num_layers: int
    conv_kernel: int
    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int

    @property
    def key_width(self) -> int:
        """Width of all keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Width of all values."""
        return self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class InfersimModel:
    """A model as InferSim sees it."""

    hidden: int
    num_layers: int
    full_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    moe: bool
    num_experts: int
    num_shared_experts: int
    topk: int
    intermediate: int
    mla: LatentAttention | None
    gdn: GatedDeltaNet | None


def read_model(config: Mapping[str, Any]) -> InfersimModel:
    """Read a config.json as InferSim does."""
    if not isinstance(config, Mapping):
        raise ModelError(f"config must be the dict of a Hugging Face config.json, got {shown(config)}")
    if config.get("model_type") in NESTED_TYPES:
        nested = config.get("text_config")
        if not isinstance(nested, Mapping):
            raise ModelError(f"config: field text_config must be an object, got {shown(nested)}")
        config = nested
    fields = Fields(config, "config")
    num_heads = fields.size("num_attention_heads")
    num_layers = fields.size("num_hidden_layers")
    interval = fields.optional_size("full_attention_interval")
    full_layers = num_layers // interval if interval else num_layers
    mla = _latent_attention(fields)
    head_dim = 0 if mla else fields.optional_size("head_dim") or fields.size("hidden_size") // num_heads
    experts = fields.optional_size("num_routed_experts") or fields.optional_size("num_experts")
    has_shared = bool(experts and config.get("num_shared_experts"))
    return InfersimModel(
        hidden=fields.size("hidden_size"),
        num_layers=num_layers,
        full_layers=full_layers,
        num_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads"),
        head_dim=head_dim,
        moe=bool(experts),
        num_experts=experts or 1,
        num_shared_experts=fields.size("num_shared_experts") if has_shared else 0,
        topk=fields.size("num_experts_per_tok") if experts else 1,
        intermediate=fields.size("moe_intermediate_size" if experts else "intermediate_size"),
        mla=mla,
        gdn=_gated_delta_net(fields, num_layers - full_layers) if interval else None,
    )


def _latent_attention(fields: Fields) -> LatentAttention | None:
    if fields.config.get("kv_lora_rank") is None:
        return None
    return LatentAttention(
        fields.size("q_lora_rank"),
        fields.size("kv_lora_rank"),
        fields.size("qk_nope_head_dim"),
        fields.size("qk_rope_head_dim"),
        fields.size("v_head_dim"),
    )


def _gated_delta_net(fields: Fields, num_layers: int) -> GatedDeltaNet:
    return GatedDeltaNet(
        num_layers,
        fields.size("linear_conv_kernel_dim"),
        fields.size("linear_num_key_heads"),
        fields.size("linear_key_head_dim"),
        fields.size("linear_num_value_heads"),
        fields.size("linear_value_head_dim"),
    )
