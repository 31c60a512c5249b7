"""Compile a plan: every operator's curve and grid, laid out in one arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array, Flags, Floats
from fastroof.caching import lazy_property
from fastroof.checks import shown
from fastroof.compiled import steps
from fastroof.compiled.grids import FORM
from fastroof.compiled.layout import FORM_LATENCY
from fastroof.config import GpuSpec, load_gpu
from fastroof.defaults import DEFAULT_ENGINE, MEASURED
from fastroof.engines import EngineProfile, PrefillGraphs
from fastroof.errors import FastroofError, PlanError
from fastroof.models import ModelSpec
from fastroof.models.execution import AUTO, Execution
from fastroof.models.lora import Lora
from fastroof.models.spec import Stage, stages_of
from fastroof.operators.calls import Role
from fastroof.plan.arena import block_launch_us, mixed_kv_us, shared_launch_us, sum_blocks, validate_arena
from fastroof.plan.call_latencies import call_latencies, captured_prompts, padded_steps
from fastroof.plan.calls import ONCE, Ranks, RowCall, RowSums, origins_of, sums_of
from fastroof.plan.curves import CurveSource, RowCurve, curves_of, num_allreduces
from fastroof.plan.execution import (
    check_adapters,
    check_context_parallel,
    check_engine_layout,
    check_expert_blocks,
    check_kernels,
    check_kv_format,
    check_tables,
    checked_model,
    execution_of,
    has_recurrent_states,
)
from fastroof.plan.kernel_counts import num_kernels
from fastroof.plan.options import OPTIONS, PlanOptions
from fastroof.plan.plan_data import ErrorSource, PlanAttention
from fastroof.plan.step_plan import StepPlan
from fastroof.tables import Tables
from fastroof.tables.table_set import chosen_tables

_SHARED_SECTIONS: Final = {
    steps.DECODE_TOKENS_AT: steps.TOKENS_AT,
    steps.DECODE_TOKENS_ORIGIN_AT: steps.TOKENS_ORIGIN_AT,
    steps.DECODE_EXPERT_AT: steps.EXPERT_AT,
    steps.WINDOW_DECODE_AT: steps.DECODE_AT,
    steps.WINDOW_PREFILL_AT: steps.PREFILL_AT,
}
"""Sections that an arena has only if they differ from another one."""


@dataclass(frozen=True, eq=False)
class PlanRecipe:
    """Curves and blocks shared by all plans that differ only in their numbers of layers."""

    gpu: GpuSpec
    options: PlanOptions
    execution: Execution
    tables_hash: str
    method: str
    calls: tuple[RowCall, ...]
    attention: tuple[PlanAttention, ...]
    error_source: ErrorSource
    prefill_graphs: PrefillGraphs | None = None

    def row_sums(self, counts: Sequence[Sequence[int]]) -> RowSums:
        """Sum the calls of plans with these numbers of layers of each kind, in the order of the step."""
        are_alike = self.options.dp > 1 and self.execution.dp_imbalance == 1.0
        return sums_of(self.calls, counts, self.options.step_tokens, self.options.step_seqs, are_alike)

    @lazy_property
    def _origins(self) -> dict[str, Flags]:
        """Origins of each section's calls: the same in every plan."""
        tokens, seqs = self.options.step_tokens, self.options.step_seqs
        return {
            "tokens": origins_of(self.calls, "tokens", tokens),
            "decode_tokens": origins_of(self.calls, "decode_tokens", tokens),
            "sequences": origins_of(self.calls, "sequences", seqs),
        }

    def plan(self, model: ModelSpec, sums: RowSums, row: int, stage: int | None = None) -> StepPlan:
        """Compile the plan of a model, or of a pipeline stage, from its row of :meth:`row_sums`."""
        counts = [*(group.count for group in model.layers), 1]  # ONCE is the last
        row_curves = tuple(call.curve.in_layers(counts[call.kind]) for call in self.calls)
        attention = tuple(part.in_layers(counts[part.kind]) for part in self.attention)
        options = self.options
        return StepPlan(
            model=model,
            gpu=self.gpu,
            layout=options.layout,
            dtype=options.dtype,
            kv_dtype=options.kv_dtype,
            execution=self.execution,
            profile=options.engine,
            method=self.method,
            max_num_batched_tokens=options.step_tokens,
            max_num_seqs=options.step_seqs,
            tables_hash=self.tables_hash,
            arena=self._arena(model, attention, sums.of_plan(row), row_curves),
            row_curves=row_curves,
            # blocks of a single kind are those of the arena
            attention=attention
            if len(attention) > 1
            else tuple(part._replace(decode_block=None, prefill_block=None) for part in attention),
            error_source=self.error_source,
            stage=stage,
            stage_plans=self._stage_plans(model) if options.pp > 1 and stage is None else (),
        )

    def _stage_plans(self, model: ModelSpec) -> tuple[StepPlan, ...]:
        """Plans of a model's pipeline stages; equal stages share one."""
        by_layers: dict[tuple[tuple[int, ...], bool, bool], StepPlan] = {}
        plans = []
        for stage in stages_of(model, self.options.pp):
            alike = (stage.counts, stage.is_first, stage.is_last)
            if alike not in by_layers:
                by_layers[alike] = self._stage_plan(model, stage)
            plans.append(by_layers[alike])
        return tuple(plans)

    def _stage_plan(self, model: ModelSpec, stage: Stage) -> StepPlan:
        """The plan of one stage: its layers, its sends, and the embedding or the LM head."""
        kinds = [kind for kind, count in enumerate(stage.counts) if count]
        calls, places = [], [0]
        for call in self.calls:
            if call.kind == ONCE and _runs_in(call.curve.operator.role, stage):
                calls.append(call._replace(curve=call.curve.once()))
            elif call.kind in kinds:
                calls.append(call._replace(kind=kinds.index(call.kind)))
            places.append(len(calls))
        attention = tuple(
            part._replace(kind=kinds.index(part.kind), before=places[part.before])
            for part in self.attention
            if part.kind in kinds
        )
        options = self.options
        if not stage.is_last:
            # the last stage samples
            costs = replace(options.engine.costs, sequence_us=0.0, logit_ps=0.0)
            options = replace(options, engine=replace(options.engine, costs=costs))
        recipe = replace(self, options=options, calls=tuple(calls), attention=attention)
        part = stage.model(model)
        return recipe.plan(part, recipe.row_sums([[g.count for g in part.layers]]), 0, stage.number)

    def _arena(
        self,
        model: ModelSpec,
        attention: Sequence[PlanAttention],
        sums: RowSums,
        row_curves: Sequence[RowCurve],
    ) -> Floats:
        """Lay out the arena that the step loops read."""
        options, costs = self.options, self.options.engine.costs
        allreduces = num_allreduces(row_curves)
        pauses = num_kernels(row_curves, attention, has_prefill=False)
        launched = num_kernels(row_curves, attention, has_prefill=True)
        is_captured = self.prefill_graphs is not None
        sections: dict[int, Array] = {
            steps.TOKENS_AT: sums.tokens_us,
            steps.LOGITS_AT: sums.logits_us,
            steps.TOKENS_ORIGIN_AT: self._origins["tokens"],
            steps.LOGITS_ORIGIN_AT: self._origins["sequences"],
        }
        if sums.decode_tokens_us is not sums.tokens_us:
            sections[steps.DECODE_TOKENS_AT] = sums.decode_tokens_us
            sections[steps.DECODE_TOKENS_ORIGIN_AT] = self._origins["decode_tokens"]
        if sums.expert_us is not None and sums.decode_expert_us is not None:
            sections[steps.EXPERT_AT] = sums.expert_us
            if sums.decode_expert_us is not sums.expert_us:
                sections[steps.DECODE_EXPERT_AT] = sums.decode_expert_us
        sections[steps.DECODE_AT] = sum_blocks([part.decode_block for part in attention])
        sections[steps.PREFILL_AT] = sum_blocks([part.prefill_block for part in attention])
        windowed = [part for part in attention if part.call.window]
        if 0 < len(windowed) < len(attention):
            # on the axes of all layers' blocks: a step searches a point's cell once for both
            for slot, total, blocks in (
                (steps.WINDOW_DECODE_AT, steps.DECODE_AT, [part.decode_block for part in windowed]),
                (steps.WINDOW_PREFILL_AT, steps.PREFILL_AT, [part.prefill_block for part in windowed]),
            ):
                sections[slot] = sum_blocks(blocks, like=sections[total])
        header = np.zeros(steps.HEADER_SIZE)
        starts = steps.HEADER_SIZE + np.cumsum([0, *(len(section) for section in sections.values())])
        header[[*sections, steps.ARENA_SIZE]] = starts
        for slot, other in _SHARED_SECTIONS.items():
            if slot not in sections:
                header[slot] = header[other]
        if steps.EXPERT_AT in sections:
            header[steps.RANKS] = options.dp
        # a kind's prefix has full and windowed parts
        pair_us, token_us, window_pair_us, window_token_us = (
            sum(prices) for prices in zip(*(part.prefix_us for part in attention), strict=True)
        )
        header[[steps.MIXED_KV_US, steps.MIXED_WINDOW_KV_US]] = mixed_kv_us(
            [part.call for part in attention], options.engine, self.gpu
        )
        header[steps.SHARED_LAUNCH_US] = sum(
            shared_launch_us(
                part.call,
                (block_launch_us(block) for block in (part.decode_block, part.prefill_block)),
                options.engine,
                self.gpu,
            )
            for part in attention
        )
        if windowed:
            header[steps.WINDOW] = windowed[0].call.window
            header[[steps.WINDOW_PAIR_US, steps.WINDOW_TOKEN_US]] = window_pair_us, window_token_us
        header[: steps.PREFIX_TOKEN_US + 1] = (
            steps.ARENA_MAGIC, steps.ARENA_FORMAT, options.step_tokens, options.step_seqs, model.num_layers,
            costs.of_step_us(model.architecture, model.num_blocks, allreduces, pauses), pair_us, token_us,
        )  # fmt: skip
        header[steps.SEQUENCE_US : steps.PREFILL_FLOOR_US + 1] = (
            costs.of_sequence_us(model.vocab), costs.of_prefill_us(model.num_blocks),
            0.0 if is_captured else costs.of_prefill_floor_us(model.num_blocks, launched),
        )  # fmt: skip
        header[steps.HIDES_HOST] = options.engine.scheduling.hides_host
        arena = np.concatenate([header, *sections.values()], dtype=np.float64)
        validate_arena(arena, f"the plan of {model.name} on {self.gpu.name}")
        arena.flags.writeable = False
        return arena


