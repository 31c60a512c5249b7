"""Whether an engine starts a model on GPUs: memory, room for KV cache, limits, and its command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastroof.acceptance import MTP
from fastroof.checks import is_number, shown, whole_number
from fastroof.config import GpuSpec, load_gpu
from fastroof.defaults import DATASHEET, DEFAULT_ENGINE, MEASURED
from fastroof.engines import EngineProfile, load_engine
from fastroof.engines.launch.commands import engine_commands
from fastroof.engines.launch.settings import LaunchSettings, served_name
from fastroof.engines.load import version_named
from fastroof.errors import BatchError, ModelError, PlanError
from fastroof.memory.gpu_memory import NO_DRAFTS
from fastroof.memory.plan_memory import PlanMemory
from fastroof.memory.room_errors import RoomErrors, room_errors_of, room_kind
from fastroof.models import ModelSpec, load_model
from fastroof.models.draft_heads import method_of
from fastroof.models.layout import TP_SIZES
from fastroof.models.load import draft_to_serve, published_checkpoint
from fastroof.models.lora import lora_settings
from fastroof.plan import StepPlan, compile_plan
from fastroof.plan.curves import DatasheetCurves
from fastroof.plan.speculation import compiled_like, draft_of, drafts_of
from fastroof.plan.start import (
    Margin,
    Refusal,
    StartQuestion,
    cache_line_tokens,
    margin_of,
    refusals,
    seqs_that_start,
)
from fastroof.serving.fit_answer import Change, Fit
from fastroof.serving.largest_sizes import LargestSize, Limits, checked_tpot_ms, largest_sizes
from fastroof.units import GIB

if TYPE_CHECKING:
    from fastroof.tables import Tables

MOST_SEQS: Final = 65_536
MOST_TOKENS: Final = 2**20
"""Largest ``max_num_seqs`` and ``max_num_batched_tokens``."""

_TOO_LARGE: Final = 1.02
"""Weights of more than the card by this do not start, whatever the error of the rules."""
_FEW_TOKENS: Final = 2048
"""Tokens of a step to compare with where the KV cache depends on them."""
_FRACTIONS: Final = (0.92, 0.95, 0.98)
_LEAST_TOKENS: Final = 512
_WHOLE_LENGTH: Final = 16
_LIMITS: Final = ("max_num_seqs", "max_model_len", "max_num_batched_tokens")


@dataclass(frozen=True)
class _Question:
    """Arguments of a start; None is the engine's own default."""

    model: ModelSpec
    gpu: GpuSpec | str | Path | Mapping[str, Any]
    engine: EngineProfile
    options: Mapping[str, Any]
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefix_caching: bool | None = None
    num_draft_tokens: int = 0
    draft: StepPlan | str | None = None
    free_bytes: int | None = None
    version: str = ""

    @property
    def spec(self) -> GpuSpec:
        """The GPU."""
        return self.gpu if isinstance(self.gpu, GpuSpec) else load_gpu(self.gpu)

    def plan(self) -> StepPlan:
        """Compile the plan whose memory is asked for, from the datasheet: times play no part."""
        gpu = self.spec
        curves = DatasheetCurves(gpu, warns=False)
        # a plan's memory stops at its engine's own limits, and larger ones are asked for here
        scheduling = replace(
            self.engine.scheduling,
            max_num_seqs=MOST_SEQS,
            max_num_batched_tokens=MOST_TOKENS,
            by_card=False,
        )
        engine = replace(self.engine, scheduling=scheduling)
        # the fewest rows: no step is timed
        options = {"max_num_batched_tokens": 1, "max_num_seqs": 1, **self.options, "allow_modelled": True}
        return compile_plan(self.model, gpu, DATASHEET, engine=engine, curves=curves, **options)

    def timed_plan(self, tables: Tables | str | Path | None, seqs: int, tokens: int) -> StepPlan:
        """Compile the plan whose steps the engine schedules within its limits."""
        sizes = self.engine.on(self.spec, self.model.ranks(self.options.get("dp", 1))).scheduling.plan_sizes(
            tokens, seqs
        )
        return compile_plan(self.model, self.gpu, tables, engine=self.engine, **{**self.options, **sizes})

    def limits(self, plan: StepPlan) -> tuple[int, int, int]:
        """Return the longest length, the requests and the tokens of a step: as asked, or by default."""
        defaults = self.engine.on(plan.gpu, plan.model.ranks(plan.layout.dp)).scheduling
        tokens, seqs, _ = defaults.step_limits(self.max_num_batched_tokens, self.max_num_seqs)
        return self.max_model_len or plan.model.max_position, seqs, tokens

    def start(self, plan: StepPlan) -> StartQuestion:
        """Return the question of a plan's start."""
        drafts = NO_DRAFTS
        if self.num_draft_tokens:
            draft, source = self.draft, plan.error_source
            if isinstance(draft, str) and draft != MTP:
                draft = compiled_like(plan, load_model(draft), source.tables, dtype="auto")
            drafts = drafts_of(*draft_of(plan, draft), self.num_draft_tokens)
        return StartQuestion(*self.limits(plan), self.prefix_caching, drafts, self.free_bytes)

    def start_or_none(self) -> tuple[StepPlan, StartQuestion] | None:
        """Return a plan and its start if the engine starts, else None."""
        try:
            plan = self.plan()
            question = self.start(plan)
        except (PlanError, ModelError):
            return None
        found = refusals(plan, question)
        return (plan, question) if all(one.is_warning for one in found) else None


