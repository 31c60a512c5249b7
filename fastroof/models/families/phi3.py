"""Phi 3, 3.5 and 4: the layers of Llama, all of them windowed in some models."""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.families.family import Family, head_sizes, layer_kinds, layer_windows
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import GatedMlp


def _layers(fields: Fields) -> list[LayerKind]:
    heads = head_sizes(fields, missing_means_all=True)
    mlp = GatedMlp(fields.size("intermediate_size"))
    windows = layer_windows(fields, fields.num_layers, fields.optional_size("sliding_window"))
    return layer_kinds((GroupedQueryAttention(*heads, window=window), mlp) for window in windows)


FAMILIES: Final = (Family("phi3", {"phi3": ("Phi3ForCausalLM",)}, _layers),)
