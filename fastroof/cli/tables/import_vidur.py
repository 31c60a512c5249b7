"""``fastroof tables import vidur``: tables from that simulator's profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from fastroof.cli.options import GPU_NAMES
from fastroof.cli.tables.imported import Dtype, Output, Overwrite, TableFormat, print_source, table_format

__all__ = ["register"]

EPILOG: Final = """\b
Example:
  fastroof tables import vidur vidur/data/profiling --gpu a100 --topology a100_dgx -o my_tables
  fastroof lookup gemm --m 64 --n 6144 --k 4096 --tables my_tables/a100
"""


def register(imports: typer.Typer) -> None:
    """Add the command."""
    imports.command("vidur", epilog=EPILOG)(vidur)


def vidur(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Vidur's data/profiling, or a folder below it.")
    ],
    output: Output = None,
    gpu: Annotated[
        str | None, typer.Option(*GPU_NAMES, help="GPU, where the folder has several or names none.")
    ] = None,
    topology: Annotated[
        str | None, typer.Option(help="Folder of network whose all-reduces are meant: a100_dgx.")
    ] = None,
    dtype: Dtype = "bf16",
    written: TableFormat = "parquet",
    overwrite: Overwrite = False,
) -> None:
    """Convert profiles that Vidur measured."""
    from fastroof.load.vidur import convert_vidur

    source = convert_vidur(
        folder,
        output,
        gpu=gpu,
        topology=topology,
        dtype=dtype,
        format=table_format(written),
        overwrite=overwrite,
    )
    print_source(source)
