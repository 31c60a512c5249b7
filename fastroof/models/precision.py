"""In which formats a step runs."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["DTYPES", "KV_DTYPES", "Precision"]

DTYPES: Final = ("bf16", "fp8", "fp8_block")
"""Formats of linear layers: fp8 is per tensor, fp8_block per block of 128 x 128 weights."""
KV_DTYPES: Final = ("bf16", "fp8")


class Precision(NamedTuple):
    """Formats of a model's weights and cache.

    Attributes
    ----------
    dtype : str
        Of the linear layers' weights and inputs.
    kv_dtype : str
        Of the KV cache.
    quantise_inputs : bool
        Whether each fp8 GEMM is preceded by a kernel that quantises its input; False where the measured
        GEMM includes it.
    """

    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    quantise_inputs: bool = False
