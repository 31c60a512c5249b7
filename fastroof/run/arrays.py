"""Integer arrays of any kind at the edge, and as the few types that loops are compiled for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from fastroof.arrays import Ints
from fastroof.checks import shown
from fastroof.errors import BatchError, FastroofError
from fastroof.given_arrays import number_array, refused

__all__ = ["CHUNK", "as_loops_read", "chunks", "int_array", "loop_array"]


CHUNK: Final = 2**16
"""Elements that are converted at once: they stay in the cache."""


def int_array(name: str, value: Any, error: type[FastroofError] = BatchError) -> Ints:
    """An array of integers as it is; anything else is refused by name."""
    array = number_array(value)
    if array is None:
        raise error(f"{name} must hold integers, {_found(value)}")
    if array.dtype.kind == "f":
        if array.size:
            raise error(f"{name} must hold integers, got {array.dtype} in {shown(value)}")
        return np.zeros(array.shape, np.int64)
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise error(f"{name} must fit int64, got {array.max()}")
    return array


def _found(value: Any) -> str:
    """What was given instead of numbers, and what kind of thing it is."""
    if isinstance(value, np.ma.MaskedArray):
        return refused(value)
    kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
    return f"got {kind} in {shown(value)}"


_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


class _Writable:
    """The memory of a read-only array, described to NumPy as writable; loops only read it."""

    def __init__(self, array: Ints) -> None:
        self.array = array
        self.__array_interface__ = {
            **array.__array_interface__,
            "data": (array.__array_interface__["data"][0], False),
        }


def loop_array(array: Ints) -> Ints:
    """A contiguous int32 or int64 array as loops take it; read-only ones would be a type of their own."""
    return array if array.flags.writeable else np.asarray(_Writable(array))


def as_loops_read(arrays: list[Ints], shape: tuple[int, ...]) -> list[Ints] | None:
    """Flat views of arrays that loops can read in place, or None where one has to be converted."""
    first = arrays[0].dtype
    if not (first is _INT64 or first is _INT32 or first in (_INT64, _INT32)):
        return None
    for array in arrays:
        # carray: C-contiguous, aligned and writable, in one question
        usable = array.flags.carray or (array.flags.c_contiguous and array.flags.aligned)
        dtype = array.dtype
        if not (dtype is first or dtype == first) or array.shape != shape or not usable:
            return None
    return [loop_array(array).reshape(-1) for array in arrays]


def chunks(arrays: list[Ints], part: slice) -> Iterator[tuple[slice, list[Ints]]]:
    """Convert a part of arrays, broadcast and in C order, to int64 chunk by chunk."""
    if part.start == part.stop:
        return
    iterator: Any = np.nditer(
        tuple(arrays),
        flags=["external_loop", "buffered", "ranged"],
        op_flags=[["readonly"]] * len(arrays),
        op_dtypes=[np.int64] * len(arrays),
        casting="unsafe",  # uint64 that does not fit was refused
        order="C",
        buffersize=CHUNK,
    )
    iterator.iterrange = (part.start, part.stop)
    scratch = [np.empty(min(CHUNK, part.stop - part.start), np.int64) for _ in arrays]
    start = part.start
    for values in iterator:
        # one operand comes as an array, several as a tuple
        columns = values if isinstance(values, tuple) else (values,)
        for first in range(0, len(columns[0]), CHUNK):
            count = min(CHUNK, len(columns[0]) - first)
            for buffer, column in zip(scratch, columns, strict=True):
                buffer[:count] = column[first : first + count]
            yield slice(start, start + count), [buffer[:count] for buffer in scratch]
            start += count
