"""What a plan has no operator for: found in a config.json before it is read, and named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastroof.models.hf import TEXT_CONFIG, Fields

__all__ = ["missing_operators", "unread_parts"]

_WRAPPED: Final = ("vision_config", "audio_config")
_LINEAR: Final = "linear_attention"
_SAYS_LINEAR: Final = ("full_attention_interval", "linear_attn_config")
_KNOWN_LAYERS: Final = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "deepseek_sparse_attention", _LINEAR}
)

_OF_SOME_FAMILIES: Final = {
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "num_routed_experts": "experts",
    "moe_num_experts": "experts",
    "attention_chunk_size": "chunked attention",
    "kv_lora_rank": "latent attention",
    "index_topk": "sparse attention",
    "sparse_attention_config": "sparse attention",
    "compress_ratios": "a compressed cache",
    **dict.fromkeys(_SAYS_LINEAR, "linear attention"),
}


def missing_operators(fields: Fields) -> list[str]:
    """Return the operators that this model needs and a plan lacks, each with its field."""
    config = fields.config
    text = config.get(TEXT_CONFIG)
    inner = text if isinstance(text, Mapping) else config
    missing = []
    kinds = inner.get("layer_types")
    other = sorted({str(k) for k in kinds} - _KNOWN_LAYERS) if isinstance(kinds, list) else []
    if other:
        missing.append(f"it needs a hybrid attention operator (layer_types {', '.join(other)})")
    if text is None and (wrapped := [key for key in _WRAPPED if config.get(key) is not None]):
        missing.append(f"it is multimodal ({', '.join(wrapped)}) without a {TEXT_CONFIG}")
    return missing


def unread_parts(fields: Fields, reads: tuple[str, ...], family: str) -> list[str]:
    """Return parts that a text model's file has and its family does not, each with its field."""
    config = fields.config
    found = {key: what for key, what in _OF_SOME_FAMILIES.items() if config.get(key) and key not in reads}
    parts = [f"{_said(config, (key,))} means {what}" for key, what in found.items()]
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and _LINEAR in kinds and not set(_SAYS_LINEAR).intersection(reads):
        parts.append(f"layer_types {_LINEAR} means linear attention")
    return [f"{part}, which {family} models do not have" for part in parts]


def _said(config: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    def shown(value: Any) -> str:
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:37]}..."

    return ", ".join(f"{key} {shown(config[key])}" for key in keys if config.get(key) is not None)
