"""Unit constants; all of them are here."""

from __future__ import annotations

from typing import Final

NS_PER_S: Final = 1e9
US_PER_S: Final = 1e6
US_PER_MS: Final = 1e3
UJ_PER_J: Final = 1e6
MS_PER_S: Final = 1e3
SECONDS_PER_HOUR: Final = 3600
NS_PER_US: Final = 1000
PS_PER_US: Final = 1_000_000
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

MX_BYTES: Final = 1 / 32
"""Bytes of scale per element of an MX format: 32 elements share one byte."""

DTYPE_BYTES: Final[dict[str, float]] = {
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "fp8_block": 1,
    "fp8_rowwise": 1,
    "mxfp8": 1 + MX_BYTES,
    "int8": 1,
    "sq": 1,
    "fp8_wo": 1,
    "int8_wo": 1,
    "int4_wo": 0.5,
    "w4afp8": 0.5,
    "nvfp4": 0.5 + 1 / 16,
    "nvfp4_wo": 0.5 + 1 / 16,
    "mxfp4": 0.5 + MX_BYTES,
    "w4a8_mxfp4_mxfp8": 0.5 + MX_BYTES,
    "w4a16_mxfp4": 0.5 + MX_BYTES,
}
"""Bytes of one stored weight or element, by dtype name, including the scales of the format.

Scales of int4 are not counted: the checkpoint decides how many elements share one.
"""

KV_BYTES: Final[dict[str, float]] = DTYPE_BYTES | {"int8_per_token_head": 1}
"""Bytes of one element of the KV cache, by format."""

KV_SCALE_BYTES: Final[dict[str, int]] = {"int8_per_token_head": 4}
"""Further bytes of each key and each value of a head, by format: a float32 scale."""

INPUT_BYTES: Final[dict[str, float]] = DTYPE_BYTES | {
    "fp8_wo": 2,
    "int8_wo": 2,
    "int4_wo": 2,
    "nvfp4_wo": 2,
    "w4a16_mxfp4": 2,
    "w4afp8": 1,
    "w4a8_mxfp4_mxfp8": 1 + MX_BYTES,
}
"""Bytes of one input element of a kernel, by dtype name: larger than a weight in weight-only formats."""

ACTIVATION_BYTES: Final = 2
"""Bytes of one activation: GEMM outputs, queries and attention outputs are bf16 for all weight dtypes."""

PEAK_DTYPE: Final[dict[str, str]] = {
    "bf16": "bf16",
    "fp16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8",
    "fp8_rowwise": "fp8",
    "mxfp8": "fp8",
    "int8": "int8",
    "sq": "int8",
    "fp8_wo": "bf16",
    "int8_wo": "bf16",
    "int4_wo": "bf16",
    "w4afp8": "fp8",
    "nvfp4": "fp4",
    "nvfp4_wo": "bf16",
    "mxfp4": "fp4",
    "w4a8_mxfp4_mxfp8": "fp8",
    "w4a16_mxfp4": "bf16",
}
"""Which of a GPU's peak rates bounds a kernel, by dtype name.

Weight-only formats compute in bf16; 4-bit weights with 8-bit activations compute at the 8-bit rate; ``sq`` is
SmoothQuant, int8 for both.
"""
