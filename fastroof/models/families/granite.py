"""Granite 3 and 4: dense, with experts, or with Mamba-2 instead of attention in most layers."""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import Attention, GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.bamba import MAMBA_MODULES, mamba_2
from fastroof.models.families.family import Family, head_sizes, layer_kinds
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import GatedMlp, Mlp

_ATTENTION: Final = "attention"
_MAMBA: Final = "mamba"
_SHARED_UP: Final = ("shared_mlp.input_linear",)
_SHARED_DOWN: Final = ("shared_mlp.output_linear",)
_EXPERTS: Final = {
    "experts": ("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
    "shared_gate_up": _SHARED_UP,
    "shared_down": _SHARED_DOWN,
}


def _attention(fields: Fields, *, rope: bool) -> GroupedQueryAttention:
    bias = fields.flag("attention_bias", default=False)
    return GroupedQueryAttention(*head_sizes(fields, missing_means_all=True), bias, bias, rope=rope)


def _experts(fields: Fields) -> RoutedExperts:
    return RoutedExperts(
        fields.size("num_local_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("intermediate_size"),
        fields.count("shared_intermediate_size"),
    )


def _dense(fields: Fields) -> list[LayerKind]:
    mlp = GatedMlp(fields.size("intermediate_size"), fields.flag("mlp_bias", default=False))
    return layer_kinds([(_attention(fields, rope=True), mlp)] * fields.num_layers)


def _moe(fields: Fields) -> list[LayerKind]:
    return layer_kinds([(_attention(fields, rope=True), _experts(fields))] * fields.num_layers)


def _hybrid(fields: Fields) -> list[LayerKind]:
    valid = (_ATTENTION, _MAMBA)
    kinds = fields.layer_words("layer_types", valid) or fields.layer_words("layers_block_type", valid)
    if kinds is None:
        raise fields.error("field layer_types is missing")
    # without routed experts, the shared expert is the MLP
    mlp: Mlp = GatedMlp(fields.size("shared_intermediate_size"))
    if fields.count("num_local_experts"):
        mlp = _experts(fields)
    mixers: dict[str, Attention] = {}
    if _ATTENTION in kinds:
        mixers[_ATTENTION] = _attention(fields, rope=fields.text("position_embedding_type") == "rope")
    if _MAMBA in kinds:
        mixers[_MAMBA] = mamba_2(fields)
    return [LayerKind(mixers[kind], mlp, kind) for kind in kinds]


FAMILIES: Final = (
    Family("granite", {"granite": ("GraniteForCausalLM",)}, _dense),
    Family(
        "granite-moe",
        {"granitemoe": ("GraniteMoeForCausalLM",), "granitemoeshared": ("GraniteMoeSharedForCausalLM",)},
        _moe,
        reads=("num_local_experts",),
        module_names=_EXPERTS,
    ),
    Family(
        "granite-4",
        {"granitemoehybrid": ("GraniteMoeHybridForCausalLM",)},
        _hybrid,
        reads=("num_local_experts", "layer_types"),
        module_names={**MAMBA_MODULES, **_EXPERTS, "gate_up": _SHARED_UP, "down": _SHARED_DOWN},
    ),
)
