"""One step, broken down by operator: time, FLOPs, bytes, MFU, what bounds it, origin.

What the engine adds to its kernels is the last row, so that rows add up to the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastroof.arrays import Ints
from fastroof.arrow import ORIGIN, ArrowResult
from fastroof.checks import check_flag, whole_number
from fastroof.columns import ORIGIN_MODELLED, Column
from fastroof.compiled import steps
from fastroof.compiled import verification as loops
from fastroof.compiled.search import curve_point
from fastroof.config import GpuSpec
from fastroof.errors import BatchError
from fastroof.operators.attention_work import pairs_within
from fastroof.operators.calls import Role
from fastroof.plan import step_error
from fastroof.plan.attention import AttentionTimes, attention_times, window_points
from fastroof.plan.curves import RowCurve, per_row, row_cost
from fastroof.plan.mixed_attention import kinds_beside_prefill
from fastroof.plan.rows import Ranks
from fastroof.run import StepBatch, StepTimes, run_batch
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.plan.step_plan import StepPlan

__all__ = ["Explanation", "OperatorTime", "bound_of", "explain_step", "explain_verification", "row_time"]


class OperatorTime(NamedTuple):
    """One operator's part of a step."""

    name: str
    role: Role
    calls: int
    total_us: float
    flops: float
    moved_bytes: float
    mfu: float
    bound: str
    origin: int
    source: str
    dtype: str = ""


@dataclass(frozen=True, eq=False)
class Explanation(ArrowResult):
    """A step by operator; ``total_us`` is the step's time to the last bit."""

    operators: tuple[OperatorTime, ...]
    total_us: float
    origin: int
    relative_error: float | None = None
    made_from: Mapping[str, str] = field(default_factory=dict, repr=False)

    arrow_columns = (
        Column("name", "text", "", "operator"),
        Column("role", "text", "", "what it does in the step"),
        Column("calls", "int", "", "how often it runs in the step"),
        Column("total_us", "float", "us", "time of all calls"),
        Column("flops", "float", "FLOPs", "work of all calls on one GPU", 0),
        Column("moved_bytes", "float", "B", "compulsory bytes of all calls; all-reduces: on the wire", 0),
        Column("mfu", "float", "", "FLOPs over time and peak; empty where it computes nothing", 0),
        Column("bound", "text", "", "its roofline's largest term; host of what the engine adds"),
        ORIGIN,
        Column("source", "text", "", "the measured tables, or the engine's profile, that it comes from"),
        Column("dtype", "text", "", "format of its kernel; attention: of the cache"),
    )
    _html_names = ("name", "calls", "total_us", "mfu", "bound", "origin", "source")

    def columns(self) -> dict[str, Any]:
        """Fields of all operators: a list a field, an entry an operator."""
        return {name: [getattr(part, name) for part in self.operators] for name in OperatorTime._fields}

    def _html_caption(self, count: int) -> str:
        error = self.relative_error
        within = "" if error is None else f" (one standard error: {error:.1%})"
        return f"{super()._html_caption(count)}, {self.total_us:,.1f} us in all{within}"


def row_time(gpu: GpuSpec, curve: RowCurve, rows: int) -> OperatorTime:
    """One call over rows, at so many of them."""
    operator, dtype = curve.operator, row_cost(curve.operator).dtype
    latency_us, origin = curve_point(curve.axis, curve.value, curve.flag, 0, len(curve.axis), float(rows))
    work, moved = (
        float(part[0]) for part in per_row(operator).row_work(operator, np.array([rows * curve.share]))
    )
    if per_row(operator).over_link:
        bound = "communication"
    else:
        bound = bound_of(gpu, curve.launch_us, work / gpu.peak(dtype), moved)
    # no time: it runs beside what takes longer
    mfu = work / gpu.peak(dtype) * US_PER_S / latency_us if work and latency_us else float("nan")
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
        curve.source,
        getattr(operator, "dtype", ""),
    )


def bound_of(gpu: GpuSpec, launch_us: float, compute_s: float, moved_bytes: float) -> str:
    """Name the largest term of a roofline."""
    terms = {
        "compute": compute_s * US_PER_S,
        "memory": moved_bytes / gpu.hbm_bytes_per_s * US_PER_S,
        "launch": launch_us,
    }
    return max(terms, key=lambda name: terms[name])


