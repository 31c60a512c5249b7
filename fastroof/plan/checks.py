"""What a plan refuses before anything is looked up: models, layouts, tables and engines that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastroof.checks import shown
from fastroof.config import GpuSpec
from fastroof.engines.profile import EngineProfile
from fastroof.errors import PlanError
from fastroof.models import Layout, ModelSpec, load_model
from fastroof.models.exchange import experts_send, sends_to_experts
from fastroof.models.execution import Execution
from fastroof.models.experts import RoutedExperts
from fastroof.models.layers import LayerKind
from fastroof.models.quantisation.scheme import BLOCK
from fastroof.plan.curves import kernel_order
from fastroof.plan.options import RACK_LIBRARIES, PlanOptions
from fastroof.tables import Tables

NODE_GPUS: Final = 8
"""GPUs behind one NVLink switch in a node; a rack has more."""


def checked_model(model: ModelSpec | str | Path | Mapping[str, Any]) -> ModelSpec:
    """Load a model unless it is one, and refuse what a plan has no operators for."""
    model = model if isinstance(model, ModelSpec) else load_model(model)
    windows = sorted({kind.attention.window or 0 for kind in model.kinds} - {0})
    if len(windows) > 1:
        sizes = " and ".join(map(str, windows))
        raise PlanError(
            f"{model.name} has layers that attend within windows of {sizes} tokens, and a plan times one "
            "size of window beside full attention; model.with_full_attention() times all as full attention"
        )
    return model


def check_tables(tables: Any, gpu: GpuSpec) -> None:
    """Raise PlanError unless the tables are of that GPU, or None."""
    if tables is None:
        return
    if not isinstance(tables, Tables):
        raise PlanError(
            f"tables must be what load_tables returns or takes, or 'datasheet', got {type(tables).__name__}"
        )
    if tables.gpu.name != gpu.name:
        raise PlanError(
            f"the tables were measured on {tables.gpu.name}, the plan is for {gpu.name}: "
            f"load_tables({gpu.name!r}), or tables='datasheet' for the datasheet model"
        )


def check_kernels(tables: Tables | None, gpu: GpuSpec, options: PlanOptions) -> None:
    """Raise PlanError where tables serve an operator from another source than the engine's kernel has."""
    engine = options.engine
    named = {kernel.operator for kernel in engine.kernels.operators}
    if tables is None or not named:
        return
    sources = tables.in_order(kernel_order(gpu, options)).sources
    for operator in named & sources.keys():
        kernel = options.kernel(operator, gpu, options.dtype)
        if kernel is not None and kernel.required and kernel.source not in ("", sources[operator]):
            raise PlanError(
                f"{engine.name} runs {operator} on {gpu.name} as source {kernel.source!r} measured it, and "
                f"the tables serve it from {sources[operator]!r}: "
                f"load_tables(..., source={{{shown(operator)}: {kernel.source!r}}})"
            )


def check_engine_layout(
    model: ModelSpec, layout: Layout, engine: EngineProfile, exchange: str | None, gpu: GpuSpec
) -> None:
    """Refuse layouts of experts that an engine does not run, or that cannot exchange tokens so."""
    if not any(kind.mlp.has_experts for kind in model.kinds):
        return
    sizes = {"tp": layout.tp, "dp": layout.dp * layout.cp, "ep": layout.ep}
    reasons = engine.layout.obstacles(engine.name, sizes)
    if exchange in RACK_LIBRARIES and gpu.linked_gpus <= NODE_GPUS:
        reasons.append(
            f"{exchange} writes over NVLink between nodes, which join {gpu.linked_gpus} {gpu.name} each: "
            "exchange='alltoall' is the engine's own library, and gb200 and gb300 have racks"
        )
    if exchange is not None and exchange != "gather":
        ranks = layout.stage_gpus
        if layout.moe_tp > 1 or layout.ep == 1:
            reasons.append(f"all-to-all needs experts that are whole on one of several GPUs: ep {ranks}")
        if engine.layout.alltoall_needs_dp and layout.of_prompts.dp == 1:
            reasons.append(f"{engine.name} sends tokens so between ranks of dp alone: tp 1, dp {ranks}")
        if exchange == "alltoall" and not engine.layout.decode_library:
            reasons.append(f"{engine.name} names no library that sends tokens to experts")
    if reasons:
        raise PlanError(f"{model.name} does not run with {layout}: {'; '.join(reasons)}")


