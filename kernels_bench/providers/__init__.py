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

    Returns
    -------
    list of Provider
        The first that works here and does not refuse a point measures it. One order serves all operators,
        since each refuses what is not its own: attention goes to vLLM's FA3, then flashinfer, then SDPA;
        bf16 GEMM to torch alone; fp8 GEMM to vLLM's CUTLASS kernel, then torch._scaled_mm, or of blocks to
        flashinfer's; experts to vLLM, flashinfer, then torch and Triton; a window to vLLM and flashinfer;
        MLA to flashinfer alone; norm, rope and activation to vLLM, flashinfer, then Triton.

    Examples
    --------
    >>> [provider.name for provider in all_providers()]
    ['vllm', 'flashinfer', 'torch']
    """
    return [VllmProvider(), FlashinferProvider(), TorchProvider()]
