"""What a plan is compiled with, checked before anything is looked up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastroof.checks import is_number, shown, whole_number
from fastroof.config import GpuSpec
from fastroof.engines import KernelChoices, OperatorKernel, load_engine
from fastroof.engines.kernel_choices import GEMM_SMOOTHINGS
from fastroof.engines.memory import checked_fraction
from fastroof.engines.profile import EngineProfile
from fastroof.errors import PlanError
from fastroof.models import Layout, ModelSpec, load_model
from fastroof.models.execution import (
    AUTO,
    DTYPES,
    KV_DTYPES,
    ROUTINGS,
    SENDING_EXPERTS,
    ExchangeRules,
    Execution,
)
from fastroof.models.experts import RoutedExperts
from fastroof.models.quantisation.scheme import BLOCK
from fastroof.operators.operator import METHODS
from fastroof.tables import Tables
from fastroof.tables.lookup import KernelOrder

RACK_LIBRARIES: Final = ("nvlink_one_sided", "nvlink_two_sided")
"""Whose GPUs write into each other's memory over NVLink: alone, or after they told each other what comes."""

EXCHANGES: Final = ("gather", "alltoall", *RACK_LIBRARIES, SENDING_EXPERTS)
"""How tokens reach experts on other GPUs: gathered, or sent to their experts alone, as the engine does, by
kernels of NVLink or by the experts' own kernel."""

NODE_GPUS: Final = 8
"""GPUs behind one NVLink switch where that is a node; a rack has more."""


def exchange_rules(engine: EngineProfile, gpu: GpuSpec, exchange: str | None) -> ExchangeRules:
    """Say what GPUs of a plan send each other for experts."""
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


LARGEST_PLAN: Final = 2**22
KERNELS_ALONE: Final = "kernels"
"""The profile that adds nothing to the kernels."""


class PlanOptions(NamedTuple):
    """The arguments of :func:`fastroof.compile_plan` that are not a model, a GPU or tables."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    moe_tp: int | None = None
    dtype: str = AUTO
    kv_dtype: str = AUTO
    runtime: Any = "kernels"
    method: str = "roofline"
    max_tokens: int = 8192
    max_seqs: int = 1024
    gemm_smoothing: str | None = None
    routing: str | None = None
    allow_modelled: bool = False
    exchange: str | None = None
    dp_imbalance: float = 1.0
    wide_experts: bool | None = None
    eplb: bool = False
    num_slots: int | None = None
    two_batch_overlap: bool = False
    cp: int = 1
    memory_fraction: float | None = None
    architecture: str = ""
    """Of the model that they are for, see :meth:`of`."""

    @property
    def layout(self) -> Layout:
        """How the model is split; the model checks that it can be."""
        return Layout(self.tp, self.pp, self.dp, self.ep, self.moe_tp, self.cp)  # type: ignore[arg-type]

    def checked(self) -> PlanOptions:
        """Return options with the runtime loaded, or raise PlanError; the model checks the layout."""
        _chosen("dtype", self.dtype, (AUTO, *DTYPES), "; fp8 is per tensor, fp8_block its own name")
        _chosen("kv_dtype", self.kv_dtype, (AUTO, *KV_DTYPES))
        if self.routing is not None:
            _chosen("routing", self.routing, ROUTINGS, "; None takes the default")
        if not isinstance(self.allow_modelled, bool):
            raise PlanError(f"allow_modelled must be True or False, got {shown(self.allow_modelled)}")
        for name in ("eplb", "two_batch_overlap"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name} must be True or False, got {shown(getattr(self, name))}")
        if self.wide_experts is not None and not isinstance(self.wide_experts, bool):
            raise PlanError(
                "wide_experts must be True, False or None for the engine's own choice, "
                f"got {shown(self.wide_experts)}"
            )
        if self.num_slots is not None:
            _limit("num_slots", self.num_slots)
        if self.exchange is not None:
            _chosen("exchange", self.exchange, EXCHANGES, "; None is the engine's own choice")
        if not is_number(self.dp_imbalance) or (
            self.dp_imbalance != 1.0 and not 1.0 <= self.dp_imbalance <= self.layout.dp
        ):
            raise PlanError(
                f"dp_imbalance is the tokens of the most loaded rank over the mean, 1 to dp ({self.dp}), "
                f"got {shown(self.dp_imbalance)}"
            )
        runtime = load_engine(self.runtime)
        if self.gemm_smoothing is not None:
            _chosen("gemm_smoothing", self.gemm_smoothing, GEMM_SMOOTHINGS)
            kernels = replace(runtime.kernels, gemm_smoothing=self.gemm_smoothing)
            runtime = replace(runtime, kernels=kernels)
        if self.memory_fraction is not None:
            fraction = checked_fraction("memory_fraction", self.memory_fraction)
            runtime = replace(runtime, memory=replace(runtime.memory, fraction=fraction))
        _chosen("method", self.method, METHODS)
        max_tokens, max_seqs = _limit("max_tokens", self.max_tokens), _limit("max_seqs", self.max_seqs)
        return self._replace(runtime=runtime, max_tokens=max_tokens, max_seqs=max_seqs)

    def of(self, model: ModelSpec) -> PlanOptions:
        """Return options with the formats of a model's checkpoint where they say auto."""
        own, own_kv = model.checkpoint.formats
        dtype = own if self.dtype == AUTO else self.dtype
        kv_dtype = own_kv if self.kv_dtype == AUTO else self.kv_dtype
        runtime = self.runtime
        if model.checkpoint.static_scales and dtype == own and getattr(runtime, "name", "") == KERNELS_ALONE:
            # an engine's profile says what fits the engine
            runtime = replace(runtime, kernels=replace(runtime.kernels, fp8_scales="static"))
        return self._replace(dtype=dtype, kv_dtype=kv_dtype, runtime=runtime, architecture=model.architecture)

    def kernel(self, operator: str, gpu: GpuSpec, dtype: str) -> OperatorKernel | None:
        """Return the kernel that the engine is known to run for an operator; options are a model's."""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep}
        kernels: KernelChoices = self.runtime.kernels
        return kernels.of(operator, gpu.name, dtype, sizes, self.architecture)


