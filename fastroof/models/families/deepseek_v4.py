"""DeepSeek-V4 Flash and Pro: compressed attention, hyper-connections, experts in every layer.

``compress_ratios`` has one ratio per layer, and one more per layer that predicts further tokens. The first
``num_hash_layers`` choose experts by a token table; router scores still weight them, so they cost the same.
Experts are stored in ``expert_dtype``, which is not part of ``quantization_config``: fp4 is MXFP4, and
without the field ``quantization_config`` applies. Engines store the KV cache in
in fp8.
"""

from __future__ import annotations

from typing import Final

from fastroof.models.compressed import CompressedAttention, CompressedWidths, measured_as
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
    intermediate = fields.size("moe_intermediate_size")
    experts = RoutedExperts(
        fields.size("n_routed_experts"),
        fields.size("num_experts_per_tok"),
        intermediate,
        fields.count("n_shared_experts", 1) * intermediate,
        router_bias=True,
        adds_residual=False,
    )
    connections = HyperConnections(fields.size("hc_mult"), fields.size("hc_sinkhorn_iters"))

    def layer(ratio: int) -> LayerKind:
        attention = CompressedAttention(widths, ratio, None if ratio else widths.window)
        return LayerKind(attention, experts, _NAMES[ratio], connections=connections)

    return [layer(ratio) for ratio in _ratios(fields, num_layers)]


def _ratios(fields: Fields, num_layers: int) -> list[int]:
    ratios = fields.numbers("compress_ratios")
    if ratios is None:
        raise fields.error("field compress_ratios is missing")
    further = fields.count("num_nextn_predict_layers")
    ratios = ratios[:num_layers] if len(ratios) == num_layers + further else ratios
    return fields.of_layers("compress_ratios", ratios, num_layers) or []


FAMILIES: Final = (
    Family(
        "deepseek-v4",
        {"deepseek_v4": ("DeepseekV4ForCausalLM",), "deepseek_ref": ("DeepseekV4ForCausalLM",)},
        _layers,
        reads=("n_routed_experts", "index_topk", "compress_ratios"),
        kv_dtype="fp8",
        module_names={
            "q_down": ("attn.wq_a", "attn.wkv"),
            "q_up": ("attn.wq_b",),
            "o": ("attn.wo_a", "attn.wo_b"),
            "index": ("attn.indexer.wq_b",),
            "shared_gate_up": ("ffn.shared_experts.w1", "ffn.shared_experts.w3"),
            "shared_down": ("ffn.shared_experts.w2",),
        },
    ),
    Family(
        "deepseek-v4.1",
        {"deepseek_v41": ("DeepseekV41ForCausalLM",), "deepseek_v41_text": ("DeepseekV41ForCausalLM",)},
        _layers,
        refusal=(
            "layers share compressed caches (kv_source_layer_ids), prompts pass half of the layers, and "
            "n-grams are looked up (engram_layer_ids): no operator times these"
        ),
    ),
)
