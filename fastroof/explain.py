"""One step, broken down by operator: time, FLOPs, bytes, MFU, what bounds it, origin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from fastroof.columns import ORIGIN_MODELLED
from fastroof.compiled import steps
from fastroof.compiled.grids import GridBlock, grid_flag, grid_value, open_block
from fastroof.compiled.search import curve_point
from fastroof.operators.attention_work import (
    attention_bytes,
    attention_flops,
    decode_attention_bytes,
    decode_attention_flops,
)
from fastroof.operators.calls import AllReduce, Role
from fastroof.plan.curves import RowCurve, row_cost
from fastroof.run import StepBatch, run_batch
from fastroof.units import DTYPE_BYTES, US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = ["Explanation", "OperatorTime", "explain_step"]


class OperatorTime(NamedTuple):
    """One operator's part of a step.

    Attributes
    ----------
    name : str
        The operator, as a person reads it.
    role : str
        What it does in the step, see :data:`fastroof.operators.calls.Role`.
    calls : int
        How often it runs in the step.
    total_us : float
        Time of all calls, us.
    flops, moved_bytes : float
        FLOPs and compulsory bytes of all calls, on one GPU; for an all-reduce bytes on the wire.
    mfu : float
        FLOPs / (time x peak of its dtype); NaN where it computes nothing.
    bound : str
        compute, memory, launch or communication: the largest term of its roofline.
    origin : int
        0 measured, 1 interpolated, 2 extrapolated, 3 borrowed, 4 modelled.
    """

    name: str
    role: Role
    calls: int
    total_us: float
    flops: float
    moved_bytes: float
    mfu: float
    bound: str
    origin: int


class Explanation(NamedTuple):
    """A step by operator; ``total_us`` is the step's time to the last bit.

    Attributes
    ----------
    operators : tuple of OperatorTime
        In the order of the step. Their times add up to the total, but for the rounding of the order
        in which they are added.
    total_us : float
        The step, us.
    origin : int
        Largest origin of its parts.
    """

    operators: tuple[OperatorTime, ...]
    total_us: float
    origin: int


def _row_time(plan: StepPlan, curve: RowCurve, rows: int) -> OperatorTime:
    operator, cost = curve.operator, row_cost(curve.operator)
    latency_us, origin = curve_point(curve.axis, curve.value, curve.flag, 0, len(curve.axis), float(rows))
    work = cost.flops_per_row * rows
    moved = cost.fixed_bytes + cost.bytes_per_row * rows
    if isinstance(operator, AllReduce):
        bound = "communication"
    else:
        bound = _bound(plan, curve.launch_us, work / plan.gpu.peak(cost.dtype), moved)
    mfu = work / plan.gpu.peak(cost.dtype) * US_PER_S / latency_us if work else float("nan")
    times = operator.times
    return OperatorTime(
        operator.name,
        operator.role,
        times,
        times * latency_us,
        times * work,
        times * moved,
        mfu,
        bound,
        int(origin),
    )


def _bound(plan: StepPlan, launch_us: float, compute_s: float, moved_bytes: float) -> str:
    terms = {
        "compute": compute_s * US_PER_S,
        "memory": moved_bytes / plan.gpu.hbm_bytes_per_s * US_PER_S,
        "launch": launch_us,
    }
    return max(terms, key=lambda name: terms[name])


def _attention_time(
    plan: StepPlan, role: Role, total_us: float, work: Any, moved: Any, block: GridBlock, y: float, x: float
) -> OperatorTime:
    layers = plan.model.num_layers
    launch_us = grid_value(plan.arena, block, 0.0, 1.0) / layers
    origin = grid_flag(plan.arena, block, y, x)
    bound = _bound(plan, launch_us, float(work) / plan.gpu.peak("bf16"), float(moved))
    mfu = float(work) * layers / plan.gpu.peak("bf16") * US_PER_S / total_us
    return OperatorTime(
        role.replace("_", " "),
        role,
        layers,
        total_us,
        float(work) * layers,
        float(moved) * layers,
        mfu,
        bound,
        int(origin),
    )


def explain_step(plan: StepPlan, requests: Iterable[tuple[int, int]]) -> Explanation:
    """Answer ``plan.explain(requests)``."""
    batch = StepBatch.from_requests([requests])
    times = run_batch(plan, batch, 1)
    new, context = batch.new_tokens, batch.context_len
    if not len(new):
        return Explanation((), 0.0, 0)
    rows = {"tokens": int(new.sum()), "sequences": len(new)}
    parts = [_row_time(plan, curve, rows[curve.operator.rows]) for curve in plan.row_curves]
    nh, nkv, dim = plan.heads[1:]
    width = DTYPE_BYTES[plan.kv_dtype]
    decode = (new == 1) & (context > 0)
    attention = []
    if decode.any():
        kv_len = context[decode] + 1
        work = decode_attention_flops(nh, dim, kv_len.sum(), 1)
        moved = decode_attention_bytes(nh, nkv, dim, kv_len, 1, width).sum()
        part = times.components.decode_attention_us[0]
        block = open_block(plan.arena, int(plan.arena[steps.DECODE_AT]))
        count = float(decode.sum())
        attention.append(
            _attention_time(
                plan, "decode_attention", float(part), work, moved, block, count, kv_len.sum() / count
            )
        )
    if not decode.all():
        q_len, prefix = new[~decode], context[~decode]
        work = attention_flops(nh, dim, q_len, q_len + prefix).sum()
        moved = attention_bytes(nh, nkv, dim, q_len, q_len + prefix, 1, width).sum()
        part = times.components.prefill_attention_us[0]
        block = open_block(plan.arena, int(plan.arena[steps.PREFILL_AT]))
        mean_q = 2.0 * float((q_len * (q_len + 1) // 2).sum()) / float(q_len.sum()) - 1.0
        found = _attention_time(
            plan, "prefill_attention", float(part), work, moved, block, float(q_len.sum()) / mean_q, mean_q
        )
        attention.append(found._replace(origin=ORIGIN_MODELLED) if prefix.any() else found)
    where = next(i for i, part in enumerate(parts) if part.role == "o")
    operators = (*parts[:where], *attention, *parts[where:])
    return Explanation(operators, float(times.latency_us[0]), int(times.origin[0]))
