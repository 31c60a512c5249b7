"""Columns that the results of every kind of sweep have."""

from __future__ import annotations

from typing import Final

from fastroof.columns import Column

__all__ = ["GPU", "KERNELS", "MODEL", "RUNTIME", "WEIGHT_BYTES"]

MODEL: Final = Column("model", "text", "", "model")
GPU: Final = Column("gpu", "text", "", "GPU it runs on")
RUNTIME: Final = Column("runtime", "text", "", "what an engine adds to the sum of its kernels")
KERNELS: Final = Column("kernels", "text", "", "measured tables that its kernels come from")
WEIGHT_BYTES: Final = Column("weight_bytes", "int", "B", "weights on one GPU")
