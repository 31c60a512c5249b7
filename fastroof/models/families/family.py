"""The interface of a model family, and readers that several families share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fastroof.models.attention import Attention
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import Mlp

FULL: Final = "full_attention"
WINDOWED: Final = "sliding_attention"


@dataclass(frozen=True)
class Family:
    """Models whose config.json is read in the same way.

    ``flat_wrappers`` are model types whose files hold the text model's fields next to ``vision_config``.
    ``refusal`` is why no file of the family loads yet.
    """

    name: str
    classes: Mapping[str, tuple[str, ...]]
    layers: Callable[[Fields], list[LayerKind]]
    tie_embeddings: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    module_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kv_dtype: str | None = None
    flat_wrappers: tuple[str, ...] = ()
    refusal: str = ""


def layer_kinds(layers: Iterable[tuple[Attention, Mlp]]) -> list[LayerKind]:
    """Return the kind of every layer, named by its differences: experts or dense, windowed or full."""
    layers = list(layers)
    windows = {attention.window is None for attention, _ in layers}

    def name(attention: Attention, mlp: Mlp) -> str:
        own = "moe" if mlp.has_experts else "dense"
        if len(windows) == 1:
            return own
        if attention.window is None:
            return f"{own} full"
        return f"{own} chunked" if getattr(attention, "is_chunked", False) else f"{own} windowed"

    kinds = {layer: LayerKind(*layer, name(*layer)) for layer in dict.fromkeys(layers)}
    return [kinds[layer] for layer in layers]


def kv_heads(fields: Fields, num_q_heads: int, *, missing_means_all: bool = False) -> int:
    """Return the KV heads of the whole layer."""
    if "num_key_value_heads" not in fields.config and not missing_means_all:
        raise fields.error("field num_key_value_heads is missing")
    num_kv_heads = fields.size_or("num_key_value_heads", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise fields.error(
            f"num_attention_heads {num_q_heads} does not divide by num_key_value_heads {num_kv_heads}"
        )
    return num_kv_heads


def head_dim(fields: Fields, hidden: int, num_q_heads: int, missing: int | None = None) -> int:
    """Return the head width; null means hidden size / heads, as does a missing field without ``missing``."""
    head_dim = fields.optional_size("head_dim")
    if head_dim is not None:
        return head_dim
    if missing is not None and "head_dim" not in fields.config:
        return missing
    if hidden % num_q_heads:
        raise fields.error(
            f"no head_dim, and hidden_size {hidden} does not divide by num_attention_heads {num_q_heads}"
        )
    return hidden // num_q_heads


def head_sizes(
    fields: Fields, *, missing_head_dim: int | None = None, missing_means_all: bool = False
) -> tuple[int, int, int]:
    """Return query heads, KV heads and the head width of a layer, by the names in Llama's files."""
    hidden, num_q_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    num_kv_heads = kv_heads(fields, num_q_heads, missing_means_all=missing_means_all)
    return num_q_heads, num_kv_heads, head_dim(fields, hidden, num_q_heads, missing_head_dim)


def layer_windows(fields: Fields, window: int | None, full_layers: int = 0) -> list[int | None]:
    """Return the tokens that each layer attends to; None for all."""
    kinds = fields.layer_words("layer_types", (FULL, WINDOWED)) or [
        FULL if i < full_layers or window is None else WINDOWED for i in range(fields.num_layers)
    ]
    if window is None and WINDOWED in kinds:
        raise fields.error(f"field layer_types contains {WINDOWED}, but no sliding_window is set")
    covers = window is None or window >= fields.size("max_position_embeddings")
    return [window if kind == WINDOWED and not covers else None for kind in kinds]


def windows_by_turns(fields: Fields, window: int, every: int) -> list[int | None]:
    """Return the windows of all layers; each ``every``-th is full unless ``layer_types`` is given."""
    kinds = [WINDOWED if (layer + 1) % every else FULL for layer in range(fields.num_layers)]
    return layer_windows(fields.with_defaults({"layer_types": kinds}), window)
