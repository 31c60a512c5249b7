"""Widths of models with latent and compressed attention, by the model names in tables.

A measured attention block is named after a model; models with the same widths share its rows (DeepSeek-R1 and
Kimi K2 those of deepseek-v3, at other numbers of heads). The widths come from the models' config.json files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class LatentShape(NamedTuple):
    """Widths of latent attention; topk 0 is full attention, index_heads 0 reuses another layer's index.

    An indexer has one key per ``index_pool`` tokens.
    """

    hidden: Any
    q_lora_rank: Any
    kv_lora_rank: Any
    nope_dim: Any
    rope_dim: Any
    v_dim: Any
    index_heads: Any = 0
    index_dim: Any = 0
    topk: Any = 0
    index_pool: Any = 1


LATENT_SHAPES: Final[Mapping[str, LatentShape]] = {
    "deepseek-v3": LatentShape(7168, 1536, 512, 128, 64, 128),
    "deepseek-v3.2": LatentShape(7168, 1536, 512, 128, 64, 128, 64, 128, 2048),
    "glm-5": LatentShape(6144, 2048, 512, 192, 64, 256, 32, 128, 2048),
    "glm-5-shared-index": LatentShape(6144, 2048, 512, 192, 64, 256, 0, 0, 2048),
    "glm-5.3-flash": LatentShape(4096, 1536, 512, 256, 0, 256, 32, 128, 2048, 4),
}
"""``glm-5-shared-index`` are the layers of GLM-5.2 that reuse another layer's index."""


def shape_name(shape: LatentShape) -> str | None:
    """Name under which blocks of these widths were measured; None if there are none."""
    return next((name for name, known in LATENT_SHAPES.items() if known == shape), None)


CSA: Final = 4
HCA: Final = 128
"""Tokens per entry of the cache."""
ENTRY: Final = 512
"""Width of an entry (key and value at once) and of a query head."""
ROPE_DIM: Final = 64
"""Rotated elements of either."""
INDEX_HEADS: Final = 64
INDEX_DIM: Final = 128
WINDOW: Final = 128
O_LORA_RANK: Final = 1024
HEADS_A_GROUP: Final = 8
"""Heads that share a part of the output's low-rank projection."""
WINDOW_ALONE: Final = "-window"
"""Suffix of a model's name for its layers with a window only: HCA kernels without entries."""


class CompressedShape(NamedTuple):
    """Widths of compressed attention that differ between models; ``topk`` is that of CSA layers.

    Layers of DeepSeek-V4.1 have a ``ratio`` of their own, score at most ``scored`` entries, may read entries
    that another layer ``writes``, and run on at most ``most_new`` tokens of a prompt.
    """

    hidden: int
    num_heads: int
    q_lora_rank: int
    topk: int
    has_entries: bool = True
    ratio: int = 0
    scored: float = math.inf
    writes: bool = True
    most_new: float = math.inf
    index_heads: int = INDEX_HEADS

    def compressor(self, ratio: int) -> int:
        """Weights that make entries."""
        if self.ratio:
            return self.hidden * ENTRY * min(self.ratio, 2) * self.writes
        # entries of CSA overlap: its compressor reads every token twice
        return self.hidden * 2 * (2 if ratio == CSA else 1) * ENTRY * self.has_entries

    def indexer(self, ratio: int) -> int:
        """Weights of the indexer, with those that make its keys."""
        if not self.scored or (ratio != CSA and not self.ratio):
            return 0
        keys = ENTRY * INDEX_DIM * self.writes if self.ratio else self.hidden * 4 * INDEX_DIM
        return self.q_lora_rank * self.index_heads * INDEX_DIM + self.hidden * self.index_heads + keys


_MEASURED: Final = {
    "deepseek-v4-flash": CompressedShape(4096, 64, 1024, 512),
    "deepseek-v4-pro": CompressedShape(7168, 128, 1536, 1024),
}

_V41: Final = CompressedShape(5120, 64, 1280, 512, ratio=1, writes=False, scored=0, index_heads=32)
SHARED_SHAPES: Final = {
    "swa": _V41._replace(has_entries=False),
    "full-2": _V41._replace(ratio=2, writes=True, scored=math.inf),
    "reuse-2": _V41._replace(ratio=2),
    "full-1": _V41._replace(writes=True, scored=math.inf),
    "reindex-1": _V41._replace(scored=16384, most_new=WINDOW),
    "reuse-1": _V41._replace(most_new=WINDOW),
}
"""Layers of DeepSeek-V4.1-Flash, by what they read and their ratio."""

COMPRESSED_SHAPES: Final[Mapping[str, CompressedShape]] = (
    _MEASURED
    | {f"{name}{WINDOW_ALONE}": shape._replace(has_entries=False) for name, shape in _MEASURED.items()}
    | {f"deepseek-v4.1-flash-{role}": shape for role, shape in SHARED_SHAPES.items()}
)
"""Shapes by the model names in tables; no table has those of DeepSeek-V4.1."""
