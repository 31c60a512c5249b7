"""Models: what a transformer is made of, and how it is split over GPUs."""

from __future__ import annotations

from fastroof.models.layout import ShardedShape, shard
from fastroof.models.load import load_model, model_names
from fastroof.models.spec import ModelSpec

__all__ = ["ModelSpec", "ShardedShape", "load_model", "model_names", "shard"]
