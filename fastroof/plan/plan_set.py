"""Compile many plans at once, and list which models, formats and layouts have measured kernels."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, overload

from fastroof.checks import shown
from fastroof.columns import MODELLED_FROM, ORIGIN_BORROWED, ORIGIN_MODELLED
from fastroof.config import GpuSpec, load_gpu
from fastroof.defaults import MEASURED
from fastroof.engines import EngineProfile, load_engine
from fastroof.errors import FastroofError, MissingTableError, PlanError
from fastroof.models import Layout, ModelSpec
from fastroof.models.execution import AUTO
from fastroof.plan.calls import RowSums
from fastroof.plan.compile import PlanRecipe, compile_plan, plan_recipe
from fastroof.plan.curves import CurveSource, curves_of, faster_kernels, kernel_order
from fastroof.plan.execution import check_kernels, check_tables, checked_model
from fastroof.plan.explain import OperatorTime
from fastroof.plan.options import OPTIONS, PlanOptions
from fastroof.plan.step_plan import StepPlan
from fastroof.tables import Tables
from fastroof.tables.table_set import chosen_tables
from fastroof.units import GIB

_architecture: Final = attrgetter("hidden", "vocab", "checkpoint", "kinds")
"""All of a model that a plan depends on, except its numbers of layers."""


class PlanSet(Sequence[StepPlan]):
    """A sequence of plans; made by :func:`compile_plans`.

    It holds the row sums of all plans. Each access builds a StepPlan, in about 40 us.

    Parameters
    ----------
    families : sequence of (PlanRecipe, RowSums)
        Plans that differ only in their numbers of layers.
    members : sequence of (int, int, ModelSpec)
        The family, row and model of each plan.
    """

    def __init__(
        self,
        families: Sequence[tuple[PlanRecipe, RowSums]],
        members: Sequence[tuple[int, int, ModelSpec]],
    ) -> None:
        self._families = families
        self._members = members

    def __len__(self) -> int:
        return len(self._members)

    @overload
    def __getitem__(self, index: int) -> StepPlan: ...
    @overload
    def __getitem__(self, index: slice) -> PlanSet: ...
    def __getitem__(self, index: int | slice) -> StepPlan | PlanSet:
        if isinstance(index, slice):
            return PlanSet(self._families, self._members[index])
        family, row, model = self._members[index]
        recipe, sums = self._families[family]
        return recipe.plan(model, sums, row)

    def __repr__(self) -> str:
        return f"PlanSet({len(self)} plans of {len(self._families)} architectures and options)"


def compile_plans(
    requests: Iterable[Mapping[str, Any]], gpu: Any, tables: Tables | str | Path | None = MEASURED
) -> PlanSet:
    """Compile many plans for one GPU: each distinct GEMM is looked up once.

    Parameters
    ----------
    requests : iterable of mapping
        Keyword arguments of :func:`compile_plan`: ``model`` and options, without gpu and tables.
    gpu : GpuSpec, str, Path or mapping
        The GPU of all of them.
    tables : Tables, str or Path
        As in :func:`compile_plan`, for all of them.

    Returns
    -------
    PlanSet
        A sequence of plans, one per request, in order.

    Raises
    ------
    PlanError
        As :func:`compile_plan`; the message names the request.

    Examples
    --------
    >>> import fastroof
    >>> requests = [{"model": "llama-3.1-8b", "tp": tp} for tp in (1, 2, 4)]
    >>> [plan.tp for plan in fastroof.compile_plans(requests, "h100")]
    [1, 2, 4]
    """
    used = chosen_tables(tables, gpu)
    gpu = gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu)
    check_tables(used, gpu)
    tables_hash = "" if used is None else used.content_hash
    sources: dict[Any, CurveSource] = {}
    models_by_name: dict[str, ModelSpec] = {}
    families: dict[Any, int] = {}
    families_by_key: dict[Any, int] = {}
    options_of: dict[Any, PlanOptions] = {}
    recipes: list[PlanRecipe] = []
    counts: list[list[list[int]]] = []
    members: list[tuple[int, int, ModelSpec]] = []
    for number, request in enumerate(_iterated(requests)):
        model, given = _read(number, request, models_by_name)
        arguments = tuple(given.items())
        try:
            options = options_of.get(arguments)
        except (TypeError, ValueError):
            # an unhashable value; its own check names the valid ones
            PlanOptions(**given).checked()
            raise PlanError(f"plan {number} has an invalid option: {shown(request, 200)}") from None
        if options is None:
            options = options_of[arguments] = PlanOptions(**given)
        # look up by identity first: hashing the kinds takes 2 us; ``members`` keeps them alive. One loop with
        # their counts: two comprehensions take 0.3 us more
        kinds: list[int] = []
        layers: list[int] = []
        for group in model.layers:
            kinds.append(id(group.kind))
            layers.append(group.count)
        same = (id(options), model.architecture, model.hidden, model.vocab, model.checkpoint, *kinds)
        family = families_by_key.get(same)
        if family is None:
            checked_model(model)
            key = (options, model.architecture, _architecture(model))
            family = families_by_key[same] = families.get(key, len(families))
        if family == len(recipes):
            families[key] = family
            checked = options.checked().for_model(model, gpu)
            check_kernels(used, gpu, checked)
            kernels = checked.engine.kernels
            order = kernel_order(gpu, checked)
            read = (kernels.gemm_smoothing, kernels.fp8_scales, gpu.kernel_name in kernels.cold_decode)
            kind = (checked.method, *read, checked.allow_modelled, order, faster_kernels(gpu, checked))
            source = sources.get(kind)
            if source is None:
                source = sources[kind] = curves_of(used, gpu, checked)
            recipes.append(plan_recipe(model, gpu, checked, source, tables_hash))
            counts.append([])
        if recipes[family].options.pp > sum(layers):
            # the only check that depends on numbers of layers, in which a family's plans differ
            model.check_layout(recipes[family].options.layout)
        of_family = counts[family]
        members.append((family, len(of_family), model))
        of_family.append(layers)
    sums = [recipe.row_sums(plans) for recipe, plans in zip(recipes, counts, strict=True)]
    return PlanSet(list(zip(recipes, sums, strict=True)), members)


def _iterated(requests: Any) -> Iterator[Any]:
    if isinstance(requests, Mapping | str | bytes):
        raise PlanError(f"requests must be an iterable of mappings, got one {type(requests).__name__}")
    try:
        return iter(requests)
    except TypeError:
        raise PlanError(f"requests must be an iterable of mappings, got {shown(requests)}") from None


def _read(
    number: int, request: Mapping[str, Any], models_by_name: dict[str, ModelSpec]
) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the model and the options of one request; presets are loaded once."""
    if not isinstance(request, Mapping):
        raise PlanError(f"plan {number} must be a mapping of arguments, got {shown(request)}")
    options = dict(request)
    model = options.pop("model", None)
    unknown = ", ".join(sorted(map(str, options.keys() - OPTIONS.keys())))
    if unknown or model is None:
        wrong = f"does not know {unknown}" if unknown else "needs a model"
        raise PlanError(f"plan {number} {wrong}: it takes model, {', '.join(sorted(OPTIONS))}")
    if type(model) is ModelSpec:
        spec = model
    elif isinstance(model, str) and model in models_by_name:
        spec = models_by_name[model]
    else:
        spec = checked_model(model)
        if isinstance(model, str):
            models_by_name[model] = spec
    if "engine" in options and isinstance(options["engine"], Mapping):
        # a dict has no hash
        options["engine"] = load_engine(options["engine"])
    return spec, options


