"""What other programs are told of a plan beside ``plan.describe()``: layout, memory and pipeline stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.plan.memory import PlanMemory

__all__ = ["memory_facts", "plan_facts"]


def plan_facts(
    plan: StepPlan, *, max_tokens: int | None = None, max_seqs: int | None = None
) -> dict[str, Any]:
    """Say how a plan is split and what one of its GPUs holds, as JSON can hold it.

    Parameters
    ----------
    plan : StepPlan
        Of any model and layout.
    max_tokens, max_seqs : int, optional
        What a step may have at most, where memory is asked for of other limits than the plan's, as of
        ``plan.memory_of``.

    Returns
    -------
    dict
        ``layout``: every size of it, and the replica's ``gpus``; ``memory``: of :func:`memory_facts`, by the
        stage with the least room; ``stages``: each one's number, layers and memory, in their order. A plan
        without stages has itself there.

    Examples
    --------
    >>> import fastroof
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels", tp=2, pp=4)
    >>> facts = plan_facts(plan)
    >>> facts["layout"]
    {'tp': 2, 'pp': 4, 'dp': 1, 'ep': 1, 'moe_tp': 2, 'cp': 1, 'gpus': 8}
    >>> facts["memory"]["max_kv_tokens"] == plan.memory.max_kv_tokens
    True
    >>> [stage["layers"] for stage in facts["stages"]]
    [8, 8, 8, 8]
    """
    layout = plan.layout

    def memory(of: StepPlan) -> dict[str, int]:
        own = max_tokens is None and max_seqs is None
        return memory_facts(of.memory if own else of.memory_of(max_tokens=max_tokens, max_seqs=max_seqs))

    sizes = {name: int(getattr(layout, name)) for name in ("tp", "pp", "dp", "ep", "moe_tp", "cp")}
    return {
        "layout": {**sizes, "gpus": layout.world_size},
        "memory": memory(plan),
        "stages": [
            {"stage": stage.stage or 0, "layers": stage.model.num_layers, "memory": memory(stage)}
            for stage in plan.stages
        ],
    }


def memory_facts(memory: PlanMemory) -> dict[str, int]:
    """Say what one GPU holds: the fields of :class:`fastroof.plan.memory.PlanMemory`, bytes and tokens.

    Examples
    --------
    >>> from fastroof.plan.memory import PlanMemory
    >>> facts = memory_facts(PlanMemory(70, 2, 10, 8, 6))
    >>> facts["weight_bytes"], facts["kv_bytes_per_token"], facts["max_kv_tokens"], facts["window"]
    (70, 2, 6, 0)
    """
    return {name: int(value) for name, value in memory._asdict().items()}
