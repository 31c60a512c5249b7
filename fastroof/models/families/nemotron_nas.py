"""Nemotron's searched layers (DeciLM): each with its own width, some without attention or MLP."""

from __future__ import annotations

from typing import Any, Final

from fastroof.checks import is_number
from fastroof.errors import UnsupportedModelError
from fastroof.models.attention import Attention, GroupedQueryAttention
from fastroof.models.families.family import Family, head_dim
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind, NoAttention, NoMlp
from fastroof.models.mlp import GatedMlp, Mlp

_WIDTH_MULTIPLE: Final = 256
_MAX_FFN_MULT: Final = 1024


def _layers(fields: Fields) -> list[LayerKind]:
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
    own, width = _attention(fields, attention), _mlp(fields, mlp)
    changes = [f"{own.num_kv_heads} KV heads"] if isinstance(own, GroupedQueryAttention) else []
    changes += [f"MLP {width.intermediate}"] if isinstance(width, GatedMlp) else []
    return LayerKind(own, width, " + ".join(changes) or "nothing")


def _attention(fields: Fields, part: Fields) -> Attention:
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


def _mlp(fields: Fields, part: Fields) -> Mlp:
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


FAMILIES: Final = (Family("nemotron-nas", {"nemotron-nas": ("DeciLMForCausalLM",)}, _layers),)
