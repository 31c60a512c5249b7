"""GPUs that a step is predicted for, and where bench_data lies."""

from __future__ import annotations

from fastroof.config.gpu import GpuSpec, gpu_names, load_gpu

__all__ = ["GpuSpec", "gpu_names", "load_gpu"]
