"""How a plan runs its model: formats, kernels of experts, exchange of tokens; and which models it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fastroof.checks import shown
from fastroof.config import GpuSpec
from fastroof.engines import EngineProfile
from fastroof.engines.memory_by_card import first_row
from fastroof.errors import PlanError
from fastroof.models import Layout, ModelSpec, load_model
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.exchange import experts_send, sends_to_experts
from fastroof.models.execution import MEASURED_KV, SENDING_EXPERTS, ExchangeRules, Execution, Formats
from fastroof.models.experts import RoutedExperts
from fastroof.models.layers import LayerKind
from fastroof.models.lora import Adapters, Lora
from fastroof.models.quantisation.scheme import BLOCK
from fastroof.operators.calls import Experts, ModelledPrompts
from fastroof.operators.gemm import GEMM
from fastroof.operators.moe import MOE, MOE_NONGATED
from fastroof.operators.wide_experts import BALANCED, MOE_WIDE
from fastroof.plan.curves import CurveSource, TableCurves, kernel_order
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
            f"use load_tables({gpu.name!r}), or the datasheet model (--tables datasheet; tables='datasheet')"
        )


def check_kernels(tables: Tables | None, gpu: GpuSpec, options: PlanOptions) -> None:
    """Refuse tables whose source of an operator is not the one that the engine's kernel requires."""
    engine = options.engine
    operators = {kernel.operator for kernel in engine.kernels.operators}
    if tables is None or not operators:
        return
    sources = tables.in_order(kernel_order(gpu, options)).sources
    for operator in operators & sources.keys():
        kernel = options.kernel(operator, gpu, options.dtype)
        if kernel is not None and kernel.required and kernel.source not in ("", sources[operator]):
            raise PlanError(
                f"{engine.name} runs {operator} on {gpu.name} as measured by source {kernel.source!r}, and "
                f"the tables serve it from {sources[operator]!r}; "
                f"use load_tables(..., source={{{shown(operator)}: {kernel.source!r}}})"
            )


def _refuse(model: ModelSpec, how: str, reasons: Sequence[str]) -> None:
    if reasons:
        raise PlanError(f"{model.name} does not run {how}: {'; '.join(reasons)}")


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
    _refuse(model, f"with {layout}", reasons)


def check_kv_format(model: ModelSpec, options: PlanOptions, gpu: GpuSpec) -> None:
    """Refuse formats of the KV cache for which a model's attention or an engine has no kernel."""
    kv_dtype, engine = options.kv_dtype, options.engine
    if kv_dtype in MEASURED_KV:
        return
    use = f"use kv_dtype {' or '.join(MEASURED_KV)}"
    rows = [one for one in engine.memory.kv_formats if one.name == kv_dtype]
    row = first_row(rows, gpu, model.architecture)
    if row is None and engine.engine:
        raise PlanError(f"{engine.title} has no known {kv_dtype} KV cache on {gpu.name}: {use}")
    for kind in model.kinds:
        heads = getattr(kind.attention, "attention", kind.attention)
        if not isinstance(heads, GroupedQueryAttention):
            if kind.kv_bytes_per_token(Layout(), MEASURED_KV[0]):
                raise PlanError(
                    f"{kv_dtype} KV is for keys and values of heads, and {model.name} caches "
                    f"{heads.heads_text}: {use}"
                )
        elif row is not None and row.head_dims and heads.head_dim not in row.head_dims:
            raise PlanError(
                f"{engine.title} takes {kv_dtype} KV on {gpu.name} with a head_dim of "
                f"{', '.join(map(str, row.head_dims))}, and {model.name} has {heads.head_dim}: {use}"
            )


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
    if options.eplb and (options.routing or model.routing) == "balanced":
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
    _refuse(model, f"with {' and '.join(used)} in {layout}", reasons)


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
    _refuse(model, f"in two batches in {layout}", reasons)


