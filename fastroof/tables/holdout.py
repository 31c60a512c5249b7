"""Hold-out: thin the tables, look the left-out points up, and see how far off each method is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fastroof.columns import ORIGIN_INTERPOLATED
from fastroof.errors import LookupInputError
from fastroof.tables.lookup import DEFAULTS, METHODS, REQUIRED

if TYPE_CHECKING:
    from fastroof.load import MeasuredTable
    from fastroof.tables import Tables

__all__ = [
    "GRIDS",
    "HoldoutGrid",
    "HoldoutRow",
    "lookup_arguments",
    "run_holdout",
    "taking_part",
    "thinned_axes",
]

Mask = npt.NDArray[np.bool_]

HEAD_DIM = 128
"""Attention is judged on the head shapes of this head_dim, full attention."""


@dataclass(frozen=True)
class HoldoutGrid:
    """Which rows of one operator are kept.

    Attributes
    ----------
    operator : str
        The operator.
    name : str
        What the grid is called in the report.
    kept : mapping of str to tuple of int
        Kept values by axis; an axis that is not named keeps every second value, from the first.
    only : mapping of str to value
        Rows that take part at all; the others are neither kept nor looked up.
    """

    operator: str
    name: str
    kept: Mapping[str, tuple[int, ...]]
    only: Mapping[str, Any]


_POWERS_OF_TWO = tuple(2**i for i in range(3, 13))
_FULL_ATTENTION = {"head_dim": HEAD_DIM, "window": 0}

GRIDS: Final = (
    HoldoutGrid(
        "gemm",
        "coarse",
        {"m": _POWERS_OF_TWO, "n": (6144, 10240), "k": (2048, 3584, 4096, 8192)},
        {"dtype": "bf16"},
    ),
    HoldoutGrid("gemm", "every second", {}, {"dtype": "bf16"}),
    HoldoutGrid("gemm", "every second (fp8)", {}, {"dtype": "fp8"}),
    HoldoutGrid(
        "attention_decode",
        "coarse",
        {
            "batch_size": (1, 16, 32, 64, 128, 256, 512),
            "kv_len": (1024, 4096, 8192, 16384, 32768, 65536, 131072),
        },
        _FULL_ATTENTION,
    ),
    HoldoutGrid("attention_decode", "every second", {}, _FULL_ATTENTION),
    HoldoutGrid(
        "attention_prefill",
        "coarse",
        {"q_len": (1024, 4096, 8192, 16384)},
        {**_FULL_ATTENTION, "batch_size": 1},
    ),
    HoldoutGrid("attention_prefill", "every second", {}, _FULL_ATTENTION),
    HoldoutGrid("allreduce", "every second (graph)", {}, {"mode": "graph"}),
    HoldoutGrid("allreduce", "every second (eager)", {}, {"mode": "eager"}),
    HoldoutGrid("moe", "every second", {}, {}),
)
"""The thin grids that tables are judged on."""


class HoldoutRow(NamedTuple):
    """Errors of one method on the left-out points of one grid, as fractions of the measured latency.

    Attributes
    ----------
    operator, grid, method : str
        What was judged.
    region : str
        ``inside``: every corner of the bracket was kept and measured; ``outside``: the rest.
    points : int
        Left-out points.
    mape, median, p90, p99 : float
        Mean, median and percentiles of the absolute relative error.
    bias : float
        Mean of the signed relative error.
    """

    operator: str
    grid: str
    method: str
    region: str
    points: int
    mape: float
    median: float
    p90: float
    p99: float
    bias: float


def taking_part(table: MeasuredTable, only: Mapping[str, Any]) -> Mask:
    """Rows of a grid: those with the values of ``only``, and of prefill those without a prefix."""
    rows = np.full(table.num_rows, True)
    for name, value in only.items():
        rows &= table.columns[name] == value
    if table.operator == "attention_prefill":
        rows &= table.columns["q_len"] == table.columns["kv_len"]
    return rows


def thinned_axes(grid: HoldoutGrid, table: MeasuredTable) -> list[str]:
    """Axes whose values may be left out."""
    names = [axis.name for axis in table.schema.axes if axis.name not in grid.only]
    return [n for n in names if not (table.operator == "attention_prefill" and n == "kv_len")]


def _kept_rows(grid: HoldoutGrid, table: MeasuredTable, part: Mask) -> Mask:
    """Rows on the thin grid; every second value is counted within each kernel's own axis."""
    kept = part.copy()
    groups = [rows[part[rows]] for rows in table.groups().values()]
    for name in thinned_axes(grid, table):
        values = table.columns[name]
        if name in grid.kept:
            kept &= np.isin(values, grid.kept[name])
            continue
        for rows in groups:
            kept[rows] &= np.isin(values[rows], np.unique(values[rows])[::2])
    return kept


