"""The options of a plan, each defined once: name, type, default, check, unit and help text.

:func:`fastroof.compile_plan`, the command line and the identity of cached plans all read
:class:`PlanOptions`. This module imports nothing that a command's ``--help`` does not need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

from fastroof.checks import check_flag, is_number, one_of, shown, whole_number
from fastroof.defaults import DEFAULT_ENGINE
from fastroof.errors import PlanError

if TYPE_CHECKING:
    from fastroof.config import GpuSpec
    from fastroof.engines import OperatorKernel
    from fastroof.engines.scheduling import Scheduling
    from fastroof.models import Layout, ModelSpec
    from fastroof.models.lora import Lora

RACK_LIBRARIES: Final = ("nvlink_one_sided", "nvlink_two_sided")
"""All-to-all kernels that write into other GPUs' memory over NVLink: alone, or after a handshake."""

EXCHANGES: Final = ("gather", "alltoall", *RACK_LIBRARIES, "megamoe")
"""How tokens reach experts on other GPUs. megamoe: the experts' own kernel sends them."""

MAX_STEP_SIZE: Final = 2**22
LEAST_TOKENS: Final = 8192
LEAST_SEQS: Final = 1024
"""Minimum tokens and sequences of a step that a plan times by default."""
KERNELS_ONLY: Final = "kernels"
"""The engine profile that adds nothing to the kernels."""

Check = Callable[[str, Any], Any]
"""Takes an option's name and value; returns the value to use, or raises PlanError."""


def _option(default: Any, text: str, metavar: str = "", check: Check | None = None, flag: str = "") -> Any:
    return field(default=default, metadata={"help": text, "metavar": metavar, "check": check, "flag": flag})


def _step_size(name: str, value: Any) -> int:
    return whole_number(name, value, most=MAX_STEP_SIZE, error=PlanError)


def _flag(name: str, value: Any) -> bool:
    check_flag(name, value, PlanError)
    return bool(value)


