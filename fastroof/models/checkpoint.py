"""What a checkpoint's weights and cache are stored in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from fastroof.checks import shown
from fastroof.errors import ModelError
from fastroof.models.checked_fields import checked_fields
from fastroof.units import DTYPE_BYTES

__all__ = ["UNQUANTISED", "Checkpoint", "check_formats"]


_MOST_SCALE_BYTES: Final = 8
"""Of a weight: a scale of its own would take less."""


def check_formats(given: Iterable[str]) -> None:
    """Raise ModelError where a format is none of :data:`fastroof.units.DTYPE_BYTES`."""
    for name in given:
        if name not in DTYPE_BYTES:
            raise ModelError(f"a format must be one of {', '.join(DTYPE_BYTES)}, got {shown(name)}")


@dataclass(frozen=True)
@checked_fields
class Checkpoint:
    """Formats of a published checkpoint; which modules have them, its kinds of layers say."""

    dtype: str = "bf16"
    kv_dtype: str | None = None
    method: str = ""
    head_dtype: str = "bf16"
    scale_bytes: tuple[tuple[str, float], ...] = ()
    static_scales: bool = False

    def __post_init__(self) -> None:
        """Refuse formats that nothing is known of."""
        check_formats((self.dtype, self.head_dtype, self.kv_dtype or "bf16", *dict(self.scale_bytes)))
        for name, scale_bytes in self.scale_bytes:
            if not 0 <= scale_bytes <= _MOST_SCALE_BYTES:
                raise ModelError(f"scale_bytes of {name} must be from 0 to {_MOST_SCALE_BYTES}")
        object.__setattr__(self, "scale_bytes", tuple((name, float(each)) for name, each in self.scale_bytes))

    @property
    def formats(self) -> tuple[str, str]:
        """What ``auto`` means of the linear layers, and of the cache."""
        return self.dtype, self.kv_dtype or "bf16"


UNQUANTISED = Checkpoint()
"""Weights in bf16."""
