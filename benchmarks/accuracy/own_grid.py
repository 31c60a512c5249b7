"""``python -m benchmarks.accuracy own-grid``: a sparse grid of one campaign, completed by another's rows.

Own rows are one campaign's at the points nearest to a grid of kernels-bench; its other rows judge.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import typer

import fastroof
from fastroof.arrays import Bools, Floats, Longs
from fastroof.cli.output import print_table
from fastroof.columns import ORIGIN_INTERPOLATED
from fastroof.load import MeasuredTable
from fastroof.load.sources import CUSTOM_TOOL
from fastroof.operators.registry import OPERATORS
from fastroof.tables import Tables
from fastroof.tables.completed import kind_of
from fastroof.tables.holdout import lookup_arguments
from fastroof.uncertainty.leave_one_out import NORMAL_80
from kernels_bench.grid.grid import load_grid

VLLM: Final = "aiconfigurator-vllm-0.25.0"
SGLANG: Final = "aiconfigurator-sglang-0.5.14"
TRTLLM: Final = "aiconfigurator-trtllm-1.3.0rc20"
PAIRS: Final = (
    ("package:h100/vllm/0.31.0", f"h100/{VLLM}"),
    ("package:h200/vllm/0.31.0", f"h200/{VLLM}"),
    (f"h200/{VLLM}", f"h100/{VLLM}"),
    ("package:gb200/vllm/0.24.0", f"b200/{VLLM}"),
    ("package:b300/vllm/0.24.0", f"b200/{VLLM}"),
    (f"h200/{SGLANG}", f"h100/{SGLANG}"),
    (f"h200/{TRTLLM}", f"h100/{TRTLLM}"),
    (f"gb200/{TRTLLM}", f"b200/{TRTLLM}"),
    (f"h100/{SGLANG}", f"h100/{VLLM}"),
    (f"h200/{TRTLLM}", f"h200/{VLLM}"),
)
"""Judging and shipped campaigns; the first pair chose the rule. The last two measured other kernels."""


class Answers(NamedTuple):
    """Lookups of the judging rows, us; their origins and errors."""

    latency_us: Floats
    origin: Any
    error: Floats


def main(
    grid: Annotated[str, typer.Option(help="Grid of kernels-bench.")] = "first_run",
    pair: Annotated[list[str] | None, typer.Option(help="JUDGING,SHIPPED campaigns.")] = None,
    apart: Annotated[bool, typer.Option(help="Leave the (n, k) of own GEMMs out of shipped rows.")] = False,
) -> None:
    """Judge own rows alone, shipped rows alone, and own rows that shipped rows complete."""
    titles = ("kernels", "own rows", "region", "points", "alone", "shipped", "completed", "in 80 %")
    for judging, shipped in (one.split(",") for one in pair) if pair else PAIRS:
        truth, other = fastroof.load_tables(judging), fastroof.load_tables(shipped)
        typer.echo(f"own: {judging} at the points of {grid}; completed by {shipped}")
        names = _completed_operators(truth, other)
        lines = [line for name in names for line in judged(truth, other, name, grid, apart)]
        print_table(titles, lines, left=titles[:1])


def _completed_operators(truth: Tables, other: Tables) -> Iterator[str]:
    both = truth.measured.tables.keys() & other.measured.tables.keys()
    yield from (name for name, operator in OPERATORS.items() if operator.completed_within and name in both)


def judged(truth: Tables, other: Tables, name: str, grid: str, apart: bool) -> Iterator[tuple[str, ...]]:
    """Yield a line for each kind of kernel and region: mean errors, and medians in brackets."""
    table, shipped = truth.table(name), other.table(name)
    picked = nearest_rows(table, grid)
    provenance = {"tool": CUSTOM_TOOL, "framework": shipped.engine}
    columns = {column: values[picked] for column, values in table.columns.items()}
    own = replace(table, columns=columns, written=None, source="own", provenance=provenance)
    if apart and table.schema.paired_axes:
        names = [*(column.name for column in table.schema.keys), *table.schema.paired_axes]
        taken = set(zip(*(columns[one].tolist() for one in names), strict=True))
        sizes = zip(*(shipped.columns[one].tolist() for one in names), strict=True)
        left = np.array([one not in taken for one in sizes])
        shipped = replace(shipped, columns={n: v[left] for n, v in shipped.columns.items()}, written=None)
    measured = replace(other.measured, spec=truth.gpu)

    def tables(first: MeasuredTable, *others: MeasuredTable) -> Tables:
        return Tables(replace(measured, tables={name: first}, others={name: others}), truth.gpu)

    kinds = {kind_of(table.schema, key) for key in own.groups()}
    alike = [rows for key, rows in table.groups().items() if kind_of(table.schema, key) in kinds]
    hidden = table.schema.plain_rows(table.columns) & ~table.spikes.every_row
    hidden[picked] = False
    rows = np.concatenate(alike)
    rows = np.sort(rows[hidden[rows]])
    # the engine of own rows that nothing completes is empty
    alone, theirs, made = (
        answers(one, table, rows)
        for one in (tables(replace(own, provenance={}), shipped), tables(shipped), tables(own, shipped))
    )
    truth_us = table.columns["latency_us"][rows]
    inside = alone.origin <= ORIGIN_INTERPOLATED
    within = [table.columns[column][rows].astype(str) for column in table.schema.completed_within]
    kind_text = np.array([" ".join(words) for words in zip(*within, strict=True)])
    own_text = [own.columns[column].astype(str) for column in table.schema.completed_within]
    own_kinds = [" ".join(words) for words in zip(*own_text, strict=True)]
    for kind, region in itertools.product(np.unique(kind_text), ("enclosed", "beyond")):
        part: Bools = (kind_text == kind) & (inside if region == "enclosed" else ~inside)
        if part.any():
            errors = [np.abs(one.latency_us / truth_us - 1.0)[part] for one in (alone, theirs, made)]
            held = np.abs(np.log(made.latency_us / truth_us)) <= NORMAL_80 * made.error
            texts = (f"{error.mean():.1%} ({np.median(error):.1%})" for error in errors)
            count = (f"{own_kinds.count(kind):,}", region, f"{int(part.sum()):,}")
            yield (f"{name} {kind}", *count, *texts, f"{held[part].mean():.0%}")


def nearest_rows(table: MeasuredTable, grid: str) -> Longs:
    """Rows nearest to a grid's points of the same dtype or heads: in (n, k), then along the free axes."""
    schema = table.schema
    names = [column.name for column in schema.keys]
    free = [name for name in schema.free_axes() if name not in schema.paired_axes]
    picked: set[int] = set()
    points = [one.values for one in load_grid(grid).points() if one.operator == table.operator]
    for key, rows in table.groups().items():
        for values in points:
            is_plain = all(values[one] == values[two] for one, two in schema.equal_axes.items())
            if is_plain and all(values[name] == size for name, size in zip(names, key, strict=True)):
                near = rows
                for axes in filter(None, (schema.paired_axes, free)):
                    away = [np.log2(table.columns[axis][near] / values[axis]) for axis in axes]
                    square = np.sum(np.square(away), axis=0)
                    near = near[square == square.min()]
                picked.add(int(near[0]))
    return np.array(sorted(picked))


def answers(tables: Tables, table: MeasuredTable, rows: Longs) -> Answers:
    """Look up rows of a table."""
    made = Answers(*(np.full(table.num_rows, np.nan) for _ in Answers._fields))
    for part, arguments in lookup_arguments(table, rows):
        found = tables.lookup(table.operator, with_error=True, **arguments)
        for values, answer in zip(made, (found.latency_us, found.origin, found.relative_error), strict=True):
            values[part] = answer
    return Answers(*(values[rows] for values in made))
