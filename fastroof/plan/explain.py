"""Break one step down by operator: time, FLOPs, bytes, MFU, bound and origin.

The engine's own time is the last row, so that rows add up to the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Ints
from fastroof.arrow import ORIGIN, ArrowResult
from fastroof.checks import shown, whole_number
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_MODELLED, Column
from fastroof.compiled import steps
from fastroof.compiled import verification as loops
from fastroof.compiled.guides import curve_point
from fastroof.config import GpuSpec
from fastroof.errors import BatchError, MissingTableError, PlanError
from fastroof.models import ModelSpec, load_model
from fastroof.models.vision import ImagePieces, VisionEncoder
from fastroof.operators.attention import ENCODER_ATTENTION
from fastroof.operators.attention_work import HeadShape
from fastroof.operators.calls import Role, RowOperator
from fastroof.plan.arena import (
    AttentionTimes,
    are_decodes,
    attention_means,
    attention_times,
    kinds_beside_decodes,
    kinds_beside_prefill,
)
from fastroof.plan.calls import Ranks
from fastroof.plan.curves import DATASHEET_SOURCE, CurveSource, RowCurve, TableCurves, per_row, row_cost
from fastroof.plan.plan_data import PlanData
from fastroof.run import StepBatch, StepTimes
from fastroof.tables import Tables
from fastroof.units import US_PER_S


class OperatorTime(NamedTuple):
    """One operator's part of a step.

    Attributes
    ----------
    name, role : str
        The operator, and what it does in the step.
    calls : int
        How often it runs.
    total_us : float
        Time of all calls.
    flops, moved_bytes : float
        FLOPs and compulsory bytes of all calls on one GPU; bytes on the wire for communication.
    mfu : float
        FLOPs divided by time and peak; NaN if it computes nothing.
    bound : str
        compute, memory, launch, communication or host.
    origin : int
        0 measured to 4 modelled.
    source, dtype : str
        Measured tables or engine profile, and the kernel's format.
    """

    name: str
    role: Role
    calls: int
    total_us: float
    flops: float
    moved_bytes: float
    mfu: float
    bound: str
    origin: int
    source: str
    dtype: str = ""


@dataclass(frozen=True, eq=False)
class Explanation(ArrowResult):
    """A step by operator; ``total_us`` is exactly the step's time."""

    operators: tuple[OperatorTime, ...]
    total_us: float
    origin: int
    relative_error: float | None = None
    made_from: Mapping[str, str] = field(default_factory=dict, repr=False)

    arrow_columns = (
        Column("name", "text", "", "operator"),
        Column("role", "text", "", "what it does in the step"),
        Column("calls", "int", "", "how often it runs in the step"),
        Column("total_us", "float", "us", "time of all calls"),
        Column("flops", "float", "FLOPs", "work of all calls on one GPU", 0),
        Column("moved_bytes", "float", "B", "compulsory bytes of all calls; all-reduces: on the wire", 0),
        Column("mfu", "float", "", "FLOPs over time and peak; empty where it computes nothing", 0),
        Column("bound", "text", "", "its roofline's largest term; host of what the engine adds"),
        ORIGIN,
        Column("source", "text", "", "the measured tables, or the engine's profile, that it comes from"),
        Column("dtype", "text", "", "format of its kernel; attention: of the cache"),
    )
    _html_names = ("name", "calls", "total_us", "mfu", "bound", "origin", "source")

    def columns(self) -> dict[str, Any]:
        """Return the fields of all operators, one list per field."""
        return {name: [getattr(part, name) for part in self.operators] for name in OperatorTime._fields}

    def _html_caption(self, count: int) -> str:
        error = self.relative_error
        within = "" if error is None else f" (one standard error: {error:.1%})"
        return f"{super()._html_caption(count)}, {self.total_us:,.1f} us in all{within}"


def row_time(gpu: GpuSpec, curve: RowCurve, rows: int) -> OperatorTime:
    """Return a call over rows at a number of rows."""
    operator, dtype = curve.operator, row_cost(curve.operator).dtype
    latency_us, origin = curve_point(curve.axis, curve.value, curve.flag, 0, len(curve.axis), float(rows))
    work, moved = (
        float(part[0]) for part in per_row(operator).row_work(operator, np.array([rows * curve.share]))
    )
    if per_row(operator).over_link:
        bound = "communication"
    else:
        bound = bound_of(gpu, curve.launch_us, work / gpu.peak(dtype), moved)
    # no time: hidden by a longer parallel path
    mfu = work / gpu.peak(dtype) * US_PER_S / latency_us if work and latency_us else float("nan")
    times = operator.times
    return OperatorTime(
        operator.name,
        operator.role,
        times,
        times * latency_us,
        times * work,
        times * moved,
        mfu,
        bound,
        int(origin),
        curve.source,
        getattr(operator, "dtype", ""),
    )


