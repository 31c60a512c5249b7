"""How a plan runs its model: where latencies come from, in which formats, by which of an engine's ways."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from fastroof.config import GpuSpec
from fastroof.errors import PlanError
from fastroof.models import Layout, ModelSpec
from fastroof.models.exchange import sends_to_experts
from fastroof.models.execution import ROUTING, Execution, Formats
from fastroof.models.experts import RoutedExperts
from fastroof.operators.calls import Experts
from fastroof.operators.gemm import GEMM
from fastroof.operators.moe import MOE, MOE_NONGATED
from fastroof.operators.wide_experts import BALANCED, MOE_WIDE
from fastroof.plan.calls import check_two_batches
from fastroof.plan.curves import CurveSource, DatasheetCurves, TableCurves
from fastroof.plan.options import PlanOptions, exchange_rules, kernel_order, shares_experts_beside
from fastroof.tables import Tables

BLOCKS: Final = ("mla_module_decode", "mla_module_prefill")
PARTS: Final = ("mla_decode", "mla_prefill", "mla_bmm")


def whole_blocks(options: PlanOptions, tables: Tables | None) -> tuple[str, ...]:
    """Formats of projections whose blocks are taken whole."""
    if tables is None or not all(name in tables.measured.tables for name in BLOCKS):
        return ()
    if not all(name in tables.measured.tables for name in PARTS):
        formats = ({str(key[0]) for key in tables.every_key(name)} for name in BLOCKS)
    elif options.runtime.kernels.latent_attention == "whole":
        formats = (_sound_formats(tables, name, options.kv_dtype) for name in BLOCKS)
    else:
        return ()
    return tuple(sorted(set.intersection(*formats)))


def _sound_formats(tables: Tables, operator: str, kv_dtype: str) -> set[str]:
    """Formats of which some source has sound blocks with a cache."""
    found = set()
    for table in tables.candidates(operator):
        keys = [key for key in tables.keys_of(table) if key[1] == kv_dtype]
        found |= {str(key[0]) for key in tables.sound_keys(table, keys)}
    return found


KERNEL_FORMATS: Final[dict[str, tuple[tuple[str, tuple[str, ...]], ...]]] = {
    "mxfp8": (("fp8", ("fp8_block",)),),
    "int8": (("int8", ("int8", "sq")), ("bf16", ("int8_wo",))),
    "w4afp8": (("fp8", ("w4afp8",)), ("bf16", ("int4_wo",))),
    "nvfp4": (("fp4", ("nvfp4",)), ("bf16", ("nvfp4_wo",))),
    "mxfp4": (("fp4", ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4")), ("bf16", ("w4a16_mxfp4",))),
}
"""Formats that kernels of a stored format compute in on GPUs that have a peak, the first that they have.

On a GPU without units for 4 bits engines keep the weights as they are and compute in bf16; fp8 without units
for it is refused. SmoothQuant's int8 kernels are called ``sq`` in the tables that have any. No kernel of
mxfp8 was measured: those of fp8_block stand for it, which compute in fp8 too and read 3 % fewer bytes.
"""


def kernel_formats(
    model: ModelSpec, stored: set[str], gpu: GpuSpec, options: PlanOptions, tables: Tables | None
) -> tuple[tuple[str, str], ...]:
    """Stored formats whose kernels compute in another, each with that."""
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
    measured = tables.kept(key, lambda: list(_measured(tables, model.hidden, experts)))
    return next((kernel for dtypes in measured for kernel in able if kernel in dtypes), able[0])


def _measured(tables: Tables, hidden: int, experts: frozenset[RoutedExperts]) -> Iterator[set[str]]:
    """Formats in which a model's experts were measured: by the first source, by any, of any shape."""
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


EVEN: Final = "balanced"


class WideExperts(NamedTuple):
    """What an execution has of wide expert parallelism: see there."""

    is_wide: bool
    num_slots: int
    routing: str


def wide_experts(
    model: ModelSpec, layout: Layout, options: PlanOptions, execution: Execution, tables: Tables | None
) -> WideExperts:
    """Say what kernels a plan's experts run, and over how many places."""
    layers = [kind for kind in model.kinds if isinstance(kind.mlp, RoutedExperts)]
    _check(model, layout, options, [kind.mlp for kind in layers if isinstance(kind.mlp, RoutedExperts)])
    routing = execution.routing + (BALANCED if options.eplb else "")
    slots = options.num_slots or 0
    if options.eplb or options.wide_experts is not None:
        return WideExperts(options.eplb or bool(options.wide_experts), slots, routing)
    if layout.ep <= options.runtime.layout.wide_experts_over or tables is None:
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


def _check(model: ModelSpec, layout: Layout, options: PlanOptions, layers: list[RoutedExperts]) -> None:
    asked = [
        name
        for name, is_asked in (
            ("eplb", options.eplb),
            ("num_slots", options.num_slots is not None),
            ("wide_experts", bool(options.wide_experts)),
        )
        if is_asked
    ]
    if not asked:
        return
    reasons = []
    if not layers:
        reasons.append("it has no routed experts")
    if layout.ep == 1 or layout.moe_tp > 1:
        reasons.append(f"experts must be whole on one of several GPUs: ep {layout.stage_gpus}, over 1")
    if layers and not all(mlp.is_gated for mlp in layers):
        reasons.append("wide kernels were measured of gated experts alone")
    if options.eplb and options.wide_experts is False:
        reasons.append("a load balancer was measured with wide kernels alone: wide_experts=None or True")
    if options.eplb and options.routing == EVEN:
        reasons.append("balanced routing leaves a load balancer nothing to do: eplb=False")
    if options.num_slots is not None:
        if not options.eplb:
            reasons.append("copies of experts are a load balancer's: eplb=True")
        most = max((mlp.num_experts for mlp in layers), default=1)
        if options.num_slots < most or options.num_slots % layout.ep:
            reasons.append(
                f"num_slots must be at least the {most} experts and divide by ep {layout.ep}, "
                f"got {options.num_slots}"
            )
    if reasons:
        raise PlanError(
            f"{model.name} does not run with {' and '.join(asked)} in {layout}: {'; '.join(reasons)}"
        )


def curves_of(tables: Tables | None, gpu: GpuSpec, options: PlanOptions) -> CurveSource:
    """Where a plan's latencies come from; ``options`` are checked."""
    if tables is None:
        return DatasheetCurves(gpu)
    kernels = options.runtime.kernels
    tables = tables.in_order(kernel_order(gpu, options))
    return TableCurves(
        tables,
        options.method,
        kernels.gemm_smoothing,
        kernels.fp8_scales,
        options.allow_modelled,
        gpu.name in kernels.cold_decode,
    )


def execution_of(model: ModelSpec, options: PlanOptions, curves: CurveSource) -> Execution:
    """How a plan runs its model; ``options`` are those of that model, see :meth:`PlanOptions.of`."""
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
        exchange=exchange_rules(options.runtime, curves.gpu, options.exchange),
        whole_blocks=whole_blocks(options, tables),
        dp_imbalance=float(options.dp_imbalance),
    )
    wide = wide_experts(model, options.layout, options, execution, tables)
    execution = execution._replace(wide_experts=wide.is_wide, num_slots=wide.num_slots, routing=wide.routing)
    if not options.two_batch_overlap:
        return execution
    starts = options.runtime.layout.two_batches_from
    check_two_batches(model, options.layout, execution, options.runtime.name, starts)
    return execution._replace(two_batches_from=starts, shared_beside=False)
