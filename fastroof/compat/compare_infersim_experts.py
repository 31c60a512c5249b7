"""Why InferSim's experts take another time than fastroof's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from fastroof.compat import infersim
from fastroof.compat.compare_models import infersim_world, is_fp8
from fastroof.compat.compare_steps import Case, Step
from fastroof.compat.infersim.rows import grouped_gemm_rows
from fastroof.errors import MissingTableError
from fastroof.operators.expert_work import moe_flops
from fastroof.units import US_PER_S

__all__ = ["BALANCED", "experts_facts", "has_other_format"]

BALANCED: Final = "balanced"
"""Routing of the rows that InferSim is given: it has none of its own."""

ROUNDING: Final = 0.0005000001
"""What an MFU to 3 decimals is off by at most."""

UP_SHARE: Final = 2.0 / 3.0
"""Gate and up are two of an expert's three projections, and have the MFU of up."""


def experts_facts(
    case: Case, step: Step, by_role: Mapping[str, float], row: Mapping[str, Any], its_share: float
) -> dict[str, Any]:
    """Facts of the experts: every ``_us`` is what one peculiarity adds, and they add up to the difference."""
    experts, layout = case.model.experts, case.layout
    assert experts is not None
    layers_us = case.model.num_layers * US_PER_S
    routed_us, load_us = row["routed_s"] * layers_us, row["moe_load_s"] * layers_us
    up, down, row_tokens = _its_row(case, step)
    at_peak_us = routed_us * its_share
    # 0 is an MFU too, of a row whose own has nothing in 3 decimals
    both = max(up, down) * (UP_SHARE / up + (1.0 - UP_SHARE) / down) if up and down else 1.0
    apart_us = at_peak_us * both
    own_us = by_role["experts"]
    routing = case.plan.execution.routing
    even_us = own_us if routing == BALANCED else _evenly_routed_us(case, step.new_tokens, own_us)
    least_us = _least_us(case, step.new_tokens)
    fell_back = "experts" in (row["fallbacks"] or "").split(", ")
    other_format = has_other_format(case)
    reads_row = case.own_trees["infersim"] and not fell_back and not other_format
    mfu, row_mfu = least_us / apart_us, 0.0
    if reads_row:
        row_mfu = _least_us(case, row_tokens) / _evenly_routed_us(case, row_tokens, own_us)
    at_row_us = least_us / row_mfu if reads_row else apart_us
    is_rounded = abs(mfu - row_mfu) <= ROUNDING
    has_shared = row.get("shared_up_s") is not None
    shared_us = (row["shared_up_s"] + row["shared_down_s"]) * layers_us if has_shared else 0.0
    own_shared_us = sum(us for role, us in by_role.items() if role in _SHARED_ROLES)
    return {
        "expert_floored": load_us > routed_us,
        "expert_floor_us": max(load_us - routed_us, 0.0),
        "expert_load_us": load_us,
        "expert_core_us": routed_us,
        "local_experts": experts.num_experts // layout.ep,
        "expert_peak_us": routed_us - at_peak_us,
        "expert_one_mfu_us": at_peak_us - apart_us,
        "up_mfu": up,
        "down_mfu": down,
        "expert_row_us": at_row_us - even_us,
        "expert_mfu_us": apart_us - at_row_us,
        "expert_tree_us": apart_us - even_us,
        "expert_mfu": mfu,
        "expert_row_mfu": row_mfu,
        "expert_effective_mfu": least_us / even_us,
        "expert_default": fell_back,
        "expert_row": reads_row,
        "expert_rounded": reads_row and is_rounded,
        "expert_drawn": reads_row and not is_rounded,
        "expert_other_format": other_format and not fell_back,
        "expert_given_tree": not reads_row and not fell_back and not other_format,
        "row_tokens": row_tokens,
        "uneven": routing != BALANCED,
        "routing": routing,
        "routing_us": even_us - own_us,
        "even_us": even_us,
        "no_router_us": -by_role["router"],
        "unread_shared": own_shared_us > 0.0 and not has_shared,
        "read_shared": has_shared,
        "shared_us": shared_us - own_shared_us,
        "its_shared_us": shared_us,
        "own_shared_us": own_shared_us,
    }


def has_other_format(case: Case) -> bool:
    """Whether InferSim's tree has MFUs of fp8 kernels for a case in bf16, or the other way round."""
    return bool(case.infersim_dtype) and is_fp8(case.infersim_dtype) != is_fp8(case.dtype)


_SHARED_ROLES: Final = ("shared_gate_up", "shared_down", "shared_gate")


def _its_row(case: Case, step: Step) -> tuple[float, float, int]:
    """MFU of up and of down that InferSim reads, and the tokens a GPU of their row; 0 without a row."""
    experts, tables = case.model.experts, case.infersim
    assert experts is not None
    world, tp, gpu = infersim_world(case.model, case.layout), case.layout.tp, case.plan.gpu.name
    up, down = infersim.grouped_gemm_mfu(
        tables,
        gpu,
        step.phase,
        num_experts=experts.num_experts,
        topk=experts.topk,
        hidden=case.model.hidden,
        intermediate=experts.intermediate,
        tokens_per_gpu=step.new_tokens,
        num_gpus=world,
        tp_size=tp,
    )
    kind = f"grouped_gemm/{step.phase}"
    layer = (
        experts.num_experts, world, experts.num_experts // (world // tp), experts.topk, case.model.hidden,
        experts.intermediate // tp,
    )  # fmt: skip
    sizes = [np.array([size]) for size in (tables.devices.index(gpu), *layer, step.new_tokens)]
    at = int(grouped_gemm_rows(tables, kind, sizes[0], tuple(sizes[1:-1]), sizes[-1])[0])
    tokens = int(tables.blocks[kind].axes[0][at]) if at >= 0 else 0
    return float(up), float(down), tokens


def _least_us(case: Case, tokens: int) -> float:
    """Time of the routed experts of so many tokens a GPU at the peak of their format."""
    experts, layout = case.model.experts, case.layout
    assert experts is not None
    shape = (case.model.hidden, experts.intermediate, experts.topk, layout.moe_tp, layout.ep)
    work = float(moe_flops(tokens * layout.dp, *shape)) * case.model.num_layers
    return work / case.plan.gpu.peak(case.dtype) * US_PER_S


def _evenly_routed_us(case: Case, tokens: int, own_us: float) -> float:
    """Time of the routed experts by fastroof's tables with even routing; ``own_us`` without such rows."""
    experts, layout = case.model.experts, case.layout
    assert experts is not None
    try:
        even = case.tables.lookup(
            "moe",
            dtype=case.dtype,
            hidden=case.model.hidden,
            intermediate=experts.intermediate,
            topk=experts.topk,
            num_experts=experts.num_experts,
            moe_tp=layout.moe_tp,
            moe_ep=layout.ep,
            distribution=BALANCED,
            num_tokens=tokens * layout.dp,
        )
    except MissingTableError:
        return own_us
    return float(even.latency_us) * case.model.num_layers
