"""``kernels-bench tables``: the journals of one run into a source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernels_bench.command_options import Engine, Format, Json, Output, Overwrite, Rank, print_json
from kernels_bench.output.table_sets import journals_of


def tables(
    journals: Annotated[list[str], typer.Argument(help="Journals, or the folder of a run.")],
    output: Output,
    overwrite: Overwrite = False,
    rank: Rank = None,
    engine: Engine = "",
    file_format: Format = "csv",
    as_json: Json = False,
) -> None:
    """Turn the journals of one run into a source that fastroof loads."""
    from kernels_bench.output.tables import write_tables

    paths = [path for word in journals for path in journals_of(word) or [Path(word)]]
    written = write_tables(
        paths, output, overwrite=overwrite, rank=rank, engine=engine, file_format=file_format
    )
    if as_json:
        print_json(
            {
                "folder": str(written.folder),
                "gpu": written.gpu,
                "rows": dict(written.rows),
                "skipped": written.skipped,
                "left_out": dict(written.left_out),
            }
        )
        return
    for operator, rows in written.rows.items():
        typer.echo(f"{operator:<26}{rows:>8,} rows")
    for key, why in written.left_out.items():
        typer.echo(f"left out: {key}: {why}")
    skipped = f", {written.skipped:,} points skipped" if written.skipped else ""
    typer.echo(f"{written.folder}: {sum(written.rows.values()):,} rows of {written.gpu}{skipped}")
