"""Which models, formats and layouts of a GPU have measured kernels, and what the others lack."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from fastroof.columns import ORIGIN_BORROWED, ORIGIN_MODELLED
from fastroof.config import GpuSpec, load_gpu
from fastroof.engines import EngineProfile, load_engine
from fastroof.errors import FastroofError, MissingTableError, TableError
from fastroof.load.by_name import table_folders
from fastroof.models import Layout, ModelSpec
from fastroof.models.execution import AUTO
from fastroof.plan.compile import compile_plan
from fastroof.plan.explain import OperatorTime
from fastroof.plan.step_plan import StepPlan
from fastroof.tables import Tables, load_tables
from fastroof.units import GB

STATUSES: Final = ("measured", "borrowed", "modelled", "refused")
"""From the best to none: all kernels measured on that GPU for that engine (or between or beyond measured
points); some are another shape's or another engine's; some come from the datasheet model; no plan."""

FORMATS: Final = (AUTO, "bf16", "fp8", "fp8_block", "nvfp4")
"""Formats that are asked for by default: the checkpoint's and those that engines quantise to."""

MAX_TOKENS: Final = 2048
MAX_SEQS: Final = 64
_STEPS: Final = ([(1, 2047)] * 16, [(2048, 0)])
"""Sixteen decodes at 2,048 tokens and a prompt of as many: where any model and layout has its kernels."""


class Support(NamedTuple):
    """One model, format and layout on a GPU, as an engine runs it."""

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
    """Layouts on up to eight GPUs that a model is asked for with by default."""
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
    layouts: Sequence[Layout] | None = None,
) -> Iterator[Support]:
    """Say of every combination whether its kernels were measured."""
    models = list(models)
    profiles = [load_engine(engine) for engine in engines]
    for given in gpus:
        gpu = given if isinstance(given, GpuSpec) else load_gpu(given)
        try:
            tables: Tables | None = load_tables(gpu.name)
        except TableError:
            if table_folders(gpu.name):
                raise
            tables = None
        for engine, model in itertools.product(profiles, models):
            named = dict.fromkeys(model.checkpoint.dtype if dtype == AUTO else dtype for dtype in dtypes)
            for dtype, layout in itertools.product(named, layouts or default_layouts(model)):
                status, why = _status(model, gpu, tables, engine, dtype, layout)
                sizes = (layout.tp, layout.pp, layout.dp, layout.ep, layout.moe_tp)
                yield Support(model.name, gpu.name, engine.name, dtype, *sizes, status, why)


def _status(
    model: ModelSpec, gpu: GpuSpec, tables: Tables | None, engine: EngineProfile, dtype: str, layout: Layout
) -> tuple[str, str]:
    """Status of one combination, and why."""
    missing = f"{gpu.name} has no measured tables" if tables is None else ""
    try:
        try:
            plan = compiled_quietly(model, gpu, tables, engine, dtype, layout, allow_modelled=False)
        except MissingTableError as error:
            missing = str(error)
            plan = compiled_quietly(model, gpu, tables, engine, dtype, layout, allow_modelled=True)
        if not plan.has_room:
            weights, room = plan.memory.weight_bytes / GB, gpu.hbm_bytes / GB
            return "refused", f"weights take {weights:,.0f} of a GPU's {room:,.0f} GB: no room for KV cache"
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
    """Compile a plan that holds :func:`typical_parts` and says nothing of what is modelled: they do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return compile_plan(
            model, gpu, tables, tp=layout.tp, pp=layout.pp, dp=layout.dp, ep=layout.ep, moe_tp=layout.moe_tp,
            dtype=dtype, engine=engine, allow_modelled=allow_modelled, max_tokens=MAX_TOKENS,
            max_seqs=MAX_SEQS,
        )  # fmt: skip


def typical_parts(plan: StepPlan) -> list[OperatorTime]:
    """Operators of sixteen decodes at 2,048 tokens, then of a prompt of as many; not what the engine adds."""
    return [part for step in _STEPS for part in plan.explain(step).operators if part.role != "runtime"]


def _made(plan: StepPlan, missing: str) -> tuple[str, str]:
    """How the kernels of a plan's steps are made, and whose the borrowed ones are."""
    parts = typical_parts(plan)
    modelled = dict.fromkeys(part.name for part in parts if part.origin == ORIGIN_MODELLED)
    if modelled:
        return "modelled", "; ".join(filter(None, (", ".join(modelled), missing)))
    lenders: dict[str, dict[str, None]] = {}
    for part in parts:
        if part.origin == ORIGIN_BORROWED:
            lenders.setdefault(part.source, {})[part.name] = None
    why = "; ".join(f"{', '.join(names)} from {source}" for source, names in lenders.items())
    return ("borrowed" if why else "measured"), why
