"""Refuse models, layouts, tables and engines that do not fit together, before any lookup."""

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
    """Load a model, and refuse one that plans have no operators for."""
    model = model if isinstance(model, ModelSpec) else load_model(model)
    windows = sorted({kind.attention.window or 0 for kind in model.kinds} - {0})
    if len(windows) > 1:
        sizes = " and ".join(map(str, windows))
        raise PlanError(
            f"{model.name} has windows of {sizes} tokens, and a plan takes one size besides full attention; "
            "use model.with_full_attention() to time all layers as full attention"
        )
    return model


def check_tables(tables: Any, gpu: GpuSpec) -> None:
    """Refuse tables of another GPU."""
    if tables is None:
        return
    if not isinstance(tables, Tables):
        raise PlanError(
            f"tables must be a Tables, an argument of load_tables or 'datasheet', got {type(tables).__name__}"
        )
    if tables.gpu.name != gpu.name:
        raise PlanError(
            f"the tables were measured on {tables.gpu.name}, the plan is for {gpu.name}; "
            f"use load_tables({gpu.name!r}), or tables='datasheet' for the datasheet model"
        )


def check_kernels(tables: Tables | None, gpu: GpuSpec, options: PlanOptions) -> None:
    """Refuse tables whose source of an operator is not the one that the engine's kernel requires."""
    engine = options.engine
    named = {kernel.operator for kernel in engine.kernels.operators}
    if tables is None or not named:
        return
    sources = tables.in_order(kernel_order(gpu, options)).sources
    for operator in named & sources.keys():
        kernel = options.kernel(operator, gpu, options.dtype)
        if kernel is not None and kernel.required and kernel.source not in ("", sources[operator]):
            raise PlanError(
                f"{engine.name} runs {operator} on {gpu.name} as measured by source {kernel.source!r}, and "
                f"the tables serve it from {sources[operator]!r}; "
                f"use load_tables(..., source={{{shown(operator)}: {kernel.source!r}}})"
            )


def check_engine_layout(
    model: ModelSpec, layout: Layout, engine: EngineProfile, exchange: str | None, gpu: GpuSpec
) -> None:
    """Refuse layouts of experts, or exchanges of their tokens, that an engine does not run."""
    if not any(kind.mlp.has_experts for kind in model.kinds):
        return
    sizes = {"tp": layout.tp, "dp": layout.dp * layout.cp, "ep": layout.ep}
    reasons = engine.layout.obstacles(engine.name, sizes)
    if exchange in RACK_LIBRARIES and gpu.linked_gpus <= NODE_GPUS:
        reasons.append(
            f"{exchange} needs racks (gb200, gb300), and NVLink joins {gpu.linked_gpus} {gpu.name}: "
            "use exchange='alltoall'"
        )
    if exchange is not None and exchange != "gather":
        ranks = layout.stage_gpus
        if layout.moe_tp > 1 or layout.ep == 1:
            reasons.append(f"all-to-all needs experts that are whole on one of several GPUs: use ep {ranks}")
        if engine.layout.alltoall_needs_dp and layout.of_prompts.dp == 1:
            reasons.append(f"{engine.name} sends tokens between dp ranks only: use tp 1, dp {ranks}")
        if exchange == "alltoall" and not engine.layout.decode_library:
            reasons.append(f"{engine.name} has no all-to-all library")
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
                f"is {width} wide, not a multiple of the {BLOCK} that share a scale; "
                f"valid: {' or '.join(sizes) or 'no split'}"
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
    """Refuse two-batch overlap where one half has no all-to-all to overlap with the other's computation."""
    reasons = []
    if not starts:
        reasons.append(f"{engine} has no such option: use engine='sglang' or 'vllm'")
    topks = [kind.mlp.topk for kind in model.kinds if isinstance(kind.mlp, RoutedExperts)]
    if not topks:
        reasons.append("it has no routed experts")
    elif not all(sends_to_experts(layout, execution.exchange, topk) for topk in topks):
        ranks = layout.stage_gpus
        reasons.append(
            f"engines overlap an all-to-all only: use exchange='alltoall' with dp and ep {ranks}, above 1"
        )
    elif any(experts_send(layout, execution.exchange, topk) for topk in topks):
        reasons.append("its experts' kernel sends the tokens itself: use exchange='alltoall'")
    if reasons:
        raise PlanError(f"{model.name} does not run in two batches in {layout}: {'; '.join(reasons)}")


def check_context_parallel(
    model: ModelSpec, layout: Layout, engine: str, is_known: bool, overlaps: bool
) -> None:
    """Refuse context parallelism that no engine runs, or no plan times."""
    if layout.cp == 1:
        return
    reasons = []
    if not is_known:
        reasons.append(f"{engine} has no prefill context parallelism: use engine='sglang' or 'vllm'")
    if any(_passes_state(kind) for kind in model.kinds):
        reasons.append("its state passes from one part of a prompt to the next, so parts cannot run at once")
    if overlaps:
        reasons.append("it cannot be combined with two batches: use two_batch_overlap=False")
    if reasons:
        raise PlanError(f"{model.name} does not run with cp {layout.cp}: {'; '.join(reasons)}")


def _passes_state(kind: LayerKind) -> bool:
    """Whether a layer's state is recurrent, not just a cache of the last tokens."""
    return bool(kind.attention.state_bytes(Layout())) and getattr(kind.attention, "is_recurrent", True)
