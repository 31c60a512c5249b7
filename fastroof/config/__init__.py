"""GPUs for which steps are predicted, and the location of bench_data."""

from __future__ import annotations

from fastroof.config.gpu import GpuSpec, gpu_names, is_shipped, load_gpu

__all__ = ["GpuSpec", "gpu_names", "is_shipped", "load_gpu"]
