"""Gemma 1 to 4: tied embeddings; from 2 on also norms after each block, and windows in most layers.

Gemma 4 has wider heads and no value projection in every sixth layer. Some models have experts next to an MLP
that all tokens pass, each with separate norms.
"""

from __future__ import annotations

from typing import Any, Final

from fastroof.errors import UnsupportedModelError
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.family import (
    FULL,
    WINDOWED,
    Family,
    kv_heads,
    layer_kinds,
    layer_windows,
    windows_by_turns,
)
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import GatedMlp, Mlp

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


_GEMMA4_EVERY: Final = 6
_FULL_HEAD_DIM: Final = 512
_GEMMA4_WINDOW: Final = 512

_UNSUPPORTED: Final = {
    "hidden_size_per_layer_input": "embeddings of each layer",
    "num_kv_shared_layers": "layers that share other layers' KV cache",
    "use_double_wide_mlp": "MLPs of twice the width in some layers",
}


def _gemma4(fields: Fields) -> list[LayerKind]:
    missing = [
        f"{what} ({key} {fields.config[key]!r})"
        for key, what in _UNSUPPORTED.items()
        if fields.config.get(key)
    ]
    if missing:
        raise UnsupportedModelError(f"{fields.where}: a plan does not support {', '.join(missing)}")
    num_layers, num_q_heads = fields.num_layers, fields.size("num_attention_heads")
    keys_are_values = fields.flag("attention_k_eq_v", default=False)
    bias = fields.flag("attention_bias", default=False)
    num_kv_heads = kv_heads(fields, num_q_heads)
    num_full_kv_heads = num_kv_heads
    if keys_are_values:
        num_full_kv_heads = fields.size_or("num_global_key_value_heads", num_kv_heads)
    width, full_width = (
        fields.size_or("head_dim", _HEAD_DIM),
        fields.size_or("global_head_dim", _FULL_HEAD_DIM),
    )

    def attention(window: int | None, is_full: bool) -> GroupedQueryAttention:
        return GroupedQueryAttention(
            num_q_heads,
            num_full_kv_heads if is_full else num_kv_heads,
            full_width if is_full else width,
            bias,
            bias,
            qk_norm=True,
            window=window,
            has_values=not (is_full and keys_are_values),
            v_norm=True,
            post_norm=True,
        )

    last = num_layers - 1
    pattern = [FULL if (i + 1) % _GEMMA4_EVERY == 0 or i == last else WINDOWED for i in range(num_layers)]
    fields = fields.with_defaults({"layer_types": pattern})
    windows = layer_windows(fields, fields.size_or("sliding_window", _GEMMA4_WINDOW))
    # a window that covers the longest context has no effect; its layer keeps the windowed head sizes
    is_full = [kind == FULL for kind in fields.texts("layer_types") or pattern]
    mlp = _mlp(fields)
    return layer_kinds((attention(*layer), mlp) for layer in zip(windows, is_full, strict=True))


def _mlp(fields: Fields) -> Mlp:
    if not fields.flag("enable_moe_block", default=False):
        return GatedMlp(fields.size("intermediate_size"), post_norm=True)
    return RoutedExperts(
        fields.size("num_experts"),
        fields.size("top_k_experts"),
        fields.size("moe_intermediate_size", "expert_intermediate_size"),
        fields.size("intermediate_size"),
        router_bias=True,
        apart=True,
    )


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
    Family(
        "gemma4",
        {"gemma4": ("Gemma4ForConditionalGeneration",), "gemma4_text": ("Gemma4ForCausalLM",)},
        _gemma4,
        tie_embeddings=True,
        reads=("num_experts",),
        module_names={
            "experts": (
                "experts",
                "moe.experts",
                *(f"experts.0.{name}_proj" for name in ("gate", "up", "down")),
            ),
            "shared_gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "shared_down": ("mlp.down_proj",),
        },
    ),
)