STATUSES: Final = ("measured", "borrowed", "modelled", "refused")
"""Best first: all kernels measured on that GPU for that engine (or interpolated, extrapolated); some borrowed
from another shape or engine; some from the datasheet model; no plan."""

FORMATS: Final = (AUTO, "bf16", "fp8", "fp8_block", "nvfp4")
"""Default formats: the checkpoint's, and those that engines quantise to."""

MAX_TOKENS: Final = 2048
MAX_SEQS: Final = 64
_STEPS: Final = ([(1, 2047)] * 16, [(2048, 0)])
"""Sixteen decodes at 2,048 tokens, and a prompt of 2,048: sizes that were measured for all."""


class Support(NamedTuple):
    """One model, format and layout on a GPU and engine, with its status and the reason."""

    model: str
    gpu: str
    engine: str
    dtype: str
    tp: int
    pp: int
    dp: int
    ep: int
    moe_tp: int
    status: str
    why: str


def default_layouts(model: ModelSpec) -> tuple[Layout, ...]:
    """Return the default layouts, on up to eight GPUs."""
    sizes = (1, 2, 4, 8)
    layouts = [Layout(tp) for tp in sizes]
    if model.has_experts:
        layouts += [Layout(tp, ep=tp) for tp in sizes[1:]]
        layouts += [Layout(1, dp=dp, ep=dp) for dp in sizes[1:]]
    return tuple(layouts)


def support_rows(
    models: Iterable[ModelSpec],
    gpus: Iterable[GpuSpec | str],
    engines: Iterable[EngineProfile | str],
    *,
    dtypes: Sequence[str] = FORMATS,
) -> Iterator[Support]:
    """Yield whether the kernels of every combination were measured."""
    for model, gpu, tables, engine in _combinations(models, gpus, engines):
        yield from _of_model(model, gpu, tables, engine, dtypes, default_layouts(model))


