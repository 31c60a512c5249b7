"""Options that several commands that draw have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

__all__ = ["DEFAULT_MODEL", "Gpu", "Output", "Results", "Source", "TablesPath", "Tp", "Where"]

DEFAULT_MODEL: Final = "llama-3.1-8b"

Output = Annotated[Path, typer.Option("--output", "-o", help="File to write: .png or .svg.")]
Gpu = Annotated[str | None, typer.Option(help="GPU (see fastroof gpus).  [default: h100]")]
TablesPath = Annotated[
    str | None, typer.Option(metavar="PATH", help="Folder of measured tables to use instead.")
]
Source = Annotated[str | None, typer.Option(help="Use only this source of the tables.")]

Tp = Annotated[int, typer.Option(help="GPUs the model is split over: 1, 2, 4 or 8.")]

Results = Annotated[
    Path, typer.Argument(metavar="RESULTS.parquet", help="What fastroof sweep wrote.", show_default=False)
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="COLUMN=VALUE",
        help="Only such rows, as --where isl=4000; repeatable.  [default: the first workload of several]",
    ),
]
