"""The vision encoder that stands before a text model: its sizes, which no step runs."""

from __future__ import annotations

from dataclasses import dataclass

from fastroof.models.hf import Fields

__all__ = ["VisionEncoder", "vision_encoder"]


@dataclass(frozen=True)
class VisionEncoder:
    """Sizes of a vision encoder.

    It runs once an image, before the prompt: it is no part of a step, of the weights that a model counts or
    of the memory that a plan has. Its attention can be looked up by itself (operator encoder_attention).
    What the configuration does not say is None.

    Attributes
    ----------
    num_layers, hidden, intermediate : int or None
        Its layers, their width and that of their MLP.
    num_heads, head_dim : int or None
        Its attention.
    patch_size : int or None
        Pixels on a side of what is one token before tokens are merged.
    """

    num_layers: int | None
    hidden: int | None
    intermediate: int | None
    num_heads: int | None
    head_dim: int | None
    patch_size: int | None


def vision_encoder(fields: Fields) -> VisionEncoder | None:
    """Read the encoder of a wrapper's ``vision_config``; None where it has none."""
    vision = fields.part("vision_config")
    if vision is None:
        return None
    hidden = vision.optional_size("hidden_size")
    num_heads = vision.optional_size("num_heads", vision.optional_size("num_attention_heads"))
    head_dim = vision.optional_size("head_dim")
    if head_dim is None and hidden is not None and num_heads is not None:
        head_dim = hidden // num_heads
    return VisionEncoder(
        num_layers=vision.optional_size("depth", vision.optional_size("num_hidden_layers")),
        hidden=hidden,
        intermediate=vision.optional_size("intermediate_size"),
        num_heads=num_heads,
        head_dim=head_dim,
        patch_size=vision.optional_size("patch_size"),
    )
