"""Checks of the arrays that a trace is made of, and their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastroof.arrays import Array, Bools, Longs
from fastroof.checks import is_whole_number, shown, whole_number
from fastroof.errors import TraceError
from fastroof.given_arrays import number_array, refused
from fastroof.traces import trace_sessions


def numbers_in_a_row(where: str, name: str, value: Any, kinds: str, count: int | None = None) -> Array:
    """Return a one-dimensional array of numbers, one a request if ``count`` is given, or raise an error."""
    needed = "numbers" if "f" in kinds else "whole numbers"
    array = number_array(value)
    if array is None:
        raise TraceError(f"{where}: {name} must hold {needed}, {refused(value)}")
    if array.ndim != 1:
        raise TraceError(f"{where}: {name} must be one-dimensional, got shape {array.shape}")
    if array.dtype.kind not in kinds and array.size:
        raise TraceError(f"{where}: {name} must hold {needed}, got {array.dtype} in {shown(value)}")
    if count is not None and len(array) != count:
        raise TraceError(f"{where}: arrival_s has {count} requests, {name} {len(array)}")
    return array


def refuse_where(where: str, name: str, values: Array, wrong: Bools, needed: str) -> None:
    """Raise an error for the first invalid row, if any."""
    if wrong.any():
        row = int(np.argmax(wrong))
        more = int(np.count_nonzero(wrong)) - 1
        others = f" (and {more} more rows)" if more else ""
        raise TraceError(f"{where}, row {row}: {name} {needed}, got {values[row]}{others}")


def sorted_by_arrival(arrays: dict[str, Any]) -> dict[str, Any]:
    """Sort requests, with their blocks and links, by arrival, parents first; stable."""
    arrival_s = arrays["arrival_s"]
    depth = arrays.pop("depth", None)
    if not (np.diff(arrival_s) < 0).any() and are_parents_first(arrays):
        return arrays | {"order": np.arange(len(arrival_s), dtype=np.int64)}
    order = np.argsort(arrival_s, kind="stable").astype(np.int64)
    if depth is not None and (np.diff(depth[order]) < 0)[np.diff(arrival_s[order]) == 0].any():
        order = np.lexsort((depth, arrival_s)).astype(np.int64)
    sorted_rows = {
        name: values[order] for name, values in arrays.items() if not name.startswith(("hash_", "parent"))
    }
    if "parents" in arrays:
        sorted_rows |= trace_sessions.reordered(order, arrays["parents"], arrays["parent_offsets"])
    if "hash_ids" in arrays:
        ids, offsets = ids_at(arrays["hash_ids"], arrays["hash_offsets"], order)
        sorted_rows |= {"hash_ids": ids, "hash_offsets": offsets}
    return sorted_rows | {"order": order}


def ids_at(ids: Longs, offsets: Longs, rows: Longs) -> tuple[Longs, Longs]:
    """Return the ids of some requests' blocks, in the order of ``rows``, and where each one's begin."""
    counts = np.diff(offsets)[rows]
    return ids[trace_sessions.places_of(offsets[:-1][rows], counts)], np.append(0, np.cumsum(counts))


def is_text(name: str) -> bool:
    """Whether a name can be written: not half of a surrogate pair."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def are_parents_first(arrays: dict[str, Any]) -> bool:
    """Whether every request comes after its parents."""
    if "parents" not in arrays:
        return True
    return bool((arrays["parents"] < trace_sessions.child_of_link(arrays["parent_offsets"])).all())


def checked_hashes(
    where: str, ids: Any, offsets: Any, size: Any, input_tokens: Array, most: int
) -> dict[str, Any]:
    """Return the ids of prompts' blocks and where each prompt's begin, checked; none if none are given."""
    is_given = (ids is not None, offsets is not None, not (isinstance(size, int) and size == 0))
    if not any(is_given):
        return {}
    if not all(is_given):
        raise TraceError(f"{where}: give hash_ids, hash_offsets and hash_block_size, or none of them")
    size = whole_number("hash_block_size", size, 1, most, TraceError)
    ids = numbers_in_a_row(where, "hash_ids", ids, "iu").astype(np.int64)
    offsets = numbers_in_a_row(where, "hash_offsets", offsets, "iu").astype(np.int64)
    if len(offsets) != len(input_tokens) + 1 or offsets[0] != 0 or offsets[-1] != len(ids):
        raise TraceError(
            f"{where}: hash_offsets must be {len(input_tokens) + 1} numbers from 0 to the {len(ids)} ids"
        )
    needed = -(-input_tokens.astype(np.int64) // size)
    wrong = np.flatnonzero(np.diff(offsets) != needed)
    if len(wrong):
        row = int(wrong[0])
        raise TraceError(
            f"{where}, row {row}: a prompt of {input_tokens[row]} tokens has {needed[row]} blocks "
            f"of {size}, got {offsets[row + 1] - offsets[row]} hash_ids"
        )
    return {"hash_ids": ids, "hash_offsets": offsets}


def check_left_out(where: str, left_out: Any) -> None:
    """Refuse counts of left-out rows that are not numbers by reason."""
    if not isinstance(left_out, Mapping) or not all(
        isinstance(reason, str) and is_whole_number(rows, 0) for reason, rows in left_out.items()
    ):
        raise TraceError(f"{where}: left_out must map reasons to numbers of rows, got {shown(left_out)}")
