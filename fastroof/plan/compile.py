"""Compiling plans: every operator's curve and grid, laid out in one arena."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastroof.compiled import grids, steps
from fastroof.compiled.search import fill_curve
from fastroof.config import GpuSpec, ModelSpec, load_gpu, load_model
from fastroof.config.parallel import shard
from fastroof.errors import PlanError
from fastroof.plan.curves import CurveSource, RowCurve
from fastroof.plan.datasheet import DatasheetCurves
from fastroof.plan.operators import transformer_operators
from fastroof.plan.step_plan import StepPlan
from fastroof.plan.table_curves import TableCurves
from fastroof.roofline import HeadShape
from fastroof.tables import Tables
from fastroof.tables.lookup import METHODS

__all__ = ["compile_plan", "compile_plans"]

DTYPES = ("bf16", "fp8", "fp8_block")
KV_DTYPES = ("bf16", "fp8")
RUNTIMES = ("kernels",)
COMPILE_ARGUMENTS = {
    "model", "tp", "dtype", "kv_dtype", "runtime", "method", "max_tokens", "max_seqs",
}  # fmt: skip
LARGEST_PLAN = 2**22
MAGIC = 1718776436.0
FORMAT = 1.0


def _chosen(name: str, value: Any, allowed: tuple[str, ...], hint: str = "") -> str:
    if not isinstance(value, str) or value not in allowed:
        raise PlanError(f"{name} must be one of {', '.join(allowed)}, got {value!r}{hint}")
    return value


def _limit(name: str, value: Any) -> int:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not 1 <= value <= LARGEST_PLAN:
        raise PlanError(f"{name} must be an integer from 1 to {LARGEST_PLAN}, got {value!r}")
    return int(value)


def compile_plan(
    model: ModelSpec | str | Path | Mapping[str, Any],
    gpu: GpuSpec | str | Path | Mapping[str, Any],
    tables: Tables | None,
    *,
    tp: int = 1,
    dtype: str = "bf16",
    kv_dtype: str = "bf16",
    runtime: str = "kernels",
    method: str = "roofline",
    max_tokens: int = 8192,
    max_seqs: int = 1024,
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
    dtype : str
        Linear layers: bf16, fp8 (weights and activations, per tensor) or fp8_block.
    kv_dtype : str
        KV cache: bf16 or fp8.
    runtime : str
        What an engine adds to the sum of its kernels: ``kernels`` adds nothing.
    method : str
        How tables are looked up: roofline, linear_mfu, nearest or floor.
    max_tokens, max_seqs : int
        The largest step to time.
    curves : CurveSource, optional
        Curves shared with other plans, as :func:`compile_plans` does.

    Returns
    -------
    StepPlan
        Ready to time steps.

    Raises
    ------
    PlanError
        If the model cannot be split, a dtype or runtime is unknown, or the tables are another GPU's.
    MissingTableError
        If no table serves an operator.
    UnsupportedModelError
        If the architecture is not a dense transformer.

    Examples
    --------
    >>> import fastroof
    >>> tables = fastroof.load_tables("h100")
    >>> fastroof.compile_plan("llama-3.1-8b", "h100", tables, tp=2).tp
    2
    """
    model = model if isinstance(model, ModelSpec) else load_model(model)
    gpu = gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu)
    _chosen("dtype", dtype, DTYPES, "; fp8 is per tensor, fp8_block its own name")
    _chosen("kv_dtype", kv_dtype, KV_DTYPES)
    _chosen("runtime", runtime, RUNTIMES, ": no profile of that engine was fitted yet")
    max_tokens, max_seqs = _limit("max_tokens", max_tokens), _limit("max_seqs", max_seqs)
    _chosen("method", method, METHODS)
    if tables is not None and not isinstance(tables, Tables):
        raise PlanError(f"tables must be what load_tables returns, or None, got {type(tables).__name__}")
    if model.sliding_window is not None:
        raise PlanError(
            f"{model.name} attends to a sliding window of {model.sliding_window} tokens, and a plan has "
            "full attention only; dataclasses.replace(model, sliding_window=None) times it as full attention"
        )
    if tables is not None and tables.gpu.name != gpu.name:
        raise PlanError(
            f"the tables were measured on {tables.gpu.name}, the plan is for {gpu.name}: "
            f"load_tables({gpu.name!r}), or tables=None for the datasheet model"
        )
    share = shard(model, tp)
    if curves is None:
        curves = DatasheetCurves(gpu) if tables is None else TableCurves(tables, method)
    heads = HeadShape(kv_dtype, share.num_q_heads, share.num_kv_heads, model.head_dim)
    operators = transformer_operators(
        model, share, dtype, kv_dtype, quantise_inputs=dtype == "fp8" and curves.quantise_inputs
    )
    row_limit = max(max_tokens, max_seqs)
    row_curves = tuple(curves.row_curve(operator, row_limit) for operator in operators)
    arena = _arena(curves, row_curves, heads, model.num_layers, max_tokens, max_seqs)
    return StepPlan(
        model=model,
        gpu=gpu,
        share=share,
        dtype=dtype,
        kv_dtype=kv_dtype,
        runtime=runtime,
        method=curves.method,
        max_tokens=max_tokens,
        max_seqs=max_seqs,
        tables_hash="" if tables is None else tables.content_hash,
        arena=arena,
        row_curves=row_curves,
    )