def best_support(
    models: Iterable[ModelSpec],
    gpus: Iterable[GpuSpec | str],
    engines: Iterable[EngineProfile | str],
    *,
    dtypes: Sequence[str] = (AUTO,),
) -> Iterator[Support]:
    """Yield the best row of each model, GPU and engine; a measured one ends the search."""
    for model, gpu, tables, engine in _combinations(models, gpus, engines):
        best: Support | None = None
        # large models first fit on many GPUs
        for row in _of_model(model, gpu, tables, engine, dtypes, default_layouts(model)[::-1]):
            if best is None or STATUSES.index(row.status) < STATUSES.index(best.status):
                best = row
            if row.status == STATUSES[0]:
                break
        assert best is not None
        yield best


def _combinations(
    models: Iterable[ModelSpec], gpus: Iterable[GpuSpec | str], engines: Iterable[EngineProfile | str]
) -> Iterator[tuple[ModelSpec, GpuSpec, Tables | None, EngineProfile]]:
    """Yield models on GPUs with their tables, if any, and engines."""
    models = list(models)
    profiles = [load_engine(engine) for engine in engines]
    for gpu_name in gpus:
        gpu = gpu_name if isinstance(gpu_name, GpuSpec) else load_gpu(gpu_name)
        tables = chosen_tables(MEASURED, gpu_name)
        for engine, model in itertools.product(profiles, models):
            yield model, gpu, tables, engine


def _of_model(
    model: ModelSpec,
    gpu: GpuSpec,
    tables: Tables | None,
    engine: EngineProfile,
    dtypes: Sequence[str],
    layouts: Sequence[Layout],
) -> Iterator[Support]:
    formats = dict.fromkeys(model.checkpoint.dtype if dtype == AUTO else dtype for dtype in dtypes)
    for dtype, layout in itertools.product(formats, layouts):
        status, why = _status(model, gpu, tables, engine, dtype, layout)
        sizes = (layout.tp, layout.pp, layout.dp, layout.ep, layout.moe_tp)
        yield Support(model.name, gpu.name, engine.name, dtype, *sizes, status, why)


def _status(
    model: ModelSpec, gpu: GpuSpec, tables: Tables | None, engine: EngineProfile, dtype: str, layout: Layout
) -> tuple[str, str]:
    """Status of one combination, and the reason."""
    missing = f"{gpu.name} has no measured tables" if tables is None else ""
    try:
        try:
            plan = compiled_quietly(model, gpu, tables, engine, dtype, layout, allow_modelled=False)
        except MissingTableError as error:
            missing = str(error)
            plan = compiled_quietly(model, gpu, tables, engine, dtype, layout, allow_modelled=True)
        if not plan.has_room:
            weights, room = plan.memory.weight_bytes / GIB, gpu.hbm_bytes / GIB
            return "refused", f"weights take {weights:,.0f} GiB of a GPU's {room:,.0f}: no room for KV cache"
        return _made(plan, missing)
    except FastroofError as error:
        return "refused", str(error)


def compiled_quietly(
    model: ModelSpec,
    gpu: GpuSpec,
    tables: Tables | None,
    engine: EngineProfile | str,
    dtype: str,
    layout: Layout,
    *,
    allow_modelled: bool,
) -> StepPlan:
    """Compile a plan for :func:`typical_parts`, without warnings about modelled kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return compile_plan(
            model, gpu, tables, tp=layout.tp, pp=layout.pp, dp=layout.dp, ep=layout.ep, moe_tp=layout.moe_tp,
            dtype=dtype, engine=engine, allow_modelled=allow_modelled, max_num_batched_tokens=MAX_TOKENS,
            max_num_seqs=MAX_SEQS,
        )  # fmt: skip


def typical_parts(plan: StepPlan) -> list[OperatorTime]:
    """Return the kernels of sixteen decodes at 2,048 tokens, then of a prompt of 2,048."""
    return [part for step in _STEPS for part in plan.explain(step).operators if part.role != "runtime"]


def _made(plan: StepPlan, missing: str) -> tuple[str, str]:
    """Status of a plan's kernels, and the donors of borrowed ones."""
    parts = typical_parts(plan)
    modelled = any(part.origin == ORIGIN_MODELLED for part in parts)
    sources: dict[str, dict[str, None]] = {}
    for part in parts:
        if part.origin == (ORIGIN_MODELLED if modelled else ORIGIN_BORROWED):
            # a source that was modelled from says so and how far it may be off
            is_named = not modelled or MODELLED_FROM in part.source
            sources.setdefault(part.source if is_named else "", {})[part.name] = None
    why = [", ".join(names) + f" from {source}" * bool(source) for source, names in sources.items()]
    if modelled:
        return "modelled", "; ".join(filter(None, (*why, missing)))
    return ("borrowed" if why else "measured"), "; ".join(why)
