"""Sizes at the public edge: integers or integer arrays of at least 1, broadcast together.

Loops take float64 arrays of one length, contiguous and writable, so that one compiled version serves
every caller. Arguments of any stride and number type are copied into such arrays a chunk at a time, and
checked on the way: 0.1 ns a size for contiguous int32 and int64, predicted 0.3, and 0.3 for all else. A
compiled version of every loop for every type costs its compilation, and a converted copy of everything
8 bytes a size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.checks import shown
from fastroof.compiled.points import copied_sizes
from fastroof.errors import LookupInputError
from fastroof.given_arrays import number_array, refused

__all__ = ["CHUNK", "LARGEST", "Points", "checked_points", "checked_text"]


LARGEST: Final[dict[str, int]] = {
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

LARGEST_OTHER: Final = 2**28

LEAST: Final = {"sms": 0, "window": 0}
"""Smallest size an argument may have; 1 where it is not listed."""

NATIVE: Final = (np.dtype(np.int64), np.dtype(np.int32))

CHUNK: Final = 32_768
"""Points at a time: a copied argument is 256 KiB of a second-level cache, and the 10 us that a chunk costs
are 0.3 ns a point."""


def _checked_size(name: str, value: Any) -> int:
    """One size in its range, or an error that names the argument."""
    if type(value) is not int and (not math.isfinite(value) or value != math.floor(value)):
        raise LookupInputError(f"{name} must be a whole number, got {shown(value)}")
    least = LEAST.get(name, 1)
    if value < least:
        raise LookupInputError(f"{name} must be at least {least}, got {shown(value)}")
    largest = LARGEST.get(name, LARGEST_OTHER)
    if value > largest:
        raise LookupInputError(f"{name} must be at most {largest}, got {shown(value)}")
    return int(value)


def _number_array(name: str, value: Any) -> Array:
    """The argument as an array of integers or floats, which need not be copied nor checked for that."""
    array = number_array(value)
    if array is None:
        raise LookupInputError(f"{name} must be an integer or an array of integers, {refused(value)}")
    return array


@dataclass(frozen=True, eq=False)
class Points:
    """The sizes of a lookup's points."""

    whole: dict[str, int]
    arrays: dict[str, Array]
    shape: tuple[int, ...]

    def chunks(self, names: Sequence[str]) -> Iterator[tuple[slice, list[Floats], dict[str, Floats]]]:
        """Yield the points in order, at most CHUNK at a time; arrays are good until the next ones."""
        rows = [*names, *(name for name in self.arrays if name not in names)]
        scratch = np.empty((len(rows), min(math.prod(self.shape), CHUNK)))
        buffers = dict(zip(rows, scratch, strict=True))
        for name in names:
            if name in self.whole:
                buffers[name][:] = self.whole[name]
        for part, sources in self._flat_chunks():
            sizes = {name: buffer[: part.stop - part.start] for name, buffer in buffers.items()}
            for name, source in zip(self.arrays, sources, strict=True):
                row, largest = sizes[name], float(LARGEST.get(name, LARGEST_OTHER))
                if not _is_native(source):
                    np.copyto(row, source, casting="unsafe")
                    source = row
                least = float(LEAST.get(name, 1))
                if not copied_sizes(source, least, largest, row):
                    with np.errstate(invalid="ignore"):
                        good = (row >= least) & (row <= largest) & (row == np.floor(row))
                    _checked_size(name, row[~good][0].item())
            yield part, [sizes.pop(name) for name in names], sizes

    def _flat_chunks(self) -> Iterator[tuple[slice, Sequence[Array]]]:
        arrays = list(self.arrays.values())
        count = math.prod(self.shape)
        if not count:
            return
        if all(a.shape == self.shape and (a.ndim == 1 or a.flags.c_contiguous) for a in arrays):
            flat = [a.reshape(-1) for a in arrays]
            for start in range(0, count, CHUNK):
                part = slice(start, min(start + CHUNK, count))
                yield part, [a[part] for a in flat]
            return
        # np.nditer broadcasts and walks any strides in the flattened order, through buffers of its own
        wide = [np.broadcast_to(a, self.shape) for a in arrays]
        with np.nditer(
            wide, ["external_loop", "buffered"], [["readonly"]] * len(wide),
            op_dtypes=[np.float64] * len(wide), order="C", casting="unsafe", buffersize=CHUNK,
        ) as walk:  # fmt: skip
            start = 0
            while not walk.finished:
                sources: Any = walk.value if len(wide) > 1 else (walk.value,)
                yield slice(start, start + len(sources[0])), sources
                start += len(sources[0])
                walk.iternext()


def _is_native(array: Array) -> bool:
    """Whether the loop that copies sizes is compiled for this array; others are copied twice."""
    flags = array.flags
    return array.dtype in NATIVE and flags.c_contiguous and flags.aligned and flags.writeable


def checked_points(given: Mapping[str, Any]) -> Points:
    """Sort the arguments of a lookup into single sizes and arrays, and broadcast them."""
    whole: dict[str, int] = {}
    arrays: dict[str, Array] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in given.items():
        if type(value) is int:
            whole[name] = _checked_size(name, value)
            continue
        array = _number_array(name, value)
        if array.ndim:
            shapes[name] = array.shape
        if array.size == 1:
            whole[name] = _checked_size(name, array.item())
        else:
            arrays[name] = array
    try:
        shape = np.broadcast_shapes(*shapes.values()) if shapes else ()
    except ValueError:
        said = ", ".join(f"{name} {s}" for name, s in shapes.items())
        raise LookupInputError(f"shapes do not broadcast: {said}") from None
    return Points(whole, arrays, shape)


def checked_text(name: str, value: Any) -> str:
    """One name, such as a dtype; arrays of names are not broadcast."""
    if not isinstance(value, str):
        raise LookupInputError(f"{name} must be one name such as 'bf16', got {shown(value)}")
    return value
