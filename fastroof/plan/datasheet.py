"""The datasheet model: what a plan is compiled from where nothing was measured.

Latency is ``launch + max(flops / peak, bytes / bandwidth) / efficiency``, with one efficiency and one
launch floor an operator class. Everything it gives has origin "modelled".
"""

from __future__ import annotations

import warnings
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fastroof import flops
from fastroof.columns import ORIGIN_MODELLED
from fastroof.config import GpuSpec
from fastroof.operators.calls import AllReduce, Elementwise, RowOperator
from fastroof.pack import SIZE_LIMIT, PackedGrid
from fastroof.plan.curves import RowCurve, row_cost, row_values
from fastroof.roofline import HeadShape, decode_roofline, prefill_roofline, prefix_roofline_us
from fastroof.units import DTYPE_BYTES, PEAK_DTYPE, US_PER_S

__all__ = ["CLASSES", "DatasheetCurves", "OperatorClass", "elementwise_curve"]

Floats = npt.NDArray[np.float64]


class OperatorClass(NamedTuple):
    """What the datasheet model assumes of one class of operators."""

    launch_us: float
    efficiency: float


CLASSES: Final[dict[str, OperatorClass]] = {
    "gemm": OperatorClass(2.5, 0.79),
    "gemm_fp8": OperatorClass(4.6, 0.45),
    "attention_prefill": OperatorClass(11.0, 0.50),
    "attention_decode": OperatorClass(11.0, 0.87),
    "elementwise": OperatorClass(1.9, 0.88),
    "allreduce": OperatorClass(4.5, 0.72),
}
"""Launch floor and efficiency by operator class.

From the vLLM 0.24.0 tables of the H100: the smallest latency, and the median of roofline / latency,
over bf16 GEMMs of m >= 1024 and n, k >= 2048 (fp8: 0.45, quantising the input included), attention
calls of over 200 us with head_dim 128 and bf16 KV, streaming kernels beyond the L2, all-reduces of
16 MiB and more over 4 GPUs.
"""


def _datasheet_curve(
    operator: RowOperator, assumed: OperatorClass, gpu: GpuSpec, bytes_per_s: float
) -> RowCurve:
    """Launch floor plus the larger of two straight lines, with a node where they cross."""
    cost = row_cost(operator)
    flops_slope = cost.flops_per_row / gpu.peak(cost.dtype) * US_PER_S
    bytes_slope, fixed = (b / bytes_per_s * US_PER_S for b in (cost.bytes_per_row, cost.fixed_bytes))
    kink = [fixed / (flops_slope - bytes_slope)] if fixed and flops_slope > bytes_slope else []
    axis = np.array([0.0, *kink, SIZE_LIMIT])
    bound = np.maximum(flops_slope * axis, fixed + bytes_slope * axis)
    flag = np.full(len(axis), ORIGIN_MODELLED, np.uint8)
    value = assumed.launch_us + bound / assumed.efficiency
    return RowCurve(operator, axis, value, flag, assumed.launch_us)


def elementwise_curve(operator: Elementwise, gpu: GpuSpec) -> RowCurve:
    """Latency of a streaming kernel against its rows, from the datasheet."""
    return _datasheet_curve(operator, CLASSES["elementwise"], gpu, gpu.hbm_bytes_per_s)


class DatasheetCurves:
    """Curves from a GPU's datasheet alone.

    Parameters
    ----------
    gpu : GpuSpec
        The GPU.
    """

    method = "datasheet"
    quantise_inputs = False

    def __init__(self, gpu: GpuSpec) -> None:
        self.gpu = gpu
        warnings.warn(
            f"no measured tables of {gpu.name}: its steps come from the datasheet model, not from kernels",
            UserWarning,
            stacklevel=3,
        )

    def row_curve(self, operator: RowOperator, max_rows: int) -> RowCurve:
        """Latency of an operator against its rows; ``max_rows`` does not matter."""
        if isinstance(operator, Elementwise):
            return elementwise_curve(operator, self.gpu)
        if isinstance(operator, AllReduce):
            return _datasheet_curve(operator, CLASSES["allreduce"], self.gpu, self.gpu.nvlink_bytes_per_s)
        assumed = CLASSES["gemm_fp8" if PEAK_DTYPE[operator.dtype] == "fp8" else "gemm"]
        return _datasheet_curve(operator, assumed, self.gpu, self.gpu.hbm_bytes_per_s)

    def row_values(self, operator: RowOperator, max_rows: int) -> tuple[Floats, npt.NDArray[np.uint8]]:
        """Latency of an operator at every number of rows, and its origin."""
        return row_values(self.row_curve(operator, max_rows), max_rows)

    def attention_block(self, operator: str, heads: HeadShape) -> Floats:
        """Grid block of an attention operator: one row of cells, exact in batch and length.

        A sequence costs the larger of two polynomials of its length, the FLOPs' and the bytes', so
        the axis has a node where they cross.
        """
        is_decode = operator == "attention_decode"
        assumed = CLASSES[operator]
        whole = (decode_roofline if is_decode else prefill_roofline)(heads, self.gpu, 0.0)
        nh, nkv, dim = heads.num_q_heads, heads.num_kv_heads, heads.head_dim
        bytes_us = US_PER_S / self.gpu.hbm_bytes_per_s
        width = DTYPE_BYTES[heads.kv_dtype]
        if is_decode:
            fixed = float(flops.decode_attention_bytes(nh, nkv, dim, 0, 1, width)) * bytes_us
            one = float(flops.decode_attention_bytes(nh, nkv, dim, 1, 1, width)) * bytes_us
            moved = (fixed, one - fixed)
        else:
            moved = (0.0, float(flops.attention_bytes(nh, nkv, dim, 1, 1, 1, width)) * bytes_us)
        # work = square x^2 + slope x against moved = fixed + slope x
        square, slope = whole.square_us, whole.slope_us - moved[1]
        line = (-moved[0], slope - moved[1])
        roots = np.roots([square, line[1], line[0]]) if square or line[1] else np.array([])
        kinks = sorted(float(r.real) for r in roots if abs(r.imag) < 1e-9 and 0.0 < r.real < SIZE_LIMIT)
        x_axis = np.array([0.0, *kinks, SIZE_LIMIT])
        y_axis = np.array([0.0, SIZE_LIMIT])
        cells = np.zeros((2, len(x_axis), 6))
        cells[0, :, 0] = assumed.launch_us
        for j, x0 in enumerate(x_axis):
            middle = x0 + 1.0 if j == len(x_axis) - 1 else (x0 + min(x_axis[j + 1], 2.0 * x0 + 2.0)) / 2.0
            compute_bound = (square * middle + slope) * middle > moved[0] + moved[1] * middle
            a, b, c = (square, slope, 0.0) if compute_bound else (0.0, moved[1], moved[0])
            cells[0, j, 3:] = np.array([(a * x0 + b) * x0 + c, 2.0 * a * x0 + b, a]) / assumed.efficiency
        cells[1, :, 0] = assumed.launch_us + cells[0, :, 3] * SIZE_LIMIT
        flags = np.full((2, len(x_axis)), ORIGIN_MODELLED)
        return PackedGrid(y_axis, x_axis, cells, flags, whole).arena

    def prefix_us(self, heads: HeadShape) -> tuple[float, float]:
        """Price of a prefix: its roofline at prefill attention's efficiency."""
        efficiency = CLASSES["attention_prefill"].efficiency
        pair_us, token_us = prefix_roofline_us(heads, self.gpu)
        return pair_us / efficiency, token_us / efficiency
