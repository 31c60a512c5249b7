"""How a plan runs its model: formats, kernels of experts, and the engine's exchange of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from fastroof.config import GpuSpec
from fastroof.engines import EngineProfile
from fastroof.models import Layout, ModelSpec
from fastroof.models.exchange import sends_to_experts
from fastroof.models.execution import ROUTING, SENDING_EXPERTS, ExchangeRules, Execution, Formats
from fastroof.models.experts import RoutedExperts
from fastroof.operators.calls import Experts
from fastroof.operators.gemm import GEMM
from fastroof.operators.moe import MOE, MOE_NONGATED
from fastroof.operators.wide_experts import BALANCED, MOE_WIDE
from fastroof.plan.checks import check_two_batches, check_wide_experts
from fastroof.plan.curves import CurveSource, TableCurves
from fastroof.plan.options import RACK_LIBRARIES, PlanOptions
from fastroof.tables import Tables

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
    "mxfp8": (("fp8", ("fp8_block",)),),
    "int8": (("int8", ("int8", "sq")), ("bf16", ("int8_wo",))),
    "w4afp8": (("fp8", ("w4afp8",)), ("bf16", ("int4_wo",))),
    "nvfp4": (("fp4", ("nvfp4",)), ("bf16", ("nvfp4_wo",))),
    "mxfp4": (("fp4", ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4")), ("bf16", ("w4a16_mxfp4",))),
}
"""Compute formats of a stored format by the GPU's peaks; the first peak that the GPU has decides.

Without 4-bit units, engines keep the weights and compute in bf16; fp8 without fp8 units is refused. Tables
call SmoothQuant's int8 kernels ``sq``. mxfp8 was not measured: fp8_block replaces it, which also computes in
fp8 and reads 3 % fewer bytes.
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
    """Whether shared experts run concurrently with the routed ones in decode steps."""
    kernel = options.kernel("moe", gpu, options.dtype)
    chosen = kernel.shared_experts if kernel is not None else ""
    return (chosen or options.engine.kernels.shared_experts) == "beside"


class WideExperts(NamedTuple):
    """The fields of an execution about wide expert parallelism."""

    is_wide: bool
    num_slots: int
    routing: str


def wide_experts(
    model: ModelSpec, layout: Layout, options: PlanOptions, execution: Execution, tables: Tables | None
) -> WideExperts:
    """Return which kernels a plan's experts run, and over how many slots."""
    layers = [kind for kind in model.kinds if isinstance(kind.mlp, RoutedExperts)]
    check_wide_experts(model, layout, options)
    routing = execution.routing + (BALANCED if options.eplb else "")
    slots = options.num_slots or 0
    if options.eplb or options.wide_experts is not None:
        return WideExperts(options.eplb or bool(options.wide_experts), slots, routing)
    if layout.ep <= options.engine.layout.wide_experts_over or tables is None:
        return WideExperts(False, slots, routing)
    tried = execution._replace(wide_experts=True)
    for kind in layers:
        mlp = kind.mlp
        if not isinstance(mlp, RoutedExperts) or not sends_to_experts(layout, execution.exchange, mlp.topk):
            return WideExperts(False, slots, routing)
        calls = [
            call
            for call in mlp.calls(model.hidden, layout, kind.run_as(tried))
            if isinstance(call, Experts) and call.operator == MOE_WIDE.name
        ]
        if not calls or not all(MOE_WIDE.is_measured(call, tables) for call in calls):
            return WideExperts(False, slots, routing)
    return WideExperts(bool(layers), slots, routing)


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
        "fp8" in stored and curves.quantise_inputs,
        formats,
        kernel_formats(model, stored, curves.gpu, options, tables),
        scale_bytes=scale_bytes,
        routing=ROUTING if options.routing is None else options.routing,
        shared_beside=shares_experts_beside(curves.gpu, options),
        exchange=exchange_rules(options.engine, curves.gpu, options.exchange),
        whole_blocks=whole_blocks(options, tables),
        dp_imbalance=float(options.dp_imbalance),
    )
    wide = wide_experts(model, options.layout, options, execution, tables)
    execution = execution._replace(wide_experts=wide.is_wide, num_slots=wide.num_slots, routing=wide.routing)
    if not options.two_batch_overlap:
        return execution
    starts = options.engine.layout.two_batches_from
    check_two_batches(model, options.layout, execution, options.engine.name, starts)
    return execution._replace(two_batches_from=starts, shared_beside=False)