def fit(
    model: ModelSpec | str | Path | Mapping[str, Any],
    gpu: GpuSpec | str | Path | Mapping[str, Any],
    *,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    prefix_caching: bool | None = None,
    free_gib: float | None = None,
    num_draft_tokens: int = 0,
    draft: StepPlan | str | None = None,
    engine: EngineProfile | str | Path | Mapping[str, Any] = DEFAULT_ENGINE,
    tpot_ms: float | None = None,
    kv_len: Any = None,
    batch_size: Any = None,
    tables: Tables | str | Path | None = MEASURED,
    **plan_options: Any,
) -> Fit:
    """Tell whether an engine starts a model on GPUs, with which limits, and by which command.

    With ``tpot_ms`` also how large a batch and how long a context it then decodes within a time per token.

    Parameters
    ----------
    model, gpu, engine
        As in :func:`fastroof.compile_plan`. ``engine="vllm-0.24.0"`` takes the rules of that version.
    max_model_len : int, optional
        Tokens of the longest sequence (default: the model's own).
    max_num_seqs, max_num_batched_tokens : int, optional
        Maximum concurrent requests, and tokens in a step (default: the engine's own).
    prefix_caching : bool, optional
        Whether states of recurrent layers are cached for prefixes too, which takes more of them (default: the
        engine's own).
    free_gib : float, optional
        GiB that are free on each GPU when the engine starts (default: all).
    num_draft_tokens : int
        Draft tokens of a request in each step.
    draft : StepPlan or str, optional
        The draft, as in :class:`fastroof.SpeculativeDecoding`, or the name or path of a model.
    tpot_ms : float, optional
        Maximum time of a decode step, ms; inf for memory alone.
    kv_len, batch_size : int or array_like of int, optional
        With ``tpot_ms``: contexts to find the largest batch of, and batches (of a rank and pipeline stage) to
        find the longest context of (default: a few contexts, and as many requests as a step may have).
    tables
        As in :func:`fastroof.compile_plan`, to time steps.
    **plan_options
        Other options of :func:`fastroof.compile_plan`; only layout, formats, ``memory_fraction``,
        ``kv_cache_gib`` and ``lora`` change memory.

    Returns
    -------
    Fit
        The answer. Memory is that of a GPU of the pipeline stage with the least room.

    Raises
    ------
    PlanError, ModelError
        If the model does not run with the layout or the formats.
    BatchError
        If a limit or a size is invalid.
    MissingTableError
        If a kernel of a timed step was not measured.

    Notes
    -----
    Without ``tpot_ms`` no kernel is looked up. Measured kernel times are not monotonic: a size of ``largest``
    is the largest within memory whose own step meets the time, ``plan.decode_us``. The rules of each engine
    and version are read from its sources and compared with logged starts (``bench_data/kv_room.csv``);
    ``source`` names the files.

    Examples
    --------
    >>> import fastroof
    >>> fastroof.fit("llama-3.1-70b", "h100", tp=4).starts
    True
    >>> tight = fastroof.fit("llama-3.1-70b", "h100", tp=2)
    >>> tight.starts, list(tight.changes[0].settings)
    (False, ['max_model_len'])
    >>> [one] = fastroof.fit("llama-3.1-8b", "h100", tpot_ms=10, kv_len=4096).largest
    >>> one.batch_size, round(one.step_ms, 2), one.limited_by
    (17, 9.99, 'tpot')
    """
    spec = model if isinstance(model, ModelSpec) else load_model(model)
    profile = load_engine(engine)
    for name, value, most in (
        ("max_model_len", max_model_len, spec.max_position),
        ("max_num_seqs", max_num_seqs, MOST_SEQS),
        ("max_num_batched_tokens", max_num_batched_tokens, MOST_TOKENS),
    ):
        if value is not None:
            whole_number(name, value, most=most, error=BatchError)
    whole_number("num_draft_tokens", num_draft_tokens, 0, 64, BatchError)
    if draft is not None and not num_draft_tokens:
        raise BatchError("draft needs num_draft_tokens of at least 1")
    if not (draft is None or isinstance(draft, StepPlan | str)):
        raise BatchError(
            f"draft must be {MTP!r}, a model, a StepPlan or None for n-grams, got {shown(draft)}"
        )
    if free_gib is not None and not (is_number(free_gib) and 0 < free_gib < 2**20):
        raise BatchError(f"free_gib must be a number of GiB above 0, got {shown(free_gib)}")
    if tpot_ms is None and not (kv_len is None and batch_size is None):
        raise BatchError("kv_len and batch_size need tpot_ms, the maximum time of a decode step in ms")
    free_bytes = None if free_gib is None else round(free_gib * GIB)
    arguments = _Question(
        spec, gpu, profile, plan_options, max_model_len, max_num_seqs, max_num_batched_tokens,
        prefix_caching, num_draft_tokens, draft, free_bytes, version_named(engine),
    )  # fmt: skip
    model_name = model if isinstance(model, str | Path) else spec.name
    answer = _answer(arguments, model_name, engine)
    if tpot_ms is None:
        return answer
    limit_ms = checked_tpot_ms(tpot_ms)
    if num_draft_tokens:
        raise BatchError("tpot_ms does not go with num_draft_tokens; fastroof.serving.estimate times drafts")
    largest: tuple[LargestSize, ...] = ()
    if answer.starts:
        plan = arguments.timed_plan(tables, answer.max_num_seqs, answer.max_num_batched_tokens)
        limits = Limits(plan, answer.memory, answer.max_model_len, limit_ms)
        largest = tuple(largest_sizes(limits, kv_len, batch_size))
    return replace(answer, tpot_ms=limit_ms, largest=largest)


