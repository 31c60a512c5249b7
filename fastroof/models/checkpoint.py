"""What a checkpoint's weights and cache are stored in."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UNQUANTISED", "Checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """Formats of a published checkpoint; which modules have them, its kinds of layers say.

    Attributes
    ----------
    dtype : str
        Of its linear layers or experts: what ``dtype="auto"`` means.
    kv_dtype : str or None
        Of its KV cache; None where it does not say, and bf16 is meant.
    method : str
        As a person reads it: ``"fp8, blocks of 128 x 128, dynamic scales"``; empty for plain bf16.
    """

    dtype: str = "bf16"
    kv_dtype: str | None = None
    method: str = ""


UNQUANTISED = Checkpoint()
"""Weights in bf16."""
