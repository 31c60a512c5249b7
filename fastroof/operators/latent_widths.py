"""Widths of models with latent attention, by the name that tables key their modules by.

A module (projections, attention, output projection) is measured for a model, and so is named by it; models
that share these widths share the rows (DeepSeek-R1 and Kimi K2 those of deepseek-v3, at their own heads).
The widths are facts of the models' config.json files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

__all__ = ["LATENT_SHAPES", "LatentShape", "shape_name"]


class LatentShape(NamedTuple):
    """Widths of one layer's latent attention, or of many rows'; heads are those of a call."""

    hidden: Any
    q_lora_rank: Any
    kv_lora_rank: Any
    nope_dim: Any
    rope_dim: Any
    v_dim: Any
    index_heads: Any = 0
    index_dim: Any = 0
    topk: Any = 0


LATENT_SHAPES: Final[Mapping[str, LatentShape]] = {
    "deepseek-v3": LatentShape(7168, 1536, 512, 128, 64, 128),
    "deepseek-v3.2": LatentShape(7168, 1536, 512, 128, 64, 128, 64, 128, 2048),
    "glm-5": LatentShape(6144, 2048, 512, 192, 64, 256, 32, 128, 2048),
    "glm-5-shared-index": LatentShape(6144, 2048, 512, 192, 64, 256, 0, 0, 2048),
}
"""``glm-5-shared-index`` are the layers of GLM-5.2 that attend to what another layer's indexer picked."""


def shape_name(shape: LatentShape) -> str | None:
    """Name under which modules of these widths were measured; None where none were."""
    return next((name for name, known in LATENT_SHAPES.items() if known == shape), None)