def bound_of(gpu: GpuSpec, launch_us: float, compute_s: float, moved_bytes: float) -> str:
    """Name the largest term of a roofline."""
    terms = {
        "compute": compute_s * US_PER_S,
        "memory": moved_bytes / gpu.hbm_bytes_per_s * US_PER_S,
        "launch": launch_us,
    }
    return max(terms, key=lambda name: terms[name])


def _attention_parts(
    plan: PlanData, batch: StepBatch, times: StepTimes, is_decode: bool
) -> list[OperatorTime]:
    """Attention of a step's decodes, or of its other requests, by kind of layers."""
    decodes = are_decodes(batch)
    chosen = decodes if is_decode else ~decodes
    new, context = batch.new_tokens[chosen], batch.context_len[chosen]
    _, size, x, within = attention_means(plan, batch, is_decode)
    kinds = [attention_times(plan, i, is_decode, size, x, within) for i in range(len(plan.attention))]
    if not chosen.all():
        kinds = (
            kinds_beside_prefill(plan, context + 1, kinds) if is_decode else kinds_beside_decodes(plan, kinds)
        )
    parts = times.components
    all_us = float((parts.decode_attention_us if is_decode else parts.prefill_attention_us)[0])
    return [
        _attention_time(plan, number, new, context, is_decode, kind, all_us)
        for number, kind in enumerate(kinds)
    ]


def _attention_time(
    plan: PlanData,
    number: int,
    new: Ints,
    context: Ints,
    is_decode: bool,
    times: AttentionTimes,
    all_us: float,
) -> OperatorTime:
    part = plan.attention[number]
    call, layers = part.call, part.call.times
    does = part.phase(is_decode).work(plan.gpu, new, context + new)
    work, moved = float(does.flops.sum()), float(does.moved_bytes.sum())
    if not is_decode:
        work /= plan.layout.cp
    total_us, origin = all_us, int(times.origin[0])
    if len(plan.attention) > 1:
        prefix_us = 0.0 if is_decode else float(part.prefixes_us(new, context).sum())
        total_us = float(times.own_us[0]) + prefix_us
    if not is_decode and context.any():
        origin = ORIGIN_MODELLED
    role: Role = "decode_attention" if is_decode else "prefill_attention"
    return OperatorTime(
        call.name.replace("attention", role.replace("_", " "), 1),
        role,
        layers,
        total_us,
        work * layers,
        moved * layers,
        work * layers / does.peak * US_PER_S / total_us if work and total_us else float("nan"),
        bound_of(plan.gpu, times.launch_us, work / does.peak, moved),
        origin,
        part.sources[0 if is_decode else 1],
        call.kv_dtype,
    )


def explain_step(plan: PlanData, batch: StepBatch, times: StepTimes) -> Explanation:
    """Break the one step of a batch down by operator."""
    new = batch.new_tokens
    error = None if times.relative_error is None else float(times.relative_error[0])
    if not len(new):
        return Explanation((), 0.0, 0, error, times.made_from)
    decode = are_decodes(batch)
    rows = Ranks.of(plan.layout, plan.execution).of_step(int(new.sum()), len(new))
    phases = [is_decode for is_decode in (True, False) if (decode == is_decode).any()]
    attention = [_attention_parts(plan, batch, times, is_decode) for is_decode in phases]
    kinds = list(zip(*attention, strict=True))
    left_out = "with_prefill" if decode.all() else "decode_only"
    operators: list[OperatorTime] = []
    for place, curve in enumerate(plan.row_curves):
        for part, times_of_kind in zip(plan.attention, kinds, strict=True):
            if part.before == place:
                operators += times_of_kind
        if curve.operator.steps != left_out:
            operators.append(row_time(plan.gpu, curve, rows[curve.operator.rows]))
    operators += _engine_parts(plan, float(times.components.runtime_us[0]))
    total_us, origin = float(times.latency_us[0]), int(times.origin[0])
    return Explanation(tuple(operators), total_us, origin, error, times.made_from)


def _engine_parts(plan: PlanData, runtime_us: float) -> list[OperatorTime]:
    """The engine's own time of a step, if any."""
    if not runtime_us:
        return []
    source = f"profile {plan.profile.name}"
    return [
        OperatorTime(
            "runtime", "runtime", 1, runtime_us, 0.0, 0.0, float("nan"), "host", ORIGIN_MODELLED, source
        )
    ]


