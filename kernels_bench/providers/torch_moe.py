"""MoE experts as two grouped GEMMs with silu-and-mul between: what is routed is given, not computed."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fastroof.arrays import Longs
from kernels_bench.points import Point
from kernels_bench.providers import references
from kernels_bench.providers.device import Device
from kernels_bench.providers.random_inputs import InputMaker
from kernels_bench.providers.rotating import RotatingCalls, count_sets, sample
from kernels_bench.providers.small_ops import SmallOps

__all__ = ["MOE_KERNEL", "expert_rows", "prepare_moe", "refuses_moe"]

MOE_KERNEL: Final = (
    "torch grouped_mm gate_up, {activation}, torch grouped_mm down; "
    "router, sort, gather and combine not inside"
)
CHECKED_ROWS: Final = 32
DISTRIBUTIONS: Final = ("balanced", "uniform")
GROUPED_ALIGNMENT: Final = 8
"""Widths in multiples of it: rows of bf16 must be of whole 16 B."""


def refuses_moe(point: Point) -> str | None:
    """Say why a MoE point cannot be measured; None where it can."""
    values = point.values
    if values["dtype"] != "bf16":
        return f"torch's grouped GEMM is bf16, not {values['dtype']}"
    if values["distribution"] not in DISTRIBUTIONS:
        return f"distribution {values['distribution']!r} is none of {', '.join(DISTRIBUTIONS)}"
    experts, ep, tp = (int(values[name]) for name in ("num_experts", "moe_ep", "moe_tp"))
    hidden, intermediate = int(values["hidden"]), int(values["intermediate"])
    if experts % ep or intermediate % tp:
        return f"{experts} experts over {ep} GPUs, or a width of {intermediate} over {tp}, does not divide"
    if int(values["topk"]) > experts:
        return f"a token takes {values['topk']} of {experts} experts"
    if hidden % GROUPED_ALIGNMENT or (intermediate // tp) % GROUPED_ALIGNMENT:
        return f"grouped GEMM needs widths in multiples of {GROUPED_ALIGNMENT}"
    return None


def expert_rows(
    num_tokens: int, topk: int, num_experts: int, moe_ep: int, distribution: str, seed: int
) -> Longs:
    """Count the rows that each expert of one GPU takes.

    Parameters
    ----------
    num_tokens, topk, num_experts : int
        Tokens of the step (of all GPUs), experts a token takes, experts of the layer.
    moe_ep : int
        GPUs that the experts are spread over; counts are those of the first.
    distribution : {"balanced", "uniform"}
        As even as whole rows can be, or each token at ``topk`` random experts.
    seed : int
        Seed of a uniform draw.

    Returns
    -------
    ndarray of int64
        Shape (num_experts / moe_ep,).

    Examples
    --------
    >>> expert_rows(3, 2, 4, 1, "balanced", seed=0).tolist()
    [2, 1, 2, 1]
    """
    assignments = num_tokens * topk
    if distribution == "balanced":
        chosen = np.arange(assignments) * num_experts // assignments
    else:
        random = np.random.default_rng(seed)
        chosen = np.argsort(random.random((num_tokens, num_experts)), axis=1)[:, :topk].ravel()
    counts = np.bincount(chosen, minlength=num_experts).astype(np.int64)
    return counts[: num_experts // moe_ep]


def prepare_moe(
    point: Point, ops: SmallOps, activation: str, device: Device, seed: int, max_bytes: int
) -> RotatingCalls:
    """Make rows sorted by expert and the experts' weights.

    Parameters
    ----------
    point : Point
        Operator moe, dtype bf16.
    ops : SmallOps
        Whose silu-and-mul runs between the GEMMs.
    activation : str
        Name of that kernel.
    device : Device
        Where inputs live.
    seed : int
        Seed of inputs and routing.
    max_bytes : int
        What they may take, B.

    Returns
    -------
    RotatingCalls
        Checked at up to 32 rows. The GEMMs allocate their outputs, which torch has no argument for.
    """
    import torch
    import torch.nn.functional as functional

    values = point.values
    tokens, topk, all_experts, ep, tp = (
        int(values[name]) for name in ("num_tokens", "topk", "num_experts", "moe_ep", "moe_tp")
    )
    hidden, width = int(values["hidden"]), int(values["intermediate"]) // tp
    counts = expert_rows(tokens, topk, all_experts, ep, str(values["distribution"]), seed)
    rows, experts = int(counts.sum()), len(counts)
    set_bytes = 2 * (3 * experts * hidden * width + rows * (2 * hidden + 3 * width))
    sets = count_sets(set_bytes, device.l2_bytes, max_bytes)
    make = InputMaker(device, seed)
    x = make.normal(sets, rows, hidden)
    gate_up, down = make.normal(sets, experts, 2 * width, hidden), make.normal(sets, experts, hidden, width)
    # As trained weights are: outputs of the order of one, far from where bf16 ends.
    gate_up *= hidden**-0.5
    down *= width**-0.5
    middle = make.poisoned(sets, rows, width)
    ends = make.indices(np.cumsum(counts))
    checked = sample(rows, CHECKED_ROWS, seed)
    expert_of = np.searchsorted(np.cumsum(counts), checked, side="right")
    outputs: dict[int, Any] = {}

    def launch(index: int) -> None:
        gated = functional.grouped_mm(x[index], gate_up[index].transpose(1, 2), offs=ends)
        ops.silu_and_mul(middle[index], gated)
        outputs[index] = functional.grouped_mm(middle[index], down[index].transpose(1, 2), offs=ends)

    def read(index: int) -> Any:
        return outputs[index][torch.as_tensor(checked)]

    def expect(index: int) -> Any:
        return torch.cat(
            [
                references.gated_mlp(x[index, row : row + 1], gate_up[index, expert], down[index, expert])
                for row, expert in zip(checked.tolist(), expert_of.tolist(), strict=True)
            ]
        )

    kernel = MOE_KERNEL.format(activation=activation)
    return RotatingCalls(kernel, sets, sets * set_bytes, launch, read, expect)