def _runs_in(role: Role, stage: Stage) -> bool:
    """Whether a stage runs a call that runs once per step."""
    if role == "embedding":
        return stage.is_first
    return not stage.is_last if role == "stage_send" else stage.is_last


def plan_recipe(
    model: ModelSpec, gpu: GpuSpec, options: PlanOptions, curves: CurveSource, tables_hash: str
) -> PlanRecipe:
    """Look up every curve and block of plans of one architecture."""
    options = options.on(gpu, model)
    states = any(map(has_recurrent_states, model.kinds))
    options = replace(options, engine=options.engine.of_plan(model.architecture, gpu, states))
    layout = options.layout
    model.check_layout(layout)
    check_engine_layout(model, layout, options.engine, options.exchange, gpu)
    check_kv_format(model, options, gpu)
    check_context_parallel(
        model,
        layout,
        options.engine.name,
        options.engine.layout.context_parallel,
        options.two_batch_overlap,
    )
    execution = execution_of(model, options, curves)
    check_expert_blocks(model, layout, execution)
    check_adapters(model, layout, execution, options)
    row_limit = max(options.step_tokens, options.step_seqs)
    graphs = captured_prompts(model, layout, execution, options.engine, gpu)
    padded = padded_steps(model, layout, graphs, row_limit)
    rows, attention = call_latencies(
        model, layout, execution, curves, row_limit if padded is None else padded.limit
    )
    if padded is not None:
        rows, attention = padded.calls(rows, attention, Ranks.of(layout, execution))
    _check_windows(model, attention)
    if any(part.call.window and part.decode_block[FORM] != FORM_LATENCY for part in attention):
        raise PlanError(
            f"method={curves.method!r} interpolates MFU, which does not fit {model.name}'s window: beyond it "
            "work does not grow with kv_len; use method='roofline'"
        )
    return PlanRecipe(
        gpu=gpu,
        options=options,
        execution=execution,
        tables_hash=tables_hash,
        method=curves.method,
        calls=tuple(rows),
        attention=tuple(attention),
        error_source=ErrorSource.of(curves),
        prefill_graphs=graphs,
    )


