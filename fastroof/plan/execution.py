"""How a plan runs its model: where latencies come from, in which formats, by which of an engine's ways."""

from __future__ import annotations

from fastroof.config import GpuSpec
from fastroof.models import ModelSpec
from fastroof.models.execution import ROUTING, Execution, Formats
from fastroof.plan.curves import CurveSource
from fastroof.plan.datasheet import DatasheetCurves
from fastroof.plan.exchange import exchange_rules
from fastroof.plan.kernel_formats import kernel_formats
from fastroof.plan.latent_blocks import whole_blocks
from fastroof.plan.options import PlanOptions, kernel_order, shares_experts_beside
from fastroof.plan.table_curves import TableCurves
from fastroof.plan.two_batches import check_two_batches
from fastroof.plan.wide_experts import wide_experts
from fastroof.tables import Tables

__all__ = ["curves_of", "execution_of"]


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
