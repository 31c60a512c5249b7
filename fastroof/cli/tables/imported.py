"""What the commands that import other programs' profiles share: options, and what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fastroof.cli.output import print_table
from fastroof.errors import TableError

__all__ = ["Dtype", "Output", "Overwrite", "TableFormat", "print_source", "table_format"]

Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Folder that gets <gpu>/<program>/; without it the user's folder of tables."
    ),
]
Dtype = Annotated[str, typer.Option(help="bf16 or fp16: what rows measured in float16 are filed under.")]
TableFormat = Annotated[str, typer.Option("--format", help="parquet or csv.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a source that is already there.")]


def table_format(word: str) -> Literal["parquet", "csv"]:
    """Check a format."""
    if word not in ("parquet", "csv"):
        raise TableError(f"--format is parquet or csv, got {word!r}")
    return "csv" if word == "csv" else "parquet"


def print_source(folder: Path) -> None:
    """Print the rows of each operator, what was left out, and where they lie."""
    from fastroof.load.own import list_sources, load_own

    rows = [(name, f"{table.num_rows:,}") for name, table in load_own(folder).tables.items()]
    print_table(("operator", "rows"), rows, left=("operator",))
    provenance = list_sources(folder)[0].provenance
    left_out: dict[str, int] = {}
    for name, about in (*provenance["imported"].items(), *provenance["operators"].items()):
        if "ignored" in about:
            typer.echo(f"not read: {name}: {about['ignored']}")
        for reason, count in about.get("left_out", {}).items():
            left_out[reason] = left_out.get(reason, 0) + count
    for reason, count in left_out.items():
        typer.echo(f"left out: {count:,} rows: {reason}")
    typer.echo(f"wrote {folder}")
