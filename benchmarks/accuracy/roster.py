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
from typing import Annotated, Any, Final, NamedTuple

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
from fastroof.cli.options import GPU_NAMES, Json
from fastroof.cli.output import print_json, print_line, print_table
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_MODELLED
from fastroof.config import GpuSpec, load_gpu
from fastroof.errors import FastroofError, PlanError
from fastroof.load.aiconfigurator import installed_root
from fastroof.models import Layout, ModelSpec
from fastroof.models.execution import AUTO
from fastroof.plan import StepPlan
from fastroof.plan.plan_set import STATUSES, compiled_quietly, typical_parts
from fastroof.progress import shown_progress
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
    fits: bool
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
    return RosterRow(*one[:4], 0, _REFUSED, on_request=False, fits=False, why=why)


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
        *one[:4], plan.tp, status, on_request=bool(missing), fits=plan.has_room, why=missing,
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


def print_markdown(root: Path | None = None) -> None:
    """Print the roster as Markdown: combinations that pass, those without data, and forward passes."""
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
        columns = (
            f"{words}, by GPU",
            *engines,
            "measured",
            "borrowed",
            "norms modelled",
            "others",
            "on request",
        )
        print()
        _print_markdown(columns, _markdown_rows(summary, engines))
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


NAMED_MODELS: Final = 4


def print_roster(
    models: Sequence[str],
    gpus: Sequence[str],
    engines: Sequence[str],
    failed: bool,
    as_json: bool,
    root: Path | None = None,
    matrix: str = MATRIX,
) -> None:
    """Compile plans of the selected combinations, and print counts by GPU and engine."""
    package = package_of(root)
    published = published_models(root)
    wanted = _wanted(read_support_matrix(root, matrix), models, gpus, engines, failed)
    rows = []
    with shown_progress("plans", "combinations") as progress:
        for row in roster_rows(wanted, published):
            rows.append(row)
            progress(len(rows), len(wanted))
    loaded = sum(not isinstance(model, Exception) for model in published.values())
    if as_json:
        document = {
            "package": package,
            "configs": len(published),
            "configs_loaded": loaded,
            "combinations": [{**row._asdict(), "is_covered": row.is_covered} for row in rows],
        }
        print_json(document)
        return
    print_line(f"{package}: {loaded} of {len(published)} config.json files load.\n")
    _print_failures(published)
    _print(summarise(rows), failed)


def _wanted(
    matrix: Sequence[Combination],
    models: Sequence[str],
    gpus: Sequence[str],
    engines: Sequence[str],
    failed: bool,
) -> list[Combination]:
    """Select combinations; names that the matrix lacks are an error."""
    chosen = {"model": list(models), "gpu": [load_gpu(name).name for name in gpus], "engine": list(engines)}
    for name, values in chosen.items():
        known = {getattr(one, name) for one in matrix}
        unknown = [value for value in values if value not in known]
        if unknown:
            raise PlanError(
                f"--{name} {', '.join(unknown)}: the support matrix has none; it has "
                f"{', '.join(sorted(known))}"
            )
    return [
        one
        for one in matrix
        if (one.wants_data if failed else one.verdict == PASS)
        and all(not values or getattr(one, name) in values for name, values in chosen.items())
    ]


def _print_failures(published: dict[str, Any]) -> None:
    named: dict[str, list[str]] = {}
    for name, model in published.items():
        if isinstance(model, Exception):
            named.setdefault(in_short(str(model)), []).append(name)
    if named:
        columns = ("does not load because", "configs", "models")
        table = [(why, str(len(names)), _names_words(names)) for why, names in named.items()]
        print_table(columns, table, left=("does not load because", "models"))
        print_line()


def _print(summary: RosterSummary, failed: bool) -> None:
    if not summary.whole.total:
        print_line("No combination is left to plan.")
        return
    gpus, engines = ({place[i]: None for place in summary.cells} for i in (0, 1))
    table = [
        (
            gpu,
            *(_cell_words(summary.cells.get((gpu, engine))) for engine in engines),
            _row_total(summary, gpu),
        )
        for gpu in gpus
    ]
    print_table(("gpu", *engines, "together"), table, left=("gpu",))
    whole = summary.whole
    print_line(
        f"\n{whole.covered:,} of {whole.total:,} combinations "
        f"{'without data there' if failed else 'that pass there'} have a plan from measured "
        f"kernels: {whole.measured:,} of measured ones alone, {whole.borrowed:,} with some borrowed, "
        f"{whole.streams_modelled:,} where norms and the like are modelled, {whole.modelled:,} where "
        f"others are. {whole.on_request:,} more have one with --allow-modelled."
    )
    _print_uncovered(summary.uncovered)
    for words, operators in (("borrowed", summary.borrowed), ("modelled", summary.modelled)):
        if operators:
            print_line()
            print_table((words, "combinations"), [(n, f"{c:,}") for n, c in operators.items()], left=(words,))


def _print_uncovered(uncovered: dict[str, list[RosterRow]]) -> None:
    if not uncovered:
        return
    print_line()
    columns = ("not covered because", "combinations", "on request", "models")
    table = [
        (
            why,
            f"{len(rows):,}",
            f"{sum(row.on_request for row in rows):,}",
            _names_words([row.model for row in rows]),
        )
        for why, rows in uncovered.items()
    ]
    print_table(columns, table, left=("not covered because", "models"))


def _names_words(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - NAMED_MODELS
    return ", ".join(distinct[:NAMED_MODELS]) + (f" and {more} more" if more > 0 else "")


def _row_total(summary: RosterSummary, gpu: str) -> str:
    cells = [cell for (of_gpu, _), cell in summary.cells.items() if of_gpu == gpu]
    return f"{sum(cell.covered for cell in cells)}/{sum(cell.total for cell in cells)}"


def _cell_words(cell: Cell | None) -> str:
    """Return covered/total, and how many are measured, borrowed and modelled."""
    if cell is None:
        return ""
    parts = (cell.measured, cell.borrowed, cell.streams_modelled, cell.modelled)
    return f"{cell.covered}/{cell.total} ({' '.join(map(str, parts))})"


def main(
    model: Annotated[list[str] | None, typer.Option(help="Only this Hugging Face id; repeatable.")] = None,
    gpu: Annotated[list[str] | None, typer.Option(*GPU_NAMES, help="Only this GPU; repeatable.")] = None,
    engine: Annotated[list[str] | None, typer.Option(help="Only this engine; repeatable.")] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Combinations that the matrix has no data for.")
    ] = False,
    root: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder aisimulate_core or aiconfigurator_core.  [default: installed]"
        ),
    ] = None,
    forward: Annotated[
        bool, typer.Option("--forward", help="The matrix of whole forward passes, which aisimulate has.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print roster.md.")] = False,
    as_json: Json = False,
) -> None:
    """Count combinations of aisimulate's or aiconfigurator-core's support matrix that plans cover."""
    if markdown:
        print_markdown(root)
    else:
        matrix = FORWARD_MATRIX if forward else MATRIX
        print_roster(model or (), gpu or (), engine or (), failed, as_json, root, matrix)
