"""Which format the kernels of a stored format compute in: by GPU, engine, and what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fastroof.config import GpuSpec
from fastroof.models import ModelSpec
from fastroof.models.experts import RoutedExperts
from fastroof.operators.gemm import GEMM
from fastroof.operators.moe import MOE
from fastroof.operators.moe_nongated import MOE_NONGATED
from fastroof.plan.options import PlanOptions
from fastroof.tables import Tables

__all__ = ["KERNEL_FORMATS", "kernel_formats"]

KERNEL_FORMATS: Final[dict[str, tuple[tuple[str, tuple[str, ...]], ...]]] = {
    "mxfp8": (("fp8", ("fp8_block",)),),
    "int8": (("int8", ("int8", "sq")), ("bf16", ("int8_wo",))),
    "w4afp8": (("fp8", ("w4afp8",)), ("bf16", ("int4_wo",))),
    "nvfp4": (("fp4", ("nvfp4",)), ("bf16", ("nvfp4_wo",))),
    "mxfp4": (("fp4", ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4")), ("bf16", ("w4a16_mxfp4",))),
}
"""Formats that kernels of a stored format compute in on GPUs that have a peak, the first that they have.

On a GPU without units for 4 bits engines keep the weights as they are and compute in bf16; fp8 without units
for it is refused. SmoothQuant's int8 kernels are called ``sq`` in the tables that have any. No kernel of
mxfp8 was measured: those of fp8_block stand for it, which compute in fp8 too and read 3 % fewer bytes.
"""


def kernel_formats(
    model: ModelSpec, stored: set[str], gpu: GpuSpec, options: PlanOptions, tables: Tables | None
) -> tuple[tuple[str, str], ...]:
    """Stored formats whose kernels compute in another, each with that."""
    chosen = {dtype: _kernel_format(model, dtype, gpu, options, tables) for dtype in sorted(stored)}
    return tuple((dtype, kernel) for dtype, kernel in chosen.items() if dtype != kernel)


def _kernel_format(
    model: ModelSpec, dtype: str, gpu: GpuSpec, options: PlanOptions, tables: Tables | None
) -> str:
    by_peak = dict(KERNEL_FORMATS.get(dtype, ()))
    able = next((kernels for peak, kernels in by_peak.items() if peak in gpu.peak_flops_per_s), (dtype,))
    if len(able) == 1:
        return able[0]
    for operator in (MOE.name, GEMM.name):
        named = options.kernel(operator, gpu, dtype)
        if named is not None and named.dtype in able:
            return str(named.dtype)
    if tables is None:
        return able[0]
    experts = frozenset(kind.mlp for kind in model.kinds if isinstance(kind.mlp, RoutedExperts))
    key = ("measured formats", model.hidden, experts)
    measured = tables.kept(key, lambda: list(_measured(tables, model.hidden, experts)))
    return next((kernel for dtypes in measured for kernel in able if kernel in dtypes), able[0])


def _measured(tables: Tables, hidden: int, experts: frozenset[RoutedExperts]) -> Iterator[set[str]]:
    """Formats in which a model's experts were measured: by the first source, by any, of any shape."""
    if not experts:
        yield _dtypes(tables, GEMM.name, None)
        return
    shapes = {(one.width(hidden), one.intermediate, one.topk, one.num_experts) for one in experts}
    operator = MOE.name if all(one.is_gated for one in experts) else MOE_NONGATED.name
    if operator not in tables.sources:
        return
    yield {str(key[0]) for key in tables.groups(operator) if key[1:5] in shapes}
    yield _dtypes(tables, operator, shapes)
    yield _dtypes(tables, operator, None)


def _dtypes(tables: Tables, operator: str, shapes: set[tuple[int, int, int, int]] | None) -> set[str]:
    return {str(key[0]) for key in tables.every_key(operator) if shapes is None or key[1:5] in shapes}
