"""Names of models in rows, and the widths of each row's model (:mod:`fastroof.operators.latent_widths`)."""

from __future__ import annotations

from typing import Final

import numpy as np

from fastroof.arrays import Array, Bools
from fastroof.errors import LookupInputError
from fastroof.operators.latent_widths import LATENT_SHAPES, LatentShape

__all__ = ["check_model", "model_names", "shapes_of", "unknown_models"]

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
