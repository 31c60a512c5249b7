"""Columns that the results of every kind of sweep have."""

from __future__ import annotations

from typing import Final

from fastroof.columns import Column

__all__ = ["DTYPE", "GPU", "KV_DTYPE", "MODEL", "RUNTIME", "WEIGHT_BYTES"]

MODEL: Final = Column("model", "text", "", "model")
GPU: Final = Column("gpu", "text", "", "GPU it runs on")
DTYPE: Final = Column("dtype", "text", "", "dtype of weights and activations: bf16, fp8, fp8_block")
KV_DTYPE: Final = Column("kv_dtype", "text", "", "dtype of the KV cache; attention computes in bf16")
RUNTIME: Final = Column("runtime", "text", "", "what an engine adds to the sum of its kernels")
WEIGHT_BYTES: Final = Column("weight_bytes", "int", "B", "weights on one GPU")
