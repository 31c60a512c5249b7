"""The platform that vLLM finds in place of a GPU."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

from fastroof.backends.vllm_engine import GPU
from fastroof.config import load_gpu


class NoGpu(Platform):  # type: ignore[misc]
    """The platform of a machine without a GPU, with the name and memory of the one that it stands for."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Return the GPU's name."""
        return str(load_gpu(os.environ[GPU]).title)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Return the GPU's memory, bytes, by which vLLM sets its limits."""
        return int(load_gpu(os.environ[GPU]).hbm_bytes)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        """Return the first generation with the GPU's formats."""
        formats = load_gpu(os.environ[GPU]).peak_flops_per_s
        major = 10 if "fp4" in formats else 9 if "fp8" in formats else 8
        return DeviceCapability(major, 0)

    @classmethod
    def get_attn_backend_cls(cls, *_: Any, **__: Any) -> str:
        """Return no backend: no layer is built."""
        return ""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Put the executor of plans in place of vLLM's."""
        parallel = vllm_config.parallel_config
        parallel.worker_cls = "vllm.v1.worker.worker_base.WorkerBase"
        parallel.distributed_executor_backend = "fastroof.backends.vllm_engine.executor.PlanExecutor"

    @classmethod
    def inference_mode(cls) -> Any:
        """Return the context in which models run."""
        return torch.no_grad()