def _answer(args: _Question, model: str | Path, engine: object) -> Fit:
    plan = args.plan()
    question = args.start(plan)
    found = refusals(plan, question)
    starts = all(one.is_warning for one in found)
    memory = question.memory(plan)
    limits = args.limits(plan)
    context, seqs, tokens = limits
    # 0 if it does not start for other reasons than the room of one request
    is_for_length = all(one.code == "C" or one.is_warning for one in found)
    longest = question.longest(plan) if memory.parts and is_for_length else 0
    rule = plan.profile.memory.of_model(plan.model.architecture, is_dense=plan.model.is_dense)
    most = seqs_that_start(plan, question, _most_seqs(plan, tokens))
    fits = memory.parts > 0
    rooms = _other_rooms(plan, question, memory)
    # the estimate counts the first use of workspaces
    is_estimated = rule.graphs is not None and memory.graphs_high_bytes and not memory.workspace_bytes
    variable = rule.graphs.variable if rule.graphs is not None and is_estimated else ""
    margin, errors = margin_of(plan, question), room_errors_of(engine, room_kind(plan.model, plan.dtype))
    running = int(min(seqs, memory.max_sequences(context))) if fits else 0
    commands = engine_commands(plan.profile.engine, plan.profile.versions, args.version)
    command = None
    if commands is not None:
        command = commands.server(_settings(plan, model, args, limits, max(running, 1)))
    layout = plan.layout
    return Fit(
        model=plan.model.name,
        gpu=plan.gpu.name,
        engine=plan.engine,
        versions=plan.profile.rule_versions,
        engine_title=plan.profile.words(plan.profile.memory.logged),
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        ep=layout.ep,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        starts=starts,
        refusals=found,
        changes=() if starts else tuple(_changes(args, plan, question, limits)),
        memory=memory,
        max_model_len=context,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        cache_line_tokens=cache_line_tokens(rule, memory, context) if fits else 0,
        concurrency=memory.max_concurrency(context) if fits else 0.0,
        largest_max_model_len=longest,
        largest_max_num_seqs=most,
        length_of_all=min(memory.largest_length(seqs), plan.model.max_position) if fits else 0,
        running=running,
        graphs_variable=variable,
        room_errors=errors,
        confidence=_confidence(found, margin, errors, memory, rooms),
        margin_gib=margin.gib,
        deciding_check=next((one.code for one in found if not one.is_warning), margin.code),
        other_rooms=rooms,
        layout=_layout_words(plan),
        fewer_tokens=_fewer_tokens(plan, question, context) if fits else None,
        source=rule.source,
        commands=commands,
        command=command,
    )


