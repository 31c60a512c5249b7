"""Widths of models with latent attention, by the name that tables key their modules by.

A module (projections, attention, output projection) is measured for a model, and so is named by it; models
that share these widths share the rows (DeepSeek-R1 and Kimi K2 those of deepseek-v3, at their own heads).
The widths are facts of the models' config.json files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Bools
from fastroof.errors import LookupInputError

__all__ = ["LATENT_SHAPES", "LatentShape", "check_model", "model_names", "shapes_of", "unknown_models"]


class LatentShape(NamedTuple):
    """Widths of one layer's latent attention, or of many rows'; heads are those of a call.

    Attributes
    ----------
    hidden : int
        Width of the residual stream.
    q_lora_rank, kv_lora_rank : int
        Widths of the compressed queries, keys and values.
    nope_dim, rope_dim, v_dim : int
        Of one head: keys without and with rotary part, values.
    index_heads, index_dim, topk : int
        Indexer of sparse attention: its heads and their width, and how many tokens it picks; topk 0 is
        full attention, index_heads 0 a layer that reuses what another one's indexer picked.
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


LATENT_SHAPES: Final[Mapping[str, LatentShape]] = {
    "deepseek-v3": LatentShape(7168, 1536, 512, 128, 64, 128),
    "deepseek-v3.2": LatentShape(7168, 1536, 512, 128, 64, 128, 64, 128, 2048),
    "glm-5": LatentShape(6144, 2048, 512, 192, 64, 256, 32, 128, 2048),
    "glm-5-shared-index": LatentShape(6144, 2048, 512, 192, 64, 256, 0, 0, 2048),
}
"""``glm-5-shared-index`` are the layers of GLM-5.2 that attend to what another layer's indexer picked."""

_NAMES: Final = {
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.2",
    "zai-org/GLM-5": "glm-5",
    "zai-org/GLM-5-FP8": "glm-5",
    "zai-org/GLM-5.2": "glm-5",
    "zai-org/GLM-5.2-FP8": "glm-5",
    "nvidia/GLM-5.2-NVFP4": "glm-5",
}
"""Models of aiconfigurator-core's rows; a checkpoint's format is in their gemm_type, not in the name."""


def model_names(words: Array) -> Array:
    """The package's models by fastroof's names; others stay as they are."""
    distinct, index = np.unique(words.astype(str), return_inverse=True)
    renamed: Array = np.array([_NAMES.get(word, word) for word in distinct], object)[index]
    return renamed


def unknown_models(models: Array) -> dict[str, Bools]:
    """Rows of models whose widths fastroof does not know, by reason."""
    return {f"model {m}": models == m for m in sorted(set(models)) if m not in LATENT_SHAPES}


def check_model(model: str) -> None:
    """Raise LookupInputError for a model whose widths are not known."""
    if model not in LATENT_SHAPES:
        raise LookupInputError(f"unknown model {model!r}: use one of {', '.join(LATENT_SHAPES)}")


def shapes_of(models: Array) -> LatentShape:
    """Widths of each row's model, arrays of shape (rows,); NaN where the model is not known."""
    # one pass over the words: a pass a width took longer than reading the file
    listed = models.tolist()
    place = {model: i for i, model in enumerate(dict.fromkeys(listed))}
    unknown = (np.nan,) * len(LatentShape._fields)
    rows = np.array([LATENT_SHAPES.get(model, unknown) for model in place], np.float64)
    return LatentShape(*rows[[place[model] for model in listed]].T)
