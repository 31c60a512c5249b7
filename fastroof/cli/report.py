"""``fastroof report``: a sweep's results as one interactive page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from fastroof.cli.options import Results
from fastroof.command_group import warn
from fastroof.units import GB

EPILOG: Final = """\b
Examples:
  fastroof sweep my.toml -o results.parquet
  fastroof report results.parquet -o report.html

The page works without a network, and filters and selections are in its address. fastroof plot pareto
draws its Pareto fronts as PNG or SVG.
"""


def report(
    results: Results,
    output: Annotated[Path, typer.Option("--output", "-o", help="Page to write: .html.")] = Path(
        "report.html"
    ),
) -> None:
    """Show a sweep's results as one interactive page."""
    from fastroof.report.html import write_report

    written = write_report(results, output)
    for note in written.notes:
        if "breakdown" in note or "changed" in note:
            warn(note)
    typer.echo(
        f"wrote {written.path}: {written.num_shown:,} of {written.num_rows:,} rows, steps of "
        f"{written.num_explained:,} of them, {written.num_bytes / GB * 1e3:.1f} MB"
    )
