"""Mixture of experts: the routed experts of one layer on one GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.operators.moe_work import moe_bytes
from fastroof.units import DTYPE_BYTES, PEAK_DTYPE
from kernels_bench.model_shape import ModelShape
from kernels_bench.operators.operator import Columns, MeasuredOperator, ModelShapes, Shape, Values
from kernels_bench.routing import DISTRIBUTIONS

DRAWN_BYTES_PER_S: Final = 4e11
QUANTISED_BYTES_PER_S: Final = 1e11
"""Not measured: from 3 and 20 bytes that are moved a byte of weight, and random numbers besides."""

VLLM_IMPORT_S: Final = 8.0
"""A guess until a GPU host has measured it: the import took 8 s on a host of 2 cores without a GPU."""
KERNEL_COMPILE_S: Final = 0.4
"""A guess until a GPU host has measured it.

For vLLM 0.26.0's fused_experts on the shapes of the grids first_run and second_run, given tensors without
memory, Triton 3.6 compiled 186 kernels for sm_90 on two cores without a GPU in 70 s, the longest in 0.84 s.
"""
KERNELS_A_SHAPE: Final = 3
"""Kernels that Triton compiles for a dtype, topk and number of tokens: those 186 were of 62 such shapes.

Each of its two GEMMs has one, and layers that vLLM's package has tuned block sizes for have their own.
"""


def _experts_of(model: ModelShape, gpus: int) -> Iterable[Shape]:
    """Every expert's width over all GPUs."""
    return [] if model.experts is None else [(*model.expert_layer(), gpus, 1)]


def _spread_experts_of(model: ModelShape, gpus: int) -> Iterable[Shape]:
    """The experts over all GPUs, each whole."""
    if model.experts is None or model.experts.num_experts % gpus:
        return []
    return [(*model.expert_layer(), 1, gpus)]


class MoeOperator(MeasuredOperator):
    """The experts of a MoE layer."""

    name = "moe"
    flops_share = 0.404  # of 989.5 TFLOP/s: 400
    fp8_flops_share = 0.4  # of 1979: 800
    launch_us = 25.0
    import_s = VLLM_IMPORT_S
    compile_s = KERNELS_A_SHAPE * KERNEL_COMPILE_S
    computes_in_dtype = True
    shape_columns = ("hidden", "intermediate", "topk", "num_experts", "moe_tp", "moe_ep")
    model_shapes: ClassVar[ModelShapes] = {"experts": _experts_of, "spread_experts": _spread_experts_of}
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"distribution": DISTRIBUTIONS}
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

    def fill_bytes_per_s(self, columns: Columns) -> Floats:
        """Of weights: drawn and scaled; fp8 ones divided, clamped and rounded too, from twice the bytes."""
        is_bf16 = np.array([str(dtype) == "bf16" for dtype in columns["dtype"]], np.bool_)
        return np.where(is_bf16, DRAWN_BYTES_PER_S, QUANTISED_BYTES_PER_S)

    def compiled_shape(self, values: Values) -> tuple[Any, ...] | None:
        """What chooses the block sizes of vLLM's Triton kernels, and is compiled in."""
        return values["dtype"], values["topk"], values["num_tokens"]

    def checked_dtype(self, values: Values) -> str:
        """Experts in fp8 round twice, one after the other."""
        dtype = str(values["dtype"])
        return "fp8_experts" if PEAK_DTYPE.get(dtype) == "fp8" else dtype

    def reference_work(self, values: Values) -> float:
        """Of three GEMMs for each expert that a token takes."""
        return (
            super().reference_work(values)
            * 3.0
            * float(values["hidden"] * values["intermediate"] * values["topk"])
        )


OPERATORS: Final = (MoeOperator(),)
