"""Coverage of the support matrices of aisimulate and aiconfigurator-core by plans of measured kernels."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from benchmarks.accuracy.support_matrix import (
    FORWARD_MATRIX,
    MATRIX,
    PASS,
    Combination,
    package_of,
    published_models,
    read_support_matrix,
)
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_MODELLED
from fastroof.config import GpuSpec, load_gpu
from fastroof.errors import FastroofError
from fastroof.load.aiconfigurator import installed_root
from fastroof.models import Layout, ModelSpec
from fastroof.models.execution import AUTO
from fastroof.plan import StepPlan
from fastroof.plan.plan_set import STATUSES, compiled_quietly, typical_parts
from fastroof.tables import Tables, load_tables

SIZES: Final = (8, 4, 2, 1)
"""Tensor-parallel sizes in the order they are tried; the first that compiles is used."""

_MEASURED, _BORROWED, _MODELLED, _REFUSED = STATUSES
_OF_ONE: Final = re.compile(
    r"\s*\([^()]*\)|\S+--\S+?_config(?:\.json)?\s*|; (?:measured: |it has |\d+ kernels? |allow_modelled=).*"
)
_STREAMED: Final = "elementwise"


class RosterRow(NamedTuple):
    """One combination of the support matrix and its plan."""

    model: str
    gpu: str
    engine: str
    verdict: str
    tp: int
    status: str
    on_request: bool
    why: str
    borrowed: tuple[str, ...] = ()
    modelled: tuple[str, ...] = ()
    streams_only: bool = False

    @property
    def is_covered(self) -> bool:
        """Return whether a plan compiles without --allow-modelled."""
        return self.status != _REFUSED and not self.on_request


def roster_rows(
    combinations: Iterable[Combination], models: Mapping[str, ModelSpec | FastroofError]
) -> Iterator[RosterRow]:
    """Compile a plan of every combination, and return the origins of its operators."""
    by_gpu = sorted(combinations, key=attrgetter("gpu"))
    for name, of_gpu in itertools.groupby(by_gpu, key=attrgetter("gpu")):
        try:
            gpu, tables = load_gpu(name), load_tables(name)
        except FastroofError as error:
            yield from (_refused(one, str(error)) for one in of_gpu)
            continue
        yield from (_row(one, models.get(one.model), gpu, tables) for one in of_gpu)


def _refused(one: Combination, why: str) -> RosterRow:
    return RosterRow(*one[:4], 0, _REFUSED, on_request=False, why=why)


def _row(
    one: Combination, model: ModelSpec | FastroofError | None, gpu: GpuSpec, tables: Tables
) -> RosterRow:
    if not isinstance(model, ModelSpec):
        return _refused(one, "no config.json of it" if model is None else str(model))
    missing = ""
    for allow_modelled in (False, True):
        for tp in SIZES:
            try:
                plan = compiled_quietly(
                    model, gpu, tables, one.engine, AUTO, Layout(tp), allow_modelled=allow_modelled
                )
                return _of_plan(one, plan, missing)
            except FastroofError as error:
                # of the smallest tp: a larger one may fail only because it does not divide
                why = str(error)
        missing = missing or why
    return _refused(one, missing)


def _of_plan(one: Combination, plan: StepPlan, missing: str) -> RosterRow:
    parts = typical_parts(plan)
    if not all(math.isfinite(part.total_us) and part.total_us >= 0.0 for part in parts):
        return _refused(one, "its steps have no time")
    roles = {curve.operator.role: curve.operator.operator for curve in plan.row_curves}
    names: dict[int, tuple[str, ...]] = {}
    for origin in (ORIGIN_BORROWED, ORIGIN_MODELLED):
        # operators of several layer kinds have the kind in their name
        found = (part.name.partition(" (")[0] for part in parts if part.origin == origin)
        names[origin] = tuple(dict.fromkeys(found))
    modelled = [part for part in parts if part.origin == ORIGIN_MODELLED]
    status = _MODELLED if modelled else _BORROWED if names[ORIGIN_BORROWED] else _MEASURED
    return RosterRow(
        *one[:4], plan.tp, status, on_request=bool(missing), why=missing,
        borrowed=names[ORIGIN_BORROWED], modelled=names[ORIGIN_MODELLED],
        streams_only=bool(modelled) and all(roles.get(part.role) == _STREAMED for part in modelled),
    )  # fmt: skip


class Cell(NamedTuple):
    """Counts of one GPU and engine."""

    total: int
    covered: int
    measured: int
    borrowed: int
    streams_modelled: int
    modelled: int
    on_request: int


@dataclass(frozen=True)
class RosterSummary:
    """Counts of a roster."""

    cells: dict[tuple[str, str], Cell]
    whole: Cell
    uncovered: dict[str, list[RosterRow]]
    borrowed: dict[str, int]
    modelled: dict[str, int]


def summarise(rows: Sequence[RosterRow]) -> RosterSummary:
    """Count the rows of a roster."""
    places = sorted({(row.gpu, row.engine) for row in rows})
    uncovered: dict[str, list[RosterRow]] = {}
    for row in rows:
        if not row.is_covered:
            uncovered.setdefault(in_short(row.why), []).append(row)
    return RosterSummary(
        {place: _cell([row for row in rows if (row.gpu, row.engine) == place]) for place in places},
        _cell(rows),
        dict(sorted(uncovered.items(), key=lambda item: -len(item[1]))),
        _counted(row.borrowed for row in rows),
        _counted(row.modelled for row in rows),
    )


def _cell(rows: Collection[RosterRow]) -> Cell:
    covered = [row for row in rows if row.is_covered]
    by_status = Counter("streams" if row.streams_only else row.status for row in covered)
    return Cell(
        len(rows), len(covered), by_status[_MEASURED], by_status[_BORROWED], by_status["streams"],
        by_status[_MODELLED], sum(row.on_request for row in rows),
    )  # fmt: skip


def _counted(names: Iterable[tuple[str, ...]]) -> dict[str, int]:
    return dict(Counter(itertools.chain.from_iterable(names)).most_common())


def in_short(why: str) -> str:
    """Shorten a reason to what several models share: without files, brackets and alternatives."""
    return _OF_ONE.sub("", why)


def main(
    root: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder aisimulate_core or aiconfigurator_core.  [default: installed]"
        ),
    ] = None,
) -> None:
    """Print roster.md: combinations of a support matrix that plans cover, and why not."""
    models = published_models(root)
    loaded = sum(isinstance(model, ModelSpec) for model in models.values())
    print(f"{loaded} of {len(models)} config.json files of {package_of(root)} load.\n")
    for name, model in models.items():
        if not isinstance(model, ModelSpec):
            print(f"* {name}: {in_short(str(model))}")
    chosen = [(MATRIX, "PASS", _passes), (MATRIX, "no data", _wants_data)]
    if ((root or installed_root()) / FORWARD_MATRIX).is_dir():
        chosen.append((FORWARD_MATRIX, "forward PASS", _passes))
    for matrix, words, choose in chosen:
        summary = summarise(list(roster_rows(filter(choose, read_support_matrix(root, matrix)), models)))
        engines = sorted({engine for _, engine in summary.cells})
        origins = ("measured", "borrowed", "norms modelled", "others", "on request")
        print()
        _print_markdown((f"{words}, by GPU", *engines, *origins), _markdown_rows(summary, engines))
        kinds = (("borrowed", summary.borrowed), ("modelled", summary.modelled))
        for kind, operators in kinds:
            listed = ", ".join(f"{name} {count}" for name, count in operators.items())
            print(f"Operators {kind}, in so many combinations: {listed or 'none'}.\n")
        for why, rows in summary.uncovered.items():
            names = sorted({row.model.split("/")[-1] for row in rows})
            print(f"* {len(rows)} not covered: {why} ({', '.join(names)})")


def _passes(one: Combination) -> bool:
    return one.verdict == PASS


def _wants_data(one: Combination) -> bool:
    return one.wants_data


def _markdown_rows(summary: RosterSummary, engines: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Return one row per GPU, and the total."""
    for gpu in dict.fromkeys(place[0] for place in summary.cells):
        cells = [summary.cells.get((gpu, engine)) for engine in engines]
        there = [cell for cell in cells if cell is not None]
        covered = ("" if cell is None else f"{cell.covered} of {cell.total}" for cell in cells)
        yield (gpu, *covered, *(str(sum(values)) for values in list(zip(*there, strict=True))[2:]))
    every = [[cell for (_, of), cell in summary.cells.items() if of == engine] for engine in engines]
    covered = (f"{sum(c.covered for c in cells)} of {sum(c.total for c in cells)}" for cells in every)
    yield ("together", *covered, *map(str, summary.whole[2:]))


def _print_markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    for cells in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(cells)} |")
    print()
