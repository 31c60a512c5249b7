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
    head_dtype : str
        Of the LM head.
    scale_bytes : tuple of (str, float)
        Bytes of scales a weight in a format, where they are the checkpoint's choice: its group size.
    static_scales : bool
        Whether it brings the scales of its fp8 layers' inputs, so that no kernel looks for them.
    """

    dtype: str = "bf16"
    kv_dtype: str | None = None
    method: str = ""
    head_dtype: str = "bf16"
    scale_bytes: tuple[tuple[str, float], ...] = ()
    static_scales: bool = False

    @property
    def formats(self) -> tuple[str, str]:
        """What ``auto`` means of the linear layers, and of the cache."""
        return self.dtype, self.kv_dtype or "bf16"


UNQUANTISED = Checkpoint()
"""Weights in bf16."""
