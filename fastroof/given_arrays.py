"""Numbers given as arrays: one rule for every function that accepts them.

Accepted are Python and NumPy numbers, single or in lists and tuples, arrays of any stride and byte order, and
buffers of numbers (``array.array``, memoryviews of arrays). Rejected are bools, also among numbers
(``[1, True]``, ``true`` in JSON), text, bytes and masked arrays, which NumPy would convert to numbers, and
missing values. Sizes are integers; lookups in tables and traces also accept floats that are whole numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array
from fastroof.checks import shown
from fastroof.errors import FastroofError

_NO_NUMBERS: Final = (bool, np.bool_, str, bytes, bytearray)
_MOST_DIMENSIONS: Final = 64


def is_masked(kind: type) -> bool:
    """Return whether a type is that of masked arrays; importing them takes 10 ms."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and issubclass(kind, masked.MaskedArray)


def number_array(value: Any) -> Array | None:
    """Return a given value as an array of integers or floats; None if it is neither."""
    if type(value) is not np.ndarray and not _holds_numbers(value):
        return None
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    if array.dtype.kind in "iuf" and array.dtype.names is None:
        return array
    # the dtype of an empty list carries no information
    return np.zeros(array.shape, np.int64) if not array.size and array.dtype.kind != "V" else None


def common_shape(shapes: Mapping[str, tuple[int, ...]], error: type[FastroofError]) -> tuple[int, ...]:
    """Return the shape to which named arrays broadcast, or raise with the shapes of all."""
    try:
        return np.broadcast_shapes(*shapes.values())
    except ValueError:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items() if shape)
        raise error(f"shapes do not broadcast: {listed}") from None


def refused(value: Any) -> str:
    """Return the end of an error message for a value that :func:`number_array` rejects."""
    if is_masked(type(value)):
        return f"and masked entries are not numbers, got {shown(value)}"
    return f"got {shown(value)}"


def _holds_numbers(value: Any) -> bool:
    """Return whether a value contains nothing that NumPy would convert to a number by mistake."""
    level = [value]
    for _ in range(_MOST_DIMENSIONS + 1):
        # check the set of types: a list of a million integers has only one
        types = set(map(type, level))
        if any(issubclass(one, _NO_NUMBERS) or is_masked(one) for one in types):
            return False
        if memoryview in types and any(_is_of_bytes(one) for one in level):
            return False
        nested = {one for one in types if issubclass(one, list | tuple)}
        if not nested:
            return True
        lists = level if nested == types else [one for one in level if type(one) in nested]
        level = list(chain.from_iterable(lists))
    return False


def _is_of_bytes(value: Any) -> bool:
    return isinstance(value, memoryview) and value.itemsize == 1 and isinstance(value.obj, bytes | bytearray)
