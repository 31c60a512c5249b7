"""Conventions of every operator's FLOPs and compulsory bytes.

Each operator's file has its own formulas. They take numbers or arrays (broadcast) and work in float64, so
that products of sizes do not overflow. A multiply-add counts two FLOPs; causal attention the exact half.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastroof.arrays import Array, Floats

__all__ = ["Real", "as_floats", "sizes_as_floats"]

Real = Any
"""A number or an array of numbers."""


def as_floats(x: Real) -> Floats:
    """A size or sizes in float64."""
    # packing takes the roofline of a thousand curves, at an n and a k each: a fifth of the time of an array
    return np.float64(x) if isinstance(x, float) else np.asarray(x, np.float64)  # type: ignore[return-value]


def sizes_as_floats(columns: Mapping[str, Array]) -> dict[str, Array]:
    """Columns of rows with their sizes in float64, words as they are."""
    return {
        name: values if np.asarray(values).dtype.kind == "O" else as_floats(values)
        for name, values in columns.items()
    }