def _confidence(
    found: tuple[Refusal, ...],
    margin: Margin,
    errors: RoomErrors | None,
    memory: PlanMemory,
    rooms: Mapping[str, int],
) -> str:
    """Return how sure the answer is: yes, likely, unlikely or no."""
    refused = {one.code: one for one in found if not one.is_warning}
    weights = refused.get("W")
    certain = {"F", "K", "A"} & refused.keys() or ("D" in refused and margin.gib >= 0)
    if certain or (weights is not None and weights.needed > _TOO_LARGE * weights.available):
        return "no"
    starts = not refused
    if errors is None:
        return "likely" if starts else "unlikely"
    others = [room - memory.kv_cache_bytes for room in rooms.values()]
    less_gib = (max(memory.graphs_high_bytes - memory.graphs_bytes, 0) - min([0, *others])) / GIB
    if starts:
        return "yes" if margin.gib >= errors.most_gib + less_gib else "likely"
    return "no" if margin.gib + max([0, *others]) / GIB <= -errors.most_gib else "unlikely"


def _other_rooms(plan: StepPlan, question: StartQuestion, memory: PlanMemory) -> dict[str, int]:
    """Return the bytes of KV cache of an engine with other packages installed, where they differ."""
    found = {}
    for words, rule in plan.profile.memory.alternatives().items():
        other = question.memory(replace(plan, profile=replace(plan.profile, memory=rule)))
        if other.kv_cache_bytes != memory.kv_cache_bytes:
            found[words] = other.kv_cache_bytes
    return found


def _layout_words(plan: StepPlan) -> str:
    """Return how a token of sparse attention is stored in a layer, if not in the format's own bytes."""
    row = plan.cache_format.row
    if row is None or not row.row_bytes or not plan.model.has_sparse_attention:
        return ""
    return f"{row.name}: {row.row_bytes:g} B a token and layer, and {plan.memory.kv_bytes_per_token:,} in all"


def _fewer_tokens(plan: StepPlan, question: StartQuestion, context: int) -> tuple[int, int] | None:
    """Return fewer tokens of a step and what is then printed, where the KV cache depends on them."""
    memory = question.memory(plan)
    if (
        not memory.windows
        or question.max_num_batched_tokens is None
        or question.max_num_batched_tokens <= _FEW_TOKENS
    ):
        return None
    fewer = replace(question, max_num_batched_tokens=_FEW_TOKENS)
    return _FEW_TOKENS, cache_line_tokens(plan.profile.memory, fewer.memory(plan), context)


