"""Rows of aiconfigurator-core's files as rows of an operator: which are kept, and how they are joined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from fastroof.arrays import Array, Bools, Longs
from fastroof.config.gpu import GpuSpec
from fastroof.load.common_points import codes_of
from fastroof.load.package_places import Place
from fastroof.load.possible_sizes import impossible_sizes
from fastroof.load.rows import word_codes
from fastroof.load.write import sort_rows
from fastroof.operators.foreign_rows import ForeignRows, Raw
from fastroof.operators.registry import OPERATORS
from fastroof.units import US_PER_S

__all__ = ["PACKAGE_FILES", "Part", "joined", "point_codes", "select"]


_FEW: Final = 1e-3
"""Share of a dtype's rows that may be faster than its peak by chance."""

_CHANCE: Final = 3
"""So many may be however few rows there are."""

PACKAGE_FILES: Final = tuple(
    (operator.name, file) for operator in OPERATORS.values() for file in operator.package_files
)
"""Operator and file, for every file of the package that becomes rows of an operator."""


@dataclass(frozen=True)
class Part:
    """The rows that one file gave one operator."""

    place: Place
    name: str
    raw: Raw
    columns: dict[str, Array]
    left_out: dict[str, int]


def select(operator: str, rows: ForeignRows, gpu: GpuSpec) -> tuple[dict[str, Array], dict[str, int]]:
    """Return the rows to keep and, by the first reason that holds, how many are left out."""
    keep = np.ones(len(rows.columns["latency_us"]), bool)
    left_out = {}
    for reason, mask in rows.left_out.items():
        count = int((keep & mask).sum())
        if count:
            left_out[reason] = count
        keep &= ~mask
    columns = {name: values[keep] for name, values in rows.columns.items()}
    slower = _slower_kernels(operator, columns)
    if slower.any():
        left_out["slower of two kernels for the same sizes"] = int(slower.sum())
        columns = {name: values[~slower] for name, values in columns.items()}
    # the work of sizes that no call has says nothing
    for find in (_no_sizes, partial(_impossible, gpu=gpu)):
        impossible = find(operator, columns)
        if impossible:
            left_out |= {reason: int(mask.sum()) for reason, mask in impossible.items()}
            possible = ~np.any(list(impossible.values()), axis=0)
            columns = {name: values[possible] for name, values in columns.items()}
    return columns, left_out


def _no_sizes(operator: str, columns: Mapping[str, Array]) -> dict[str, Bools]:
    """Mark, by reason, rows of sizes that no call can have."""
    schema = OPERATORS[operator]
    found = {f"more {one.size} than {one.largest}": one.rows for one in impossible_sizes(schema, columns)}
    for column in (*schema.keys, *schema.axes):
        if column.kind == "int":
            below: Bools = columns[column.name] < column.minimum
            if below.any():
                found[f"{column.name} below {column.minimum}"] = below
    return found


def _impossible(operator: str, columns: Mapping[str, Array], gpu: GpuSpec) -> dict[str, Bools]:
    """Mark, by reason, rows that the card cannot have run."""
    work = OPERATORS[operator].work(columns, gpu)
    dtypes = columns.get("dtype", columns.get("kv_dtype", np.full(len(work.flops), "bf16", object)))
    no_units = np.isnan(work.peak_flops_per_s) & ~np.isnan(work.flops)
    # sizes as large as any may be beat every peak
    with np.errstate(over="ignore"):
        rate = work.flops / (columns["latency_us"] / US_PER_S)
    too_fast, refused = rate > work.peak_flops_per_s, rate > work.limit_flops_per_s
    found = {
        f"{gpu.name} has no units for {d}": no_units & (dtypes == d) for d in sorted(set(dtypes[no_units]))
    }
    for dtype in sorted(set(dtypes[too_fast])):
        of_dtype = dtypes == dtype
        few = max(_FEW * int(of_dtype.sum()), _CHANCE)
        number = int((refused & of_dtype).sum())
        if number > few:
            found[f"computes in another dtype than {dtype}: {number} rows beat its peak on {gpu.name}"] = (
                of_dtype
            )
            too_fast &= ~of_dtype
        elif (too_fast & of_dtype).sum() > few:
            # over an fp8 cache a kernel may compute in fp8
            too_fast &= refused | ~of_dtype
    if too_fast.any():
        found[f"faster than the peak of {gpu.name}"] = too_fast
    return found


def _slower_kernels(operator: str, columns: Mapping[str, Array]) -> Bools:
    """Mark rows of every kernel but the fastest of its sizes: a framework that has several picks one."""
    point = point_codes(operator, columns)
    kernel = word_codes(columns["kernel"])
    order = np.lexsort((columns["latency_us"], point))
    first = order[np.unique(point[order], return_index=True)[1]]
    return np.asarray(kernel != kernel[first][point])


def point_codes(operator: str, columns: Mapping[str, Array]) -> Longs:
    """Return a code for each row: equal for equal keys and axes."""
    schema = OPERATORS[operator]
    return codes_of(columns[column.name] for column in (*schema.keys, *schema.axes))


def joined(operator: str, parts: list[Part]) -> dict[str, Array]:
    """Return the rows of all files that gave an operator some, sorted."""
    names = parts[0].columns
    return sort_rows(operator, {name: np.concatenate([p.columns[name] for p in parts]) for name in names})
