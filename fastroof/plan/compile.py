"""Compiling plans: every operator's curve and grid, laid out in one arena."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastroof.checks import shown
from fastroof.config import GpuSpec, load_gpu
from fastroof.engines import EngineProfile
from fastroof.errors import PlanError
from fastroof.models import ModelSpec
from fastroof.models.execution import AUTO
from fastroof.plan.curves import CurveSource
from fastroof.plan.execution import curves_of
from fastroof.plan.options import PlanOptions, check_kernels, check_tables, checked_model
from fastroof.plan.recipe import plan_recipe
from fastroof.plan.step_plan import StepPlan
from fastroof.tables import Tables

__all__ = ["compile_plan"]


def compile_plan(
    model: ModelSpec | str | Path | Mapping[str, Any],
    gpu: GpuSpec | str | Path | Mapping[str, Any],
    tables: Tables | None,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    moe_tp: int | None = None,
    dtype: str = AUTO,
    kv_dtype: str = AUTO,
    runtime: EngineProfile | str | Path | Mapping[str, Any] = "kernels",
    method: str = "roofline",
    max_tokens: int = 8192,
    max_seqs: int = 1024,
    gemm_smoothing: str | None = None,
    routing: str | None = None,
    allow_modelled: bool = False,
    exchange: str | None = None,
    dp_imbalance: float = 1.0,
    wide_experts: bool | None = None,
    eplb: bool = False,
    num_slots: int | None = None,
    two_batch_overlap: bool = False,
    cp: int = 1,
    memory_fraction: float | None = None,
    curves: CurveSource | None = None,
) -> StepPlan:
    """Compile a model on a GPU into a plan that times steps.

    Parameters
    ----------
    model : ModelSpec, str, Path or mapping
        What :func:`fastroof.load_model` takes or returns.
    gpu : GpuSpec, str, Path or mapping
        What :func:`fastroof.load_gpu` takes or returns.
    tables : Tables or None
        Measured tables of that GPU. None compiles the datasheet model: rooflines of the GPU's peaks
        times one efficiency an operator class, origin "modelled", with a warning.
    tp : int
        Tensor-parallel size: 1, 2, 4 or 8.
    pp : int
        Pipeline stages. A step is one batch through all of them, with what they send each other (modelled);
        ``plan.stages``, ``plan.pipeline_us`` and ``plan.cycle_us`` know several batches at once.
    dp : int
        Ranks of attention data parallelism. Steps are those of one rank: ``batch_size`` and tokens are a
        rank's. Ranks of a dense model share nothing, so its times are those of dp 1.
    ep, moe_tp : int
        Groups of experts on GPUs of their own, and GPUs that share each expert; ``moe_tp`` None is what
        tp x dp / ep leaves. A dense model has no experts to split: ep is 1.
    dtype : str
        Linear layers and experts: ``auto`` takes each as the checkpoint has it, see ``plan.dtype`` for what
        that is. Another name of :data:`fastroof.models.execution.DTYPES` (fp8 is a scale a tensor, fp8_block
        a scale a block of 128 x 128) than the checkpoint's times the model as if all but the router and the
        LM head were quantised so.
    kv_dtype : str
        KV cache: ``auto`` (the checkpoint's, else bf16), bf16 or fp8.
    runtime : EngineProfile, str, Path or mapping
        What an engine adds to the sum of its kernels, and how it schedules, see
        :func:`fastroof.engines.load_engine`: ``kernels`` adds nothing; ``vllm`` and ``trtllm`` were fitted
        on measured serving.
    method : str
        How tables are looked up: roofline, linear_mfu, nearest or floor.
    max_tokens, max_seqs : int
        The largest step to time.
    gemm_smoothing : str, optional
        ``none`` sums bf16 GEMMs as they were measured, ``median3`` smooths the small ones along m; by
        default as the engine's profile says.
    routing : str, optional
        How tokens spread over experts: balanced, power_law_1.01 or power_law_1.2 (the default, see
        :data:`fastroof.models.execution.ROUTING`).
    allow_modelled : bool
        Whether a call that no measured table serves, attention included, comes from the datasheet model
        (origin modelled) instead of raising MissingTableError.
    exchange : str, optional
        How tokens reach experts on other GPUs: ``gather`` (all-gather and reduce-scatter, or all-reduces) or
        ``alltoall`` (dispatch and combine, in their low-latency kind in steps of decodes alone), or
        all-to-all by the kernels of a rack, ``nvlink_one_sided`` or ``nvlink_two_sided``, or ``megamoe``, by
        the experts' own kernel, which sends and computes; by default as the engine does it by itself.
    dp_imbalance : float
        Tokens of the most loaded rank of ``dp`` over the mean of all, at least 1. Steps are those of the
        most loaded rank: experts get ``dp / dp_imbalance`` times its tokens.
    wide_experts : bool, optional
        Whether experts run the kernels of wide expert parallelism, one in decodes and another with prefill;
        by default where tokens are sent to more groups of experts than the engine's profile says (8; any of
        SGLang's DeepEP), and its own wide kernels were measured for the layer.
    eplb : bool
        Whether a load balancer spreads the busiest experts' tokens (as measured: ``routing`` with it).
    num_slots : int, optional
        Places for experts on all GPUs of a group, with ``eplb``: more than experts holds copies of some, in
        memory too. By default one an expert.
    two_batch_overlap : bool
        Whether a step runs as two halves, one's tokens on their way to experts and back while the other
        computes (modelled, see :mod:`fastroof.plan.two_batches`): with an all-to-all alone, from as many
        tokens on as the engine's profile says.
    cp : int
        GPUs that share the new tokens of each prompt, each with the whole cache (context parallelism of
        prefill, see :mod:`fastroof.plan.context_parallel`); decodes run on all of them alike.
    memory_fraction : float, optional
        ``gpu_memory_utilization`` of vLLM, ``free_gpu_memory_fraction`` of TensorRT-LLM,
        ``mem_fraction_static`` of SGLang, each of what the engine takes it of; without an engine of the
        datasheet's memory. By default the engine's own. What is left for KV cache is ``plan.memory``.
    curves : CurveSource, optional
        Where latencies come from instead of the tables; plans of the same tables share theirs anyway.

    Returns
    -------
    StepPlan
        Ready to time steps.

    Raises
    ------
    PlanError
        If the model cannot be split so, a dtype or runtime is unknown, or the tables are another GPU's.
    MissingTableError
        If no table serves an operator.
    UnsupportedModelError
        If the architecture needs an operator that a plan does not have.

    Examples
    --------
    >>> import fastroof
    >>> tables = fastroof.load_tables("h100")
    >>> fastroof.compile_plan("llama-3.1-8b", "h100", tables, tp=2).tp
    2
    """
    model = checked_model(model)
    gpu = gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu)
    options = PlanOptions(
        tp, pp, dp, ep, moe_tp, dtype, kv_dtype, runtime, method, max_tokens, max_seqs, gemm_smoothing,
        routing, allow_modelled, exchange, dp_imbalance, wide_experts, eplb, num_slots,
        two_batch_overlap, cp, memory_fraction,
    ).checked().of(model)  # fmt: skip
    check_tables(tables, gpu)
    check_kernels(tables, gpu, options)
    if curves is not None and not callable(getattr(curves, "row_values", None)):
        raise PlanError(f"curves must be a source of latencies or None, got {shown(curves)}")
    if curves is None:
        curves = curves_of(tables, gpu, options)
    recipe = plan_recipe(model, gpu, options, curves, "" if tables is None else tables.content_hash)
    sums = recipe.row_sums([[group.count for group in model.layers]])
    return recipe.plan(model, sums, 0)