def explain_verification(
    plan: PlanData, arena: Floats, sizes: tuple[int, int, int], total_us: float, made_from: Mapping[str, str]
) -> Explanation:
    """Break a step of (batch_size, kv_len, tokens) that verifies drafts down by operator."""
    batch_size, kv_len, tokens = sizes
    batch = float(batch_size)
    speculation = loops.open_speculation(arena, steps.open_plan(arena))._replace(tokens=float(tokens))
    longer = loops.queries_factor(arena, speculation, batch, float(kv_len))
    new = np.full(batch_size, tokens)
    parts = []
    for number in range(len(plan.attention)):
        one = attention_times(plan, number, True, [batch], [float(kv_len)])
        flags = one.origin if tokens == 1 else np.full_like(one.origin, ORIGIN_MODELLED)
        times = one._replace(own_us=one.own_us * longer, origin=flags)
        parts.append(_attention_time(plan, number, new, kv_len - new, True, times, float(times.own_us[0])))
    rows = Ranks.of(plan.layout, plan.execution).of_step(batch_size * tokens, batch_size * tokens)
    operators: list[OperatorTime] = []
    for place, curve in enumerate(plan.row_curves):
        operators += [time for part, time in zip(plan.attention, parts, strict=True) if part.before == place]
        if curve.operator.steps != "with_prefill":
            operators.append(row_time(plan.gpu, curve, rows[curve.operator.rows]))
    origin = max(operator.origin for operator in operators)
    operators += _engine_parts(plan, float(arena[steps.STEP_US] + arena[steps.SEQUENCE_US] * batch))
    return Explanation(tuple(operators), total_us, origin, None, made_from)


MOST_PATCHES: Final = 2**17

ImageSize = tuple[int, int]
"""Width and height of an image, pixels."""

_CALLED: Final = "vision encoder"


class EncoderTime(NamedTuple):
    """Time of a vision encoder over some images at once."""

    latency_us: float
    origin: int
    tokens: int
    parts: tuple[OperatorTime, ...]


