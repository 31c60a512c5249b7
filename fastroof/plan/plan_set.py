"""Many plans at once: what they share is looked up once, and what they are is a row each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, overload

from fastroof.checks import shown
from fastroof.config import GpuSpec, load_gpu
from fastroof.engines import load_engine
from fastroof.errors import PlanError
from fastroof.models import ModelSpec
from fastroof.plan.calls import RowSums
from fastroof.plan.compile import PlanRecipe, plan_recipe
from fastroof.plan.curves import CurveSource
from fastroof.plan.execution import curves_of
from fastroof.plan.options import PlanOptions, check_kernels, check_tables, checked_model, kernel_order
from fastroof.plan.step_plan import StepPlan
from fastroof.tables import Tables

_OPTIONS: Final = frozenset(PlanOptions._fields) - {"architecture"}
_architecture: Final = attrgetter("hidden", "vocab", "checkpoint", "kinds")
"""What a plan depends on of a model, but for its numbers of layers."""


class PlanSet(Sequence[StepPlan]):
    """Plans in the order in which they were asked for; made by :func:`compile_plans`.

    Row sums of all plans are there; the StepPlan of one is put together when it is taken out, in some
    40 us, and not kept.

    Parameters
    ----------
    families : sequence of (PlanRecipe, RowSums)
        Plans that differ in their numbers of layers alone.
    members : sequence of (int, int, ModelSpec)
        The family of each plan, its row there, and its model.
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


def compile_plans(requests: Iterable[Mapping[str, Any]], gpu: Any, tables: Tables | None) -> PlanSet:
    """Compile many plans for one GPU: each distinct GEMM is looked up once.

    Parameters
    ----------
    requests : iterable of mapping
        Keyword arguments of :func:`compile_plan`, with ``model``, without gpu and tables.
    gpu : GpuSpec, str, Path or mapping
        The GPU of all of them.
    tables : Tables or None
        As in :func:`compile_plan`, for all of them.

    Returns
    -------
    PlanSet
        A sequence of plans, one a request, in order.

    Raises
    ------
    PlanError
        As :func:`compile_plan`; the message names the request.

    Examples
    --------
    >>> import fastroof
    >>> requests = [{"model": "llama-3.1-8b", "tp": tp} for tp in (1, 2, 4)]
    >>> [plan.tp for plan in fastroof.compile_plans(requests, "h100", fastroof.load_tables("h100"))]
    [1, 2, 4]
    """
    gpu = gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu)
    check_tables(tables, gpu)
    tables_hash = "" if tables is None else tables.content_hash
    sources: dict[Any, CurveSource] = {}
    named: dict[str, ModelSpec] = {}
    families: dict[Any, int] = {}
    known: dict[Any, int] = {}
    recipes: list[PlanRecipe] = []
    counts: list[list[list[int]]] = []
    members: list[tuple[int, int, ModelSpec]] = []
    for number, request in enumerate(_iterated(requests)):
        model, options = _read(number, request, named)
        # by the very kinds of layers first, which ``members`` keeps alive: hashing them takes 2 us; in one
        # loop with their counts: two comprehensions take 0.3 us more
        kinds: list[int] = []
        layers: list[int] = []
        for group in model.layers:
            kinds.append(id(group.kind))
            layers.append(group.count)
        same = (options, model.architecture, model.hidden, model.vocab, model.checkpoint, *kinds)
        try:
            family = known.get(same)
        except (TypeError, ValueError):
            # one of them has no hash, or NumPy none for it; what it must be its check says
            options.checked()
            raise PlanError(f"plan {number} has an option that is none: {shown(request, 200)}") from None
        if family is None:
            checked_model(model)
            key = (options, model.architecture, _architecture(model))
            family = known[same] = families.get(key, len(families))
        if family == len(recipes):
            families[key] = family
            checked = options.checked().of(model)
            check_kernels(tables, gpu, checked)
            kernels = checked.runtime.kernels
            order = kernel_order(gpu, checked)
            read = (kernels.gemm_smoothing, kernels.fp8_scales, gpu.name in kernels.cold_decode)
            kind = (checked.method, *read, checked.allow_modelled, order)
            source = sources.get(kind)
            if source is None:
                source = sources[kind] = curves_of(tables, gpu, checked)
            recipes.append(plan_recipe(model, gpu, checked, source, tables_hash))
            counts.append([])
        if recipes[family].options.pp > sum(layers):
            # the one check of a recipe's that depends on numbers of layers, in which its plans differ
            model.check_layout(recipes[family].options.layout)
        of_family = counts[family]
        members.append((family, len(of_family), model))
        of_family.append(layers)
    sums = [recipe.row_sums(plans) for recipe, plans in zip(recipes, counts, strict=True)]
    return PlanSet(list(zip(recipes, sums, strict=True)), members)


def _iterated(requests: Any) -> Iterator[Any]:
    if isinstance(requests, Mapping | str | bytes):
        raise PlanError(f"requests must be several mappings of arguments, got one {type(requests).__name__}")
    try:
        return iter(requests)
    except TypeError:
        raise PlanError(f"requests must be mappings of arguments, got {shown(requests)}") from None


def _read(
    number: int, request: Mapping[str, Any], named: dict[str, ModelSpec]
) -> tuple[ModelSpec, PlanOptions]:
    """Model and options of one request; presets are loaded once."""
    if not isinstance(request, Mapping):
        raise PlanError(f"plan {number} must be a mapping of arguments, got {shown(request)}")
    given = dict(request)
    model = given.pop("model", None)
    unknown = "" if given.keys() <= _OPTIONS else ", ".join(sorted(map(str, given.keys() - _OPTIONS)))
    if unknown or model is None:
        wrong = f"does not know {unknown}" if unknown else "needs a model"
        raise PlanError(f"plan {number} {wrong}: it takes model, {', '.join(sorted(_OPTIONS))}")
    if type(model) is ModelSpec:
        spec = model
    elif isinstance(model, str) and model in named:
        spec = named[model]
    else:
        spec = checked_model(model)
        if isinstance(model, str):
            named[model] = spec
    if "runtime" in given and isinstance(given["runtime"], Mapping):
        # what a dict holds cannot tell families apart: it has no hash
        given["runtime"] = load_engine(given["runtime"])
    return spec, PlanOptions(**given)
