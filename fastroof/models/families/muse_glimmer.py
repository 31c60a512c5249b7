"""Muse Glimmer: norms before and after each block, and a gate on the output of attention.

Layers with a window rotate queries and keys; full ones do not. The gate's projection is timed as a part of
that to queries, keys and values.
"""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.families.family import Family, head_sizes, layer_kinds, layer_windows
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import GatedMlp


def _layers(fields: Fields) -> list[LayerKind]:
    heads = head_sizes(fields)
    mlp = GatedMlp(fields.size("intermediate_size"), post_norm=True)
    windows = layer_windows(fields, fields.optional_size("sliding_window"))
    return layer_kinds(
        (
            GroupedQueryAttention(
                *heads, qk_norm=True, window=window, qk_norm_weights=False,
                rope=window is not None, output_gate=True, post_norm=True,
            ),
            mlp,
        )
        for window in windows
    )  # fmt: skip


FAMILIES: Final = (
    Family(
        "muse-glimmer",
        {
            "muse_glimmer": ("MuseGlimmerForConditionalGeneration",),
            "muse_glimmer_text": ("MuseGlimmerForCausalLM",),
        },
        _layers,
    ),
)
