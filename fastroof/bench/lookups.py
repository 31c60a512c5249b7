"""Lookup workloads: every operator of every source and method, at random points in the measured range."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.bench.workload import Baseline, Setup, Workload, stream_lookups
from fastroof.operators.attention_work import HeadShape
from fastroof.operators.operator import METHODS
from fastroof.operators.registry import OPERATORS
from fastroof.tables import Tables

LOOKUP_OPERATORS: Final = tuple(o.name for o in OPERATORS.values() if o.answers_lookups)
SEED: Final = 7
SIZE_BYTES: Final = 8
ANSWER_BYTES: Final = 8 + 8 + 1
"""latency_us, mfu and origin of a point."""

Arguments = dict[str, Any]


def lookup_points(tables: Tables, operator: str, count: int, heads: HeadShape | None = None) -> Arguments:
    """Return arguments for lookups of one kernel, sizes log-uniform over its measured axes.

    Uniform sizes would nearly all lie between the two largest measured ones. The kernel is that of
    ``heads`` if it was measured; otherwise the one with most measured points, preferably without a
    window, in bf16 and in CUDA graphs.
    """
    table = tables.table(operator)
    groups = tables.groups(operator)
    names = [column.name for column in table.schema.keys]
    plain = [(names.index(name), value) for name, value in table.schema.constants.items()]
    groups = {key: rows for key, rows in groups.items() if all(key[at] == value for at, value in plain)}

    def is_full(key: tuple[Any, ...]) -> bool:
        return "window" not in names or key[names.index("window")] == 0

    def rank(key: tuple[Any, ...]) -> tuple[Any, ...]:
        return key == heads, is_full(key), "bf16" in key, "graph" in key, len(groups[key]), str(key)

    key = max(groups, key=rank)
    named = zip(names, key, strict=True)
    arguments: Arguments = {name: value for name, value in named if name not in table.schema.constants}
    rng = np.random.default_rng(SEED)
    for axis in table.schema.axes:
        measured = table.columns[axis.name][groups[key]]
        low, high = int(measured.min()), int(measured.max())
        sizes = np.exp(rng.uniform(np.log(low), np.log(high), count))
        arguments[axis.name] = np.clip(np.round(sizes).astype(np.int64), low, high)
    arguments |= {name: arguments[other] for name, other in table.schema.equal_axes.items()}
    if "q_len" in arguments and "kv_len" in arguments:
        # the tokens attended to include the new ones
        arguments["kv_len"] = np.maximum(arguments["kv_len"], arguments["q_len"])
    return arguments


def lookup_workloads(setup: Setup, sources: dict[str, Tables]) -> Iterator[Workload]:
    """Yield one workload per operator and method, of each source: named by it if there are several."""
    count = setup.size(1_000_000, 2_000)
    for source, tables in sources.items():
        prefix = f"{source} " if len(sources) > 1 else ""
        for operator in LOOKUP_OPERATORS:
            if operator not in tables.measured.tables:
                continue
            points = lookup_points(tables, operator, count, setup.plan.heads)
            sizes = {name: size for name, size in points.items() if isinstance(size, np.ndarray)}
            kernel = " ".join(str(value) for name, value in points.items() if name not in sizes)
            columns = list({id(size): size for size in sizes.values()}.values())
            first, second, third = (columns * 3)[:3]
            answers = np.empty(count), np.empty(count), np.empty(count, np.uint8)
            streamed = partial(stream_lookups, first, second, third, *answers)
            for method in METHODS:
                yield Workload(
                    f"{prefix}{operator} {method}",
                    f"{count:,} random points of {kernel}",
                    "lookup",
                    count,
                    partial(_latency_us, tables, operator, method, points),
                    SIZE_BYTES * len(columns) + ANSWER_BYTES,
                    (Baseline("stream", streamed, count, None),),
                )


def _latency_us(tables: Tables, operator: str, method: str, points: Arguments) -> Floats:
    return tables.lookup(operator, method=method, **points).latency_us