def _attention_parts(
    plan: StepPlan, new: Ints, context: Ints, times: StepTimes, is_decode: bool, is_mixed: bool
) -> list[OperatorTime]:
    """Attention over some requests of the step, all of them decodes or none, by kind of layers."""
    if is_decode:
        batch = float(len(new))
        x = float((context + 1).sum()) / batch
        all_us = float(times.components.decode_attention_us[0])
    else:
        x = 2.0 * float((new * (new + 1) // 2).sum()) / float(new.sum()) - 1.0
        batch = float(new.sum()) / x
        all_us = float(times.components.prefill_attention_us[0])
    within = None
    window = int(plan.arena[steps.WINDOW])
    if window:
        seen = np.minimum(context + 1, window) if is_decode else pairs_within(new, window)
        within = window_points(window, is_decode, [batch], [x], [new.sum()], [seen.sum()])
    kinds = [attention_times(plan, i, is_decode, [batch], [x], within) for i in range(len(plan.attention))]
    if is_decode and is_mixed:
        kinds = kinds_beside_prefill(plan, context + 1, kinds)
    return [
        _attention_time(plan, number, new, context, is_decode, kind, all_us)
        for number, kind in enumerate(kinds)
    ]


def _attention_time(
    plan: StepPlan,
    number: int,
    new: Ints,
    context: Ints,
    is_decode: bool,
    times: AttentionTimes,
    all_us: float,
) -> OperatorTime:
    part = plan.attention[number]
    call, layers = part.call, part.call.times
    does = part.phase(is_decode).work(plan.gpu, new, context + new)
    work, moved = float(does.flops.sum()), float(does.moved_bytes.sum())
    if not is_decode:
        work /= plan.layout.cp
    total_us, origin = all_us, int(times.origin[0])
    if len(plan.attention) > 1:
        prefix_us = 0.0 if is_decode else float(part.prefixes_us(new, context).sum())
        total_us = float(times.own_us[0]) + prefix_us
    if not is_decode and context.any():
        origin = ORIGIN_MODELLED
    role: Role = "decode_attention" if is_decode else "prefill_attention"
    return OperatorTime(
        call.name.replace("attention", role.replace("_", " "), 1),
        role,
        layers,
        total_us,
        work * layers,
        moved * layers,
        work * layers / does.peak * US_PER_S / total_us if work and total_us else float("nan"),
        bound_of(plan.gpu, times.launch_us, work / does.peak, moved),
        origin,
        part.sources[0 if is_decode else 1],
        call.kv_dtype,
    )


def explain_step(plan: StepPlan, requests: Iterable[tuple[int, int]], with_error: bool) -> Explanation:
    """Answer ``plan.explain(requests)``."""
    check_flag("with_error", with_error, BatchError)
    batch = StepBatch.from_requests([requests])
    times = run_batch(plan, batch, 1)
    new, context = batch.new_tokens, batch.context_len
    error = float(step_error.batch_error(plan, batch, times)[0]) if with_error else None
    if not len(new):
        return Explanation((), 0.0, 0, error, plan.made_from)
    decode = (new == 1) & (context > 0)
    rows = Ranks.of(plan.layout, plan.execution).of_step(int(new.sum()), len(new))
    attention: list[list[OperatorTime]] = []
    for chosen, is_decode in ((decode, True), (~decode, False)):
        if chosen.any():
            is_mixed = not chosen.all()
            attention.append(_attention_parts(plan, new[chosen], context[chosen], times, is_decode, is_mixed))
    kinds = list(zip(*attention, strict=True))
    left_out = "with_prefill" if decode.all() else "decode_only"
    operators: list[OperatorTime] = []
    for place, curve in enumerate(plan.row_curves):
        for part, times_of_kind in zip(plan.attention, kinds, strict=True):
            if part.before == place:
                operators += times_of_kind
        if curve.operator.steps != left_out:
            operators.append(row_time(plan.gpu, curve, rows[curve.operator.rows]))
    operators += _engine_parts(plan, float(times.components.runtime_us[0]))
    total_us, origin = float(times.latency_us[0]), int(times.origin[0])
    return Explanation(tuple(operators), total_us, origin, error, plan.made_from)


def _engine_parts(plan: StepPlan, runtime_us: float) -> list[OperatorTime]:
    """What the engine adds to a step's kernels, as the profile has it; nothing where that is nothing."""
    if not runtime_us:
        return []
    source = f"profile {plan.runtime}"
    return [
        OperatorTime(
            "runtime", "runtime", 1, runtime_us, 0.0, 0.0, float("nan"), "host", ORIGIN_MODELLED, source
        )
    ]


def explain_verification(plan: StepPlan, batch_size: int, kv_len: int, tokens: int) -> Explanation:
    """Answer ``plan.explain_verification``."""
    given = (("batch_size", batch_size), ("kv_len", kv_len), ("tokens", tokens))
    batch_size, kv_len, tokens = (whole_number(name, size, error=BatchError) for name, size in given)
    total_us = plan.verify_us(batch_size, kv_len, tokens)
    arena, batch = plan.verification_arena, float(batch_size)
    asked = loops.open_speculation(arena, steps.open_plan(arena))._replace(tokens=float(tokens))
    longer = loops.queries_factor(arena, asked, batch, float(kv_len))
    new = np.full(batch_size, tokens)
    parts = []
    for number in range(len(plan.attention)):
        one = attention_times(plan, number, True, [batch], [float(kv_len)])
        made = one.origin if tokens == 1 else np.full_like(one.origin, ORIGIN_MODELLED)
        times = one._replace(own_us=one.own_us * longer, origin=made)
        parts.append(_attention_time(plan, number, new, kv_len - new, True, times, float(times.own_us[0])))
    rows = Ranks.of(plan.layout, plan.execution).of_step(batch_size * tokens, batch_size * tokens)
    operators: list[OperatorTime] = []
    for place, curve in enumerate(plan.row_curves):
        operators += [time for part, time in zip(plan.attention, parts, strict=True) if part.before == place]
        if curve.operator.steps != "with_prefill":
            operators.append(row_time(plan.gpu, curve, rows[curve.operator.rows]))
    origin = max(operator.origin for operator in operators)
    operators += _engine_parts(plan, float(arena[steps.STEP_US] + arena[steps.SEQUENCE_US] * batch))
    return Explanation(tuple(operators), total_us, origin, None, plan.made_from)
