"""Mixture of experts: the routed experts of one layer on one GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.operators.expert_work import moe_bytes
from fastroof.units import DTYPE_BYTES
from kernels_bench.model_shape import ModelShape
from kernels_bench.operators.operator import Columns, MeasuredOperator, ModelShapes, Shape, Values

__all__ = ["OPERATORS", "MoeOperator"]


def _experts_of(model: ModelShape, tp: int) -> Iterable[Shape]:
    layer = model.expert_layer(tp)
    return [] if layer is None else [layer]


class MoeOperator(MeasuredOperator):
    """The experts of a MoE layer."""

    name = "moe"
    title = "MoE layer"
    flops_share = 0.404  # of 989.5 TFLOP/s: 400
    launch_us = 25.0
    computes_in_dtype = True
    shape_columns = ("hidden", "intermediate", "topk", "num_experts", "moe_tp")
    model_shapes: ClassVar[ModelShapes] = {"experts": _experts_of}
    defaults: ClassVar[Mapping[str, int | str]] = {"moe_tp": 1, "moe_ep": 1, "distribution": "balanced"}
    divisors: ClassVar[Mapping[str, str]] = {"intermediate": "moe_tp", "num_experts": "moe_ep"}

    def impossible(self, given: Values) -> str | None:
        """No token takes more experts than there are."""
        if reason := super().impossible(given):
            return reason
        if given["topk"] > given["num_experts"]:
            return f"topk {given['topk']} is above num_experts {given['num_experts']}"
        return None

    def set_bytes(self, columns: Columns, moved_bytes: Floats) -> Floats:
        """Every expert is held, those that no token takes too."""
        c = columns
        # moe_bytes types the size as a float; it broadcasts
        element_bytes: Any = np.array([DTYPE_BYTES[str(dtype)] for dtype in c["dtype"]])
        # As if a token took all of them.
        return moe_bytes(
            c["num_tokens"], c["hidden"], c["intermediate"], c["num_experts"], c["num_experts"],
            c["moe_tp"], c["moe_ep"], element_bytes,
        )  # fmt: skip

    def reference_work(self, values: Values) -> float:
        """Of three GEMMs for each expert that a token takes."""
        return (
            super().reference_work(values)
            * 3.0
            * float(values["hidden"] * values["intermediate"] * values["topk"])
        )


OPERATORS: Final = (MoeOperator(),)
