"""Operators as they are measured: one file each, and the table of them that everything else asks."""

from __future__ import annotations

from typing import Final

from kernels_bench.operators.attention import (
    DecodeAttentionOperator,
    PrefillAttentionOperator,
    UnequalDecodeAttentionOperator,
)
from kernels_bench.operators.communication import AllreduceOperator, CollectiveOperator
from kernels_bench.operators.elementwise import ElementwiseOperator
from kernels_bench.operators.gemm import GemmOperator
from kernels_bench.operators.mla import MlaDecodeOperator, MlaPrefillOperator
from kernels_bench.operators.moe import MoeOperator
from kernels_bench.operators.operator import MeasuredOperator

__all__ = ["MEASURED", "MeasuredOperator"]

MEASURED: Final[dict[str, MeasuredOperator]] = {
    operator.name: operator
    for operator in (
        GemmOperator(),
        PrefillAttentionOperator(),
        DecodeAttentionOperator(),
        UnequalDecodeAttentionOperator(),
        MoeOperator(),
        AllreduceOperator(),
        CollectiveOperator(),
        ElementwiseOperator(),
        MlaPrefillOperator(),
        MlaDecodeOperator(),
    )
}
"""By the name of the operator's table."""
