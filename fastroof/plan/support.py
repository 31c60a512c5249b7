"""Support matrix: which models, formats and layouts have measured kernels on a GPU, and what others lack."""

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
    layouts: Sequence[Layout] | None = None,
) -> Iterator[Support]:
    """Yield whether the kernels of every combination were measured."""
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
    """Status of one combination, and the reason."""
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
    """Compile a plan for :func:`typical_parts`, without warnings about modelled kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return compile_plan(
            model, gpu, tables, tp=layout.tp, pp=layout.pp, dp=layout.dp, ep=layout.ep, moe_tp=layout.moe_tp,
            dtype=dtype, engine=engine, allow_modelled=allow_modelled, max_tokens=MAX_TOKENS,
            max_seqs=MAX_SEQS,
        )  # fmt: skip


def typical_parts(plan: StepPlan) -> list[OperatorTime]:
    """Return the kernels of sixteen decodes at 2,048 tokens, then of a prompt of 2,048."""
    return [part for step in _STEPS for part in plan.explain(step).operators if part.role != "runtime"]


def _made(plan: StepPlan, missing: str) -> tuple[str, str]:
    """Status of a plan's kernels, and the donors of borrowed ones."""
    parts = typical_parts(plan)
    modelled = dict.fromkeys(part.name for part in parts if part.origin == ORIGIN_MODELLED)
    if modelled:
        return "modelled", "; ".join(filter(None, (", ".join(modelled), missing)))
    donors: dict[str, dict[str, None]] = {}
    for part in parts:
        if part.origin == ORIGIN_BORROWED:
            donors.setdefault(part.source, {})[part.name] = None
    why = "; ".join(f"{', '.join(names)} from {source}" for source, names in donors.items())
    return ("borrowed" if why else "measured"), why
