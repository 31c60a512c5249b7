"""What a step is predicted for: a model, a GPU and how the one is split over several of the other."""

from __future__ import annotations

from fastroof.config.gpu import GpuSpec, gpu_names, load_gpu
from fastroof.config.model import ModelSpec, load_model, model_names
from fastroof.config.parallel import ShardedShape, shard

__all__ = [
    "GpuSpec",
    "ModelSpec",
    "ShardedShape",
    "gpu_names",
    "load_gpu",
    "load_model",
    "model_names",
    "shard",
]
