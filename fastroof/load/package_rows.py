"""Rows of aiconfigurator-core's files as rows of an operator: which are kept, and how they are joined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from fastroof.arrays import Array, Bools, Longs
from fastroof.config.gpu import GpuSpec
from fastroof.load.package_places import Place
from fastroof.load.write import sort_rows
from fastroof.operators.foreign_rows import ForeignRows, Raw
from fastroof.operators.registry import OPERATORS
from fastroof.units import US_PER_S

__all__ = ["PACKAGE_FILES", "Part", "joined", "point_codes", "select"]


_FEW: Final = 1e-3

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
    work = OPERATORS[operator].work(columns, gpu)
    too_fast = work.flops > columns["latency_us"] / US_PER_S * work.peak_flops_per_s
    # A few are broken measurements; more would mean a wrong peak or wrong sizes, which loading refuses.
    if 0 < too_fast.sum() <= _FEW * len(too_fast):
        left_out[f"faster than the peak of {gpu.name}"] = int(too_fast.sum())
        columns = {name: values[~too_fast] for name, values in columns.items()}
    return columns, left_out


def _slower_kernels(operator: str, columns: Mapping[str, Array]) -> Bools:
    """Mark rows of every kernel but the fastest of its sizes: a framework that has several picks one."""
    point = point_codes(operator, columns)
    _, kernel = np.unique(columns["kernel"], return_inverse=True)
    order = np.lexsort((columns["latency_us"], point))
    first = order[np.unique(point[order], return_index=True)[1]]
    return np.asarray(kernel != kernel[first][point])


def point_codes(operator: str, columns: Mapping[str, Array]) -> Longs:
    """Return a code for each row: equal for equal keys and axes."""
    schema = OPERATORS[operator]
    codes = np.zeros(len(columns["latency_us"]), np.int64)
    for column in (*schema.keys, *schema.axes):
        _, code = np.unique(columns[column.name], return_inverse=True)
        # Renumbered at each step, so that the product of two counts of rows cannot overflow.
        _, codes = np.unique(codes * (int(code.max(initial=0)) + 1) + code, return_inverse=True)
    return codes


def joined(operator: str, parts: list[Part]) -> dict[str, Array]:
    """Return the rows of all files that gave an operator some, sorted."""
    names = parts[0].columns
    return sort_rows(operator, {name: np.concatenate([p.columns[name] for p in parts]) for name in names})
