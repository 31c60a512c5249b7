"""Two-batch overlap: one half of a batch computes while the other's tokens are on their way to experts.

SGLang's two-batch overlap and vLLM's dual batch overlap split a step in two halves that take turns. In the
order that vLLM's documentation draws, a layer of halves 0 and 1 is four phases, each as long as the longer of
what runs beside each other:

    computing       A0       E1       S1 + E0     S0 + A1
    on the way      D1       D0       C1          C0

A is everything up to the router, D dispatch, E the routed experts, S the shared ones, C combine. So both
halves compute one after the other, each with its own launches, and of D and C only that is seen which what
runs beside it does not cover. It does not always help: kernels often take as long for half the rows.

This is a model (origin modelled), and on the slow side: what attention takes beyond its floor grows with
kv_len, which rows do not know, and covers nothing here. It leaves out what kernels that send take from those
that compute, and the ends of the model, where there is nothing to take turns with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Flags, Floats
from fastroof.columns import ORIGIN_MODELLED
from fastroof.errors import PlanError
from fastroof.models import Layout, ModelSpec
from fastroof.models.exchange import experts_send, sends_to_experts
from fastroof.models.execution import Execution
from fastroof.models.experts import RoutedExperts
from fastroof.operators.calls import Elementwise, Role
from fastroof.plan.curves import RowCurve
from fastroof.plan.rows import Ranks, RowCall, every_row

__all__ = ["OTHER_HALF", "Floors", "check_two_batches", "in_two_batches"]

OTHER_HALF: Final = "attention of the other half"
"""What is called so: the floor of attention, which a second half pays again."""

_ON_THE_WAY: Final = ("experts_dispatch", "experts_combine")
_SHARED: Final = "shared_"

_Part = Literal["before", "dispatch", "routed", "shared", "combine"]


class Floors(NamedTuple):
    """Least time of a layer's attention, us: decodes', and prompts'."""

    decode_us: float
    prefill_us: float


def check_two_batches(
    model: ModelSpec, layout: Layout, execution: Execution, engine: str, starts: tuple[int, ...]
) -> None:
    """Refuse plans whose halves would have nothing to take turns with."""
    reasons = []
    if not starts:
        reasons.append(f"{engine} has no such option: runtime 'sglang' or 'vllm'")
    topks = [kind.mlp.topk for kind in model.kinds if isinstance(kind.mlp, RoutedExperts)]
    if not topks:
        reasons.append("a model without routed experts sends them nothing")
    elif not all(sends_to_experts(layout, execution.exchange, topk) for topk in topks):
        ranks = layout.stage_gpus
        reasons.append(
            "engines overlap an all-to-all with computing: "
            f"exchange='alltoall', with dp and ep {ranks}, over 1"
        )
    elif any(experts_send(layout, execution.exchange, topk) for topk in topks):
        reasons.append("the kernel of its experts sends their tokens itself: exchange='alltoall' sends apart")
    if reasons:
        raise PlanError(f"{model.name} does not run in two batches in {layout}: {'; '.join(reasons)}")


def in_two_batches(
    calls: Sequence[RowCall], floors: Floors, starts: tuple[int, ...], ranks: Ranks
) -> list[tuple[RowCall, ...]]:
    """Calls of one kind of layers as two halves of a batch run them."""
    if not any(_role(call) in _ON_THE_WAY for call in calls):
        return [*((call,) for call in calls), ()]
    sections = [
        _in_section(calls, floor_us, start, ranks, is_decode)
        for floor_us, start, is_decode in zip(floors, starts, (True, False), strict=True)
    ]
    return [tuple(part for section in pair for part in section) for pair in zip(*sections, strict=True)]


def _role(call: RowCall) -> Role:
    return call.curve.operator.role


def _part(call: RowCall) -> _Part:
    role = _role(call)
    if role in _ON_THE_WAY:
        return "dispatch" if role == "experts_dispatch" else "combine"
    if role == "experts":
        return "routed"
    return "shared" if role.startswith(_SHARED) else "before"


def _in_section(
    calls: Sequence[RowCall], floor_us: float, start: int, ranks: Ranks, is_decode: bool
) -> list[tuple[RowCall, ...]]:
    """Calls of one kind of steps; none for those of the other."""
    steps: Literal["decode_only", "with_prefill"] = "decode_only" if is_decode else "with_prefill"
    tokens = np.arange(len(calls[0].latency_us))
    is_split = tokens >= max(start, 2)
    halves = (tokens + 1) // 2, tokens // 2
    run = [call.curve.operator.steps in ("all", steps) for call in calls]
    us: dict[_Part, list[Floats]] = {
        part: [np.zeros(len(tokens)) for _ in halves]
        for part in ("before", "dispatch", "routed", "shared", "combine")
    }
    for call, runs in zip(calls, run, strict=True):
        if runs:
            for number, half in enumerate(halves):
                us[_part(call)][number] += call.curve.operator.times * call.latency_us[half]
    before = [one + floor_us for one in us["before"]]
    routed, shared = us["routed"], us["shared"]
    beside: dict[_Part, tuple[Floats, Floats]] = {
        "dispatch": (routed[1], before[0]),
        "combine": (shared[0] + before[1], shared[1] + routed[0]),
    }
    made: list[tuple[RowCall, ...]] = []
    for call, runs in zip(calls, run, strict=True):
        if not runs:
            made.append(())
            continue
        operator = replace(call.curve.operator, steps=steps)
        split_us = sum(call.latency_us[half] for half in halves)
        origin = np.maximum(call.origin[halves[0]], call.origin[halves[1]])
        part = _part(call)
        if part in beside:
            seen = sum(
                np.maximum(whole - covered, 0.0)
                / np.maximum(whole, np.finfo(float).tiny)
                * call.latency_us[half]
                for whole, covered, half in zip(us[part], beside[part], halves, strict=True)
            )
            split_us, origin = seen, np.full_like(origin, ORIGIN_MODELLED)
            operator = replace(operator, name=f"{operator.name}, not overlapped")
        latency_us = np.where(is_split, split_us, call.latency_us)
        made.append((_call(call, operator, latency_us, np.where(is_split, origin, call.origin), ranks),))
    return [*made, (_other_half(calls[0], floor_us, is_split, steps, ranks),)]


def _other_half(
    like: RowCall,
    floor_us: float,
    is_split: Bools,
    steps: Literal["decode_only", "with_prefill"],
    ranks: Ranks,
) -> RowCall:
    """The floor of attention, once more where a batch is split."""
    role: Role = "decode_attention" if steps == "decode_only" else "prefill_attention"
    operator = Elementwise(role, OTHER_HALF, 1, 0.0, steps=steps)
    latency_us = np.where(is_split, floor_us, 0.0)
    origin = np.where(is_split, ORIGIN_MODELLED, 0).astype(np.uint8)
    curve = RowCurve(operator, like.curve.axis, like.curve.value, like.curve.flag, floor_us)
    return _call(RowCall(like.kind, curve, latency_us, origin), operator, latency_us, origin, ranks)


def _call(like: RowCall, operator: object, latency_us: Floats, origin: Flags, ranks: Ranks) -> RowCall:
    curve = replace(like.curve, operator=operator)  # type: ignore[arg-type]
    return like._replace(
        curve=every_row(curve, latency_us, origin.astype(np.uint8), ranks),
        latency_us=latency_us,
        origin=origin,
    )