def shares_experts_beside(gpu: GpuSpec, options: PlanOptions) -> bool:
    """Whether shared experts run beside the routed ones in steps of decodes; ``options`` are a model's."""
    kernel = options.kernel("moe", gpu, options.dtype)
    chosen = kernel.shared_experts if kernel is not None else ""
    return (chosen or options.runtime.kernels.shared_experts) == "beside"


def _chosen(name: str, value: Any, allowed: tuple[str, ...], hint: str = "") -> None:
    if not isinstance(value, str) or value not in allowed:
        raise PlanError(f"{name} must be one of {', '.join(allowed)}, got {shown(value)}{hint}")


def _limit(name: str, value: Any) -> int:
    return whole_number(name, value, most=LARGEST_PLAN, error=PlanError)


def check_tables(tables: Any, gpu: GpuSpec) -> None:
    """Raise PlanError unless the tables are of that GPU, or None."""
    if tables is None:
        return
    if not isinstance(tables, Tables):
        raise PlanError(f"tables must be what load_tables returns, or None, got {type(tables).__name__}")
    if tables.gpu.name != gpu.name:
        raise PlanError(
            f"the tables were measured on {tables.gpu.name}, the plan is for {gpu.name}: "
            f"load_tables({gpu.name!r}), or tables=None for the datasheet model"
        )


def kernel_order(gpu: GpuSpec, options: PlanOptions) -> KernelOrder:
    """Whose measured kernels a plan reads first; ``options`` are checked."""
    engine = options.runtime
    named = []
    for operator in dict.fromkeys(kernel.operator for kernel in engine.kernels.operators):
        kernel = options.kernel(operator, gpu, options.dtype)
        if kernel is not None and (kernel.source or kernel.engine):
            named.append((operator, kernel.source or kernel.engine))
    own = (engine.engine,) if engine.engine else ()
    return KernelOrder(tuple(dict.fromkeys((*own, *engine.kernels.engines))), tuple(named))


def check_kernels(tables: Tables | None, gpu: GpuSpec, options: PlanOptions) -> None:
    """Raise PlanError where tables serve an operator from another source than the engine's kernel has."""
    engine = options.runtime
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
