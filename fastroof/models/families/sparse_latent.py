"""DeepSeek-V3.2 and GLM-5 to 5.3: latent attention to the tokens that an indexer picks, and experts.

Layers of GLM-5.2 and 5.3 share an indexer: ``indexer_types`` lists those that have one; without it, each
``index_topk_freq``-th layer from ``index_skip_topk_offset`` on has one, and all before. GLM stores its router
in float32 (``moe_router_dtype``); it is timed in bf16, like every router. Layers that predict further tokens
are omitted.

GLM-5.3 Flash has Kimi delta attention in three of four layers. In the others the indexer scores one key per
``index_kpool`` tokens. Residual streams are mixed as in DeepSeek-V4. All attention projections run in bf16,
as checkpoints store those of delta attention.
"""

from __future__ import annotations

from typing import Final

from fastroof.errors import UnsupportedModelError
from fastroof.models.attention import Attention
from fastroof.models.families.deepseek import first_dense, latent_experts
from fastroof.models.families.family import Family
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.linear_attention import KimiDeltaAttention
from fastroof.models.mlp import GatedMlp, Mlp
from fastroof.models.residuals import HyperConnections
from fastroof.models.sparse import SparseLatentAttention

DSA: Final = "deepseek_sparse_attention"
_INDEXED, _SHARED = "full", "shared"
_DENSE, _SPARSE = "dense", "sparse"
_ROUTER_DTYPES: Final = (None, "float32", "bfloat16")
_INDEXER: Final = {"index": ("self_attn.indexer.wq_b", "self_attn.indexer.wk")}


def _shares_index(fields: Fields) -> list[bool]:
    """Return which layers reuse the tokens that another layer's indexer picked."""
    pattern, key = fields.text("index_topk_pattern"), "indexer_types"
    if pattern is not None and not fields.has(key):
        key = "index_topk_pattern"
        named = [{"F": _INDEXED, "S": _SHARED}.get(letter, letter) for letter in pattern]
        fields = Fields({**fields.config, key: named}, fields.where)
    kinds = fields.layer_words(key, (_INDEXED, _SHARED))
    if kinds is not None:
        if kinds[0] == _SHARED:
            raise fields.error(f"indexer_types starts with {_SHARED}, before any indexer")
        return [kind == _SHARED for kind in kinds]
    every, first = fields.size_or("index_topk_freq", 1), fields.count("index_skip_topk_offset", 2)
    return [max(layer - first + 1, 0) % every != 0 for layer in range(fields.num_layers)]


def layer_mlps(fields: Fields) -> list[Mlp]:
    """Return the MLP of each layer: dense ones, and experts with shared ones."""
    router = fields.text("moe_router_dtype")
    if router not in _ROUTER_DTYPES:
        raise fields.error(f"field moe_router_dtype must be float32 or bfloat16, got {router!r}")
    experts = latent_experts(fields.with_defaults({"topk_method": "noaux_tc"}))
    kinds = fields.layer_words("mlp_layer_types", (_DENSE, _SPARSE))
    if kinds is None:
        return first_dense(fields, experts)
    dense = GatedMlp(fields.size("intermediate_size"))
    return [experts if kind == _SPARSE else dense for kind in kinds]


def sparse_attention(
    fields: Fields, *, index_pool: int = 1, shares_index: bool = False
) -> SparseLatentAttention:
    """Read sparse attention; unknown widths are rejected here, not when a plan first needs them."""
    attention = SparseLatentAttention(
        fields.size("num_attention_heads"),
        fields.size("q_lora_rank"),
        fields.size("kv_lora_rank"),
        fields.size("qk_nope_head_dim"),
        fields.count("qk_rope_head_dim"),
        fields.size("v_head_dim"),
        fields.size("index_n_heads"),
        fields.size("index_head_dim"),
        fields.size("index_topk"),
        shares_index,
        index_pool,
    )
    attention.module(fields.size("hidden_size"))
    return attention


def _layers(fields: Fields) -> list[LayerKind]:
    shares_index = _shares_index(fields)
    by_sharing = {
        shares: sparse_attention(fields, shares_index=shares) for shares in dict.fromkeys(shares_index)
    }

    def kind(shares: bool, mlp: Mlp) -> LayerKind:
        attention = by_sharing[shares]
        name = "moe" if mlp.has_experts else "dense"
        return LayerKind(attention, mlp, f"{name} shared index" if shares else name)

    return [kind(*layer) for layer in zip(shares_index, layer_mlps(fields), strict=True)]


_SIZES: Final = "linear_attn_config"
_LINEAR: Final = "linear_attention"


def _glm5_flash(fields: Fields) -> list[LayerKind]:
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
        "deepseek-v3.2",
        {"deepseek_v32": ("DeepseekV32ForCausalLM",)},
        _layers,
        reads=("n_routed_experts", "kv_lora_rank", "index_topk"),
        module_names=_INDEXER,
    ),
    Family(
        "glm-5",
        {"glm_moe_dsa": ("GlmMoeDsaForCausalLM",)},
        _layers,
        # the nvfp4 file of GLM-5.2 has the number of its experts twice
        reads=("n_routed_experts", "num_experts", "kv_lora_rank", "index_topk"),
        module_names=_INDEXER,
    ),
    Family(
        "glm-5-flash",
        {"glm5_next": ("Glm5NextForConditionalGeneration",), "glm5_next_text": ("Glm5NextForCausalLM",)},
        _glm5_flash,
        reads=("n_routed_experts", "kv_lora_rank", "index_topk", _SIZES),
        # no pattern excludes all of them, and engines run them in bf16
        module_names=dict.fromkeys(("q_down", "q_up", "kv_up", "o", "index", "state_in", "state_out"), ()),
    ),
)
