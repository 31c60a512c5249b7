"""Arrays of requests, one number each: checked where they come in, and sorted."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastroof.arrays import Array, Bools
from fastroof.checks import shown
from fastroof.errors import TraceError
from fastroof.given_arrays import number_array, refused

__all__ = ["numbers_in_a_row", "refuse_where", "sorted_by_arrival"]


def numbers_in_a_row(where: str, name: str, value: Any, kinds: str) -> Array:
    """Return an array of numbers of one dimension; anything else is refused by name."""
    needed = "numbers" if "f" in kinds else "whole numbers"
    array = number_array(value)
    if array is None:
        raise TraceError(f"{where}: {name} must hold {needed}, {refused(value)}")
    if array.ndim != 1:
        raise TraceError(f"{where}: {name} must be one-dimensional, got shape {array.shape}")
    if array.dtype.kind not in kinds and array.size:
        raise TraceError(f"{where}: {name} must hold {needed}, got {array.dtype} in {shown(value)}")
    return array


def refuse_where(where: str, name: str, values: Array, wrong: Bools, needed: str) -> None:
    """Raise what a row must be, of the first row that is wrong, if any is."""
    if wrong.any():
        row = int(np.argmax(wrong))
        more = int(np.count_nonzero(wrong)) - 1
        others = f" ({more} more rows likewise)" if more else ""
        raise TraceError(f"{where}, row {row}: {name} {needed}, got {values[row]}{others}")


def sorted_by_arrival(arrays: dict[str, Any]) -> dict[str, Any]:
    """Sort requests by arrival, stable, their blocks with them."""
    arrival_s = arrays["arrival_s"]
    if not (np.diff(arrival_s) < 0).any():
        return arrays | {"order": np.arange(len(arrival_s), dtype=np.int64)}
    order = np.argsort(arrival_s, kind="stable").astype(np.int64)
    sorted_rows = {name: values[order] for name, values in arrays.items() if not name.startswith("hash_")}
    if "hash_ids" in arrays:
        starts, counts = arrays["hash_offsets"][:-1][order], np.diff(arrays["hash_offsets"])[order]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
        sorted_rows |= {"hash_ids": arrays["hash_ids"][places], "hash_offsets": offsets}
    return sorted_rows | {"order": order}
