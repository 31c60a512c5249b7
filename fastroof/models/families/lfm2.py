"""LFM2: short convolutions in most layers, attention in the others; dense, or with experts."""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import Attention, GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.family import FULL, Family, head_sizes
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.linear_attention import ShortConvolution
from fastroof.models.mlp import GatedMlp, Mlp

_CONVOLUTION: Final = "conv"
_TAPS: Final = 3
# Defaults of the configuration class: a multiple, and whether two thirds of the given width are meant.
_MULTIPLE: Final = 256


def _mixers(fields: Fields) -> list[Attention]:
    attention = GroupedQueryAttention(*head_sizes(fields), qk_norm=True)
    bias = fields.flag("conv_bias", default=False)
    convolution = ShortConvolution(fields.size("hidden_size"), fields.size_or("conv_L_cache", _TAPS), bias)
    return [attention if kind == FULL else convolution for kind in _kinds(fields)]


def _kinds(fields: Fields) -> list[str]:
    kinds = fields.layer_words("layer_types", (FULL, _CONVOLUTION))
    if kinds is not None:
        return kinds
    # files of LFM2 list the layers with attention
    full = fields.numbers("full_attn_idxs")
    if full is None:
        raise fields.error("field layer_types or full_attn_idxs is missing")
    return [FULL if layer in full else _CONVOLUTION for layer in range(fields.num_layers)]


def _kinds_of(mixers: list[Attention], mlps: list[Mlp]) -> list[LayerKind]:
    def name(mixer: Attention, mlp: Mlp) -> str:
        mixed = "convolution" if isinstance(mixer, ShortConvolution) else "attention"
        return f"{'moe' if mlp.has_experts else 'dense'} {mixed}"

    return [LayerKind(mixer, mlp, name(mixer, mlp)) for mixer, mlp in zip(mixers, mlps, strict=True)]


def _dense(fields: Fields) -> list[LayerKind]:
    width = fields.size("block_ff_dim") if fields.has("block_ff_dim") else fields.size("intermediate_size")
    if fields.flag("block_auto_adjust_ff_dim", default=True):
        scale = fields.config.get("block_ffn_dim_multiplier", 1.0)
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale <= _MULTIPLE:
            raise fields.error(
                f"field block_ffn_dim_multiplier must be a number up to {_MULTIPLE}, got {scale!r}"
            )
        multiple = fields.size_or("block_multiple_of", _MULTIPLE)
        width = max(1, -(-int(scale * (2 * width // 3)) // multiple)) * multiple
    return _kinds_of(_mixers(fields), [GatedMlp(width)] * fields.num_layers)


def _moe(fields: Fields) -> list[LayerKind]:
    experts = RoutedExperts(
        fields.size("num_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("moe_intermediate_size"),
        router_bias=fields.flag("use_expert_bias", default=True),
    )
    first, dense = fields.count("num_dense_layers", 2), GatedMlp(fields.size("intermediate_size"))
    mlps: list[Mlp] = [dense if layer < first else experts for layer in range(fields.num_layers)]
    return _kinds_of(_mixers(fields), mlps)


_MODULES: Final = {
    "o": ("self_attn.out_proj",),
    "state_in": ("conv.in_proj",),
    "state_out": ("conv.out_proj",),
    "gate_up": ("feed_forward.w1", "feed_forward.w3"),
    "down": ("feed_forward.w2",),
}

FAMILIES: Final = (
    Family(
        "lfm2",
        {"lfm2": ("Lfm2ForCausalLM",)},
        _dense,
        tie_embeddings=True,
        reads=("layer_types",),
        module_names=_MODULES,
    ),
    Family(
        "lfm2-moe",
        {"lfm2_moe": ("Lfm2MoeForCausalLM",)},
        _moe,
        tie_embeddings=True,
        reads=("num_experts", "layer_types"),
        module_names=_MODULES,
    ),
)