def _optional_flag(name: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise PlanError(f"{name} must be True, False or None, got {shown(value)}")
    return value


def _optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _dtype(name: str, value: Any) -> str:
    from fastroof.models.execution import AUTO, DTYPES

    return one_of(name, value, (AUTO, *DTYPES), PlanError)


def _kv_dtype(name: str, value: Any) -> str:
    from fastroof.models.execution import AUTO, KV_DTYPES

    return one_of(name, value, (AUTO, *KV_DTYPES), PlanError)


def _routing(name: str, value: Any) -> str | None:
    from fastroof.models.execution import AUTO, ROUTINGS

    return None if one_of(name, value, (AUTO, *ROUTINGS), PlanError) == AUTO else str(value)


def _exchange(name: str, value: Any) -> str:
    return one_of(name, value, EXCHANGES, PlanError)


def _engine(name: str, value: Any) -> Any:
    from fastroof.engines import load_engine

    return load_engine(value)


def _method(name: str, value: Any) -> str:
    from fastroof.operators.operator import METHODS

    return one_of(name, value, METHODS, PlanError)


def _smoothing(name: str, value: Any) -> str:
    from fastroof.engines.kernel_choices import GEMM_SMOOTHINGS

    return one_of(name, value, GEMM_SMOOTHINGS, PlanError)


def _fraction(name: str, value: Any) -> float:
    from fastroof.engines.memory import checked_fraction

    return checked_fraction(name, value)


def _front_end(name: str, value: Any) -> str | float:
    from fastroof.engines.front_end import front_end_given

    return front_end_given(name, value)


def _lora(name: str, value: Any) -> Any:
    from fastroof.models.lora import Lora

    return Lora.of(value)


def _gib(name: str, value: Any) -> float:
    if not is_number(value) or not 1e-3 <= value <= 1e6:
        raise PlanError(f"{name} must be GiB from 0.001 to 1,000,000, got {shown(value)}")
    return float(value)


@dataclass(frozen=True)
class PlanOptions:
    """What a plan is compiled with, besides its model, GPU and tables.

    A field with metadata is an option: ``help`` is the text of ``--help``, ``metavar`` its unit or kind of
    value, ``check`` its validation. The layout checks its own sizes when it is made.
    """

    tp: int = _option(1, "GPUs that share each layer: 1, 2, 4 or 8; 16, 32 or 64 across nodes.", "GPUS")
    pp: int = _option(1, "Number of pipeline stages.", "STAGES")
    dp: int = _option(1, "Ranks of attention data parallelism; batch sizes are per rank.", "RANKS")
    ep: int = _option(1, "Number of GPU groups that the experts are spread over.", "GROUPS")
    moe_tp: int | None = _option(None, "GPUs that share each expert (default: tp x dp x cp / ep).", "GPUS")
    dtype: str = _option(
        "auto",
        "Format of linear layers and experts: auto (the checkpoint's), bf16, fp8 (per-tensor scales), "
        "fp8_block, mxfp8, int8, int8_wo, int4_wo, w4afp8, nvfp4, nvfp4_wo or mxfp4.",
        "DTYPE",
        _dtype,
    )
    kv_dtype: str = _option(
        "auto",
        "Format of the KV cache: auto (the engine's own choice), bf16, fp8, nvfp4 or int8_per_token_head.",
        "DTYPE",
        _kv_dtype,
    )
    engine: Any = _option(  # noqa: RUF009 -- frozen, and its default is a text
        DEFAULT_ENGINE,
        "Serving engine whose costs, schedule and memory are added (see fastroof engines): its newest "
        "version, or one as in vllm-0.12.0; or a .toml file; kernels adds nothing.",
        "ENGINE",
        _engine,
    )
    method: str = _option(
        "roofline",
        "Interpolation between measured points: roofline, linear_mfu, nearest or floor.",
        "METHOD",
        _method,
    )
    max_num_batched_tokens: int | None = _option(
        None,
        "Maximum number of tokens in a step (default: 8192, or the engine's own on the GPU if more).",
        "TOKENS",
        _optional(_step_size),
    )
    max_num_seqs: int | None = _option(
        None,
        "Maximum number of sequences in a step (default: 1024, or the engine's own on the GPU if more).",
        "SEQUENCES",
        _optional(_step_size),
    )
    gemm_smoothing: str | None = _option(
        None,
        "Smoothing of small bf16 GEMMs: none or median3 (default: the engine's own).",
        "NAME",
        _optional(_smoothing),
    )
    routing: str | None = _option(
        None,
        "Distribution of tokens over experts: auto, balanced, power_law_1.01 or power_law_1.2 "
        "(default: auto, as measured of the model's family).",
        "NAME",
        _optional(_routing),
    )
    allow_modelled: bool = _option(
        False, "Use the datasheet model for kernels that were not measured.", check=_flag
    )
    exchange: str | None = _option(
        None,
        "How tokens reach experts on other GPUs: gather, alltoall, nvlink_one_sided or nvlink_two_sided "
        "(racks), or megamoe (fused with the experts) (default: the engine's own).",
        "NAME",
        _optional(_exchange),
    )
    dp_imbalance: float = _option(
        1.0, "Tokens of the most loaded dp rank divided by the mean; steps are those of that rank.", "RATIO"
    )
    wide_experts: bool | None = _option(
        None,
        "Run the kernels of wide expert parallelism (default: the engine's own, if measured).",
        check=_optional_flag,
    )
    eplb: bool = _option(False, "Balance the experts' load over the GPUs.", check=_flag)
    num_slots: int | None = _option(
        None,
        "Expert slots on all GPUs with eplb; slots beyond one per expert hold copies (default: one per "
        "expert).",
        "SLOTS",
        _optional(_step_size),
    )
    two_batch_overlap: bool = _option(
        False, "Overlap one half of a batch's all-to-all with the other half's computation.", check=_flag
    )
    cp: int = _option(1, "GPUs that share each prompt's new tokens (prefill context parallelism).", "GPUS")
    memory_fraction: float | None = _option(
        None,
        "gpu_memory_utilization (vLLM), free_gpu_memory_fraction (TensorRT-LLM) or mem_fraction_static "
        "(SGLang) (default: the engine's own).",
        "FRACTION",
        _optional(_fraction),
    )
    kv_cache_gib: float | None = _option(
        None,
        "Memory of the KV cache on each GPU, as vLLM's --kv-cache-memory-bytes (default: what the engine "
        "leaves).",
        "GIB",
        _optional(_gib),
    )
    front_end: str | float | None = _option(
        None,
        "What requests pass outside the engine, in TTFT and E2E: plain (HTTP server and tokenizer of the "
        "engine), dynamo, none (the engine's clock) or milliseconds a request (default: the engine's own).",
        "NAME|MS",
        _optional(_front_end),
    )
    lora: Lora | str | int | None = _option(  # noqa: RUF009 -- frozen
        None,
        "LoRA adapters of all requests (modelled): their rank, how many a GPU holds, and their modules (all, "
        "linear, attention, mlp, or names joined by +), as 16, 16:4, 16:2/4 (2 of 4 in a step) or "
        "16:4:attention; or a folder with adapter_config.json (default: none).",
        "RANK[:ADAPTERS[:MODULES]]",
        _optional(_lora),
    )
    architecture: str = ""
    """Of the model; set by :meth:`for_model`, not an option."""
    release: str = ""
    """Version in the engine's name, whose kernels come first; set by :meth:`checked`, not an option."""

    @property
    def layout(self) -> Layout:
        """How the model is split; raises PlanError for impossible sizes."""
        from fastroof.models import Layout

        return Layout(self.tp, self.pp, self.dp, self.ep, self.moe_tp, self.cp)  # type: ignore[arg-type]

    def checked(self) -> PlanOptions:
        """Return valid options with the engine loaded, or raise PlanError."""
        values = {
            name: one.metadata["check"](name, getattr(self, name))
            for name, one in OPTIONS.items()
            if one.metadata["check"] is not None
        }
        if not is_number(self.dp_imbalance) or (
            self.dp_imbalance != 1.0 and not 1.0 <= self.dp_imbalance <= self.layout.dp
        ):
            raise PlanError(f"dp_imbalance must be from 1 to dp ({self.dp}), got {shown(self.dp_imbalance)}")
        engine = values["engine"]
        release, given = self.release, self.engine
        if isinstance(given, str) and given not in (engine.name, engine.engine) and ".toml" not in given:
            release = given.partition("-")[2]
        if values["gemm_smoothing"] is not None:
            kernels = replace(engine.kernels, gemm_smoothing=values["gemm_smoothing"])
            engine = replace(engine, kernels=kernels)
        if values["memory_fraction"] is not None:
            engine = replace(engine, memory=replace(engine.memory, fraction=values["memory_fraction"]))
        if values["kv_cache_gib"] is not None:
            if engine.memory.room == "datasheet":
                raise PlanError(f"kv_cache_gib needs a serving engine, got engine {engine.name!r}")
            engine = replace(engine, memory=replace(engine.memory, cache_gib=values["kv_cache_gib"]))
        if values["lora"] is not None:
            values["lora"] = values["lora"].in_engine(engine.lora, engine.name)
            engine = engine.started_with({"lora"})
        if values["front_end"] is not None:
            engine = engine.behind(values["front_end"])
        return replace(self, **values | {"engine": engine, "release": release})

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens in a step."""
        return self.max_num_batched_tokens or LEAST_TOKENS

    @property
    def step_seqs(self) -> int:
        """Maximum number of sequences in a step."""
        return self.max_num_seqs or LEAST_SEQS

    def on(self, gpu: GpuSpec, model: ModelSpec) -> PlanOptions:
        """Return options with the engine's limits for a model on a GPU."""
        engine = self.engine.on(gpu, model.ranks(self.layout.dp))
        sizes = default_sizes(engine.scheduling)
        sizes_given = {name: value for name in sizes if (value := getattr(self, name)) is not None}
        return replace(self, engine=engine, **sizes | sizes_given)

    def for_model(self, model: ModelSpec, gpu: GpuSpec) -> PlanOptions:
        """Return options with auto replaced by the formats of a model's checkpoint, or its engine's."""
        engine, (checkpoint_dtype, stored) = self.engine, model.checkpoint.formats
        dtype = checkpoint_dtype if self.dtype == "auto" else self.dtype
        own_kv = engine.memory.auto_kv_dtype(gpu, model.architecture, stored)
        kv_dtype = own_kv if self.kv_dtype == "auto" else self.kv_dtype
        static = model.checkpoint.static_scales and dtype == checkpoint_dtype
        # an engine's profile already has the scales that the engine uses
        if static and getattr(engine, "name", "") == KERNELS_ONLY:
            engine = replace(engine, kernels=replace(engine.kernels, fp8_scales="static"))
        return replace(self, dtype=dtype, kv_dtype=kv_dtype, engine=engine, architecture=model.architecture)

    def kernel(self, operator: str, gpu: GpuSpec, dtype: str) -> OperatorKernel | None:
        """Return the kernel that the engine is known to run for an operator, if any."""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep}
        kernel: OperatorKernel | None = self.engine.kernels.of(
            operator, gpu.kernel_name, dtype, sizes, self.architecture
        )
        if kernel is not None and kernel.source and gpu.kernels_of:
            from fastroof.load.scaled import scaled_name

            return replace(kernel, source=scaled_name(kernel.source, gpu.kernels_of))
        return kernel


def default_sizes(scheduling: Scheduling, tokens: int = 0, seqs: int = 0) -> dict[str, Any]:
    """Return the sizes of a plan by default, or to time a larger step of some tokens and sequences."""
    limits = scheduling.step_limits()
    sizes = scheduling.plan_sizes(limits.tokens, limits.seqs)
    return {
        "max_num_batched_tokens": max(LEAST_TOKENS, sizes["max_num_batched_tokens"], tokens),
        "max_num_seqs": max(LEAST_SEQS, sizes["max_num_seqs"], seqs),
    }


OPTIONS: Final[dict[str, Field[Any]]] = {one.name: one for one in fields(PlanOptions) if one.metadata}
"""Every option by name, in the order of :func:`fastroof.compile_plan`."""
