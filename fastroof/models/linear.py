"""Linear layers, as attention and MLPs call them."""

from __future__ import annotations

from fastroof.models.execution import Execution
from fastroof.operators.calls import Elementwise, Gemm, Role, RowOperator
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES

__all__ = ["linear_calls"]


def linear_calls(role: Role, quantise: Role, n: int, k: int, execution: Execution) -> list[RowOperator]:
    """One linear layer of n outputs and k inputs, after what quantises its input if a kernel does."""
    dtype = execution.kernel(role)
    gemm = Gemm(role, role, 1, n, k, dtype)
    if dtype != "fp8" or not execution.quantise_inputs:
        return [gemm]
    row_bytes = k * (ACTIVATION_BYTES + DTYPE_BYTES["fp8"])
    return [Elementwise(quantise, f"{role} quantise", 1, row_bytes), gemm]
