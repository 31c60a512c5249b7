"""Options that several commands that draw have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

__all__ = ["DEFAULT_MODEL", "Output", "Results", "Where"]

DEFAULT_MODEL: Final = "llama-3.1-8b"

Output = Annotated[Path, typer.Option("--output", "-o", help="File to write: .png or .svg.")]
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
