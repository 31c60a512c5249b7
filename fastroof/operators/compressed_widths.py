"""Widths of DeepSeek-V4's compressed attention whose blocks were measured. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = [
    "COMPRESSED_SHAPES",
    "CSA",
    "ENTRY",
    "HCA",
    "HEADS_A_GROUP",
    "INDEX_DIM",
    "INDEX_HEADS",
    "O_LORA_RANK",
    "ROPE_DIM",
    "WINDOW",
    "WINDOW_ALONE",
    "CompressedShape",
]

CSA: Final = 4
HCA: Final = 128
"""Tokens an entry of the cache."""
ENTRY: Final = 512
"""Width of an entry, key and value at once, and of a query head."""
ROPE_DIM: Final = 64
"""Elements of either that are rotated."""
INDEX_HEADS: Final = 64
INDEX_DIM: Final = 128
WINDOW: Final = 128
O_LORA_RANK: Final = 1024
HEADS_A_GROUP: Final = 8
"""Heads that share one part of the output's low-rank projection."""
WINDOW_ALONE: Final = "-window"
"""What the name of a model ends in for its layers with the window alone: kernels of HCA without entries."""


class CompressedShape(NamedTuple):
    """Widths of one layer that differ between models."""

    hidden: int
    num_heads: int
    q_lora_rank: int
    topk: int
    has_entries: bool = True


_MEASURED: Final = {
    "deepseek-v4-flash": CompressedShape(4096, 64, 1024, 512),
    "deepseek-v4-pro": CompressedShape(7168, 128, 1536, 1024),
}

COMPRESSED_SHAPES: Final[Mapping[str, CompressedShape]] = _MEASURED | {
    f"{name}{WINDOW_ALONE}": shape._replace(has_entries=False) for name, shape in _MEASURED.items()
}
"""By the names that tables have."""