def _check_windows(model: ModelSpec, attention: Sequence[PlanAttention]) -> None:
    """Refuse attention with several caps: windows, or the tokens that indexers select."""
    windows = sorted({part.call.window for part in attention} - {0})
    if len(windows) > 1:
        raise PlanError(
            f"{model.name} has attention whose cost is capped at {' and '.join(map(str, windows))} tokens, "
            "and a plan takes one cap besides uncapped attention"
        )


def compile_plan(
    model: ModelSpec | str | Path | Mapping[str, Any],
    gpu: GpuSpec | str | Path | Mapping[str, Any],
    tables: Tables | str | Path | None = MEASURED,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    moe_tp: int | None = None,
    dtype: str = AUTO,
    kv_dtype: str = AUTO,
    engine: EngineProfile | str | Path | Mapping[str, Any] = DEFAULT_ENGINE,
    method: str = "roofline",
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
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
    kv_cache_gib: float | None = None,
    front_end: str | float | None = None,
    lora: Lora | str | int | None = None,
    curves: CurveSource | None = None,
) -> StepPlan:
    """Compile a model on a GPU into a plan that times steps.

    Parameters
    ----------
    model : ModelSpec, str, Path or mapping
        A model, or an argument of :func:`fastroof.load_model`.
    gpu : GpuSpec, str, Path or mapping
        A GPU, or an argument of :func:`fastroof.load_gpu`.
    tables : Tables, str or Path
        Measured tables of that GPU, or an argument of :func:`fastroof.load_tables` (default: the GPU's own,
        or the datasheet model if nothing was measured on it). ``"datasheet"`` (or None) compiles the
        datasheet model: rooflines of the GPU's peaks times one efficiency per operator class, origin
        "modelled", with a warning.
    tp : int
        Tensor-parallel size: 1, 2, 4 or 8; 16, 32 or 64 across nodes.
    pp : int
        Pipeline stages. A step is one batch through all of them, with their sends (modelled);
        ``plan.pipeline_us`` and ``plan.cycle_us`` time several batches at once.
    dp : int
        Ranks of attention data parallelism. Steps are those of one rank: ``batch_size`` and tokens are per
        rank. Ranks of a dense model share nothing, so its times equal those of dp 1.
    ep, moe_tp : int
        Number of GPU groups that the experts are spread over, and GPUs that share each expert (default:
        tp x dp x cp / ep). A dense model has ep 1.
    dtype : str
        Format of linear layers and experts: ``auto`` (the checkpoint's) or one of
        :data:`fastroof.models.execution.DTYPES` (fp8 has per-tensor scales, fp8_block one per 128 x 128
        block). Another format than the checkpoint's applies to all but the router and the LM head.
    kv_dtype : str
        Format of the KV cache: ``auto`` (the engine's own, mostly the checkpoint's), bf16, fp8,
        nvfp4 or int8_per_token_head (one float32 scale per key and value of a head).
    engine : EngineProfile, str, Path or mapping
        Serving engine: its costs besides kernels, schedule and memory, see
        :func:`fastroof.engines.load_engine`. ``vllm`` by default, as in every command; ``kernels`` adds
        nothing.
    method : str
        Interpolation between measured points: roofline, linear_mfu, nearest or floor.
    max_num_batched_tokens, max_num_seqs : int, optional
        Maximum number of tokens and of sequences in a step (default: 8,192 and 1,024, or as many as the
        engine schedules by default on the GPU if that is more: 16,384 tokens in TensorRT-LLM, and on 160 GiB
        in vLLM from 0.28 and SGLang).
    gemm_smoothing : str, optional
        ``none`` takes bf16 GEMMs as measured, ``median3`` smooths the small ones along m (default: the
        engine's own).
    routing : str, optional
        Distribution of tokens over experts: balanced, power_law_1.01, power_law_1.2 or ``auto`` (default), as
        serving runs show: balanced for Mixtral, power_law_1.2 for other families.
    allow_modelled : bool
        Whether a call that was not measured comes from the datasheet model (origin "modelled") instead of
        raising MissingTableError; it always does on a card of your own.
    exchange : str, optional
        How tokens reach experts on other GPUs: ``gather`` (all-gather and reduce-scatter, or all-reduces),
        ``alltoall`` (dispatch and combine, low-latency in decode-only steps), ``nvlink_one_sided`` or
        ``nvlink_two_sided`` (all-to-all within a rack), or ``megamoe`` (fused with the experts' kernel)
        (default: the engine's own).
    dp_imbalance : float
        Tokens of the most loaded rank divided by the mean, 1 to ``dp``. Steps are those of the most loaded
        rank: experts get ``dp / dp_imbalance`` times its tokens.
    wide_experts : bool, optional
        Whether experts run the kernels of wide expert parallelism (default: if tokens are sent to more
        groups of experts than the engine's profile says, and its wide kernels were measured for the layer).
    eplb : bool
        Whether a load balancer spreads the busiest experts' tokens, as measured.
    num_slots : int, optional
        Expert slots on all GPUs of a group, with ``eplb``: slots beyond one per expert hold copies, which
        take memory too (default: one per expert).
    two_batch_overlap : bool
        Whether a step runs as two halves, one half's all-to-all overlapping the other's computation
        (modelled), from as many tokens on as the engine's profile says.
    cp : int
        GPUs that share the new tokens of each prompt, each with the whole cache (prefill context
        parallelism); decodes run on all of them alike.
    memory_fraction : float, optional
        ``gpu_memory_utilization`` of vLLM, ``free_gpu_memory_fraction`` of TensorRT-LLM or
        ``mem_fraction_static`` of SGLang, with the engine's meaning; a fraction of the datasheet's memory
        without an engine (default: the engine's own). ``plan.memory`` has what it leaves for KV cache.
    kv_cache_gib : float, optional
        Memory of the KV cache on each GPU, GiB, as vLLM's ``--kv-cache-memory-bytes`` sets it, whatever else
        the engine would leave (default: what it leaves).
    front_end : str or float, optional
        What requests pass outside the engine, in TTFT and E2E of estimates and simulations: ``"plain"``, the
        HTTP server and tokenizer of the engine; ``"dynamo"``, Dynamo's; ``"none"``; or
        a request's milliseconds (default: ``plan.profile.front_end``). Times of steps do not change.
    lora : Lora, str or int, optional
        LoRA adapters of all requests (modelled): a :class:`fastroof.Lora`, a rank, or the text of its option,
        as ``"16:4"`` for four adapters of rank 16. They take memory, and kernels next to each layer (default:
        none).
    curves : CurveSource, optional
        Source of latencies instead of the tables.

    Returns
    -------
    StepPlan
        A plan that times steps.

    Raises
    ------
    PlanError
        If an option is invalid, the model or engine does not run with the layout, or the tables are another
        GPU's.
    MissingTableError
        If an operator was not measured.
    UnsupportedModelError
        If the architecture needs an unsupported operator.

    Examples
    --------
    >>> import fastroof
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", tp=2)
    >>> plan.tp, plan.engine
    (2, 'vllm')
    """
    chosen = {name: value for name, value in locals().items() if name in OPTIONS}
    model = checked_model(model)
    used = chosen_tables(tables, gpu)
    gpu = gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu)
    options = PlanOptions(**chosen).checked().for_model(model, gpu)
    check_tables(used, gpu)
    check_kernels(used, gpu, options)
    if curves is not None and not callable(getattr(curves, "row_values", None)):
        raise PlanError(f"curves must be a CurveSource or None, got {shown(curves)}")
    if curves is None:
        curves = curves_of(used, gpu, options)
    recipe = plan_recipe(model, gpu, options, curves, "" if used is None else used.content_hash)
    sums = recipe.row_sums([[group.count for group in model.layers]])
    return recipe.plan(model, sums, 0)


def check_plan(name: str, value: Any, error: type[FastroofError]) -> None:
    """Refuse anything but a StepPlan."""
    if not isinstance(value, StepPlan):
        raise error(f"{name} must be a StepPlan (see compile_plan), got {shown(value)}")
