"""Llama, Mistral, Ministral, Phi, Qwen 2 and 3, Seed-OSS, MiMo-7B, GLM-4, Command: attention and a gated MLP.

Attention and MLP of Command R, R7B and A read one norm, and one sum over GPUs serves both. Muse Glimmer has
norms before and after each block, and a gate on the output of attention, whose projection is timed as a part
of that to queries, keys and values; its layers with a window rotate queries and keys, full ones do not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from fastroof.errors import UnsupportedModelError
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.families.family import Family, head_sizes, layer_kinds, layer_windows, windows_by_turns
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import GatedMlp

QWEN3_HEAD_DIM: Final = 128
"""Head width of a Qwen3 file without ``head_dim``."""

_MINISTRAL_HEAD_DIM: Final = 128
_SEED_HEAD_DIM: Final = 128

# Defaults of transformers for mistral and qwen without sliding_window or max_window_layers.
_DEFAULT_WINDOW: Final = 4096
_DEFAULT_FULL_LAYERS: Final = 28


def qwen_windows(fields: Fields) -> list[int | None]:
    """Return the windows of all layers: off by default, and never in the first ``max_window_layers``."""
    full_layers = fields.count("max_window_layers", _DEFAULT_FULL_LAYERS)
    window = _window(fields)
    if not fields.flag("use_sliding_window", default=False):
        window = None
    return layer_windows(fields, window, full_layers)


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
    post_norm: bool = False,
) -> list[LayerKind]:
    heads = head_sizes(fields, missing_head_dim=missing_head_dim, missing_means_all=missing_means_all)
    mlp = GatedMlp(fields.size("intermediate_size"), mlp_bias, post_norm)
    attention = {
        window: GroupedQueryAttention(*heads, qkv_bias, o_bias, qk_norm, window, post_norm=post_norm)
        for window in dict.fromkeys(windows)
    }
    return layer_kinds((attention[window], mlp) for window in windows)


def _llama(fields: Fields) -> list[LayerKind]:
    # InternLM3 has bias for both, and qkv_bias for the first alone
    bias = fields.flag("attention_bias", default=fields.flag("bias", default=False))
    qkv_bias = fields.flag("qkv_bias", default=bias)
    windows = layer_windows(fields, fields.optional_size("sliding_window"))
    mlp_bias = fields.flag("mlp_bias", default=False)
    return _layers(fields, windows, qkv_bias=qkv_bias, o_bias=bias, mlp_bias=mlp_bias, missing_means_all=True)


def _mistral(fields: Fields) -> list[LayerKind]:
    bias = fields.flag("attention_bias", default=False)
    windows = layer_windows(fields, _window(fields))
    mlp_bias = fields.flag("mlp_bias", default=False)
    return _layers(fields, windows, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def _ministral3(fields: Fields) -> list[LayerKind]:
    windows = layer_windows(fields, fields.optional_size("sliding_window"))
    return _layers(fields, windows, qkv_bias=False, o_bias=False, missing_head_dim=_MINISTRAL_HEAD_DIM)


def _phi3(fields: Fields) -> list[LayerKind]:
    windows = layer_windows(fields, fields.optional_size("sliding_window"))
    return _layers(fields, windows, qkv_bias=False, o_bias=False, missing_means_all=True)


def _seed_oss(fields: Fields) -> list[LayerKind]:
    return _layers(
        fields,
        [None] * fields.num_layers,
        qkv_bias=fields.flag("attention_bias", default=True),
        o_bias=fields.flag("attention_out_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        missing_head_dim=_SEED_HEAD_DIM,
        missing_means_all=True,
    )


def _smollm3(fields: Fields) -> list[LayerKind]:
    """Return Llama's layers; some do not rotate queries and keys."""
    num_layers, every = fields.num_layers, fields.size_or("no_rope_layer_interval", 4)
    rotate = fields.of_layers("no_rope_layers", fields.numbers("no_rope_layers"), num_layers)
    rotate = rotate or [int((layer + 1) % every != 0) for layer in range(num_layers)]
    kinds = _llama(fields.with_defaults({"num_key_value_heads": 4}))

    def unrotated(kind: LayerKind) -> LayerKind:
        attention: Any = kind.attention
        return replace(kind, attention=replace(attention, rope=False), name=f"{kind.name} unrotated")

    unrotated_kinds = {kind: unrotated(kind) for kind in dict.fromkeys(kinds)}
    return [kind if rotates else unrotated_kinds[kind] for kind, rotates in zip(kinds, rotate, strict=True)]


