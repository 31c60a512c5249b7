"""DeepSeek-V4 Flash and Pro: compressed attention, hyper-connections, experts in every layer.

``compress_ratios`` has one ratio per layer, and one more per layer that predicts further tokens. The first
``num_hash_layers`` choose experts by a token table; router scores still weight them, so they cost the same.
Experts are stored in ``expert_dtype``, which is not part of ``quantization_config``: fp4 is MXFP4, and
without the field ``quantization_config`` applies. Engines store the KV cache in
in fp8.
"""

from __future__ import annotations

from typing import Final

from fastroof.errors import UnsupportedModelError
from fastroof.models.compressed import CompressedAttention, CompressedWidths, SharedEntries, measured_as
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.family import Family
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.residuals import HyperConnections
from fastroof.operators.widths import CSA, HCA

_NAMES: Final = {CSA: "csa", HCA: "hca", 0: "windowed"}


def _layers(fields: Fields) -> list[LayerKind]:
    num_layers = fields.num_layers
    widths = CompressedWidths(
        fields.size("num_attention_heads"),
        fields.size("head_dim"),
        fields.size("qk_rope_head_dim"),
        fields.size("q_lora_rank"),
        fields.size("o_groups"),
        fields.size("o_lora_rank"),
        fields.size("sliding_window"),
        fields.size("index_n_heads"),
        fields.size("index_head_dim"),
        fields.size("index_topk"),
    )
    measured_as(fields.size("hidden_size"), widths)
    experts, connections = _experts(fields), _connections(fields)

    def layer(ratio: int) -> LayerKind:
        attention = CompressedAttention(widths, ratio, None if ratio else widths.window)
        return LayerKind(attention, experts, _NAMES[ratio], connections=connections)

    return [layer(ratio) for ratio in _ratios(fields, num_layers)]


def _shared_layers(fields: Fields) -> list[LayerKind]:
    """Read layers of DeepSeek-V4.1: those that write entries, that pick again, and that reuse picks."""
    measured = {name: fields.size(name) for name in _V41_SIZES}
    if measured != _V41_SIZES:
        unlike = ", ".join(f"{name} {size}" for name, size in measured.items() if size != _V41_SIZES[name])
        raise UnsupportedModelError(
            f"{fields.where}: {unlike}: only DeepSeek-V4.1-Flash's sizes are modelled"
        )
    num_layers = fields.num_layers
    ratios = _ratios(fields, num_layers)
    owners, pickers, engrams = (set(fields.numbers(f"{name}_ids") or ()) for name in _V41_LAYERS)
    rows = fields.numbers("engram_num_embeddings") or []
    if len(rows) != len(engrams) or min(rows, default=1) < 1:
        raise fields.error("field engram_num_embeddings must have the rows of each of engram_layer_ids")
    tables = dict(zip(sorted(engrams), rows, strict=True))
    experts, connections = _experts(fields), _connections(fields)

    def role(layer: int, ratio: int) -> str:
        if not ratio:
            return "swa"
        kind = "full" if layer in owners else "reindex" if layer in pickers else "reuse"
        return f"{kind}-{ratio}"

    return [
        LayerKind(
            SharedEntries(role(i, ratio), tables.get(i, 0)),
            experts,
            role(i, ratio) + " engram" * (i in tables),
            connections=connections,
        )
        for i, ratio in enumerate(ratios)
    ]


_V41_SIZES: Final = {
    "hidden_size": 5120, "num_attention_heads": 64, "head_dim": 512, "q_lora_rank": 1280, "o_groups": 8,
    "o_lora_rank": 1024, "sliding_window": 128, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
    "candidate_topk_blocks": 2048, "candidate_block_size": 8, "hc_mult": 4, "engram_n_heads": 8,
    "engram_max_ngram_size": 4, "engram_head_dim": 256,
}  # fmt: skip
_V41_LAYERS: Final = ("kv_source_layer", "index_source_layer", "engram_layer")


def _experts(fields: Fields) -> RoutedExperts:
    intermediate = fields.size("moe_intermediate_size")
    return RoutedExperts(
        fields.size("n_routed_experts"),
        fields.size("num_experts_per_tok"),
        intermediate,
        fields.count("n_shared_experts", 1) * intermediate,
        router_bias=True,
        adds_residual=False,
    )


def _connections(fields: Fields) -> HyperConnections:
    return HyperConnections(fields.size("hc_mult"), fields.size("hc_sinkhorn_iters"))


def _ratios(fields: Fields, num_layers: int) -> list[int]:
    ratios = fields.numbers("compress_ratios")
    if ratios is None:
        raise fields.error("field compress_ratios is missing")
    further = fields.count("num_nextn_predict_layers")
    ratios = ratios[:num_layers] if len(ratios) == num_layers + further else ratios
    return fields.of_layers("compress_ratios", ratios, num_layers) or []


_MODULES: Final = {
    "q_down": ("attn.wq_a", "attn.wkv"),
    "q_up": ("attn.wq_b",),
    "o": ("attn.wo_a", "attn.wo_b"),
    "index": ("attn.indexer.wq_b",),
    "shared_gate_up": ("ffn.shared_experts.w1", "ffn.shared_experts.w3"),
    "shared_down": ("ffn.shared_experts.w2",),
}

FAMILIES: Final = (
    Family(
        "deepseek-v4",
        {"deepseek_v4": ("DeepseekV4ForCausalLM",), "deepseek_ref": ("DeepseekV4ForCausalLM",)},
        _layers,
        reads=("n_routed_experts", "index_topk", "compress_ratios"),
        kv_dtype="fp8",
        module_names=_MODULES,
    ),
    Family(
        "deepseek-v4.1",
        {"deepseek_v41": ("DeepseekV41ForCausalLM",), "deepseek_v41_text": ("DeepseekV41ForCausalLM",)},
        _shared_layers,
        reads=("n_routed_experts", "index_topk", "compress_ratios"),
        kv_dtype="fp8",
        module_names=_MODULES | {"engram": ("engram.embed",), "engram_in": ("engram.wkv",)},
    ),
)
