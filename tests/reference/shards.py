"""What one GPU holds of a dense model, and dense models with other sizes."""

from __future__ import annotations

from fastroof.models import DenseModel, Layout, ModelSpec
from fastroof.models.dense import DenseShard, split


def shard(model: ModelSpec, tp: int) -> DenseShard:
    """Split a model as a plan would, or raise what a plan would."""
    model.check_layout(Layout(tp))
    return split(DenseModel.of(model), tp)


def changed(model: ModelSpec, **sizes: object) -> ModelSpec:
    """A dense model with other sizes."""
    return DenseModel(**{**vars(DenseModel.of(model)), **sizes}).spec()
