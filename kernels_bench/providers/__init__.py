"""Providers: what launches the kernel of a point, and the inputs and references they share.

Importing this loads neither torch nor any kernel library.
"""

from __future__ import annotations

from kernels_bench.protocol import Provider
from kernels_bench.providers.flashinfer_provider import FlashinferProvider
from kernels_bench.providers.torch_provider import TorchProvider
from kernels_bench.providers.vllm_provider import VllmProvider

__all__ = ["all_providers"]


def all_providers() -> list[Provider]:
    """Return the providers of GPU kernels in the order of choice.

    >>> [provider.name for provider in all_providers()]
    ['vllm', 'flashinfer', 'torch']
    """
    return [VllmProvider(), FlashinferProvider(), TorchProvider()]
