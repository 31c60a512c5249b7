"""The same values in every layout that an array can have in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

Values = np.ndarray[Any, np.dtype[Any]]


def unaligned(values: Values) -> Values:
    """The same values one byte off."""
    buffer = np.empty(values.nbytes + 1, np.uint8)
    moved = np.ndarray(values.shape, values.dtype, buffer.data, 1)
    moved[...] = values
    assert not moved.flags.aligned or not values.size or values.itemsize == 1
    return moved


def read_only(values: Values) -> Values:
    copied = values.copy()
    copied.flags.writeable = False
    return copied


LAYOUTS: Final[dict[str, Callable[[Values], Values]]] = {
    "contiguous": np.copy,
    "read-only": read_only,
    # the neighbours are other numbers, so that a loop that ignores strides answers wrong
    "a slice": lambda values: np.concatenate([values[:1] * 0 + 7, values, values[:1] * 0 + 7])[
        1 if len(values) else 0 :
    ][: len(values)],
    "a column": lambda values: np.stack([values, values * 0 + 3], axis=-1)[..., 0],
    "every other": lambda values: np.stack([values, values * 0 + 5], axis=1).reshape(-1, *values.shape[1:])[
        ::2
    ],
    "reversed": lambda values: values[::-1].copy()[::-1],
    "in Fortran's order": lambda values: np.asfortranarray(np.stack([values, values * 0 + 3]))[0],
    "unaligned": unaligned,
    "big-endian": lambda values: values.astype(values.dtype.newbyteorder(">")),
}
READ_IN_PLACE: Final = ("contiguous", "read-only", "a slice", "unaligned")