def image_us(
    model: ModelSpec | str | Path, tables: Tables, patches: int, images: int = 1, *, tp: int = 1
) -> EncoderTime:
    """Time a model's vision encoder over images of ``patches`` each, in bf16."""
    model = model if isinstance(model, ModelSpec) else load_model(model)
    encoder = model.encoder
    whole_number("patches", patches, error=PlanError)
    whole_number("images", images, error=PlanError)
    whole_number("tp", tp, error=PlanError)
    one = ImagePieces(1, patches, -(-patches // encoder.merge**2))
    return encode(encoder, TableCurves(tables), [one] * images, tp)


def encode(
    encoder: VisionEncoder, curves: CurveSource, images: Sequence[ImagePieces], tp: int
) -> EncoderTime:
    """Time an encoder over images, all at once."""
    patches = sum(image.pieces * image.patches for image in images)
    tokens = sum(image.tokens for image in images)
    if patches > MOST_PATCHES:
        raise PlanError(f"{len(images)} images have {patches:,} patches, max {MOST_PATCHES:,} at once")
    if not images:
        return EncoderTime(0.0, 0, 0, ())
    calls, layers = encoder.calls(tp), encoder.num_layers or 0
    parts = (
        *_rows(curves, calls.before, patches, 1),
        *_rows(curves, calls.layer, patches, layers),
        *_attention(encoder, curves, images, tp),
        *_rows(curves, calls.projection, patches, 1),
        *_rows(curves, calls.after, tokens, 1),
    )
    return EncoderTime(
        sum(part.total_us for part in parts), max(part.origin for part in parts), tokens, parts
    )


def _rows(
    curves: CurveSource, calls: Iterable[RowOperator], rows: int, layers: int
) -> Iterator[OperatorTime]:
    for call in calls:
        every = replace(call, times=call.times * layers)
        yield row_time(curves.gpu, curves.row_curve(every, rows), rows)


def _attention(
    encoder: VisionEncoder, curves: CurveSource, images: Sequence[ImagePieces], tp: int
) -> Iterator[OperatorTime]:
    """Attention within pieces or windows: one call per layers and number of patches."""
    sequences: Counter[tuple[int, int]] = Counter()
    for image in images:
        for layers, batch, patches in encoder.attended(image):
            sequences[layers, patches] += batch
    num_heads = (encoder.num_heads or 0) // tp
    heads = HeadShape("bf16", num_heads, num_heads, encoder.head_dim or 0)
    for (layers, patches), batch in sequences.items():
        if not layers:
            continue
        sizes = {**heads._asdict(), "kv_len": float(patches), "batch_size": float(batch)}
        columns = {name: np.array([size]) for name, size in sizes.items()}
        work, moved = (
            float(of(columns)[0]) for of in (ENCODER_ATTENTION.flops, ENCODER_ATTENTION.moved_bytes)
        )
        one_us, origin, source = _attention_us(curves, heads, patches, batch, (work, moved))
        peak, launch_us = curves.gpu.peak("bf16"), ENCODER_ATTENTION.datasheet.launch_us
        total_us = one_us * layers
        yield OperatorTime(
            "attention", "prefill_attention", layers, total_us, work * layers, moved * layers,
            work * layers / peak * US_PER_S / total_us, bound_of(curves.gpu, launch_us, work / peak, moved),
            origin, source, "bf16",
        )  # fmt: skip


def _attention_us(
    curves: CurveSource, heads: HeadShape, patches: int, batch: int, work: tuple[float, float]
) -> tuple[float, int, str]:
    """Time of one call, its origin and its source."""
    if not isinstance(curves, TableCurves):
        return _datasheet_us(curves.gpu, *work), ORIGIN_MODELLED, DATASHEET_SOURCE
    tables = curves.tables
    try:
        donor = tuple(ENCODER_ATTENTION.grid(tables, heads).donors[0])
    except MissingTableError as error:
        if not curves.allow_modelled:
            raise MissingTableError(
                f"the vision encoder's attention: {error}; allow_modelled=True (--allow-modelled) models it "
                "from the datasheet"
            ) from None
        return _datasheet_us(curves.gpu, *work), ORIGIN_MODELLED, DATASHEET_SOURCE
    sizes = {**heads._asdict(), "kv_len": patches, "batch_size": batch}
    found = tables.lookup(
        "encoder_attention",
        method=curves.method,
        **{name: size for name, size in sizes.items() if name != "window"},
    )
    origin = int(found.origin)
    if tables.is_foreign(tables.serving("encoder_attention", donor)):
        origin = max(origin, ORIGIN_BORROWED)
    return float(found.latency_us), origin, tables.source_of("encoder_attention", donor)


def _datasheet_us(gpu: GpuSpec, work: float, moved: float) -> float:
    kind = ENCODER_ATTENTION.datasheet
    busiest_s = max(work / gpu.peak("bf16"), moved / gpu.hbm_bytes_per_s)
    return kind.launch_us + busiest_s * US_PER_S / kind.efficiency


def images_us(plan: PlanData, images: Iterable[ImageSize]) -> EncoderTime:
    """Time the plan's vision encoder over images."""
    encoder = plan.model.encoder
    curves = plan.error_source.curves
    if curves is None:
        raise PlanError("an unpickled plan has no tables to look up its vision encoder in; compile it again")
    pieces = [encoder.pieces(*_checked(image)) for image in images]
    # an encoder that does not divide runs whole on each GPU
    tp = plan.layout.tp
    divides = not (encoder.num_heads or 0) % tp and not (encoder.intermediate or 0) % tp
    time = encode(encoder, curves, pieces, tp if divides else 1)
    return time._replace(parts=tuple(part._replace(name=f"{_CALLED} {part.name}") for part in time.parts))


def _checked(image: Any) -> tuple[Any, Any]:
    try:
        width, height = image
    except (TypeError, ValueError):
        raise BatchError(f"an image must be (width, height) in pixels, got {shown(image)}") from None
    return width, height


def listed_images(images: Any) -> list[Any]:
    """Return images, or images of each step, as a list."""
    try:
        return list(images)
    except TypeError:
        raise BatchError(f"images must be lists of (width, height) in pixels, got {shown(images)}") from None


def with_encoder(
    plan: PlanData, step: Explanation, batch: StepBatch, images: Sequence[ImageSize]
) -> Explanation:
    """Put the vision encoder's operators before those of the step that has the images' tokens."""
    _check_prompts(_requests_of(batch), [images])
    encoded = images_us(plan, images)
    return replace(
        step,
        operators=(*encoded.parts, *step.operators),
        total_us=step.total_us + encoded.latency_us,
        origin=max(step.origin, encoded.origin),
    )


def step_us_with_images(
    plan: PlanData, batch: StepBatch, step_us: Floats, images: Iterable[Iterable[ImageSize]]
) -> Floats:
    """Add the vision encoder's time for each step's images to the steps' times."""
    of_steps = [listed_images(of_step) for of_step in listed_images(images)]
    if len(of_steps) != len(step_us):
        raise BatchError(f"images needs one list per step: {len(step_us)} steps, {len(of_steps)} lists")
    _check_prompts(_requests_of(batch), of_steps)
    encoders_us: Floats = np.array([images_us(plan, one).latency_us if one else 0.0 for one in of_steps])
    return np.asarray(step_us + encoders_us)


def _requests_of(batch: StepBatch) -> list[list[list[int]]]:
    requests = np.stack([batch.new_tokens, batch.context_len], axis=1)
    return [requests[a:b].tolist() for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)]


def _check_prompts(steps: Iterable[Sequence[Sequence[int]]], images: Iterable[Sequence[ImageSize]]) -> None:
    """Refuse images in a step without a prompt: their tokens are a prompt's."""
    for requests, of_step in zip(steps, images, strict=True):
        if of_step and not any(new > 1 or not context for new, context in requests):
            raise BatchError(
                f"{len(of_step)} images in a decode-only step: their tokens must be among a prompt's"
            )
