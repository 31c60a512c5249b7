"""Which rows of a sweep over capacities are kept, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastroof.sweep.capacities.spec import CapacitySpec

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["best_rows", "ordered_rows", "reduced_rows"]


def _by_group(spec: CapacitySpec, rows: pa.Table) -> dict[tuple[Any, ...], list[int]]:
    """Places of the rows of each group, the most requests a second of a GPU first; equals as they come."""
    per_gpu = rows["requests_per_s_per_gpu"].to_pylist()
    keys = [rows[name].to_pylist() for name in spec.per]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, key in enumerate(zip(*keys, strict=True) if keys else [()] * rows.num_rows):
        groups.setdefault(key, []).append(place)
    return {key: sorted(places, key=lambda place: -per_gpu[place]) for key, places in groups.items()}


def reduced_rows(spec: CapacitySpec, rows: pa.Table) -> pa.Table:
    """Keep the best of each group, or all; the order stays."""
    if spec.keep == "all":
        return rows
    kept = [place for places in _by_group(spec, rows).values() for place in places[: spec.k]]
    return _taken(rows, sorted(kept))


def ordered_rows(spec: CapacitySpec, rows: pa.Table) -> pa.Table:
    """Put rows in the order of the file: by group, as they first come, the best first."""
    return _taken(rows, [place for places in _by_group(spec, rows).values() for place in places])


def best_rows(spec: CapacitySpec, rows: pa.Table) -> pa.Table:
    """Take the best row of each group, of those that serve anything."""
    per_gpu = rows["requests_per_s_per_gpu"].to_pylist()
    firsts = (places[0] for places in _by_group(spec, rows).values())
    return _taken(rows, sorted(place for place in firsts if per_gpu[place] > 0.0))


def _taken(rows: pa.Table, places: list[int]) -> pa.Table:
    """Take some rows; none, too."""
    import numpy as np

    return rows.take(np.array(places, np.int64))
