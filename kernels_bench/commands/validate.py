"""``kernels-bench validate``: what is wrong with tables, before they are used."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from kernels_bench.command_options import SET_WORDS, Json, print_json, print_table
from kernels_bench.grid.grid import load_grid
from kernels_bench.journal import read_journal
from kernels_bench.output.table_sets import gpu_of, journals_of, load_table_set
from kernels_bench.output.validate import Validation, validate_tables

EXIT_INVALID: Final = 1


def validate(
    where: Annotated[str, typer.Argument(help=f"What to check: {SET_WORDS}.")],
    grid: Annotated[
        str | None, typer.Option(help="Grid whose points should be there: a TOML file or a name.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check tables before they are used. Exit code 1 where they must not be."""
    tables = load_table_set(where)
    lines = [line for journal in journals_of(where) for line in read_journal(journal)]
    validation = validate_tables(
        tables,
        gpu_of(tables),
        None if grid is None else load_grid(grid).points(),
        skipped=[line["key"] for line in lines if line["type"] == "skip"],
        sentinels=[line["key"] for line in lines if line["type"] == "sentinel"],
    )
    if as_json:
        print_json(validation.as_dict())
    else:
        _print_validation(validation)
    if validation.severity == "error":
        raise typer.Exit(EXIT_INVALID)


def _print_validation(validation: Validation) -> None:
    for report in validation.reports:
        typer.echo(f"{report.operator}: {report.rows:,} rows in {report.file}")
        for finding in report.findings:
            typer.echo(f"  {finding.severity:<8}{finding.kind}: {finding.message}")
    if validation.findings:
        typer.echo("the whole set")
    for finding in validation.findings:
        typer.echo(f"  {finding.severity:<8}{finding.kind}: {finding.message}")
    if validation.sentinels:
        typer.echo()
        repeats = [
            (
                str(one["key"]).partition(" ")[0],
                str(one["run"]),
                str(one.get("rounds", "")),
                f"{one['spread']:.1%}",
                f"{one['drift']:+.1%}",
            )
            for one in validation.sentinels
        ]
        print_table(("sentinel", "run", "rounds", "spread", "drift"), repeats, left=2)
    if validation.coverage:
        typer.echo()
        covered = [
            (g.group or g.operator, *(f"{n:,}" for n in (g.points, g.measured, g.skipped, g.missing)))
            for g in validation.coverage
        ]
        print_table(("group of the grid", "points", "measured", "skipped", "missing"), covered)
    typer.echo(f"\n{validation.gpu}: gravest finding: {validation.severity}")