def lookup_arguments(
    table: MeasuredTable, rows: npt.NDArray[np.int64]
) -> Iterable[tuple[Any, dict[str, Any]]]:
    """Lookup arguments of some rows, one batch a combination of the text columns."""
    known = {*REQUIRED[table.operator], *DEFAULTS[table.operator]}
    columns = {name: table.columns[name][rows] for name in known}
    text = [name for name, column in columns.items() if column.dtype.kind not in "iuf"]
    keys = list(zip(*(columns[name] for name in text), strict=True))
    for key in sorted(set(keys)):
        part = np.array([k == key for k in keys])
        sizes = {n: c[part] for n, c in columns.items() if n not in text}
        yield rows[part], {**sizes, **dict(zip(text, key, strict=True))}


def _summary(signed: npt.NDArray[np.float64]) -> tuple[float, ...]:
    error = np.abs(signed)
    p90, p99 = np.percentile(error, (90, 99))
    return tuple(map(float, (error.mean(), np.median(error), p90, p99, signed.mean())))


def run_holdout(
    tables: Tables,
    *,
    operators: Iterable[str] | None = None,
    methods: Iterable[str] = METHODS,
    grids: Iterable[HoldoutGrid] = GRIDS,
    progress: Callable[[str], None] | None = None,
) -> list[HoldoutRow]:
    """Judge lookups on points they have not seen.

    Parameters
    ----------
    tables : Tables
        The tables to thin.
    operators : iterable of str, optional
        Judge these only; by default every operator that the tables have.
    methods : iterable of str
        Lookup methods to judge.
    grids : iterable of HoldoutGrid
        What is kept of each operator.
    progress : callable, optional
        Called with a line of text before each grid.

    Returns
    -------
    list of HoldoutRow
        A row a grid, method and region that has points.

    Raises
    ------
    LookupInputError
        For an unknown operator or method.
    """
    from fastroof.tables import Tables

    methods = tuple(methods)
    wanted = set(REQUIRED) if operators is None else set(operators)
    for given, known in ((wanted, set(REQUIRED)), (set(methods), set(METHODS))):
        if given - known:
            raise LookupInputError(
                f"unknown {', '.join(sorted(given - known))}: use one of {', '.join(sorted(known))}"
            )
    report = []
    for grid in grids:
        table = tables.measured.tables.get(grid.operator)
        if table is None or grid.operator not in wanted:
            continue
        if progress is not None:
            progress(f"{grid.operator}, {grid.name}")
        part = taking_part(table, grid.only)
        kept = _kept_rows(grid, table, part)
        hidden = np.flatnonzero(part & ~kept)
        if not kept.any() or not len(hidden):
            continue
        columns = {name: values[kept] for name, values in table.columns.items()}
        thin_table = replace(table, columns=columns)
        thin = Tables(replace(tables.measured, tables={grid.operator: thin_table}), tables.gpu)
        errors: dict[str, list[npt.NDArray[np.float64]]] = {method: [] for method in methods}
        inside = []
        for rows, arguments in lookup_arguments(table, hidden):
            truth = table.columns["latency_us"][rows]
            found = thin.lookup(grid.operator, **arguments)
            inside.append(found.origin <= ORIGIN_INTERPOLATED)
            for method in methods:
                guess = (
                    found if method == "roofline" else thin.lookup(grid.operator, method=method, **arguments)
                )
                errors[method].append(guess.latency_us / truth - 1.0)
        is_inside = np.concatenate(inside)
        for method in methods:
            signed = np.concatenate(errors[method])
            for region, where in (("inside", is_inside), ("outside", ~is_inside)):
                if where.any():
                    row = (grid.operator, grid.name, method, region, int(where.sum()))
                    report.append(HoldoutRow(*row, *_summary(signed[where])))
    return report
