"""GLM-5.3 Flash: Kimi delta attention in three of four layers, sparse latent attention in the others.

The indexer scores one key per ``index_kpool`` tokens. Residual streams are mixed as in DeepSeek-V4. All
attention projections run in bf16, as checkpoints store those of delta attention.
"""

from __future__ import annotations

from typing import Final

from fastroof.errors import UnsupportedModelError
from fastroof.models.attention import Attention
from fastroof.models.families.family import Family
from fastroof.models.families.sparse_latent import DSA, layer_mlps, sparse_attention
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.linear_attention import KimiDeltaAttention
from fastroof.models.residuals import HyperConnections

_SIZES: Final = "linear_attn_config"
_LINEAR: Final = "linear_attention"


def _layers(fields: Fields) -> list[LayerKind]:
    sizes = fields.part(_SIZES)
    if sizes is None:
        raise fields.error(f"field {_SIZES} is missing")
    kinds = fields.layer_words("layer_types", (_LINEAR, DSA))
    if kinds is None:
        raise fields.error("field layer_types is missing")
    if "shared" in (fields.texts("indexer_types") or ()):
        raise UnsupportedModelError(
            f"{fields.where}: indexer_types has shared, which no such layer was read as"
        )
    heads, width = sizes.size("num_heads"), sizes.size("head_dim")
    taps = sizes.size_or("short_conv_kernel_size", 4)
    mixers: dict[str, Attention] = {
        _LINEAR: KimiDeltaAttention(heads, width, heads, width, taps, gate_rank=width)
    }
    if DSA in kinds:
        mixers[DSA] = sparse_attention(fields, index_pool=fields.size_or("index_kpool", 1))
    streams = None
    if fields.flag("mhc", default=True):
        streams = HyperConnections(fields.size("hc_mult"), fields.size("hc_sinkhorn_iters"))
    return [
        LayerKind(
            mixers[kind],
            mlp,
            f"{'moe' if mlp.has_experts else 'dense'} {'linear' if kind == _LINEAR else 'sparse'}",
            connections=streams,
        )
        for kind, mlp in zip(kinds, layer_mlps(fields), strict=True)
    ]


FAMILIES: Final = (
    Family(
        "glm-5-flash",
        {"glm5_next": ("Glm5NextForConditionalGeneration",), "glm5_next_text": ("Glm5NextForCausalLM",)},
        _layers,
        reads=("n_routed_experts", "kv_lora_rank", "index_topk", _SIZES),
        # no pattern excludes all of them, and engines run them in bf16
        module_names=dict.fromkeys(("q_down", "q_up", "kv_up", "o", "index", "state_in", "state_out"), ()),
    ),
)
