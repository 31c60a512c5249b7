"""Phi 3, 3.5 and 4: the layers of Llama, all of them windowed in some models."""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.families.family import Family, head_dim, kv_heads, layer_kinds, layer_windows
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import GatedMlp


def _layers(fields: Fields) -> list[LayerKind]:
    hidden, num_q_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    num_kv_heads = kv_heads(fields, num_q_heads, missing_means_all=True)
    width = head_dim(fields, hidden, num_q_heads)
    mlp = GatedMlp(fields.size("intermediate_size"))
    windows = layer_windows(fields, fields.num_layers, fields.optional_size("sliding_window"))
    return layer_kinds(
        (GroupedQueryAttention(num_q_heads, num_kv_heads, width, window=window), mlp) for window in windows
    )


FAMILIES: Final = (Family("phi3", {"phi3": ("Phi3ForCausalLM",)}, _layers),)
