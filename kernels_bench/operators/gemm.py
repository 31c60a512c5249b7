"""GEMMs: the linear layers and the LM head."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from kernels_bench.operators.operator import MeasuredOperator, ModelShapes, Values

COMPILE_S: Final = 1.0
"""A guess until a GPU host has measured it."""


class GemmOperator(MeasuredOperator):
    """GEMMs."""

    name = "gemm"
    flops_share = 0.606  # of 989.5 TFLOP/s: 600
    fp8_flops_share = 0.556  # of 1979: 1100
    launch_us = 4.0
    compile_s = COMPILE_S
    computes_in_dtype = True
    shape_columns = ("n", "k")
    model_shapes: ClassVar[ModelShapes] = {
        "linear": lambda model, tp: model.linear(tp),
        "lm_head": lambda model, tp: [model.lm_head(tp)],
    }

    def compiled_shape(self, values: Values) -> tuple[Any, ...] | None:
        """A weight and tiles of rows by their number, for DeepGEMM; the width that Inductor quantises."""
        if values["dtype"] == "fp8":
            return (values["k"],)
        if values["dtype"] != "fp8_block":
            return None
        return values["n"], values["k"], min(max(int(values["m"]).bit_length(), 4), 8)

    def line(self, values: Values) -> tuple[Any, ...]:
        """One weight."""
        return values["n"], values["k"]


OPERATORS: Final = (GemmOperator(),)