def check_context_parallel(
    model: ModelSpec, layout: Layout, engine: str, is_known: bool, overlaps: bool
) -> None:
    """Refuse context parallelism that no engine runs, or no plan times."""
    if layout.cp == 1:
        return
    reasons = []
    if not is_known:
        reasons.append(f"{engine} has no prefill context parallelism: use engine='sglang' or 'vllm'")
    if any(has_recurrent_states(kind) for kind in model.kinds):
        reasons.append("its state passes from one part of a prompt to the next, so parts cannot run at once")
    if overlaps:
        reasons.append("it cannot be combined with two batches: use two_batch_overlap=False")
    _refuse(model, f"with cp {layout.cp}", reasons)


def check_adapters(model: ModelSpec, layout: Layout, execution: Execution, options: PlanOptions) -> None:
    """Refuse LoRA adapters that the engine does not run, or whose calls are not known."""
    adapters = execution.adapters
    if adapters is None:
        return
    reasons = []
    if model.architecture in options.engine.lora.refused:
        reasons.append(f"{options.engine.name} starts it without adapters only")
    hidden = {
        name.replace("_", " ")
        for kind in model.kinds
        for name in kind.without_adapters(model.hidden, layout, execution)
    }
    if hidden:
        parts = ", ".join(sorted(hidden))
        reasons.append(f"its attention is measured as one block with {parts}: use modules mlp")
    if execution.two_batches_from:
        reasons.append("they cannot be combined with two batches: use two_batch_overlap=False")
    topks = [kind.mlp.topk for kind in model.kinds if isinstance(kind.mlp, RoutedExperts)]
    if "experts" in adapters.roles and any(
        sends_to_experts(layout, execution.exchange, topk) for topk in topks
    ):
        reasons.append(
            "adapters of experts need the tokens of all ranks: use exchange='gather' or modules attention"
        )
    _refuse(model, f"with lora in {layout}", reasons)


def has_recurrent_states(kind: LayerKind) -> bool:
    """Whether a layer's state is recurrent, not just a cache of the last tokens."""
    return bool(kind.attention.state_bytes(Layout())) and getattr(kind.attention, "is_recurrent", True)


BLOCKS: Final = ("mla_module_decode", "mla_module_prefill")
PARTS: Final = ("mla_decode", "mla_prefill", "mla_bmm")


def whole_blocks(options: PlanOptions, tables: Tables | None) -> tuple[str, ...]:
    """Formats of projections whose latent attention is looked up as one block."""
    if tables is None or not all(name in tables.measured.tables for name in BLOCKS):
        return ()
    if not all(name in tables.measured.tables for name in PARTS):
        formats = ({str(key[0]) for key in tables.every_key(name)} for name in BLOCKS)
    elif options.engine.kernels.latent_attention == "whole":
        formats = (_sound_formats(tables, name, options.kv_dtype) for name in BLOCKS)
    else:
        return ()
    return tuple(sorted(set.intersection(*formats)))


def _sound_formats(tables: Tables, operator: str, kv_dtype: str) -> set[str]:
    """Formats in which some source has sound blocks with a KV cache of a format."""
    found = set()
    for table in tables.candidates(operator):
        keys = [key for key in table.groups() if key[1] == kv_dtype]
        found |= {str(key[0]) for key in keys if tables.is_sound(table, key)}
    return found


