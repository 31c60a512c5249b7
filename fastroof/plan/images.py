"""What images cost the step that encodes them: the vision encoder's operators, each looked up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.checks import shown, whole_number
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_MODELLED
from fastroof.config import GpuSpec
from fastroof.errors import BatchError, MissingTableError, PlanError
from fastroof.models import ModelSpec, load_model
from fastroof.models.image_sizes import ImagePieces
from fastroof.models.vision import VisionEncoder
from fastroof.operators.attention_work import HeadShape
from fastroof.operators.calls import RowOperator
from fastroof.operators.encoder_attention import ENCODER_ATTENTION
from fastroof.plan.curves import DATASHEET_SOURCE, CurveSource
from fastroof.plan.explain import Explanation, OperatorTime, bound_of, explain_step, row_time
from fastroof.plan.table_curves import TableCurves
from fastroof.tables import Tables
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.plan.plan_facts import PlanFacts
    from fastroof.plan.step_plan import StepPlan
    from fastroof.run import StepBatch

__all__ = [
    "MOST_PATCHES",
    "EncoderTime",
    "ImageSize",
    "encode",
    "explain_with_images",
    "image_us",
    "images_us",
    "step_us_with_images",
]

MOST_PATCHES: Final = 2**17

ImageSize = tuple[int, int]
"""Width and height of an image, pixels."""

_CALLED: Final = "vision encoder"


class EncoderTime(NamedTuple):
    """Time of an encoder over some images at once."""

    latency_us: float
    origin: int
    tokens: int
    parts: tuple[OperatorTime, ...]


def image_us(
    model: ModelSpec | str | Path, tables: Tables, patches: int, images: int = 1, *, tp: int = 1
) -> EncoderTime:
    """Time a model's vision encoder over some images of as many patches each, in bf16."""
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
        raise PlanError(f"{patches:,} patches of {len(images)} images are more than {MOST_PATCHES:,} at once")
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
    """Attention within pieces: a call for each number of patches."""
    pieces: Counter[int] = Counter()
    for image in images:
        pieces[image.patches] += image.pieces
    num_heads, layers = (encoder.num_heads or 0) // tp, encoder.num_layers or 0
    heads = HeadShape("bf16", num_heads, num_heads, encoder.head_dim or 0)
    for patches, batch in pieces.items():
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
        lender = tuple(ENCODER_ATTENTION.grid(tables, heads).lenders[0])
    except MissingTableError as error:
        if not curves.allow_modelled:
            raise MissingTableError(
                f"the vision encoder's attention: {error}; allow_modelled=True models it from the datasheet"
            ) from None
        return _datasheet_us(curves.gpu, *work), ORIGIN_MODELLED, DATASHEET_SOURCE
    sizes = {**heads._asdict(), "kv_len": patches, "batch_size": batch}
    found = tables.lookup(
        "encoder_attention",
        method=curves.method,
        **{name: size for name, size in sizes.items() if name != "window"},
    )
    origin = int(found.origin)
    if tables.is_foreign("encoder_attention", lender):
        origin = max(origin, ORIGIN_BORROWED)
    return float(found.latency_us), origin, tables.source_of("encoder_attention", lender)


def _datasheet_us(gpu: GpuSpec, work: float, moved: float) -> float:
    kind = ENCODER_ATTENTION.datasheet
    busiest_s = max(work / gpu.peak("bf16"), moved / gpu.hbm_bytes_per_s)
    return kind.launch_us + busiest_s * US_PER_S / kind.efficiency


def images_us(plan: PlanFacts, images: Iterable[ImageSize]) -> EncoderTime:
    """Answer ``plan.encode(images)``."""
    encoder = plan.model.encoder
    curves = plan.error_source.curves
    if curves is None:
        raise PlanError("an unpickled plan has no tables any more, and encoders are looked up in them")
    pieces = [encoder.pieces(*_checked(image)) for image in images]
    # one that does not divide is encoded by each GPU as a whole
    divides = not (encoder.num_heads or 0) % plan.tp and not (encoder.intermediate or 0) % plan.tp
    time = encode(encoder, curves, pieces, plan.tp if divides else 1)
    return time._replace(parts=tuple(part._replace(name=f"{_CALLED} {part.name}") for part in time.parts))


def _checked(image: Any) -> tuple[Any, Any]:
    try:
        width, height = image
    except (TypeError, ValueError):
        raise BatchError(f"an image is (width, height) in pixels, got {shown(image)}") from None
    return width, height


def _listed(images: Any) -> list[Any]:
    try:
        return list(images)
    except TypeError:
        raise BatchError(f"images are lists of (width, height) in pixels, got {shown(images)}") from None


def explain_with_images(
    plan: StepPlan, requests: Iterable[tuple[int, int]], images: Iterable[ImageSize], with_error: bool
) -> Explanation:
    """Answer ``plan.explain(requests, images=images)``: the encoder's operators, then the step's."""
    images = _listed(images)
    if not images:
        return explain_step(plan, requests, with_error)
    if with_error:
        raise PlanError("with_error goes without images: what encoders are off by was not put together")
    requests = list(requests)
    _check_prompts([requests], [images])
    step = explain_step(plan, requests, False)
    encoded = images_us(plan, images)
    return replace(
        step,
        operators=(*encoded.parts, *step.operators),
        total_us=step.total_us + encoded.latency_us,
        origin=max(step.origin, encoded.origin),
    )


def step_us_with_images(
    plan: StepPlan, batch: StepBatch, step_us: Floats, images: Iterable[Iterable[ImageSize]]
) -> Floats:
    """Answer ``plan.step_us(batch, images=images)``."""
    of_steps = [_listed(of_step) for of_step in _listed(images)]
    if len(of_steps) != len(step_us):
        raise BatchError(f"images are a list a step: {len(step_us)} steps, {len(of_steps)} lists of images")
    requests = np.stack([batch.new_tokens, batch.context_len], axis=1)
    _check_prompts(
        [requests[a:b].tolist() for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)], of_steps
    )
    encoders_us: Floats = np.array([images_us(plan, one).latency_us if one else 0.0 for one in of_steps])
    return np.asarray(step_us + encoders_us)


def _check_prompts(steps: Iterable[Sequence[Sequence[int]]], images: Iterable[Sequence[ImageSize]]) -> None:
    """Refuse images in a step without a prompt, which would have their tokens."""
    for requests, of_step in zip(steps, images, strict=True):
        if of_step and not any(new > 1 or not context for new, context in requests):
            raise BatchError(
                f"a step of decodes alone has {len(of_step)} images: their tokens are new ones of a prompt"
            )
