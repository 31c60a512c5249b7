"""Grids: which points are measured, as TOML data.

A grid file has ``title``; ``tp`` and ``models``, where shapes are derived from models; and ``[[group]]``
tables. A group has ``name``, ``operator`` and ``priority`` (0 for sentinels, the highest number is dropped
first), and a value for every key and axis column of the operator: one, a list, or a range ``{start, stop,
factor}`` or ``{start, stop, step}``. Its points are all combinations. ``shapes`` gives several columns
together: a name (heads, linear, lm_head; experts, spread_experts; hidden, activations, rope, kv) derives
them from the models at every tp, from those that ``models`` of the group names or all; a list of lists
spells them out. Limits (``max_kv_bytes``, ``max_kv_tokens``, ``max_new_tokens``, ``max_io_bytes``) leave
points out.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fastroof.checks import shown
from fastroof.documents import parse_toml
from fastroof.errors import MeasureError
from fastroof.units import DTYPE_BYTES
from kernels_bench.grid.checked_table import MAX_VALUES, CheckedTable
from kernels_bench.grid.estimate import SENTINEL_PRIORITY
from kernels_bench.model_shape import Experts, ModelShape
from kernels_bench.operators.operator import MeasuredOperator
from kernels_bench.operators.registry import MEASURED
from kernels_bench.protocol import Point

GRIDS: Final = Path(__file__).parent / "grids"
DEFAULT_GRID: Final = "h100"
MAX_PRIORITY: Final = 99

_MODEL_KEYS: Final = ("name", "heads", "hidden", "intermediate", "experts", "vocab", "tp")


@dataclass(frozen=True)
class Group:
    """One ``[[group]]`` of a grid: a line of ``kernels-bench plan``."""

    # What it is called, and the operator of all its points.
    name: str
    operator: str
    # 0 for sentinels; the points of the highest number are dropped first.
    priority: int
    # Its points within its limits.
    candidates: tuple[Point, ...]
    # Combinations that its limits left out.
    num_beyond_limits: int = 0


@dataclass(frozen=True)
class Grid:
    """The points of one grid file."""

    # Name of the file without its ending, and its title.
    name: str
    title: str
    path: Path
    # Of the file's bytes, for the provenance.
    sha256: str
    # The models whose shapes it derives.
    models: tuple[ModelShape, ...]
    # In the order of the file.
    groups: tuple[Group, ...]

    def points(self) -> list[Point]:
        """List every point once, in the order of the file.

        >>> load_grid("smoke").points()[0].values
        {'dtype': 'bf16', 'm': 256, 'n': 4096, 'k': 4096}
        """
        owner: dict[str, Group] = {}
        for group in sorted(self.groups, key=lambda g: g.priority):
            for point in group.candidates:
                owner.setdefault(point.key, group)
        by_key: dict[str, Point] = {}
        for group in self.groups:
            for point in group.candidates:
                if owner[point.key] is group:
                    by_key.setdefault(point.key, point)
        return list(by_key.values())

    def sentinels(self) -> list[Point]:
        """List the points that are measured again and again through a run, to show drift."""
        return [point for point in self.points() if point.priority == SENTINEL_PRIORITY]


def grid_names() -> list[str]:
    """Return the grids that come with the package, sorted.

    >>> grid_names()
    ['cpu', 'first_run', 'h100', 'moe', 'second_run', 'smoke']
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
    data = parse_toml(content, f"grid {file}", MeasureError)
    return _parse(file, data, hashlib.sha256(content).hexdigest())


def _parse(file: Path, data: Mapping[str, Any], sha256: str) -> Grid:
    top = CheckedTable(f"grid {file}", data)
    top.refuse_unknown(("title", "tp", "models", "group"))
    tp = top.sizes("tp") if "tp" in data else [1]
    models = [_model(f"{top.where}, model {i + 1}", one, tp) for i, one in enumerate(top.tables("models"))]
    _refuse_twice(top, "models", [model.name for model in models])
    given = top.tables("group")
    if not given:
        raise MeasureError(f"{top.where}: has no [[group]], so nothing to measure")
    groups = [_group(f"{top.where}, group {i + 1}", one, models) for i, one in enumerate(given)]
    _refuse_twice(top, "group", [group.name for group in groups])
    return Grid(file.stem, top.text("title"), file, sha256, tuple(models), tuple(groups))


