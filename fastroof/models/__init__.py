"""Models: the layers of a transformer, loading them, and splitting them over GPUs."""

from __future__ import annotations

from fastroof.models.dense import DenseModel
from fastroof.models.layers import LayerGroup, LayerKind
from fastroof.models.layout import TP_SIZES, Layout
from fastroof.models.load import load_model
from fastroof.models.named import model_names
from fastroof.models.spec import ModelSpec

__all__ = [
    "TP_SIZES",
    "DenseModel",
    "LayerGroup",
    "LayerKind",
    "Layout",
    "ModelSpec",
    "load_model",
    "model_names",
]
