"""Experts through torch: rows gathered by expert, two grouped GEMMs, silu-and-mul between, a weighted sum."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kernels_bench.protocol import Point
from kernels_bench.providers.device import Device
from kernels_bench.providers.experts import ExpertLayer, ExpertSets, refuses_experts
from kernels_bench.providers.rotating import RotatingCalls
from kernels_bench.providers.small_ops import SmallOps

MOE_KERNEL: Final = (
    "torch gather, grouped_mm gate_up, {activation}, grouped_mm down, weighted sum; "
    "router and sort not inside"
)
GROUPED_ALIGNMENT: Final = 8
"""Widths in multiples of it: rows of bf16 must be of whole 16 B."""


def refuses_moe(point: Point) -> str | None:
    """Return why a MoE point cannot be measured; None where it can."""
    if reason := refuses_experts(point, ("bf16",)):
        return f"torch's grouped GEMM: {reason}"
    layer = ExpertLayer.of(point)
    if layer.hidden % GROUPED_ALIGNMENT or layer.width % GROUPED_ALIGNMENT:
        return f"grouped GEMM needs widths in multiples of {GROUPED_ALIGNMENT}"
    return None


def prepare_moe(
    point: Point, ops: SmallOps, kernel: str, device: Device, seed: int, max_bytes: int
) -> RotatingCalls:
    """Make tokens and experts, and the order of rows by expert."""
    import torch
    import torch.nn.functional as functional

    sets = ExpertSets.make(point, device, seed, max_bytes)
    plans = [_Rows(sets, index) for index in range(sets.num_sets)]
    most = max(len(plan.tokens) for plan in plans)
    middle = torch.empty((most, sets.layer.width), dtype=sets.x.dtype, device=sets.x.device)

    def compute(index: int) -> Any:
        weights, plan = sets.weights_of(index), plans[index]
        gathered = sets.x[index].index_select(0, plan.tokens)
        gated = functional.grouped_mm(gathered, weights.gate_up.transpose(1, 2), offs=plan.ends)
        between = middle[: len(plan.tokens)]
        (between,) = ops.silu_and_mul(between, gated) or (between,)
        rows = functional.grouped_mm(between, weights.down.transpose(1, 2), offs=plan.ends)
        back = rows.index_select(0, plan.row_of).view(*plan.shares.shape[::2], -1)
        return torch.bmm(plan.shares, back)[:, 0]

    return sets.calls(kernel, compute, seed)


class _Rows:
    """Rows of a call: one for each expert here that a token takes, sorted by expert."""

    def __init__(self, sets: ExpertSets, index: int) -> None:
        import torch

        experts = sets.experts[index].cpu().numpy()
        is_here = experts < sets.layer.num_local
        order = np.argsort(np.where(is_here, experts, sets.layer.num_experts).ravel(), kind="stable")
        rows = order[: int(is_here.sum())]
        row_of = np.zeros(experts.size, np.int64)  # of experts elsewhere any, at a share of zero
        row_of[rows] = np.arange(len(rows))
        counts = np.bincount(experts[is_here], minlength=sets.layer.num_local)
        device = sets.x.device
        self.tokens = torch.as_tensor(rows // experts.shape[1], device=device)
        self.row_of = torch.as_tensor(row_of, device=device)
        self.ends = torch.as_tensor(np.cumsum(counts), dtype=torch.int32, device=device)
        shares = sets.expert_weights[index] * torch.as_tensor(is_here, device=device)
        self.shares = shares.to(sets.x.dtype)[:, None, :]
