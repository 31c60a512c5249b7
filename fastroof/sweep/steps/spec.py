"""Spec, units, columns and summary of a sweep over decode steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fastroof.columns import Column
from fastroof.config import load_gpu
from fastroof.defaults import DEFAULT_ENGINE
from fastroof.engines import engine_names, load_engine
from fastroof.models import load_model
from fastroof.sweep.result_rows import SweepSummary
from fastroof.sweep.spec import MAX_ROWS, Sizes, SweepSpec, count_problem, path_as_text, up_to
from fastroof.sweep.units import (
    EXECUTION,
    GPU,
    MODEL,
    SPLIT,
    WEIGHT_BYTES,
    PlanKey,
    Split,
    WorkUnit,
    plan_units,
)

MAX_BATCH_SIZE: Final = 2**16
MAX_KV_LEN: Final = 2**28
MAX_EVALUATIONS: Final = 10**11
"""Maximum number of steps of a sweep: about an hour on one core."""

_AXES: Final = ("models", "tp", "pp", "dp", "ep", "routing", "dtype", "kv_dtype", "batch_size", "kv_len")


def _known_gpu(gpu: str) -> str:
    load_gpu(gpu)
    return gpu


def _known_engine(engine: Any) -> str:
    load_engine(engine)
    return str(engine)


class StepSpec(SweepSpec):
    """Spec of a sweep over decode steps: candidates, limits, and which rows to keep.

    Every combination of models, tp, pp, dp, ep, routing, dtype, kv_dtype, batch_size and kv_len is one
    decode step of one rank; layouts that a model does not support are skipped and reported.
    :func:`fastroof.sweep.load_spec` creates and validates it.
    """

    gpu: Annotated[str, path_as_text, AfterValidator(_known_gpu)] = Field(
        "h100", description="a GPU's name, or the path of a gpu.toml"
    )
    batch_size: Annotated[Sizes, up_to(MAX_BATCH_SIZE)] = Field(
        description="a list of sizes, or a range like {start = 1, stop = 512, step = 1}"
    )
    kv_len: Annotated[Sizes, up_to(MAX_KV_LEN)] = Field(
        description="a list of lengths, or a range like {start = 1024, stop = 131072, factor = 2}"
    )
    engine: Annotated[str, BeforeValidator(_known_engine)] = Field(
        DEFAULT_ENGINE,
        description=f"one of {', '.join(engine_names())}, or the path of a profile's .toml file",
    )
    tpot_ms: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="a number of ms above 0; omit the key for no limit"
    )
    report_kv_len: int = Field(
        4096, ge=1, le=MAX_KV_LEN, description=f"a whole number from 1 to {MAX_KV_LEN:,}"
    )
    keep: Literal["best", "all"] = Field("best", description="'best' or 'all'")
    with_error: bool = Field(False, description="true or false")

    @property
    def all_gpus(self) -> tuple[str, ...]:
        """Return the GPU in the spec."""
        return (self.gpu,)

    @property
    def all_engines(self) -> tuple[str, ...]:
        """Return the engine in the spec."""
        return (self.engine,)

    @model_validator(mode="after")
    def _check_counts(self) -> StepSpec:
        _check_count(self, _AXES, "evaluations", MAX_EVALUATIONS, "")
        if self.keep == "all":
            _check_count(self, _AXES, "rows", MAX_ROWS, ", or keep = 'best'")
        _check_count(self, [axis for axis in _AXES if axis != "batch_size"], "rows", MAX_ROWS, "")
        return self

    @model_validator(mode="after")
    def _check_error(self) -> StepSpec:
        if self.with_error and self.method != "roofline":
            raise ValueError(f"with_error needs method = 'roofline', got {self.method!r}")
        return self


def _check_count(spec: StepSpec, axes: Sequence[str], what: str, most: int, hint: str) -> None:
    sizes = {axis: len(getattr(spec, axis)) for axis in axes}
    relevant = {axis: size for axis, size in sizes.items() if size > 1 or axis not in Split._fields}
    count_problem(relevant, what, most, hint)


EVALUATIONS_A_UNIT: Final = 2**26
"""A fraction of a second of work, which is how long an interrupt may have to wait."""
ROWS_A_UNIT: Final = 2**18


def step_units(spec: StepSpec) -> Iterator[WorkUnit]:
    """Yield units in the order of the rows: models, layouts, dtypes, kv_dtypes, lengths."""
    batches = len(spec.batch_size)
    rows_a_length = batches if spec.keep == "all" else 1
    most = min(ROWS_A_UNIT // rows_a_length, EVALUATIONS_A_UNIT // batches)
    for model in spec.models:
        longest = load_model(model).max_position
        within = sum(kv_len <= longest for kv_len in spec.kv_len)
        kinds = spec.formats(model, spec.gpu)
        for (tp, split), (dtype, kv_dtype, engine) in itertools.product(spec.splits, kinds):
            key = PlanKey(model, spec.gpu, tp, dtype, kv_dtype, engine, *split)
            yield from plan_units(key, "steps", within, most, each=batches)


COLUMNS: Final = (
    MODEL,
    GPU,
    Column("tp", "int", "GPUs", "tensor-parallel size"),
    *SPLIT,
    *EXECUTION,
    Column("kv_len", "int", "tokens", "tokens that each request attends to, including the new one"),
    Column(
        "batch_size",
        "int",
        "sequences",
        "decoding requests per rank; 0 if no batch is within the limits",
        0,
    ),
    Column("step_us", "float", "us", "time of one decode step, which is the time per output token"),
    Column("tokens_per_s", "float", "tokens/s", "output rate with every rank and stage busy"),
    Column("tokens_per_s_per_gpu", "float", "tokens/s", "tokens_per_s / (tp x pp x dp)"),
    Column(
        "limited_by",
        "text",
        "",
        "what prevents the next larger batch (the smallest if batch_size is 0): memory, tpot, throughput "
        "(it fits but gives fewer tokens/s) or batch grid (no larger batch in the spec)",
    ),
    Column("exceeds", "text", "", "limit that the step exceeds: memory or tpot; empty if within both"),
    Column("origin", "text", "", "origin of the step's latency: measured to modelled"),
    Column(
        "relative_error",
        "float",
        "",
        "standard error / step_us (80 % are within 1.28 standard errors); empty if not requested",
        0,
    ),
    WEIGHT_BYTES,
    Column("max_kv_tokens", "int", "tokens", "KV tokens that fit on one GPU next to the weights"),
)
"""All columns, one row per step: ``limited_by`` only if the best are kept, ``exceeds`` only if all are."""


def step_columns(keep: Literal["best", "all"]) -> tuple[Column, ...]:
    """Return the columns of results that keep the best steps or all steps."""
    left_out = "exceeds" if keep == "best" else "limited_by"
    return tuple(column for column in COLUMNS if column.name != left_out)


@dataclass(frozen=True)
class BestStep:
    """The step of one plan and kv_len with the most tokens/s within the limits.

    Attributes
    ----------
    model, dtype, kv_dtype : str
        Model and formats.
    tp, pp, dp, ep : int
        Layout.
    kv_len : int
        Tokens that each request attends to.
    batch_size : int
        Requests in the step; 0 if no batch is within the limits, in which case times and rates are None.
    step_us : float or None
        Time of the step, us.
    tokens_per_s, tokens_per_s_per_gpu : float or None
        Output tokens, tokens/s.
    limited_by : str
        What prevents the next larger batch: memory, tpot, throughput or batch grid.
    origin : str or None
        Origin of the step's latency: measured to modelled.
    relative_error : float or None
        Standard error of the step's time, relative to it; None without ``with_error`` in the spec.
    standing : str or None
        ``best`` of its model in tokens/s per GPU, or ``tie`` if it falls short of the best by less than the
        standard error of the difference; None for the others, and if errors are unknown.
    """

    model: str
    tp: int
    pp: int
    dp: int
    ep: int
    dtype: str
    kv_dtype: str
    kv_len: int
    batch_size: int
    step_us: float | None
    tokens_per_s: float | None
    tokens_per_s_per_gpu: float | None
    limited_by: str
    origin: str | None
    relative_error: float | None = None
    standing: str | None = None


@dataclass(frozen=True)
class StepSummary(SweepSummary):
    """Counts of a sweep over steps, and the best step of each plan.

    Attributes
    ----------
    best : tuple of BestStep
        One per plan, at the evaluated length nearest to the spec's report_kv_len.
    engine : str
        Serving engine.
    plans : int
        Number of evaluated plans.
    evaluations : int
        Number of evaluated steps, including those beyond memory.
    """

    kind: ClassVar[str] = "steps"

    best: tuple[BestStep, ...]
    engine: str
    plans: int
    evaluations: int

    @property
    def evaluations_per_s(self) -> float:
        """Return the steps evaluated per second and thread."""
        return self.evaluations / self.evaluate_s if self.evaluate_s else 0.0

    def best_columns(self) -> tuple[Column, ...]:
        """Return the columns of :class:`BestStep`, in the order of its fields."""
        known = {column.name: column for column in COLUMNS}
        standing = Column("standing", "text", "", "best of its model, or tie; empty for the others")
        return tuple(known.get(each.name, standing) for each in fields(BestStep))

    def best_rows(self) -> list[dict[str, Any]]:
        """Return the best steps as values by column name."""
        return [asdict(step) for step in self.best]

    def document(self) -> dict[str, Any]:
        """Return all fields as JSON values, except the path."""
        return {**asdict(self), "evaluations_per_s": self.evaluations_per_s}


def with_standings(steps: Sequence[BestStep]) -> tuple[BestStep, ...]:
    """Mark the best step of each model and length, and steps that tie with it."""
    best: dict[tuple[str, int], BestStep] = {}
    for step in steps:
        leader = best.get((step.model, step.kv_len))
        if step.relative_error is not None and (leader is None or _rate(step) > _rate(leader)):
            best[step.model, step.kv_len] = step
    return tuple(replace(s, standing=_standing(s, best.get((s.model, s.kv_len)))) for s in steps)


def _rate(step: BestStep) -> float:
    return step.tokens_per_s_per_gpu or 0.0


def _standing(step: BestStep, best: BestStep | None) -> str | None:
    if step is best:
        return "best"
    if best is None or step.relative_error is None or best.relative_error is None:
        return None
    short = math.log(_rate(best) / _rate(step))
    return "tie" if short < math.hypot(step.relative_error, best.relative_error) else None
