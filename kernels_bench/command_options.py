"""Options and arguments that several commands have, and how they print."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from fastroof.errors import MeasureError
from kernels_bench.journal import finite

EXIT_INTERRUPTED: Final = 130
EXIT_UNFINISHED: Final = 1

Output = Annotated[Path, typer.Option("--output", "-o", help="Folder to write the source to.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing source in the folder.")]
Rank = Annotated[
    int | None,
    typer.Option(help="Rank among the GPU's sources; the lowest serves an operator.  [default: 50]"),
]
Engine = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Serving engine whose kernels these are, as vllm, or vllm-0.26.0 if the runs record no version: "
        "they serve its plans. Default: those of all.",
    ),
]
Format = Annotated[Literal["csv", "parquet"], typer.Option("--format", help="Format of the tables.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
HostGpu = Annotated[
    str | None, typer.Option(help="GPU name or gpu.toml.  [default: what the driver reports]")
]
PointsSeed = Annotated[int, typer.Option(help="Seed of the order of points and of their inputs.")]
DeadlineOfPart = Annotated[
    float | None, typer.Option(help="Maximum seconds for everything; run again to continue.")
]
SET_WORDS: Final = (
    "a folder of tables, a journal (.jsonl) or the folder of a run, the name of a GPU, or gpu:source as in "
    "h100:kernels_bench"
)
"""What :func:`kernels_bench.output.table_sets.load_table_set` takes, in the words of a help text."""


def listed(given: str) -> tuple[str, ...]:
    """Return the words of a comma-separated option."""
    return tuple(word.strip() for word in given.split(",") if word.strip())


def check_deadline(deadline_s: float | None) -> None:
    """Raise a MeasureError unless a deadline is above zero, or not given."""
    if deadline_s is not None and not deadline_s > 0:
        raise MeasureError(f"a deadline is a number of seconds above zero, got {deadline_s:g}")


def print_json(document: Any) -> None:
    """Print one JSON document, with null for NaN and infinities."""
    typer.echo(json.dumps(finite(document), indent=2, allow_nan=False))


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> None:
    """Print a table, its first columns to the left."""
    cells = [tuple(heads), *(tuple(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    for row in cells:
        padded = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        typer.echo("  ".join(padded).rstrip())
