"""InferSim's GPUs, and the unit conversions and fixed times of its method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

__all__ = ["GPUS", "InfersimGpu"]

GFLOP: Final = 1e9
GFLOPS_PER_TFLOPS: Final = 1024
"""InferSim counts 1024 GFLOP/s in one TFLOP/s, 2.4 % more than there are."""

BANDWIDTH_SHARE: Final = 0.8
"""Share of every datasheet bandwidth that InferSim takes as achievable."""

RUNTIME_GIB: Final = 15
"""Memory that InferSim keeps free for the runtime."""
ACTIVATIONS_GIB: Final = 5
"""Memory that InferSim keeps free for activations."""

CAUSAL_DIVISOR: Final = 1.8
MISSING_PREFILL_MFU: Final = 0.9
PREFILL_OVERHEAD_MS: Final = 30
DECODE_OVERHEAD_MS: Final = 5
HYBRID_DECODE_OVERHEAD_MS: Final = 2
SM_RATIO: Final = 108 / 132
"""Share of the SMs left to compute while two batches overlap."""


@dataclass(frozen=True)
class InfersimGpu:
    """What InferSim knows of a GPU; bandwidths as it uses them, after its derating.

    Attributes
    ----------
    fp16_tflops, fp8_tflops : float
        Peaks, TFLOP/s (taken as 1024 GFLOP/s each).
    default_mfu : float
        MFU where no measured row answers.
    memory_gib : float
        Memory, GiB.
    memory_gb_per_s, nvlink_gb_per_s, rdma_gb_per_s : float
        Bandwidths, GB/s (taken as GiB/s): of memory, of NVLink in one direction, of the network.

    Examples
    --------
    >>> GPUS["h800"].fp16_tflops
    989
    """

    fp16_tflops: float
    fp8_tflops: float
    default_mfu: float
    memory_gib: float
    memory_gb_per_s: float
    nvlink_gb_per_s: float
    rdma_gb_per_s: float


GPUS: Final[Mapping[str, InfersimGpu]] = MappingProxyType(
    {
        name: InfersimGpu(
            fp16_tflops, fp8_tflops, default_mfu, memory_gib, memory * BANDWIDTH_SHARE,
            nvlink * BANDWIDTH_SHARE / 2, rdma * BANDWIDTH_SHARE,
        )
        for name, fp16_tflops, fp8_tflops, default_mfu, memory_gib, memory, nvlink, rdma in (
            ("h20", 148, 296, 0.6, 96, 4096, 900, 50),
            ("h800", 989, 1979, 0.35, 80, 3430, 400, 50),
            ("h200", 989, 1979, 0.4, 141, 4800, 900, 50),
            ("gb200", 2500, 5000, 0.5, 192, 13400, 1800, 50),
        )
    }
)  # fmt: skip
"""InferSim's table of GPUs (alibaba/InferSim@f2293da, Apache-2.0): datasheet GB/s, NVLink halved."""
