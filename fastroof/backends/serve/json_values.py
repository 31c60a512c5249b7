"""Values as JSON holds them: no NaN, no infinity, no number of NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastroof.arrays import Floats

__all__ = ["floats_for_json", "for_json"]


def for_json(value: Any) -> Any:
    """Return a value as JSON has it: null for what is no finite number.

    Examples
    --------
    >>> for_json({"mfu": float("nan"), "calls": (np.int64(32), 1.5)})
    {'mfu': None, 'calls': [32, 1.5]}
    """
    if isinstance(value, dict):
        return {name: for_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def floats_for_json(values: Floats) -> list[Any]:
    """Return an array as lists, null for what is no finite number.

    Examples
    --------
    >>> floats_for_json(np.array([[1.5, np.nan], [2.0, np.inf]]))
    [[1.5, None], [2.0, None]]
    """
    listed: list[Any] = values.tolist()
    return listed if np.isfinite(values).all() else list(for_json(listed))
