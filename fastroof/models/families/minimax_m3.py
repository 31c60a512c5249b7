"""MiniMax-M3: grouped-query attention and dense MLPs first, then block-sparse attention and experts.

The layer lists say which layers are which. Its activation (SwiGLU with limits) is timed as SiLU; layers that
predict further tokens are omitted, and the vision encoder is read as for any other wrapper.
"""

from __future__ import annotations

from typing import Final

from fastroof.errors import UnsupportedModelError
from fastroof.models.attention import Attention, GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.family import Family, head_sizes
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import GatedMlp
from fastroof.models.sparse import MSA_HEAD_DIM, BlockSparseAttention

_HIDDEN: Final = 6144
_GROUP_SIZE: Final = 16
"""Sizes of the one model whose blocks were measured."""


def _sparse(fields: Fields, heads: tuple[int, int, int]) -> tuple[Attention | None, list[int]]:
    """Return this model's sparse attention (None if disabled) and the layers that use it."""
    num_layers, sparse = fields.num_layers, fields.part("sparse_attention_config")
    if sparse is None or not sparse.flag("use_sparse_attention", default=True):
        return None, [0] * num_layers
    attention = BlockSparseAttention(
        *heads,
        sparse.size("sparse_num_index_heads"),
        sparse.size("sparse_index_dim"),
        sparse.size("sparse_topk_blocks"),
        sparse.size("sparse_block_size"),
    )
    measured = (_HIDDEN, _GROUP_SIZE * attention.num_kv_heads, MSA_HEAD_DIM, attention.num_kv_heads, 16, 128)
    own = (
        fields.size("hidden_size"),
        attention.num_q_heads,
        attention.head_dim,
        attention.index_heads,
        attention.topk_blocks,
        attention.block_size,
    )
    if own != measured or attention.index_dim != MSA_HEAD_DIM:
        raise UnsupportedModelError(
            f"{fields.where}: sparse_attention_config: block-sparse attention was measured with MiniMax-M3's "
            f"widths only: hidden {_HIDDEN}, {_GROUP_SIZE} query heads and 1 index head a KV head, heads of "
            f"{MSA_HEAD_DIM}, 16 blocks of 128 tokens"
        )
    which = sparse.of_layers("sparse_attention_freq", sparse.numbers("sparse_attention_freq"), num_layers)
    return attention, which or [1] * num_layers


def _layers(fields: Fields) -> list[LayerKind]:
    num_layers, heads = fields.num_layers, head_sizes(fields)
    full = GroupedQueryAttention(*heads, qk_norm=fields.flag("use_qk_norm", default=True))
    sparse, is_sparse = _sparse(fields, heads)
    experts = RoutedExperts(
        fields.size("num_local_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("intermediate_size"),
        fields.count("shared_intermediate_size"),
        router_bias=fields.flag("use_routing_bias", default=True),
    )
    dense = GatedMlp(fields.size("dense_intermediate_size"))
    has_experts = fields.of_layers("moe_layer_freq", fields.numbers("moe_layer_freq"), num_layers)
    if has_experts is None:
        raise fields.error("field moe_layer_freq is missing")

    def kind(picks: int, has: int) -> LayerKind:
        attention = sparse if picks and sparse is not None else full
        names = ("moe" if has else "dense", "sparse" if attention is sparse else "full")
        return LayerKind(attention, experts if has else dense, " ".join(names))

    return [kind(*layer) for layer in zip(is_sparse, has_experts, strict=True)]


FAMILIES: Final = (
    Family(
        "minimax-m3",
        {
            "minimax_m3": ("MiniMaxM3ForCausalLM", "MiniMaxM3SparseForCausalLM"),
            "minimax_m3_vl": ("MiniMaxM3SparseForConditionalGeneration",),
        },
        _layers,
        reads=("num_local_experts", "sparse_attention_config"),
        module_names={"index": ("self_attn.index_q_proj", "self_attn.index_k_proj")},
    ),
)
