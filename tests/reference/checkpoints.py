"""Small checkpoints of a family, written out tensor by tensor, and publishers' figures of whole ones."""

from __future__ import annotations

from typing import Any, NamedTuple

Config = dict[str, Any]
Shapes = list[tuple[int, ...]]
Case = tuple[Config, list[tuple[str, int]], Shapes]
"""A file, its kinds of layers with their counts, and the tensors of all layers."""

H, V = 64, 320
SIZES: Config = {
    "hidden_size": H,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": V,
    "max_position_embeddings": 4096,
}
Q, KV = 8 * 16, 2 * 16
ATTENTION: Shapes = [(Q, H), (KV, H), (KV, H), (H, Q), (H,)]
QK_NORMS: Shapes = [(16,), (16,)]
DENSE: Shapes = [(96, H), (96, H), (H, 96), (H,)]


def config(model_type: str, **more: Any) -> Config:
    """A small file of a family; ``...`` leaves a field out."""
    merged = {**SIZES, "model_type": model_type, **more}
    return {key: value for key, value in merged.items() if value is not ...}


def moe(num_experts: int, width: int, shared: int = 0) -> Shapes:
    """Router, norm and experts; a shared one."""
    experts: Shapes = [(width, H), (width, H), (H, width)] * num_experts
    return [(num_experts, H), (H,), *experts, *([(shared, H), (shared, H), (H, shared)] if shared else [])]


CARD = "model card"
INDEX = "weights in the checkpoint's index, as the model's page shows them"


class Published(NamedTuple):
    """A publisher's figures of its model.

    ``billions`` of weights and, of models with experts, ``active`` ones, with the digits that are published;
    ``kv_bytes`` of a token in bf16, over all layers, from the heads and layers that the publisher names;
    ``source`` of the weights; ``extra``, the billions of them that are no part of the text model;
    ``rounded``, the billions that a figure of trillions may be off.
    """

    billions: str
    active: str | None
    kv_bytes: int
    source: str
    extra: float = 0.0
    rounded: float = 0.0


def kv(*layers: tuple[int, int, int]) -> int:
    """Bytes in bf16 of a token's keys and values: layers, KV heads, elements of a head's key and value."""
    return sum(count * heads * elements * 2 for count, heads, elements in layers)
