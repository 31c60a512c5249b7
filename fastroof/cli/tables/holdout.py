"""``fastroof tables holdout``: how far lookups are off on points they have not seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.gpu_tables import DEFAULT_GPU, tables_of
from fastroof.cli.options import GPU_NAMES, Json
from fastroof.cli.output import print_json, print_table
from fastroof.errors import LookupInputError

if TYPE_CHECKING:
    from fastroof.tables import Tables

__all__ = ["register"]

EPILOG: Final = """\b
Errors are absolute, relative to the measured latency; bias is their signed mean. inside: every corner
around the point was kept and measured; outside: the rest.

\b
JSON: a list with one object a grid, method and region: operator, grid, method, region, points, mape,
median, p90, p99, bias, all errors as fractions; with --coverage one a grid and region: operator, grid,
region, points, level_50, level_80, level_90, level_95 (shares of the points in intervals that claim so much),
lowest_80, highest_80 (over four draws), quartiles_80 (from small to large errors claimed), median_error.
"""


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("holdout", epilog=EPILOG)(holdout)


def holdout(
    where: Annotated[
        str | None, typer.Argument(metavar="[GPU|PATH]", help="A GPU's name or a folder of measured tables.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(*GPU_NAMES, help="GPU, or which one where a folder holds several.")
    ] = None,
    source: Annotated[str | None, typer.Option(help="Use only this source.")] = None,
    operator: Annotated[list[str] | None, typer.Option(help="Judge only this operator; repeatable.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Judge only this method; repeatable.")] = None,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="Judge the errors that lookups claim, not the lookups.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="With --coverage: a picture, .png or .svg.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Judge lookups on left-out points."""
    if coverage and method:
        raise LookupInputError("--coverage judges the roofline lookup: it takes no --method")
    if output is not None and not coverage:
        raise LookupInputError("--output draws what --coverage finds: pass both")
    if output is not None:
        from fastroof.report import check_picture

        check_picture(output)
    tables = tables_of(gpu or DEFAULT_GPU, None, source) if where is None else tables_of(where, gpu, source)
    options: dict[str, Any] = {}
    if operator:
        options["operators"] = operator
    if method:
        options["methods"] = method
    if not as_json:
        options["progress"] = lambda words: typer.echo(f"holding out: {words}", err=True)
    if coverage:
        _coverage(tables, options, output, as_json=as_json)
        return
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


def _coverage(tables: Tables, options: dict[str, Any], output: Path | None, *, as_json: bool) -> None:
    from fastroof.tables.coverage import run_coverage

    rows = run_coverage(tables, **options)
    if as_json:
        print_json([row._asdict() for row in rows])
    else:
        text = [
            (
                row.operator,
                row.grid,
                row.region,
                f"{row.points:,}",
                *(f"{s * 100.0:.0f} %" for s in (row.level_50, row.level_80, row.level_90, row.level_95)),
                f"{row.lowest_80 * 100.0:.0f} to {row.highest_80 * 100.0:.0f}",
                " ".join(f"{s * 100.0:.0f}" for s in row.quartiles_80),
                f"{row.median_error * 100.0:.1f} %",
            )
            for row in rows
        ]
        columns = (
            "operator", "grid", "region", "points", "50 %", "80 %", "90 %", "95 %", "80 %, draws",
            "80 %, quartiles", "error",
        )  # fmt: skip
        print_table(columns, text, left=("operator", "grid", "region", "80 %, draws", "80 %, quartiles"))
    if output is not None:
        from fastroof.report import save_figure
        from fastroof.report.coverage_plot import draw_coverage

        figure = draw_coverage(rows, source=", ".join(sorted(set(tables.sources.values()))))
        typer.echo(f"wrote {save_figure(figure, output)}", err=as_json)