def _refuse_twice(table: CheckedTable, key: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise MeasureError(f"{table.where}: {key} has {', '.join(map(repr, twice))} more than once")


def _model(where: str, data: Any, default_tp: Sequence[int]) -> ModelShape:
    table = CheckedTable(where, data)
    name = table.text("name")
    table = CheckedTable(f"{where} ({name})", data)
    table.refuse_unknown(_MODEL_KEYS)
    heads = table.sizes_of("heads", data.get("heads"), ("num_q_heads", "num_kv_heads", "head_dim"))
    experts = None
    if "experts" in data:
        num_experts, topk, intermediate = table.sizes_of(
            "experts", data["experts"], ("num_experts", "topk", "intermediate")
        )
        experts = Experts(num_experts, topk, intermediate)
    try:
        return ModelShape(
            name,
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=heads[2],
            hidden=table.size("hidden"),
            vocab=table.size("vocab"),
            intermediate=table.size("intermediate") if "intermediate" in data else 0,
            experts=experts,
            tp=tuple(table.sizes("tp") if "tp" in data else default_tp),
        )
    except MeasureError:
        raise
    except ValueError as error:
        raise MeasureError(f"{table.where}: {error}") from error


def _group(where: str, data: Any, models: Sequence[ModelShape]) -> Group:
    table = CheckedTable(where, data)
    name = table.text("name")
    table = CheckedTable(f"{where} ({name})", data)
    given = table.text("operator")
    if given not in MEASURED:
        raise MeasureError(f"{table.where}: unknown operator {given!r}; valid are {', '.join(MEASURED)}")
    operator = MEASURED[given]
    priority = table.size("priority", 0, MAX_PRIORITY)
    columns = operator.given_columns()
    may_shape = ("shapes", "models") if operator.shape_columns else ()
    table.refuse_unknown(("name", "operator", "priority", *may_shape, *columns, *operator.limits))
    most_of = {limit: table.number(limit) for limit in operator.limits if limit in data}

    shaped, shapes = _shapes(table, operator, models) if "shapes" in data else ((), [()])
    choices = {column: _values(table, operator, column) for column in columns if column not in shaped}
    total = len(shapes) * math.prod(len(values) for values in choices.values())
    if total > MAX_VALUES:
        raise MeasureError(f"{table.where}: its lists give {total:,} combinations, at most {MAX_VALUES:,}")
    points: list[Point] = []
    for shape, combination in itertools.product(shapes, itertools.product(*choices.values())):
        values = dict(zip((*shaped, *choices), (*shape, *combination), strict=True))
        if reason := operator.impossible(values):
            raise MeasureError(f"{table.where}: {reason}")
        completed = operator.completed(values)
        if all(operator.limits[limit](completed) <= most for limit, most in most_of.items()):
            ordered = {column: completed[column] for column in operator.columns}
            points.append(Point(operator.name, ordered, priority, name))
    if not points:
        raise MeasureError(f"{table.where}: {', '.join(most_of)} leave none of its {total} points")
    return Group(name, operator.name, priority, tuple(points), total - len(points))


def _shapes(
    table: CheckedTable, operator: MeasuredOperator, models: Sequence[ModelShape]
) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    columns = operator.shape_columns
    for column in columns:
        if column in table.data:
            raise MeasureError(f"{table.where}: {column} is given twice, by shapes too")
    given = table.data["shapes"]
    if isinstance(given, list):
        if "models" in table.data:
            raise MeasureError(f"{table.where}: shapes spells them out, so models are not used")
        names = ", ".join(columns)
        if not given:
            raise MeasureError(f"{table.where}: shapes is empty; need lists of {names}, or a name")
        return columns, [table.sizes_of("shapes", one, columns) for one in given]
    if not isinstance(given, str) or given not in operator.model_shapes:
        raise MeasureError(
            f"{table.where}: unknown shapes {shown(given)}; valid are {', '.join(operator.model_shapes)}, "
            f"or lists of {', '.join(columns)}"
        )
    if "models" in table.data:
        chosen = table.texts("models", [model.name for model in models])
        models = [model for model in models if model.name in chosen]
    shapes = shapes_of(given, models)
    if not shapes:
        raise MeasureError(f"{table.where}: shapes {given!r} finds none in the grid's {len(models)} models")
    return columns, shapes


def shapes_of(name: str, models: Iterable[ModelShape]) -> list[tuple[int, ...]]:
    """Derive the distinct shapes that a group's ``shapes`` names, sorted.

    >>> shapes_of("heads", [ModelShape("m", 32, 8, 128, 4096, 128256, intermediate=14336, tp=(1, 8))])
    [(4, 1, 128), (32, 8, 128)]
    """
    derive = next(o.model_shapes[name] for o in MEASURED.values() if name in o.model_shapes)
    return sorted({shape for model in models for tp in model.tp for shape in derive(model, tp)})


def _values(table: CheckedTable, operator: MeasuredOperator, column: str) -> list[Any]:
    if column not in table.data and column in operator.defaults:
        return [operator.defaults[column]]
    spec = {c.name: c for c in (*operator.schema.keys, *operator.schema.axes)}.get(column)
    if spec is not None and spec.kind == "text":
        known = tuple(DTYPE_BYTES) if column in ("dtype", "kv_dtype") else ()
        return table.texts(column, known)
    return table.sizes(column, 0 if spec is None else spec.minimum)
