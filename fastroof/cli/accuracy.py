"""``fastroof tables holdout``: how far lookups are off on points they have not seen."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from fastroof.cli.inputs import DEFAULT_GPU, tables_of
from fastroof.cli.output import print_json, print_table

__all__ = ["register"]

EPILOG: Final = """\b
Errors are absolute, relative to the measured latency; bias is their signed mean. inside: every corner
around the point was kept and measured; outside: the rest.

\b
JSON: a list with one object a grid, method and region: operator, grid, method, region, points, mape,
median, p90, p99, bias, all errors as fractions.
"""


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("holdout", epilog=EPILOG)(holdout)


def holdout(
    where: Annotated[
        str | None, typer.Argument(metavar="[GPU|PATH]", help="A GPU's name or a folder of measured tables.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU, or which one where a folder holds several.")] = None,
    source: Annotated[str | None, typer.Option(help="Use only this source.")] = None,
    operator: Annotated[list[str] | None, typer.Option(help="Judge only this operator; repeatable.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Judge only this method; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Judge lookups on left-out points.

    Each table is thinned, its left-out points are looked up, and the errors of each method reported.
    """
    tables = tables_of(gpu or DEFAULT_GPU, None, source) if where is None else tables_of(where, gpu, source)
    options: dict[str, Any] = {}
    if operator:
        options["operators"] = operator
    if method:
        options["methods"] = method
    if not as_json:
        options["progress"] = lambda words: typer.echo(f"holding out: {words}", err=True)
    rows = tables.holdout(**options)
    if as_json:
        print_json([row._asdict() for row in rows])
        return
    errors = ("mape", "median", "p90", "p99", "bias")
    text = [
        (
            row.operator,
            row.grid,
            row.method,
            row.region,
            f"{row.points:,}",
            *(f"{getattr(row, name) * 100.0:.1f} %" for name in errors),
        )
        for row in rows
    ]
    columns = ("operator", "grid", "method", "region", "points", "MAPE", "median", "p90", "p99", "bias")
    print_table(columns, text, left=("operator", "grid", "method", "region"))
