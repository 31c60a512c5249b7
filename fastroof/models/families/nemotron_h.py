"""Nemotron-H and Nemotron 3: each layer is only one part: Mamba-2, attention, an MLP or experts."""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.family import Family, kv_heads
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind, NoAttention, NoMlp
from fastroof.models.linear_attention import Mamba2
from fastroof.models.mlp import UngatedMlp

_PATTERN, _NAMES = "hybrid_override_pattern", "layers_block_type"
_LETTERS: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of the pattern, and their names in newer files."""

_HEAD_DIM: Final = 128


def _layers(fields: Fields) -> list[LayerKind]:
    parts = _parts(fields)
    makes = {"mamba": _mamba, "attention": _attention, "mlp": _mlp, "moe": _experts}
    kinds = {part: makes[part](fields) for part in dict.fromkeys(parts)}
    return [kinds[part] for part in parts]


def _parts(fields: Fields) -> list[str]:
    """Return the part of each layer, by the names of newer files."""
    pattern, field = fields.text(_PATTERN), _PATTERN
    parts: list[str] | None
    if pattern is not None:
        # the pattern may separate sections of pipeline stages
        parts = [_LETTERS.get(letter, letter) for letter in pattern.replace("|", "")]
    else:
        parts, field = fields.texts(_NAMES), _NAMES
    if not parts:
        raise fields.error(f"field {_PATTERN} or {_NAMES} is missing")
    other = sorted(set(parts) - set(_LETTERS.values()))
    if other:
        known = ", ".join(_LETTERS if field == _PATTERN else _LETTERS.values())
        raise fields.error(f"field {field} has {', '.join(map(repr, other))}: valid layers are {known}")
    if fields.has("num_hidden_layers"):
        fields.of_layers(field, parts, fields.num_layers)
    return parts


def _mamba(fields: Fields) -> LayerKind:
    mamba = Mamba2(
        fields.size("mamba_num_heads"),
        fields.size("mamba_head_dim"),
        fields.size("ssm_state_size"),
        fields.size("n_groups"),
        fields.size_or("conv_kernel", 4),
        fields.size_or("chunk_size", 128),
        fields.text("mamba_ssm_cache_dtype") or "float32",
        bias=fields.flag("use_bias", default=False),
        conv_bias=fields.flag("use_conv_bias", default=True),
    )
    return LayerKind(mamba, NoMlp(), "mamba")


def _attention(fields: Fields) -> LayerKind:
    num_q_heads = fields.size("num_attention_heads")
    width = fields.size_or("head_dim", fields.size_or("attention_head_dim", _HEAD_DIM))
    bias = fields.flag("attention_bias", default=False)
    # Mamba encodes positions: nothing is rotated
    attention = GroupedQueryAttention(
        num_q_heads,
        kv_heads(fields, num_q_heads),
        width,
        bias,
        bias,
        window=fields.optional_size("sliding_window"),
        rope=False,
    )
    return LayerKind(attention, NoMlp(), "attention")


def _mlp(fields: Fields) -> LayerKind:
    mlp = UngatedMlp(fields.size("intermediate_size"), fields.flag("mlp_bias", default=False))
    return LayerKind(NoAttention(), mlp, "MLP")


def _experts(fields: Fields) -> LayerKind:
    shared = fields.count("n_shared_experts")
    width = fields.size("moe_shared_expert_intermediate_size") if shared else 0
    experts = RoutedExperts(
        fields.size("n_routed_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("moe_intermediate_size"),
        shared * width,
        is_gated=False,
        router_bias=True,
        expert_bias=fields.flag("mlp_bias", default=False),
        latent=fields.size_or("moe_latent_size", 0),
    )
    return LayerKind(NoAttention(), experts, "experts")


FAMILIES: Final = (
    Family(
        "nemotron-h",
        {"nemotron_h": ("NemotronHForCausalLM",)},
        _layers,
        reads=("n_routed_experts",),
        module_names={
            "state_in": ("mixer.in_proj",),
            "state_out": ("mixer.out_proj",),
            "gate_up": ("mixer.up_proj",),
            "down": ("mixer.down_proj",),
            "experts_down": ("mixer.fc1_latent_proj",),
            "experts_up": ("mixer.fc2_latent_proj",),
        },
    ),
)
