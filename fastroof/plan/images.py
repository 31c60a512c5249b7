"""What a vision encoder takes: once an image, before the prompt, and no part of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from fastroof.checks import whole_number
from fastroof.errors import ModelError, PlanError
from fastroof.models import ModelSpec, load_model
from fastroof.models.vision import VisionEncoder
from fastroof.operators.calls import RowOperator
from fastroof.plan.table_curves import TableCurves
from fastroof.tables import Tables

__all__ = ["MOST_PATCHES", "EncoderPart", "EncoderTime", "image_us"]

MOST_PATCHES = 2**17


class EncoderPart(NamedTuple):
    """One operator of an encoder, over all layers: us, and how its latency was made (0 to 4)."""

    name: str
    total_us: float
    origin: int


class EncoderTime(NamedTuple):
    """Time of an encoder over some images at once.

    Attributes
    ----------
    latency_us : float
        The sum of its parts.
    origin : int
        The largest of theirs.
    tokens : int
        That the text model gets of each image.
    parts : tuple of EncoderPart
        In the order in which they are summed.
    """

    latency_us: float
    origin: int
    tokens: int
    parts: tuple[EncoderPart, ...]


def image_us(
    model: ModelSpec | str | Path, tables: Tables, patches: int, images: int = 1, *, tp: int = 1
) -> EncoderTime:
    """Time a model's vision encoder over some images of as many patches each, in bf16.

    Parameters
    ----------
    model : ModelSpec, str or Path
        What :func:`fastroof.load_model` takes or returns, with a vision encoder.
    tables : Tables
        Measured tables of the GPU, those of encoder_attention among them.
    patches : int
        Patches of an image: (height / patch_size) x (width / patch_size).
    images : int
        Images encoded at once.
    tp : int
        GPUs that share every layer; 1 where each GPU encodes images of its own.

    Returns
    -------
    EncoderTime
        Kernels alone.

    Raises
    ------
    ModelError
        If the model has no vision encoder, or it cannot be split so.
    MissingTableError
        If no table serves an operator.

    Notes
    -----
    Position embeddings, rotation and reading the pixels are left out: they stream little beside the rest. So
    is what brings the encoder's output to the text model's width where vision_config names no
    out_hidden_size (Gemma, Llama 4, Pixtral, InternVL). Each GPU of ``tp`` embeds and merges all patches.

    Examples
    --------
    >>> import fastroof
    >>> image_us("qwen3-vl-8b", fastroof.load_tables("h100"), patches=4096).tokens
    1024
    """
    model = model if isinstance(model, ModelSpec) else load_model(model)
    encoder = model.vision
    if encoder is None:
        raise ModelError(f"{model.name} has no vision encoder: its config.json has no vision_config")
    whole_number("patches", patches, error=PlanError)
    whole_number("images", images, error=PlanError)
    whole_number("tp", tp, error=PlanError)
    tokens = -(-patches // encoder.merge**2)
    if patches * images > MOST_PATCHES:
        raise PlanError(f"{images} images of {patches} patches are more than {MOST_PATCHES:,} at once")
    before, layer, after = encoder.calls(tp)
    curves, layers = TableCurves(tables), encoder.num_layers or 0
    parts = [
        *(_part(curves, call, patches * images, 1) for call in before),
        *(_part(curves, call, patches * images, layers) for call in layer),
        _attention(encoder, tables, patches, images, tp),
        *(_part(curves, call, tokens * images, 1) for call in after),
    ]
    return EncoderTime(
        sum(part.total_us for part in parts), max(part.origin for part in parts), tokens, tuple(parts)
    )


def _part(curves: TableCurves, call: RowOperator, rows: int, layers: int) -> EncoderPart:
    latency_us, origin = curves.row_values(call, rows)
    return EncoderPart(call.name, float(latency_us[rows]) * call.times * layers, int(origin[rows]))


def _attention(encoder: VisionEncoder, tables: Tables, patches: int, images: int, tp: int) -> EncoderPart:
    heads = (encoder.num_heads or 0) // tp
    sizes: dict[str, Any] = {"num_q_heads": heads, "num_kv_heads": heads, "head_dim": encoder.head_dim}
    found = tables.lookup("encoder_attention", **sizes, kv_len=patches, batch_size=images)
    own_us, origin = float(found.latency_us), int(found.origin)
    return EncoderPart("attention", own_us * (encoder.num_layers or 0), origin)
