"""What a family of models says of itself, and what many of them read alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fastroof.models.attention import Attention
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import Mlp

__all__ = ["FULL", "WINDOWED", "Family", "head_dim", "kv_heads", "layer_kinds", "layer_windows"]

FULL: Final = "full_attention"
WINDOWED: Final = "sliding_attention"


@dataclass(frozen=True)
class Family:
    """Models whose config.json is read alike.

    Attributes
    ----------
    name : str
        What a person calls it: ``"qwen3"``.
    classes : mapping of str to tuple of str
        Values of ``model_type``, each with the classes that a file of it may name in ``architectures``:
        the first is what a file without ``architectures`` is served as.
    layers : callable
        From the fields of a text model to the kind of every layer, in their order.
    tie_embeddings : bool
        What a missing ``tie_word_embeddings`` means.
    defaults : mapping of str to value
        What other missing fields mean, where a file of this family may leave sizes out.
    reads : tuple of str
        Of the fields that make other models mixtures of experts, chunked or latent, those that this family
        reads; any other is refused.
    module_names : mapping
        What its checkpoints call the modules of a layer, by the role of their call, where that is not in
        :data:`fastroof.models.quantisation.names.MODULE_NAMES`; no names where it is never quantised.
    kv_dtype : str or None
        Of the cache where the checkpoint says nothing of it, if engines have but one; None for bf16.
    presets : mapping of str to tuple of str
        Its presets that :mod:`fastroof.models.named` does not list itself, with their Hugging Face ids.
    """

    name: str
    classes: Mapping[str, tuple[str, ...]]
    layers: Callable[[Fields], list[LayerKind]]
    tie_embeddings: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    module_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kv_dtype: str | None = None
    presets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def layer_kinds(layers: Iterable[tuple[Attention, Mlp]]) -> list[LayerKind]:
    """The kind of every layer, named for what tells it from others: experts or none, a window or none."""
    layers = list(layers)
    windows = {attention.window is None for attention, _ in layers}

    def name(attention: Attention, mlp: Mlp) -> str:
        own = "moe" if mlp.has_experts else "dense"
        if len(windows) == 1:
            return own
        if attention.window is None:
            return f"{own} full"
        return f"{own} chunked" if getattr(attention, "is_chunked", False) else f"{own} windowed"

    return [LayerKind(attention, mlp, name(attention, mlp)) for attention, mlp in layers]


def kv_heads(fields: Fields, num_q_heads: int, *, missing_means_all: bool = False) -> int:
    """KV heads of the whole layer.

    Null means one KV head a query head for all families, a missing field only for some of them; the others
    then fall back on a number that fits one size of the family, so it is asked for.
    """
    if "num_key_value_heads" not in fields.config and not missing_means_all:
        raise fields.error("field num_key_value_heads is missing")
    num_kv_heads = fields.size_or("num_key_value_heads", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise fields.error(
            f"num_attention_heads {num_q_heads} does not divide by num_key_value_heads {num_kv_heads}"
        )
    return num_kv_heads


def head_dim(fields: Fields, hidden: int, num_q_heads: int, missing: int | None = None) -> int:
    """Width of a head; null means hidden size over heads, as a missing field does without ``missing``."""
    given = fields.optional_size("head_dim")
    if given is not None:
        return given
    if missing is not None and "head_dim" not in fields.config:
        return missing
    if hidden % num_q_heads:
        raise fields.error(
            f"no head_dim, and hidden_size {hidden} does not divide by num_attention_heads {num_q_heads}"
        )
    return hidden // num_q_heads


def layer_windows(
    fields: Fields, num_layers: int, window: int | None, full_layers: int = 0
) -> list[int | None]:
    """Tokens that each layer attends within; None for all.

    Parameters
    ----------
    fields : Fields
        Of the text model; where it has ``layer_types``, these say which layers are windowed.
    num_layers : int
        Layers of the model.
    window : int or None
        Of its windowed layers; None where windows are off. One that covers the longest context is none.
    full_layers : int
        How many of the first layers attend to everything, without ``layer_types``.
    """
    kinds = fields.of_layers("layer_types", fields.texts("layer_types"), num_layers)
    kinds = kinds or [FULL if i < full_layers or window is None else WINDOWED for i in range(num_layers)]
    other = sorted(set(kinds) - {FULL, WINDOWED})
    if other:
        raise fields.error(f"field layer_types has {', '.join(other)}: {FULL} and {WINDOWED} would do")
    if window is None and WINDOWED in kinds:
        raise fields.error(f"field layer_types says {WINDOWED}, but no sliding_window is on")
    covers = window is None or window >= fields.size("max_position_embeddings")
    return [window if kind == WINDOWED and not covers else None for kind in kinds]
