"""``kernels-bench export``: tables in the layouts of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernels_bench.command_options import SET_WORDS, Json, print_json
from kernels_bench.output.table_sets import load_table_set


def infersim(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The tree that is written.")],
    tables: Annotated[str, typer.Option(help=f"What to export: {SET_WORDS}.")] = "h100",
    gemm_dtype: Annotated[
        str | None,
        typer.Option(help="dtype of the GEMMs: InferSim has one file per GPU.  [default: bf16 if measured]"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace this GPU's folders.")] = False,
    as_json: Json = False,
) -> None:
    """Write tables as the tree that InferSim reads."""
    from kernels_bench.output.export_infersim import export_infersim

    export = export_infersim(load_table_set(tables), folder, gemm_dtype=gemm_dtype, overwrite=overwrite)
    if as_json:
        print_json(
            {
                "folder": str(export.root),
                "gpu": export.gpu,
                "rows": dict(export.rows),
                "left_out": dict(export.left_out),
                "rounds_to_zero": export.rounds_to_zero,
            }
        )
        return
    for why, count in export.left_out.items():
        typer.echo(f"left out {count:,} rows: {why}")
    if export.rounds_to_zero:
        typer.echo(
            f"note: {export.rounds_to_zero:,} rows have an MFU that InferSim rounds to 0.0 and divides by"
        )
    typer.echo(f"{export.root}: {sum(export.rows.values()):,} rows in {len(export.rows)} files")
