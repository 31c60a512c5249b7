"""Nemotron: searched layers (DeciLM), and layers of only one part (Nemotron-H, Nemotron 3).

The search gave each layer its own width, some without attention or MLP. A layer of Nemotron-H is
Mamba-2, attention, an MLP or experts.
"""

from __future__ import annotations

from typing import Any, Final

from fastroof.checks import is_number
from fastroof.errors import UnsupportedModelError
from fastroof.models.attention import Attention, GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.family import Family, head_dim, kv_heads
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind, NoAttention, NoMlp
from fastroof.models.linear_attention import Mamba2
from fastroof.models.mlp import GatedMlp, Mlp, UngatedMlp

_WIDTH_MULTIPLE: Final = 256
_MAX_FFN_MULT: Final = 1024


def _searched(fields: Fields) -> list[LayerKind]:
    num_layers = fields.num_layers
    blocks = fields.of_layers("block_configs", fields.parts("block_configs"), num_layers)
    if blocks is None:
        raise fields.error("field block_configs is missing")
    return [_kind(fields, block) for block in blocks]


def _kind(fields: Fields, block: Fields) -> LayerKind:
    attention, mlp = block.part("attention"), block.part("ffn")
    if attention is None or mlp is None:
        raise block.error(f"field {'attention' if attention is None else 'ffn'} is missing")
    for part in (attention, mlp):
        if part.flag("replace_with_linear", default=False):
            raise UnsupportedModelError(
                f"{part.where}: replace_with_linear: a plan does not support a linear layer in its place"
            )
    own, width = _searched_attention(fields, attention), _searched_mlp(fields, mlp)
    changes = [f"{own.num_kv_heads} KV heads"] if isinstance(own, GroupedQueryAttention) else []
    changes += [f"MLP {width.intermediate}"] if isinstance(width, GatedMlp) else []
    return LayerKind(own, width, " + ".join(changes) or "nothing")


def _searched_attention(fields: Fields, part: Fields) -> Attention:
    if part.flag("no_op", default=False):
        return NoAttention()
    num_q_heads, group = fields.size("num_attention_heads"), part.size("n_heads_in_group")
    if num_q_heads % group:
        raise part.error(f"num_attention_heads {num_q_heads} does not divide by n_heads_in_group {group}")
    window = part.optional_size("window_length")
    bias = fields.flag("attention_bias", default=False)
    return GroupedQueryAttention(
        num_q_heads,
        num_q_heads // group,
        head_dim(fields, fields.size("hidden_size"), num_q_heads),
        bias,
        bias,
        window=None if window is None or window >= fields.size("max_position_embeddings") else window,
    )


def _searched_mlp(fields: Fields, part: Fields) -> Mlp:
    if part.flag("no_op", default=False):
        return NoMlp()
    bias = fields.flag("mlp_bias", default=False)
    if part.has("intermediate_size"):
        return GatedMlp(part.size("intermediate_size"), bias)
    mult: Any = part.config.get("ffn_mult")
    if not is_number(mult) or not 0 < mult <= _MAX_FFN_MULT:
        raise part.error(f"field ffn_mult must be a number up to {_MAX_FFN_MULT}, got {mult!r}")
    width = int(2 * mult * fields.size("hidden_size") / 3)
    return GatedMlp(-(-width // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE, bias)


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
    Family("nemotron-nas", {"nemotron-nas": ("DeciLMForCausalLM",)}, _searched),
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
