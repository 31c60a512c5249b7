"""The only place with unit constants."""

from __future__ import annotations

from typing import Final

US_PER_S: Final = 1e6
US_PER_MS: Final = 1e3
MS_PER_S: Final = 1e3
NS_PER_US: Final = 1000
NS_PER_MS: Final = 1_000_000

TFLOP: Final = 1e12
"""FLOPs in one TFLOP."""

GB: Final = 1e9
"""Bytes in one GB, as in bandwidths (GB/s)."""

TB: Final = 1e12
"""Bytes in one TB, as in bandwidths (TB/s)."""

MIB: Final = 2**20
"""Bytes in one MiB."""

GIB: Final = 2**30
"""Bytes in one GiB, as in memory sizes."""

DTYPE_BYTES: Final[dict[str, float]] = {
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "fp8_block": 1,
    "fp8_rowwise": 1,
    "int8": 1,
    "int4_wo": 0.5,
    "w4a16_mxfp4": 0.5,
}
"""Bytes of one stored weight or element, by dtype name."""

ACTIVATION_BYTES: Final = 2
"""Bytes of one activation: GEMM outputs, queries and attention outputs are bf16 whatever the weights are."""

PEAK_DTYPE: Final[dict[str, str]] = {
    "bf16": "bf16",
    "fp16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8",
    "fp8_rowwise": "fp8",
    "int8": "int8",
    "int4_wo": "bf16",
    "w4a16_mxfp4": "bf16",
}
"""Which of a GPU's peaks a kernel of a dtype runs against: weight-only formats compute in bf16."""
