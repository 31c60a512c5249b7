"""Gemma 1 to 3: tied embeddings; from 2 on also norms after each block, and windows in most layers."""

from __future__ import annotations

from typing import Any, Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.families.family import Family, kv_heads, layer_kinds, windows_by_turns
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import GatedMlp

_HEAD_DIM: Final = 256
_WINDOW: Final = 4096
# Published wrappers of Gemma 3 omit values that are defaults in transformers.
_GEMMA3_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window": _WINDOW,
}


def _layers(
    fields: Fields, windows: list[int | None], *, has_post_norms: bool, qk_norm: bool = False
) -> list[LayerKind]:
    num_q_heads = fields.size("num_attention_heads")
    num_kv_heads, width = kv_heads(fields, num_q_heads), fields.size_or("head_dim", _HEAD_DIM)
    bias = fields.flag("attention_bias", default=False)
    mlp = GatedMlp(fields.size("intermediate_size"), post_norm=has_post_norms)
    return layer_kinds(
        (
            GroupedQueryAttention(
                num_q_heads, num_kv_heads, width, bias, bias, qk_norm, window, post_norm=has_post_norms
            ),
            mlp,
        )
        for window in windows
    )


def _gemma(fields: Fields) -> list[LayerKind]:
    return _layers(fields, [None] * fields.num_layers, has_post_norms=False)


def _gemma2(fields: Fields) -> list[LayerKind]:
    return _layers(fields, _windows(fields, 2), has_post_norms=True)


def _gemma3(fields: Fields) -> list[LayerKind]:
    every = fields.size_or("sliding_window_pattern", fields.size_or("_sliding_window_pattern", 6))
    return _layers(fields, _windows(fields, every), has_post_norms=True, qk_norm=True)


def _windows(fields: Fields, every: int) -> list[int | None]:
    return windows_by_turns(fields, fields.size_or("sliding_window", _WINDOW), every)


FAMILIES: Final = (
    Family("gemma", {"gemma": ("GemmaForCausalLM",)}, _gemma, tie_embeddings=True),
    Family("gemma2", {"gemma2": ("Gemma2ForCausalLM",)}, _gemma2, tie_embeddings=True),
    Family(
        "gemma3",
        {"gemma3": ("Gemma3ForConditionalGeneration",), "gemma3_text": ("Gemma3ForCausalLM",)},
        _gemma3,
        tie_embeddings=True,
        defaults=_GEMMA3_DEFAULTS,
    ),
)