def check_expert_blocks(model: ModelSpec, layout: Layout, execution: Execution) -> None:
    """Refuse experts whose share on one GPU is not a whole number of fp8 scale blocks."""
    for kind in model.kinds:
        mlp = kind.mlp
        if not isinstance(mlp, RoutedExperts) or kind.run_as(execution).stored("experts") != "fp8_block":
            continue
        if mlp.intermediate // layout.moe_tp % BLOCK:
            width, gpus = mlp.intermediate // layout.moe_tp, layout.moe_tp * layout.ep
            fit = [n for n in range(1, gpus + 1) if gpus % n == 0 and mlp.intermediate % (n * BLOCK) == 0]
            sizes = [f"ep {gpus // n} with moe_tp {n}" for n in fit]
            raise PlanError(
                f"{model.name} in fp8_block: an expert of width {mlp.intermediate} over {layout.moe_tp} GPUs "
                f"is {width} wide, no multiple of the {BLOCK} that share a scale; "
                f"{' or '.join(sizes) or 'no split'} would do"
            )


def check_wide_experts(model: ModelSpec, layout: Layout, options: PlanOptions) -> None:
    """Refuse eplb, num_slots and wide_experts where no engine runs them or nothing was measured."""
    used = [name for name in ("eplb", "num_slots", "wide_experts") if getattr(options, name)]
    if not used:
        return
    mlps = [kind.mlp for kind in model.kinds if isinstance(kind.mlp, RoutedExperts)]
    reasons = []
    if not mlps:
        reasons.append("it has no routed experts")
    if layout.ep == 1 or layout.moe_tp > 1:
        reasons.append(f"experts must be whole on one of several GPUs: use ep {layout.stage_gpus}, above 1")
    if not all(mlp.is_gated for mlp in mlps):
        reasons.append("wide kernels were measured for gated experts only")
    if options.eplb and options.wide_experts is False:
        reasons.append("eplb was measured with wide kernels only: use wide_experts=None or True")
    if options.eplb and options.routing == "balanced":
        reasons.append("balanced routing leaves eplb nothing to balance: use eplb=False")
    if options.num_slots is not None:
        if not options.eplb:
            reasons.append("copies of experts need a load balancer: use eplb=True")
        least = max((mlp.num_experts for mlp in mlps), default=1)
        if options.num_slots < least or options.num_slots % layout.ep:
            reasons.append(
                f"num_slots must be a multiple of ep {layout.ep} and at least the {least} experts, "
                f"got {options.num_slots}"
            )
    if reasons:
        raise PlanError(
            f"{model.name} does not run with {' and '.join(used)} in {layout}: {'; '.join(reasons)}"
        )


def check_two_batches(
    model: ModelSpec, layout: Layout, execution: Execution, engine: str, starts: tuple[int, ...]
) -> None:
    """Refuse plans whose halves would have nothing to take turns with."""
    reasons = []
    if not starts:
        reasons.append(f"{engine} has no such option; use engine='sglang' or 'vllm'")
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


def check_context_parallel(
    model: ModelSpec, layout: Layout, engine: str, is_known: bool, overlaps: bool
) -> None:
    """Refuse what no engine shares so, or no plan times."""
    if layout.cp == 1:
        return
    reasons = []
    if not is_known:
        reasons.append(f"{engine} has no context parallelism of prefill; use engine='sglang' or 'vllm'")
    if any(_passes_state(kind) for kind in model.kinds):
        reasons.append("a state passes from one part of a prompt to the next, so parts cannot run at once")
    if overlaps:
        reasons.append("no plan times it together with two batches: two_batch_overlap=False")
    if reasons:
        raise PlanError(f"{model.name} does not run with cp {layout.cp}: {'; '.join(reasons)}")


def _passes_state(kind: LayerKind) -> bool:
    """Whether what a sequence keeps in a layer goes from token to token, not only of its last ones."""
    return bool(kind.attention.state_bytes(Layout())) and getattr(kind.attention, "is_recurrent", True)
