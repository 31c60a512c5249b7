"""What a comparison knows of a model: one kind of layer, dense or with experts, and where it may be split."""

from __future__ import annotations

from typing import Final, NamedTuple

from fastroof.compat.roofline_v2.configs import NO_EXPERTS
from fastroof.errors import ModelError
from fastroof.models import Layout, ModelSpec
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.mlp import GatedMlp
from fastroof.operators.calls import Experts, Gemm
from fastroof.plan import StepPlan
from fastroof.units import DTYPE_BYTES

__all__ = [
    "INFERSIM_DTYPES",
    "ComparedModel",
    "gemm_dtype",
    "infersim_obstacle",
    "infersim_world",
    "is_fp8",
    "roofline_v2_obstacle",
]

LAYER_GEMMS: Final = ("qkv", "o", "gate_up", "down", "experts", "shared_gate_up", "shared_down")
INFERSIM_DTYPES: Final = ("bf16", "fp8", "fp8_block")
"""Formats that InferSim has: two bytes a weight and the fp16 peak, or one and the fp8 peak."""


class ComparedModel(NamedTuple):
    """Sizes of a model whose layers are all alike."""

    num_layers: int
    hidden: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    experts: RoutedExperts | None

    @classmethod
    def of(cls, model: ModelSpec) -> ComparedModel:
        """Read a model's sizes."""
        kind = model.only_kind
        attention, mlp = kind.attention, kind.mlp
        is_known = isinstance(attention, GroupedQueryAttention) and isinstance(mlp, GatedMlp | RoutedExperts)
        if not is_known or attention.window is not None:
            raise ModelError(
                f"{model.name} cannot be compared: its layers are {kind.name}"
                + (f" within {attention.window} tokens" if attention.window else "")
                + ", and the methods have grouped-query attention over all tokens in common, with a gated "
                "MLP or with experts; model.with_full_attention() takes windows away, and "
                "fastroof.compat.infersim answers for MLA alone"
            )
        assert isinstance(attention, GroupedQueryAttention)
        assert isinstance(mlp, GatedMlp | RoutedExperts)
        return cls(
            model.num_layers,
            model.hidden,
            attention.num_q_heads,
            attention.num_kv_heads,
            attention.head_dim,
            mlp.intermediate,
            mlp if isinstance(mlp, RoutedExperts) else None,
        )


def gemm_dtype(plan: StepPlan) -> str:
    """Format that all GEMMs of a plan's layers compute in, the router aside; several are joined by commas."""
    calls = (curve.operator for curve in plan.row_curves)
    dtypes = {call.dtype for call in calls if isinstance(call, Gemm | Experts) and call.role in LAYER_GEMMS}
    return ", ".join(sorted(dtypes))


def infersim_world(model: ComparedModel, layout: Layout) -> int:
    """GPUs that InferSim is told of: ranks of a dense model share nothing, those of experts do."""
    return layout.tp * layout.dp if model.experts else layout.tp


def infersim_obstacle(model: ComparedModel, layout: Layout, dtype: str) -> str:
    """Why InferSim cannot represent a case; empty where it can."""
    if dtype not in INFERSIM_DTYPES:
        return f"its GEMMs are all bf16 or all fp8, these are {dtype}"
    experts = model.experts
    if experts is None:
        return ""
    if not experts.is_gated:
        return "its experts have three projections, these two"
    if (layout.ep, layout.moe_tp) != (layout.dp, layout.tp):
        return (
            f"it splits experts as attention: each over tp GPUs, and groups of them over the dp ranks; here "
            f"that is ep {layout.dp} with moe_tp {layout.tp}, not ep {layout.ep} with moe_tp {layout.moe_tp}"
        )
    return ""


def roofline_v2_obstacle(model: ComparedModel, dtype: str) -> str:
    """Why roofline V2 cannot represent a case; empty where it can."""
    if model.experts:
        return f"{NO_EXPERTS}; and V2's tables have no MFU of any"
    if dtype != "bf16":
        return f"GEMMs and attention share one peak and one width of a weight: bf16, not {dtype}"
    return ""


def is_fp8(dtype: str) -> bool:
    """Whether a format of GEMMs is one of fp8."""
    return DTYPE_BYTES[dtype] < DTYPE_BYTES["bf16"]
