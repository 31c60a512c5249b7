"""A naive step in two batches: each half timed by a plan of whole batches, phase by phase."""

from __future__ import annotations

from typing import Any

Request = tuple[int, int]


def step_us(plan: Any, requests: list[Request], floor_us: float) -> float:
    """Time of a step whose layers with experts run as two halves, us.

    Parameters
    ----------
    plan : StepPlan
        Of whole batches, of one kind of layers.
    requests : list of (int, int)
        An even number: a half each.
    floor_us : float
        Least time of a layer's attention.
    """
    layers = plan.model.num_layers
    whole = {part.name: part for part in plan.explain(requests).operators}
    half = plan.explain(requests[: len(requests) // 2]).operators
    a_layer = [part for part in half if part.calls == layers]

    def us(*roles: str) -> float:
        return sum(part.total_us / layers for part in a_layer if part.role in roles)

    dispatch, combine, routed = us("experts_dispatch"), us("experts_combine"), us("experts")
    shared = us(*{part.role for part in a_layer if part.role.startswith("shared_")})
    core = ("decode_attention", "prefill_attention")
    everything = us(*{part.role for part in a_layer} - set(core))
    before = floor_us + everything - dispatch - combine - routed - shared
    phases = (
        max(before, dispatch),
        max(routed, dispatch),
        max(shared + routed, combine),
        max(shared + before, combine),
    )
    attention = sum(part.total_us for part in whole.values() if part.role in core)
    once = sum(part.total_us for part in whole.values() if part.calls != layers)
    # of both floors the whole batch's attention has one
    return layers * (sum(phases) - floor_us) + attention + once
