"""Sizes at the public edge: integers or integer arrays of at least 1, broadcast together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fastroof.errors import FastroofError, LookupInputError

__all__ = ["LARGEST", "checked_size_array", "checked_sizes", "checked_text"]

LARGEST: dict[str, int] = {
    "n": 2**24,
    "k": 2**24,
    "batch_size": 2**24,
    "num_gpus": 2**16,
    "num_q_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**16,
    "message_bytes": 2**40 - 1,
}
"""Largest size each argument may have; 2**28 where it is not listed."""

LARGEST_OTHER = 2**28


def checked_size_array(
    name: str, value: Any, minimum: int = 1, error: type[FastroofError] = LookupInputError
) -> npt.NDArray[np.int64]:
    """One argument as an int64 array, or an error that names it.

    Parameters
    ----------
    name : str
        The argument's name.
    value : int or array_like of int
        Integers; floats are taken where they hold whole numbers.
    minimum : int
        Least allowed value.
    error : type
        What to raise.

    Returns
    -------
    ndarray of int64
        Of the value's own shape.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        raise error(f"{name} must be an integer or an array of integers, got {value!r:.60}") from None
    largest = LARGEST.get(name, LARGEST_OTHER)
    if array.dtype.kind not in "iuf":
        raise error(f"{name} must be an integer or an array of integers, got {value!r:.60}")
    if array.size == 0:
        return np.zeros(array.shape, np.int64)
    if array.dtype.kind == "f":
        wrong = ~np.isfinite(array) | (array != np.floor(array))
        if wrong.any():
            raise error(f"{name} must be a whole number, got {array[wrong].flat[0]}")
    low, high = array.min(), array.max()
    if low < minimum:
        raise error(f"{name} must be at least {minimum}, got {low}")
    if high > largest:
        raise error(f"{name} must be at most {largest}, got {high}")
    return array.astype(np.int64)


def checked_sizes(
    given: Mapping[str, Any],
) -> tuple[dict[str, npt.NDArray[np.int64]], tuple[int, ...]]:
    """All arguments of a lookup as flat int64 arrays of one length, and the broadcast shape.

    Raises
    ------
    LookupInputError
        Naming the argument that is not a size, or the shapes that do not broadcast.
    """
    arrays = {name: checked_size_array(name, value) for name, value in given.items()}
    try:
        shape = np.broadcast_shapes(*(a.shape for a in arrays.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {a.shape}" for name, a in arrays.items() if a.ndim)
        raise LookupInputError(f"shapes do not broadcast: {shapes}") from None
    flat = {name: np.broadcast_to(a, shape).ravel() for name, a in arrays.items()}
    return flat, shape


def checked_text(name: str, value: Any) -> str:
    """One name, such as a dtype; arrays of names are not broadcast."""
    if not isinstance(value, str):
        raise LookupInputError(f"{name} must be one name such as 'bf16', got {value!r:.60}")
    return value
