"""Columns that the results of every kind of sweep have."""

from __future__ import annotations

from typing import Final

from fastroof.columns import Column

__all__ = ["GPU", "KERNELS", "MODEL", "NO_ROUTING", "RUNTIME", "SPLIT", "WEIGHT_BYTES"]

NO_ROUTING: Final = "none"
"""Of a model without experts; what is empty would come back from a CSV as nothing."""

MODEL: Final = Column("model", "text", "", "model")
GPU: Final = Column("gpu", "text", "", "GPU it runs on")
SPLIT: Final = (
    Column("pp", "int", "", "pipeline stages"),
    Column("dp", "int", "", "ranks of attention data parallelism"),
    Column("ep", "int", "", "groups of experts on GPUs of their own"),
    Column("routing", "text", "", "how tokens spread over experts; none without any"),
)
"""How a model is split, beside its tensor-parallel size."""
RUNTIME: Final = Column("runtime", "text", "", "what an engine adds to the sum of its kernels")
KERNELS: Final = Column("kernels", "text", "", "measured tables that its kernels come from")
WEIGHT_BYTES: Final = Column("weight_bytes", "int", "B", "weights on one GPU")