def _glm4(fields: Fields) -> list[LayerKind]:
    bias = fields.flag("attention_bias", default=False)
    return _layers(fields, [None] * fields.num_layers, qkv_bias=bias, o_bias=False, post_norm=True)


def _qwen2(fields: Fields) -> list[LayerKind]:
    windows = qwen_windows(fields)
    bias, mlp_bias = fields.flag("attention_bias", default=True), fields.flag("mlp_bias", default=False)
    return _layers(fields, windows, qkv_bias=bias, o_bias=False, mlp_bias=mlp_bias)


def _qwen3(fields: Fields) -> list[LayerKind]:
    windows = qwen_windows(fields)
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


_COHERE_EVERY: Final = 4
_COHERE_WINDOW: Final = 4096


def _cohere_layers(fields: Fields, windows: list[int | None], *, full_has_rope: bool) -> list[LayerKind]:
    if fields.flag("use_qk_norm", default=False):
        raise UnsupportedModelError(
            f"{fields.where}: use_qk_norm true has a norm with weights of each head, which no plan has yet"
        )
    heads = head_sizes(fields, missing_means_all=True)
    bias = fields.flag("attention_bias", default=False)
    mlp = GatedMlp(fields.size("intermediate_size"), parallel=True)
    return layer_kinds(
        (
            GroupedQueryAttention(
                *heads, bias, bias, window=window, sums_over_gpus=False,
                rope=full_has_rope or window is not None,
            ),
            mlp,
        )
        for window in windows
    )  # fmt: skip


def _cohere(fields: Fields) -> list[LayerKind]:
    return _cohere_layers(fields, [None] * fields.num_layers, full_has_rope=True)


def _cohere2(fields: Fields) -> list[LayerKind]:
    every = fields.size_or("sliding_window_pattern", _COHERE_EVERY)
    windows = windows_by_turns(fields, fields.size_or("sliding_window", _COHERE_WINDOW), every)
    return _cohere_layers(fields, windows, full_has_rope=False)


def _muse(fields: Fields) -> list[LayerKind]:
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
        "llama",
        {
            "llama": ("LlamaForCausalLM", "LLaMAForCausalLM"),
            "internlm2": ("InternLM2ForCausalLM",),
            "internlm3": ("InternLM3ForCausalLM",),
            "iquestcoder": ("IQuestCoderForCausalLM",),
            "minicpm": ("MiniCPMForCausalLM",),
            "telechat3": ("TeleChat3ForCausalLM",),
        },
        _llama,
    ),
    Family("mistral", {"mistral": ("MistralForCausalLM",)}, _mistral),
    Family("ministral3", {"ministral3": ("Ministral3ForCausalLM",)}, _ministral3),
    Family("phi3", {"phi3": ("Phi3ForCausalLM",)}, _phi3),
    Family("smollm3", {"smollm3": ("SmolLM3ForCausalLM",)}, _smollm3, tie_embeddings=True),
    Family("glm4", {"glm4": ("Glm4ForCausalLM",), "glm4v_text": ("Glm4vTextModel",)}, _glm4),
    Family("seed-oss", {"seed_oss": ("SeedOssForCausalLM",)}, _seed_oss),
    Family(
        "qwen2",
        {
            "qwen2": ("Qwen2ForCausalLM",),
            "qwen2_vl": ("Qwen2VLForConditionalGeneration",),
            "qwen2_vl_text": ("Qwen2VLTextModel",),
            "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration",),
            "qwen2_5_vl_text": ("Qwen2_5_VLTextModel",),
        },
        _qwen2,
        flat_wrappers=("qwen2_vl", "qwen2_5_vl"),
    ),
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
    Family("cohere", {"cohere": ("CohereForCausalLM",)}, _cohere, tie_embeddings=True),
    Family("cohere2", {"cohere2": ("Cohere2ForCausalLM",)}, _cohere2, tie_embeddings=True),
    Family(
        "muse-glimmer",
        {
            "muse_glimmer": ("MuseGlimmerForConditionalGeneration",),
            "muse_glimmer_text": ("MuseGlimmerForCausalLM",),
        },
        _muse,
    ),
)
