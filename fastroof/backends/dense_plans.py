"""Programs that know less than a plan does: which plans have no place in their files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastroof.compiled import steps
from fastroof.errors import BackendError

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = ["check_decodes_alone", "check_dense"]

_DENSE_ROLES = frozenset(
    [
        "embedding",
        "attention_norm",
        "qkv_quantise",
        "qkv",
        "qk_norm",
        "rope",
        "kv_write",
        "o_quantise",
        "o",
        "attention_allreduce",
        "mlp_norm",
        "gate_up_quantise",
        "gate_up",
        "activation",
        "down_quantise",
        "down",
        "mlp_allreduce",
        "final_norm",
        "lm_head",
    ]
)
INSTEAD = "export c, serve, Dynamo's profile and plan.scalar take any plan"


def check_dense(plan: StepPlan, program: str) -> None:
    """Refuse plans whose times would lack a part in a file of layers that all are alike and dense.

    Raises
    ------
    BackendError
        Naming what the program has no place for.
    """
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
        lacks.append(f"steps with prompts that {plan.runtime} pads to captured numbers of tokens")
    if layout.world_size != layout.tp:
        lacks.append(f"ranks and stages ({layout})")
    if lacks:
        raise BackendError(
            f"{program} has no place for {' and '.join(lacks)} of {model.name}: its times would be of "
            f"another model; {INSTEAD}"
        )


def check_decodes_alone(plan: StepPlan, program: str) -> None:
    """Refuse plans whose decodes take longer beside prefill, for programs that add up both from tables.

    Raises
    ------
    BackendError
        Saying what its steps would lack.
    """
    if plan.arena[steps.MIXED_KV_US] > 0.0 or plan.arena[steps.MIXED_WINDOW_KV_US] > 0.0:
        raise BackendError(
            f"{program} adds a step of decodes to one of prompts, and {plan.engine.name} on {plan.gpu.name} "
            "has decode attention that takes longer beside prompts than alone (mixed_attention of its "
            "profile): its mixed steps would come out too fast; a runtime without it (kernels), or export "
            "c, serve and plan.scalar"
        )
