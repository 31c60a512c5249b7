"""What a block of compressed attention costs: projections, the indexer, attention, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.operators.compressed_widths import (
    COMPRESSED_SHAPES,
    CSA,
    ENTRY,
    HEADS_A_GROUP,
    INDEX_DIM,
    INDEX_HEADS,
    O_LORA_RANK,
)
from fastroof.operators.operator import Columns, by_word, element_bytes
from fastroof.operators.ragged import WorkPart
from fastroof.units import ACTIVATION_BYTES

__all__ = ["block_bytes", "block_parts", "width_of"]


def width_of(models: Array, name: str) -> Array:
    """A width of each row's model; NaN where the model is not known."""

    def of(model: str) -> float:
        return getattr(COMPRESSED_SHAPES[model], name) if model in COMPRESSED_SHAPES else np.nan

    return by_word(models, of)


def _weights(columns: Columns, ratio: int) -> tuple[Floats, Floats]:
    """Weights of a block without its indexer, and of the indexer."""
    hidden, q_lora = (width_of(columns["model"], name) for name in ("hidden", "q_lora_rank"))
    heads = columns["num_heads"]
    # entries of CSA overlap: its compressor sees every token twice
    seen = 2 if ratio == CSA else 1
    compressor = hidden * 2 * seen * ENTRY * width_of(columns["model"], "has_entries")
    own = hidden * (q_lora + ENTRY) + q_lora * heads * ENTRY + heads * ENTRY * O_LORA_RANK
    out = heads / HEADS_A_GROUP * O_LORA_RANK * hidden
    indexer = q_lora * INDEX_HEADS * INDEX_DIM + hidden * (INDEX_HEADS + 2 * seen * INDEX_DIM)
    return np.asarray(own + out + compressor), np.asarray(indexer if ratio == CSA else 0.0 * indexer)


def block_parts(columns: Columns, ratio: int, tokens: Floats, pairs: Sequence[Floats]) -> list[WorkPart]:
    """Projections of some tokens; ``pairs`` of queries and entries that are scored and attended to."""
    own, indexer = _weights(columns, ratio)
    scored, attended = pairs
    attention = 4.0 * columns["num_heads"] * ENTRY * attended
    return [
        WorkPart(np.asarray(2.0 * tokens * (own + indexer)), columns["dtype"]),
        WorkPart(np.asarray(2.0 * INDEX_HEADS * INDEX_DIM * scored), "fp8"),
        WorkPart(np.asarray(attention), columns["attn_dtype"]),
    ]


def block_bytes(columns: Columns, ratio: int, tokens: Floats, scored: Floats, read: Floats) -> Floats:
    """Weights once, tokens in and out, the indexer's keys and the entries that are read."""
    weights = np.asarray(sum(_weights(columns, ratio)) * element_bytes(columns["dtype"]))
    kv = read * ENTRY * element_bytes(columns["kv_dtype"]) + scored * INDEX_DIM
    return np.asarray(weights + kv + 2.0 * ACTIVATION_BYTES * tokens * width_of(columns["model"], "hidden"))
