"""Grids: which points are measured, as TOML data.

A grid file has ``title``; ``tp`` and ``models``, where shapes are derived from models; and ``[[group]]``
tables. A group has ``name``, ``operator`` and ``priority`` (0 for sentinels, the highest number is dropped
first), and a value for every key and axis column of the operator: one, a list, or a range ``{start, stop,
factor}``, ``{start, stop, step}`` or ``{start, stop, num}``. Its points are all combinations. ``shapes``
gives several columns together: a name (heads, linear, lm_head; experts, spread_experts; hidden, activations,
rope, kv) derives them from the models at every tp, from those that ``models`` of the group names or all; a
list of lists spells them out. Limits (``max_kv_bytes``, ``max_kv_tokens``, ``max_new_tokens``,
``max_io_bytes``) leave points out. ``[[left_out]]`` tables are like groups, of points that shipped tables
hold: only one in ``kept_of_left_out`` of them is a point of the grid, to give the ratio of two campaigns.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fastroof.checks import is_whole_number, shown, unknown_word
from fastroof.documents import MOST_SIZE, Table, parse_table
from fastroof.errors import MeasureError
from fastroof.ranges import expand_sizes
from fastroof.units import DTYPE_BYTES
from kernels_bench.grid.estimate import SENTINEL_PRIORITY
from kernels_bench.model_shape import Experts, ModelShape
from kernels_bench.operators.operator import MeasuredOperator
from kernels_bench.operators.registry import MEASURED
from kernels_bench.protocol import Point

GRIDS: Final = Path(__file__).parent / "grids"
DEFAULT_GRID: Final = "h100"
MAX_PRIORITY: Final = 99
MAX_VALUES: Final = 1_000_000
"""Most values of a range, and most points of a group: more is a slip, and would take weeks to measure."""

MAX_LIMIT: Final = 1e18
"""Most bytes or tokens of a limit of a group."""

_MODEL_KEYS: Final = ("name", "heads", "hidden", "intermediate", "experts", "vocab", "tp")


@dataclass(frozen=True)
class Group:
    """One ``[[group]]`` of a grid: a line of ``kernels-bench plan``."""

    name: str
    operator: str
    # 0 for sentinels; the points of the highest number are dropped first.
    priority: int
    # Its points within its limits.
    candidates: tuple[Point, ...]
    num_beyond_limits: int = 0


@dataclass(frozen=True)
class Grid:
    """The points of one grid file."""

    name: str
    title: str
    path: Path
    sha256: str
    models: tuple[ModelShape, ...]
    groups: tuple[Group, ...]
    left_out: frozenset[str] = frozenset()

    def points(self) -> list[Point]:
        """List every point once, in the order of the file.

        >>> load_grid("smoke").points()[0].values
        {'dtype': 'bf16', 'm': 256, 'n': 4096, 'k': 4096}
        """
        owner: dict[str, Group] = {}
        for group in sorted(self.groups, key=lambda g: g.priority):
            for point in group.candidates:
                if point.priority == SENTINEL_PRIORITY or point.key not in self.left_out:
                    owner.setdefault(point.key, group)
        by_key: dict[str, Point] = {}
        for group in self.groups:
            for point in group.candidates:
                if owner.get(point.key) is group:
                    by_key.setdefault(point.key, point)
        return list(by_key.values())

    def sentinels(self) -> list[Point]:
        """List the points that are measured again and again through a run, to show drift."""
        return [point for point in self.points() if point.priority == SENTINEL_PRIORITY]


def grid_names() -> list[str]:
    """Return the grids that come with the package, sorted.

    >>> grid_names()
    ['cpu', 'first_run', 'h100', 'moe', 'rotation', 'second_run', 'smoke']
    """
    return sorted(path.stem for path in GRIDS.glob("*.toml"))


def load_grid(path: Path | str | None = None) -> Grid:
    """Read a grid file and check every key of it.

    >>> load_grid().name
    'h100'
    """
    given = DEFAULT_GRID if path is None else path
    file = GRIDS / f"{given}.toml" if str(given) in grid_names() else Path(given)
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        names = ", ".join(grid_names())
        raise MeasureError(
            f"grid {given} cannot be read: {reason}; give a TOML file or one of {names}"
        ) from error
    top = parse_table(content, f"grid {file}", MeasureError)
    top.allow(("title", "tp", "models", "group", "left_out", "kept_of_left_out"))
    tp = _sizes(top, "tp") if "tp" in top.data else [1]
    models = [_model(table, tp) for table in top.tables("models")]
    _refuse_twice(top, "models", [model.name for model in models])
    groups = [_group(table, models) for table in top.tables("group")]
    if not groups:
        raise top.problem("has no [[group]], so nothing to measure")
    _refuse_twice(top, "group", [group.name for group in groups])
    shipped = [point for table in top.tables("left_out") for point in _group(table, models).candidates]
    of_groups = {point.key for group in groups for point in group.candidates}
    left_out = sorted(of_groups & {point.key for point in shipped})
    if left_out:
        del left_out[:: top.size("kept_of_left_out", 2, MAX_VALUES)]
    sha256 = hashlib.sha256(content).hexdigest()
    parts = tuple(models), tuple(groups), frozenset(left_out)
    return Grid(file.stem, top.text("title"), file, sha256, *parts)


def _refuse_twice(table: Table, key: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise table.problem(f"has {', '.join(map(repr, twice))} more than once", key)


def _model(table: Table, default_tp: Sequence[int]) -> ModelShape:
    table.allow(_MODEL_KEYS)
    heads = _row(table, "heads", table.value("heads"), ("num_q_heads", "num_kv_heads", "head_dim"))
    experts = None
    if "experts" in table.data:
        experts = Experts(
            *_row(table, "experts", table.data["experts"], ("num_experts", "topk", "intermediate"))
        )
    try:
        return ModelShape(
            table.text("name"),
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=heads[2],
            hidden=table.size("hidden"),
            vocab=table.size("vocab"),
            intermediate=table.size("intermediate") if "intermediate" in table.data else 0,
            experts=experts,
            tp=tuple(_sizes(table, "tp") if "tp" in table.data else default_tp),
        )
    except MeasureError:
        raise
    except ValueError as error:
        raise table.problem(str(error)) from error


def _group(table: Table, models: Sequence[ModelShape]) -> Group:
    name, given = table.text("name"), table.text("operator")
    if given not in MEASURED:
        raise table.problem(unknown_word("operator", given, MEASURED), at="operator")
    operator = MEASURED[given]
    priority = table.size("priority", 0, MAX_PRIORITY)
    columns = operator.given_columns()
    may_shape = ("shapes", "models") if operator.shape_columns else ()
    table.allow(("name", "operator", "priority", *may_shape, *columns, *operator.limits))
    most_of = {limit: table.number(limit, 1.0, MAX_LIMIT) for limit in operator.limits if limit in table.data}

    shaped, shapes = _shapes(table, operator, models) if "shapes" in table.data else ((), [()])
    choices = {column: _values(table, operator, column) for column in columns if column not in shaped}
    total = len(shapes) * math.prod(len(values) for values in choices.values())
    if total > MAX_VALUES:
        raise table.problem(f"its lists give {total:,} combinations, at most {MAX_VALUES:,}")
    points: list[Point] = []
    for shape, combination in itertools.product(shapes, itertools.product(*choices.values())):
        values = dict(zip((*shaped, *choices), (*shape, *combination), strict=True))
        if reason := operator.impossible(values):
            raise table.problem(f"{reason}")
        completed = operator.completed(values)
        if all(operator.limits[limit](completed) <= most for limit, most in most_of.items()):
            ordered = {column: completed[column] for column in operator.columns}
            points.append(Point(operator.name, ordered, priority, name))
    if not points:
        raise table.problem(f"{', '.join(most_of)} leave none of its {total} points")
    return Group(name, operator.name, priority, tuple(points), total - len(points))


def _shapes(
    table: Table, operator: MeasuredOperator, models: Sequence[ModelShape]
) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    columns = operator.shape_columns
    for column in columns:
        if column in table.data:
            raise table.problem(f"{column} is given twice, by shapes too")
    given = table.data["shapes"]
    if isinstance(given, list):
        if "models" in table.data:
            raise table.problem("shapes spells them out, so models are not used")
        names = ", ".join(columns)
        if not given:
            raise table.problem(f"shapes is empty; need lists of {names}, or a name")
        return columns, [_row(table, "shapes", one, columns) for one in given]
    if not isinstance(given, str) or given not in operator.model_shapes:
        raise table.problem(
            f"unknown shapes {shown(given)}; valid are {', '.join(operator.model_shapes)}, "
            f"or lists of {', '.join(columns)}"
        )
    if "models" in table.data:
        chosen = table.texts("models", [model.name for model in models])
        models = [model for model in models if model.name in chosen]
    shapes = shapes_of(given, models)
    if not shapes:
        raise table.problem(f"shapes {given!r} finds none in the grid's {len(models)} models")
    return columns, shapes


def shapes_of(name: str, models: Iterable[ModelShape]) -> list[tuple[int, ...]]:
    """Derive the distinct shapes that a group's ``shapes`` names, sorted.

    >>> shapes_of("heads", [ModelShape("m", 32, 8, 128, 4096, 128256, intermediate=14336, tp=(1, 8))])
    [(4, 1, 128), (32, 8, 128)]
    """
    derive = next(o.model_shapes[name] for o in MEASURED.values() if name in o.model_shapes)
    return sorted({shape for model in models for tp in model.tp for shape in derive(model, tp)})


def _values(table: Table, operator: MeasuredOperator, column: str) -> list[Any]:
    if column not in table.data and column in operator.defaults:
        return [operator.defaults[column]]
    spec = {c.name: c for c in (*operator.schema.keys, *operator.schema.axes)}.get(column)
    if spec is not None and spec.kind == "text":
        known = tuple(DTYPE_BYTES) if column in ("dtype", "kv_dtype") else ()
        return table.texts(column, known)
    return _sizes(table, column, 0 if spec is None else spec.minimum)


def _sizes(table: Table, key: str, least: int = 1) -> list[int]:
    """Return one whole number, a list of them in its order, or a range written out."""
    value = table.value(key)
    try:
        sizes = list(expand_sizes(value, MOST_SIZE, least, MAX_VALUES))
    except ValueError as error:
        raise table.problem(f"is invalid: {error}", key) from None
    return sizes if isinstance(value, Mapping) else value if isinstance(value, list) else [value]


def _row(table: Table, key: str, value: Any, columns: Sequence[str]) -> tuple[int, ...]:
    """Return a list of whole numbers of at least 1, one a column."""
    is_row = isinstance(value, list) and len(value) == len(columns)
    if not is_row or not all(is_whole_number(one, 1, MOST_SIZE) for one in value):
        raise table.problem(
            f"must be [{', '.join(columns)}], whole numbers from 1 to {MOST_SIZE:,}, got {shown(value)}", key
        )
    return tuple(value)