def compile_plans(requests: Iterable[Mapping[str, Any]], tables: Tables | None, gpu: Any) -> list[StepPlan]:
    """Compile many plans for one GPU from shared curves: each distinct GEMM is looked up once.

    Parameters
    ----------
    requests : iterable of mapping
        Keyword arguments of :func:`compile_plan`, with ``model``, without gpu and tables.
    tables : Tables or None
        As in :func:`compile_plan`, for all of them.
    gpu : GpuSpec, str, Path or mapping
        The GPU of all of them.

    Returns
    -------
    list of StepPlan
        One a request, in order.

    Raises
    ------
    PlanError
        As :func:`compile_plan`; the message names the request.
    """
    gpu = gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu)
    shared: dict[str, CurveSource] = {}
    plans: list[StepPlan] = []
    for request in requests:
        method = _chosen("method", request.get("method", "roofline"), METHODS)
        if method not in shared:
            shared[method] = DatasheetCurves(gpu) if tables is None else TableCurves(tables, method)
        unknown = sorted(set(request) - COMPILE_ARGUMENTS)
        if unknown or "model" not in request:
            wrong = f"does not know {', '.join(unknown)}" if unknown else "needs a model"
            raise PlanError(f"plan {len(plans)} {wrong}: it takes {', '.join(sorted(COMPILE_ARGUMENTS))}")
        plans.append(compile_plan(gpu=gpu, tables=tables, curves=shared[method], **request))
    return plans


def _arena(
    curves: CurveSource,
    row_curves: tuple[RowCurve, ...],
    heads: HeadShape,
    num_layers: int,
    max_tokens: int,
    max_seqs: int,
) -> npt.NDArray[np.float64]:
    """Lay a plan out as the step loops read it."""
    sums = {"tokens": np.zeros(max_tokens + 1), "sequences": np.zeros(max_seqs + 1)}
    origins = {name: np.zeros(len(total), np.uint8) for name, total in sums.items()}
    for curve in row_curves:
        rows = curve.operator.rows
        fill_curve(
            curve.axis, curve.value, curve.flag, float(curve.operator.times), sums[rows], origins[rows]
        )
    decode = _all_layers(curves.attention_block("attention_decode", heads), num_layers)
    prefill = _all_layers(curves.attention_block("attention_prefill", heads), num_layers)
    pair_us, token_us = (num_layers * us for us in curves.prefix_us(heads))
    sections: list[npt.NDArray[Any]] = [*sums.values(), *origins.values(), decode, prefill]
    starts = steps.HEADER_SIZE + np.cumsum([0, *(len(section) for section in sections)])
    header = np.zeros(steps.HEADER_SIZE)
    header[: steps.PREFIX_TOKEN_US + 1] = (
        MAGIC, FORMAT, max_tokens, max_seqs, num_layers, 0.0, pair_us, token_us,
    )  # fmt: skip
    header[steps.TOKENS_AT : steps.ARENA_SIZE + 1] = starts
    arena = np.concatenate([header, *(np.asarray(s, np.float64) for s in sections)])
    arena.flags.writeable = False
    return arena


def _all_layers(block: npt.NDArray[np.float64], num_layers: int) -> npt.NDArray[np.float64]:
    """Block of one call -> block of all layers: cells are latencies, or work / latency."""
    block = block.copy()
    cells = block[grids.cells_of(block)]
    if block[grids.FORM] == grids.FORM_LATENCY:
        cells *= num_layers
    else:
        cells /= num_layers
    return block