def _settings(
    plan: StepPlan, model: str | Path, args: _Question, limits: tuple[int, int, int], running: int
) -> LaunchSettings:
    checkpoint = published_checkpoint(model, plan.dtype)
    context, seqs, tokens = limits
    memory, layout = plan.profile.memory, plan.layout
    own = args.draft if isinstance(args.draft, StepPlan) else None
    draft, method = (own.model.name, method_of(own.model)) if own else draft_to_serve(str(args.draft or ""))
    return LaunchSettings(
        model=served_name(checkpoint.name),
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        ep=layout.ep,
        has_experts=plan.model.has_experts,
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        max_context=context,
        running=running,
        memory_fraction=0.0 if memory.room == "datasheet" else memory.fraction,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        checkpoint_dtype=checkpoint.dtype,
        auto_kv_dtype=memory.auto_kv_dtype(plan.gpu, plan.model.architecture, checkpoint.kv_dtype),
        num_draft_tokens=args.num_draft_tokens,
        draft=draft,
        draft_method=method,
        draft_tp=own.layout.tp if own else 0,
        balance_steps=plan.profile.data_parallel.balance_steps,
        pauses=plan.profile.scheduling.pauses_on,
        kv_cache_bytes=round(memory.cache_gib * GIB),
        **lora_settings(args.options.get("lora"), plan.profile.lora, plan.engine, plan.model.linear_roles),
    )


def _changes(
    arguments: _Question, plan: StepPlan, question: StartQuestion, limits: tuple[int, int, int]
) -> Iterator[Change]:
    """Yield changes with which the engine starts, the cheapest first."""
    context, seqs, tokens = limits
    halves = (tokens >> by for by in range(1, tokens.bit_length()))
    wider: dict[str, Iterable[Any]] = {
        "memory_fraction": (share for share in _FRACTIONS if share > question.memory(plan).fraction),
        "kv_dtype": ["fp8"] if plan.kv_dtype == "bf16" else [],
        "dtype": ["fp8"] if plan.dtype == "bf16" else [],
        "tp": (size for size in TP_SIZES if size > plan.layout.tp),
    }
    tried: list[Iterable[dict[str, Any]]] = [
        *([one] for one in _smaller_limits(plan, question, min(seqs, _most_seqs(plan, tokens)))),
        ({"max_num_batched_tokens": size} for size in halves if size >= _LEAST_TOKENS),
        *([{name: value} for value in values] for name, values in wider.items()),
    ]
    for settings in tried:
        yield from _first_that_starts(arguments, settings, context)


def _most_seqs(plan: StepPlan, tokens: int) -> int:
    """Return the largest ``max_num_seqs`` that an engine accepts with a limit on the tokens of a step."""
    return min(tokens, MOST_SEQS) if plan.profile.memory.room == "all" else MOST_SEQS


def _smaller_limits(plan: StepPlan, question: StartQuestion, seqs: int) -> Iterator[dict[str, Any]]:
    """Yield smaller limits to try: of requests, of their length, and of both if neither alone is enough."""

    def longest(number: int) -> int:
        return replace(question, max_num_seqs=number).longest(plan) // _WHOLE_LENGTH * _WHOLE_LENGTH

    most = seqs_that_start(plan, question, seqs)
    if most:
        yield {"max_num_seqs": most}
    length = longest(seqs)
    if _WHOLE_LENGTH <= length < question.length(plan):
        yield {"max_model_len": length}
    fewer = seqs_that_start(plan, replace(question, max_model_len=1), seqs)
    if not most and length < _WHOLE_LENGTH and fewer:
        # half of what starts at all leaves room for more than a block
        half = 1 << max(fewer.bit_length() - 2, 0)
        yield {"max_num_seqs": half, "max_model_len": longest(half)}
    elif fewer and fewer < seqs and _WHOLE_LENGTH <= longest(fewer) < question.length(plan):
        # where each alone leaves another check
        yield {"max_num_seqs": fewer, "max_model_len": longest(fewer)}


def _first_that_starts(args: _Question, tried: Iterable[dict[str, Any]], context: int) -> Iterator[Change]:
    """Yield the first settings with which the engine starts, if any does."""
    for settings in tried:
        limits = {name: value for name, value in settings.items() if name in _LIMITS}
        options = {name: value for name, value in settings.items() if name not in _LIMITS}
        changed = replace(args, options={**args.options, **options}, **limits)
        started = changed.start_or_none()
        if started is None:
            continue
        plan, question = started
        memory, longest = question.memory(plan), question.longest(plan)
        length = min(settings.get("max_model_len", context), longest)
        yield Change(settings, longest, memory.max_concurrency(length))
        return
