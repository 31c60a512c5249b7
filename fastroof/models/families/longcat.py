"""LongCat-Flash: per layer two latent attentions, two dense MLPs, and experts next to them.

A layer of the file is three here: two of attention and an MLP, and one of experts only. Engines run the
experts next to the second half; they are added up here. A router also picks experts that return their input:
a token goes to as many real ones as if all were picked equally often.
"""

from __future__ import annotations

from typing import Final

from fastroof.models.experts import RoutedExperts
from fastroof.models.families.deepseek import LATENT_DEFAULTS, latent_attention
from fastroof.models.families.family import Family
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind, NoAttention
from fastroof.models.mlp import GatedMlp

_NAMES: Final = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "expert_ffn_hidden_size",
    "num_experts_per_tok": "moe_topk",
}
"""Names of a field in most files, and in LongCat's."""


def _layers(fields: Fields) -> list[LayerKind]:
    standard = {name: fields.config[own] for name, own in _NAMES.items() if own in fields.config}
    fields = Fields({**fields.config, **standard}, fields.where)
    real, zero = fields.size("n_routed_experts"), fields.count("zero_expert_num")
    picked = fields.size("num_experts_per_tok")
    experts = RoutedExperts(
        real,
        max(1, round(picked * real / (real + zero))),
        fields.size("moe_intermediate_size"),
        router_bias=True,
        zero_experts=zero,
        norm=False,
    )
    half = LayerKind(latent_attention(fields), GatedMlp(fields.size("intermediate_size")), "dense")
    return [half, LayerKind(NoAttention(), experts, "experts"), half] * fields.num_layers


FAMILIES: Final = (
    Family(
        "longcat-flash",
        {"longcat_flash": ("LongcatFlashForCausalLM",)},
        _layers,
        defaults=LATENT_DEFAULTS,
        reads=("n_routed_experts", "kv_lora_rank"),
        module_names={
            "gate_up": tuple(f"mlps.{half}.{name}" for half in (0, 1) for name in ("gate_proj", "up_proj")),
            "down": ("mlps.0.down_proj", "mlps.1.down_proj"),
        },
    ),
)