KERNEL_FORMATS: Final[dict[str, tuple[tuple[str, tuple[str, ...]], ...]]] = {
    "fp8": (("fp8", ("fp8",)), ("bf16", ("fp8_wo",))),
    "fp8_block": (("fp8", ("fp8_block",)), ("bf16", ("fp8_wo",))),
    "mxfp8": (("fp8", ("fp8_block",)), ("bf16", ("fp8_wo",))),
    "int8": (("int8", ("int8", "sq")), ("bf16", ("int8_wo",))),
    "w4afp8": (("fp8", ("w4afp8",)), ("bf16", ("int4_wo",))),
    "nvfp4": (("fp4", ("nvfp4",)), ("bf16", ("nvfp4_wo",))),
    "mxfp4": (("fp4", ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4")), ("bf16", ("w4a16_mxfp4",))),
}
"""Compute formats of a stored format by the GPU's peaks; the first peak that the GPU has decides.

Without units for a format, engines keep the weights and compute in bf16; those without
``fp8_weight_only`` refuse fp8. Tables call SmoothQuant's int8 kernels ``sq``. mxfp8 was not measured:
fp8_block replaces it, which also computes in fp8 and reads 3 % fewer bytes.
"""


def kernel_formats(
    model: ModelSpec, stored: set[str], gpu: GpuSpec, options: PlanOptions, tables: Tables | None
) -> tuple[tuple[str, str], ...]:
    """Pairs of a stored format and the different format that its kernels compute in."""
    chosen = {dtype: _kernel_format(model, dtype, gpu, options, tables) for dtype in sorted(stored)}
    return tuple((dtype, kernel) for dtype, kernel in chosen.items() if dtype != kernel)


def _kernel_format(
    model: ModelSpec, dtype: str, gpu: GpuSpec, options: PlanOptions, tables: Tables | None
) -> str:
    by_peak = dict(KERNEL_FORMATS.get(dtype, ()))
    able = next((kernels for peak, kernels in by_peak.items() if peak in gpu.peak_flops_per_s), (dtype,))
    if able == ("fp8_wo",) and not options.engine.kernels.fp8_weight_only:
        return dtype
    if len(able) == 1:
        return able[0]
    for operator in (MOE.name, GEMM.name):
        named = options.kernel(operator, gpu, dtype)
        if named is not None and named.dtype in able:
            return str(named.dtype)
    if tables is None:
        return able[0]
    experts = frozenset(kind.mlp for kind in model.kinds if isinstance(kind.mlp, RoutedExperts))
    key = ("measured formats", model.hidden, experts)
    measured = tables.cached(key, lambda: list(_measured(tables, model.hidden, experts)))
    return next((kernel for dtypes in measured for kernel in able if kernel in dtypes), able[0])


def _measured(tables: Tables, hidden: int, experts: frozenset[RoutedExperts]) -> Iterator[set[str]]:
    """Formats in which a model's experts were measured: by the first source, by any source, in any shape."""
    if not experts:
        yield _dtypes(tables, GEMM.name, None)
        return
    shapes = {(one.width(hidden), one.intermediate, one.topk, one.num_experts) for one in experts}
    operator = MOE.name if all(one.is_gated for one in experts) else MOE_NONGATED.name
    if operator not in tables.sources:
        return
    yield {str(key[0]) for key in tables.groups(operator) if key[1:5] in shapes}
    yield _dtypes(tables, operator, shapes)
    yield _dtypes(tables, operator, None)


def _dtypes(tables: Tables, operator: str, shapes: set[tuple[int, int, int, int]] | None) -> set[str]:
    return {str(key[0]) for key in tables.every_key(operator) if shapes is None or key[1:5] in shapes}


def exchange_rules(engine: EngineProfile, gpu: GpuSpec, exchange: str | None) -> ExchangeRules:
    """Return how GPUs exchange tokens for experts."""
    rules = engine.layout
    on_rack = gpu.name in rules.alltoall_gpus
    alltoall = rules.alltoall if on_rack and rules.alltoall == "over_topk" else "never"
    if exchange is not None:
        alltoall = "never" if exchange == "gather" else "always"
    libraries = (rules.decode_library, rules.prefill_library)
    if exchange in (*RACK_LIBRARIES, SENDING_EXPERTS):
        libraries = (exchange, exchange)
    elif on_rack and rules.rack_library:
        libraries = (rules.rack_library, rules.rack_library)
    return ExchangeRules(
        alltoall,
        rules.alltoall_needs_dp,
        libraries,
        rules.comm_dtypes,
        rules.gathered_bytes if gpu.name in rules.gathered_gpus else (),
        rules.token_shares,
        rules.attention_sum,
        rules.copies_embedding,
    )


def shares_experts_beside(gpu: GpuSpec, options: PlanOptions) -> bool:
    """Whether shared experts run concurrently with the routed ones."""
    kernel = options.kernel("moe", gpu, options.dtype)
    chosen = kernel.shared_experts if kernel is not None else ""
    # vLLM's runner: not with a load balancer's or a handshake's all-to-all
    is_apart = options.exchange == "nvlink_two_sided" or (options.eplb and options.exchange == "alltoall")
    if is_apart and options.engine.kernels.shared_experts_tokens:
        return False
    return (chosen or options.engine.kernels.shared_experts) == "beside"


def _with_experts(
    model: ModelSpec, options: PlanOptions, execution: Execution, tables: Tables | None
) -> Execution:
    """Return an execution with the kernels of its experts: wide ones or not, and over how many slots."""
    layout, tried = options.layout, execution._replace(wide_experts=True)
    check_wide_experts(model, layout, options)
    execution = execution._replace(
        num_slots=options.num_slots or 0, routing=execution.routing + (BALANCED if options.eplb else "")
    )
    if options.eplb or options.wide_experts is not None:
        return execution._replace(wide_experts=options.eplb or bool(options.wide_experts))
    if layout.ep <= options.engine.layout.wide_experts_over or tables is None:
        return execution
    layers = [kind for kind in model.kinds if isinstance(kind.mlp, RoutedExperts)]
    for kind in layers:
        mlp = kind.mlp
        if not isinstance(mlp, RoutedExperts) or not sends_to_experts(layout, execution.exchange, mlp.topk):
            return execution
        calls = [
            call
            for call in mlp.calls(model.hidden, layout, kind.run_as(tried))
            if isinstance(call, Experts) and call.operator == MOE_WIDE.name
        ]
        if not calls or not all(MOE_WIDE.is_measured(call, tables) for call in calls):
            return execution
    return execution._replace(wide_experts=bool(layers))


def execution_of(model: ModelSpec, options: PlanOptions, curves: CurveSource) -> Execution:
    """Return how a plan runs its model; ``options`` come from :meth:`PlanOptions.for_model`."""
    checkpoint = model.checkpoint
    formats: Formats | None = None
    scale_bytes: tuple[tuple[str, float], ...] = ()
    stored = {options.dtype}
    if options.dtype == checkpoint.dtype:
        formats, scale_bytes = (("lm_head", checkpoint.head_dtype),), checkpoint.scale_bytes
        stored = {dtype for kind in model.kinds for _, dtype in kind.formats} | {checkpoint.head_dtype}
    tables = curves.tables if isinstance(curves, TableCurves) else None
    execution = Execution(
        options.dtype,
        options.kv_dtype,
        tuple(dtype for dtype in ("fp8", "fp8_block") if dtype in stored and curves.quantises_apart(dtype)),
        formats,
        kernel_formats(model, stored, curves.gpu, options, tables),
        scale_bytes=scale_bytes,
        routing=options.routing or model.routing,
        shared_beside=shares_experts_beside(curves.gpu, options),
        shared_most_tokens=options.engine.kernels.shared_experts_tokens,
        fused_norm_tokens=options.engine.kernels.fused_norm_tokens(model.architecture),
        sink_prompts=next(
            (
                ModelledPrompts(one.share, one.error)
                for one in options.engine.kernels.sink_attention
                if curves.gpu.name in (one.gpus or (curves.gpu.name,))
            ),
            None,
        ),
        exchange=exchange_rules(options.engine, curves.gpu, options.exchange),
        whole_blocks=whole_blocks(options, tables),
        dp_imbalance=float(options.dp_imbalance),
    )
    execution = _with_experts(model, options, execution, tables)
    if isinstance(options.lora, Lora):
        adapters = Adapters.of(options.lora, options.engine.lora, model.architecture)
        execution = execution._replace(adapters=adapters)
    if not options.two_batch_overlap:
        return execution
    starts = options.engine.layout.two_batches_from
    check_two_batches(model, options.layout, execution, options.engine.name, starts)
    return execution._replace(two_batches_from=starts, shared_beside=False)
