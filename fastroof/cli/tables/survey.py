"""``fastroof tables survey``: every source of some GPUs, by itself and against the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from fastroof.cli.gpu_tables import tables_of
from fastroof.cli.options import Json
from fastroof.cli.output import print_json, print_table

if TYPE_CHECKING:
    from fastroof.tables.survey import SurveyRow

__all__ = ["register"]

EPILOG: Final = """\b
inside, outside: mean absolute error of hidden points, every second value of each axis kept. same 80 %: share
of other sources' values in its 80 % intervals where both ran one library's kernels; any 80 %: of all common
points, as answers for the other's engine.

\b
JSON: a list with one object a source and operator: gpu, engine, source, operator, rows, mape_inside,
mape_outside, hidden, same_80, same_points, any_80, any_points (fractions; null without points), unsound
(rows of families that tests find unsound).
"""

HEADS: Final = (
    "gpu", "engine", "source", "operator", "rows", "inside", "outside", "same 80 %", "points", "any 80 %",
    "points", "unsound",
)  # fmt: skip


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("survey", epilog=EPILOG, short_help="Judge every source of some GPUs.")(survey)


def survey(
    where: Annotated[list[str], typer.Argument(metavar="GPU|PATH...", help="GPUs' names or folders.")],
    operator: Annotated[list[str] | None, typer.Option(help="Judge only this one; repeatable.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table for a README.")] = False,
    as_json: Json = False,
) -> None:
    """Judge every source: rows, hold-out errors, intervals against other campaigns."""
    from fastroof.tables.survey import run_survey

    rows: list[SurveyRow] = []
    for name in where:
        tables = tables_of(name)
        rows += run_survey(tables, operators=operator, progress=lambda words: typer.echo(words, err=True))
    if as_json:
        print_json([row._asdict() for row in rows])
        return
    text = [_cells(row) for row in rows]
    if markdown:
        for cells in (HEADS, ("---",) * len(HEADS), *text):
            typer.echo(f"| {' | '.join(cells)} |")
        return
    print_table(HEADS, text, left=HEADS[:4])


def _cells(row: SurveyRow) -> tuple[str, ...]:
    def share(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value * 100.0:.{digits}f} %"

    return (
        row.gpu,
        row.engine,
        row.source,
        row.operator,
        f"{row.rows:,}",
        share(row.mape_inside, 1),
        share(row.mape_outside, 1),
        share(row.same_80, 0),
        f"{row.same_points:,}",
        share(row.any_80, 0),
        f"{row.any_points:,}",
        f"{row.unsound:,}",
    )
