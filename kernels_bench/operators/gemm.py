"""GEMMs: the linear layers and the LM head."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.units import PEAK_DTYPE
from kernels_bench.operators.operator import Columns, MeasuredOperator, ModelShapes, Values

FP8_SHARE: Final = 0.556
"""Of 1979 TFLOP/s: 1100."""


class GemmOperator(MeasuredOperator):
    """GEMMs."""

    name = "gemm"
    flops_share = 0.606  # of 989.5 TFLOP/s: 600
    launch_us = 4.0
    computes_in_dtype = True
    shape_columns = ("n", "k")
    model_shapes: ClassVar[ModelShapes] = {
        "linear": lambda model, tp: model.linear(tp),
        "lm_head": lambda model, tp: [model.lm_head(tp)],
    }

    def flops_shares(self, columns: Columns) -> Floats:
        """Of fp8 kernels a smaller share of a higher peak."""
        is_fp8 = np.array([PEAK_DTYPE.get(str(dtype)) == "fp8" for dtype in columns["dtype"]], np.bool_)
        return np.where(is_fp8, FP8_SHARE, self.flops_share)

    def line(self, values: Values) -> tuple[Any, ...]:
        """One weight."""
        return values["n"], values["k"]


OPERATORS: Final = (GemmOperator(),)
