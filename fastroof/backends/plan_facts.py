"""What adapters say of a plan, and which plans a program has no place for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastroof.compiled import steps
from fastroof.errors import BackendError

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

_DENSE_ROLES = (
    "embedding", "attention_norm", "qkv_quantise", "qkv", "qk_norm", "rope", "kv_write", "o_quantise", "o",
    "attention_allreduce", "mlp_norm", "gate_up_quantise", "gate_up", "activation", "down_quantise", "down",
    "mlp_allreduce", "final_norm", "lm_head",
)  # fmt: skip
INSTEAD = "export c, serve, Dynamo's profile and plan.scalar take any plan"


def plan_facts(
    plan: StepPlan, *, max_num_batched_tokens: int | None = None, max_num_seqs: int | None = None
) -> dict[str, Any]:
    """Return how a plan is split and what one of its GPUs holds, as JSON can hold it.

    Memory is that of the stage with the least room; a plan without pipeline stages is its own only stage.
    ``max_num_batched_tokens`` and ``max_num_seqs`` ask for the memory of other limits than the plan's.

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

    def memory(of: StepPlan) -> dict[str, int | None]:
        if max_num_batched_tokens is None and max_num_seqs is None:
            return of.memory.facts()
        return of.memory_of(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs).facts()

    sizes = {name: int(getattr(layout, name)) for name in ("tp", "pp", "dp", "ep", "moe_tp", "cp")}
    return {
        "layout": {**sizes, "gpus": layout.world_size},
        "memory": memory(plan),
        "stages": [
            {"stage": stage.stage or 0, "layers": stage.model.num_layers, "memory": memory(stage)}
            for stage in plan.stages
        ],
    }


def check_dense(plan: StepPlan, program: str) -> None:
    """Refuse plans whose times would lack a part in a file of equal, dense layers."""
    layout, model = plan.layout, plan.model
    lacks = []
    if model.has_experts:
        lacks.append("experts")
    if len(model.layers) > 1:
        kinds = ", ".join(f"{group.count} {group.kind.name}" for group in model.layers)
        lacks.append(f"layers of several kinds ({kinds})")
    elif model.window is not None:
        lacks.append(f"layers within a window of {model.window} tokens")
    others = {
        curve.operator.role: None for curve in plan.row_curves if curve.operator.role not in _DENSE_ROLES
    }
    if others and not lacks:
        lacks.append(", ".join(role.replace("_", " ") for role in others))
    if any(curve.operator.steps != "all" for curve in plan.row_curves) and not lacks:
        lacks.append(f"steps with prompts that {plan.engine} pads to captured numbers of tokens")
    if layout.world_size != layout.tp:
        lacks.append(f"ranks and stages ({layout})")
    if lacks:
        raise BackendError(
            f"{program} has no place for {' and '.join(lacks)} of {model.name}: its times would be of "
            f"another model; {INSTEAD}"
        )


def check_decodes_alone(plan: StepPlan, program: str) -> None:
    """Refuse plans whose decodes take longer next to prefill, for programs that add up both from tables."""
    if plan.arena[steps.MIXED_KV_US] > 0.0 or plan.arena[steps.MIXED_WINDOW_KV_US] > 0.0:
        raise BackendError(
            f"{program} adds a decode step to one of prompts, and {plan.profile.name} on {plan.gpu.name} "
            "has decode attention that takes longer next to prompts than alone (mixed_attention of its "
            "profile): its mixed steps would be too fast; use an engine without it (kernels), or export "
            "c, serve or plan.scalar"
        )
