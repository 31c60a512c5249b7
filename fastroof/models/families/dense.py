"""Llama, Mistral, Qwen 2 and 3, MiMo-7B: attention, windowed in some, and a gated MLP."""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.families.family import Family, head_dim, kv_heads, layer_kinds, layer_windows
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import GatedMlp

QWEN3_HEAD_DIM: Final = 128
"""Head width of a Qwen3 file without ``head_dim``."""

# Defaults of transformers for mistral and qwen without sliding_window or max_window_layers.
_DEFAULT_WINDOW: Final = 4096
_DEFAULT_FULL_LAYERS: Final = 28


def qwen_windows(fields: Fields, num_layers: int) -> list[int | None]:
    """Return the windows of all layers: off by default, and never in the first ``max_window_layers``."""
    full_layers = fields.count("max_window_layers", _DEFAULT_FULL_LAYERS)
    window = _window(fields)
    if not fields.flag("use_sliding_window", default=False):
        window = None
    return layer_windows(fields, num_layers, window, full_layers)


def _window(fields: Fields) -> int | None:
    window = fields.optional_size("sliding_window")
    return _DEFAULT_WINDOW if "sliding_window" not in fields.config else window


def _layers(
    fields: Fields,
    windows: list[int | None],
    *,
    qkv_bias: bool,
    o_bias: bool,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    missing_head_dim: int | None = None,
    missing_means_all: bool = False,
) -> list[LayerKind]:
    hidden, num_q_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    num_kv_heads = kv_heads(fields, num_q_heads, missing_means_all=missing_means_all)
    width = head_dim(fields, hidden, num_q_heads, missing_head_dim)
    mlp = GatedMlp(fields.size("intermediate_size"), mlp_bias)
    attention = {
        window: GroupedQueryAttention(num_q_heads, num_kv_heads, width, qkv_bias, o_bias, qk_norm, window)
        for window in dict.fromkeys(windows)
    }
    return layer_kinds((attention[window], mlp) for window in windows)


def _llama(fields: Fields) -> list[LayerKind]:
    bias = fields.flag("attention_bias", default=False)
    windows = layer_windows(fields, fields.num_layers, fields.optional_size("sliding_window"))
    mlp_bias = fields.flag("mlp_bias", default=False)
    return _layers(fields, windows, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias, missing_means_all=True)


def _mistral(fields: Fields) -> list[LayerKind]:
    bias = fields.flag("attention_bias", default=False)
    windows = layer_windows(fields, fields.num_layers, _window(fields))
    mlp_bias = fields.flag("mlp_bias", default=False)
    return _layers(fields, windows, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def _qwen2(fields: Fields) -> list[LayerKind]:
    windows = qwen_windows(fields, fields.num_layers)
    bias, mlp_bias = fields.flag("attention_bias", default=True), fields.flag("mlp_bias", default=False)
    return _layers(fields, windows, qkv_bias=bias, o_bias=False, mlp_bias=mlp_bias)


def _qwen3(fields: Fields) -> list[LayerKind]:
    windows = qwen_windows(fields, fields.num_layers)
    bias, mlp_bias = fields.flag("attention_bias", default=False), fields.flag("mlp_bias", default=False)
    return _layers(
        fields,
        windows,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=mlp_bias,
        qk_norm=True,
        missing_head_dim=QWEN3_HEAD_DIM,
    )


FAMILIES: Final = (
    Family("llama", {"llama": ("LlamaForCausalLM",)}, _llama),
    Family("mistral", {"mistral": ("MistralForCausalLM",)}, _mistral),
    Family("qwen2", {"qwen2": ("Qwen2ForCausalLM",)}, _qwen2),
    Family("mimo", {"mimo": ("MiMoForCausalLM",)}, _qwen2),
    Family(
        "qwen3",
        {
            "qwen3": ("Qwen3ForCausalLM",),
            "qwen3_vl": ("Qwen3VLForConditionalGeneration",),
            "qwen3_vl_text": ("Qwen3VLTextModel",),
        },
        _qwen3,
    ),
)
