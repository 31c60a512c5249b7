"""Numbers given as arrays: one rule for every function that takes them.

A number is Python's or NumPy's, alone, in lists and tuples, in an array of any stride and byte order, or in
what lends its memory as numbers (``array.array``, memoryviews of arrays). It is no bool, neither alone nor
among numbers (``[1, True]``, ``true`` in JSON); no text, also of digits; no bytes, whose elements would be
taken for numbers; no array with a mask, whose masked elements would be taken for numbers; and nothing that is
missing. Sizes are integers; lookups in tables and traces also take floats that hold whole numbers.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array
from fastroof.checks import shown

_NO_NUMBERS: Final = (bool, np.bool_, str, bytes, bytearray, np.ma.MaskedArray)
_MOST_DIMENSIONS: Final = 64


def number_array(value: Any) -> Array | None:
    """Return what was given as an array of integers or floats; None where it is neither."""
    if type(value) is not np.ndarray and not _holds_numbers(value):
        return None
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    if array.dtype.kind in "iuf" and array.dtype.names is None:
        return array
    # an empty list has a type that says nothing
    return np.zeros(array.shape, np.int64) if not array.size and array.dtype.kind != "V" else None


def refused(value: Any) -> str:
    """Say what was given that :func:`number_array` refuses, after what would have done."""
    if isinstance(value, np.ma.MaskedArray):
        return f"and masked entries are not numbers, got {shown(value)}"
    return f"got {shown(value)}"


def _holds_numbers(value: Any) -> bool:
    """Whether a value contains nothing that NumPy would convert to a number by mistake."""
    level = [value]
    for _ in range(_MOST_DIMENSIONS + 1):
        # by types: a list of a million integers has one
        types = set(map(type, level))
        if any(issubclass(one, _NO_NUMBERS) for one in types):
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
