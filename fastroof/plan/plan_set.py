"""Compile many plans at once: what they share is looked up once, the rest is one row each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, overload

from fastroof.checks import shown
from fastroof.config import GpuSpec, load_gpu
from fastroof.defaults import MEASURED, chosen_engine
from fastroof.engines import load_engine
from fastroof.errors import PlanError
from fastroof.models import ModelSpec
from fastroof.plan.calls import RowSums
from fastroof.plan.checks import check_kernels, check_tables, checked_model
from fastroof.plan.compile import PlanRecipe, plan_recipe
from fastroof.plan.curves import CurveSource, curves_of, kernel_order
from fastroof.plan.options import OPTIONS, PlanOptions
from fastroof.plan.step_plan import StepPlan
from fastroof.tables import Tables
from fastroof.tables.table_set import chosen_tables

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
    named: dict[str, ModelSpec] = {}
    families: dict[Any, int] = {}
    known: dict[Any, int] = {}
    options_of: dict[Any, PlanOptions] = {}
    recipes: list[PlanRecipe] = []
    counts: list[list[list[int]]] = []
    members: list[tuple[int, int, ModelSpec]] = []
    for number, request in enumerate(_iterated(requests)):
        model, given = _read(number, request, named)
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
        family = known.get(same)
        if family is None:
            checked_model(model)
            key = (options, model.architecture, _architecture(model))
            family = known[same] = families.get(key, len(families))
        if family == len(recipes):
            families[key] = family
            checked = options.checked().for_model(model)
            check_kernels(used, gpu, checked)
            kernels = checked.engine.kernels
            order = kernel_order(gpu, checked)
            read = (kernels.gemm_smoothing, kernels.fp8_scales, gpu.name in kernels.cold_decode)
            kind = (checked.method, *read, checked.allow_modelled, order)
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
    number: int, request: Mapping[str, Any], named: dict[str, ModelSpec]
) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the model and the options of one request; presets are loaded once."""
    if not isinstance(request, Mapping):
        raise PlanError(f"plan {number} must be a mapping of arguments, got {shown(request)}")
    given = dict(request)
    model = given.pop("model", None)
    if "runtime" in given:
        given["engine"] = chosen_engine(given.get("engine"), given.pop("runtime"), PlanError)
    unknown = ", ".join(sorted(map(str, given.keys() - OPTIONS.keys())))
    if unknown or model is None:
        wrong = f"does not know {unknown}" if unknown else "needs a model"
        raise PlanError(f"plan {number} {wrong}: it takes model, {', '.join(sorted(OPTIONS))}")
    if type(model) is ModelSpec:
        spec = model
    elif isinstance(model, str) and model in named:
        spec = named[model]
    else:
        spec = checked_model(model)
        if isinstance(model, str):
            named[model] = spec
    if "engine" in given and isinstance(given["engine"], Mapping):
        # a dict has no hash
        given["engine"] = load_engine(given["engine"])
    return spec, given
