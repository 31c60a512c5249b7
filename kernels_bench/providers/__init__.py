"""Providers: what launches the kernel of a point, and the inputs and references they share.

Importing this loads neither torch nor any kernel library.
"""

from __future__ import annotations

from kernels_bench.providers.aiter_provider import AiterProvider
from kernels_bench.providers.cuda_provider import CudaProvider
from kernels_bench.providers.device import Device
from kernels_bench.providers.flashinfer_provider import FlashinferProvider
from kernels_bench.providers.torch_provider import TorchProvider
from kernels_bench.providers.vllm_provider import VllmProvider

__all__ = ["all_providers"]


def all_providers(device: Device | None = None) -> list[CudaProvider]:
    """Return the providers of GPU kernels in the order of choice, for the GPU of this host by default.

    >>> [provider.name for provider in all_providers()]
    ['vllm', 'flashinfer', 'aiter', 'torch']
    """
    return [kind(device) for kind in (VllmProvider, FlashinferProvider, AiterProvider, TorchProvider)]
