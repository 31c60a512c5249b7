"""``kernels-bench export``: tables in the layouts of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernels_bench.command_options import SET_WORDS, Json, print_json
from kernels_bench.output.table_sets import load_table_set

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The tree that is written.")]
Tables = Annotated[str, typer.Option(help=f"What to export: {SET_WORDS}.")]
GemmDtype = Annotated[
    str | None,
    typer.Option(help="dtype of the GEMMs: there is one file per GPU.  [default: bf16 if measured]"),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace this GPU's folders.")]


def infersim(
    folder: Folder,
    tables: Tables = "h100",
    gemm_dtype: GemmDtype = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write tables as the tree that InferSim reads."""
    from kernels_bench.output.export_trees import INFERSIM

    _export(INFERSIM, folder, tables, gemm_dtype, overwrite, as_json)


def roofline(
    folder: Folder,
    tables: Tables = "h100",
    gemm_dtype: GemmDtype = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write tables as the tree that roofline V2 reads, decodes in a file per heads and GPUs (-tpN).

    Decodes of 8 and 2 heads are in 32-8-128-tp4.csv if prefills of 32 and 8 heads were measured, and in the
    file of each other such pair. Windows, prefixes, KV caches other than bf16, MLA and experts are left out.
    """
    from kernels_bench.output.export_trees import ROOFLINE_V2

    _export(ROOFLINE_V2, folder, tables, gemm_dtype, overwrite, as_json)


def _export(
    program: str, folder: Path, tables: str, gemm_dtype: str | None, overwrite: bool, as_json: bool
) -> None:
    from kernels_bench.output.export_trees import READ_AS_ZERO, export_tree

    export = export_tree(load_table_set(tables), folder, program, gemm_dtype=gemm_dtype, overwrite=overwrite)
    if as_json:
        print_json(
            {
                "folder": str(export.root),
                "gpu": export.gpu,
                "rows": dict(export.rows),
                "left_out": dict(export.left_out),
                "read_as_zero": export.read_as_zero,
            }
        )
        return
    for why, count in export.left_out.items():
        typer.echo(f"left out {count:,} rows: {why}")
    if export.read_as_zero:
        typer.echo(f"note: {export.read_as_zero:,} {READ_AS_ZERO[program]}")
    typer.echo(f"{export.root}: {sum(export.rows.values()):,} rows in {len(export.rows)} files")
