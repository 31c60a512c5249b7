"""``fastroof tables import aiconfigurator``: tables from that package's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from fastroof.cli.output import print_table
from fastroof.errors import TableError

__all__ = ["register"]

EPILOG: Final = """\b
Example:
  fastroof tables import aiconfigurator --system h200_sxm --backend vllm --version 0.24.0 -o my_tables
  fastroof step --model llama-3.1-8b --decode 64x4096 --tables my_tables/h200
"""


def register(imports: typer.Typer) -> None:
    """Add the command."""
    imports.command("aiconfigurator", epilog=EPILOG)(aiconfigurator)


def aiconfigurator(
    system: Annotated[str, typer.Option(help="System of the package: h100_sxm, h200_sxm, a100_sxm, ...")],
    backend: Annotated[str, typer.Option(help="vllm, sglang or trtllm.")],
    version: Annotated[str, typer.Option(help="Version of the backend: 0.24.0.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Folder that gets <gpu>/aiconfigurator-<backend>-<version>/."),
    ],
    root: Annotated[
        Path | None,
        typer.Option(help="Folder of the package aiconfigurator_core; without it the installed one."),
    ] = None,
    table_format: Annotated[str, typer.Option("--format", help="parquet or csv.")] = "parquet",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a source that is already there.")
    ] = False,
) -> None:
    """Convert one system of the package aiconfigurator-core."""
    from fastroof.load.aiconfigurator import convert_aiconfigurator
    from fastroof.load.own import load_own

    if table_format not in ("parquet", "csv"):
        raise TableError(f"--format is parquet or csv, got {table_format!r}")
    folder = convert_aiconfigurator(
        system, backend, version, output, root, "csv" if table_format == "csv" else "parquet", overwrite
    )
    written = load_own(folder)
    rows = [(name, f"{table.num_rows:,}") for name, table in written.tables.items()]
    print_table(("operator", "rows"), rows, left=("operator",))
    typer.echo(f"wrote {folder}")
