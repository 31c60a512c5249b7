"""``fastroof merge``: the shards of a sweep into one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

EPILOG: Final = """\b
Examples:
  fastroof sweep my.toml -o my-1.parquet --shard 1/2
  fastroof sweep my.toml -o my-2.parquet --shard 2/2
  fastroof merge my-1.parquet my-2.parquet -o my.parquet
  fastroof merge shards/*.parquet -o my.parquet

It prints the summary of `fastroof sweep`.
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("merge", epilog=EPILOG)(merge)


def merge(
    shards: Annotated[
        list[Path], typer.Argument(metavar="SHARD.parquet...", help="Result files of all shards.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Results to write: .parquet, .csv or .jsonl.")
    ] = Path("results.parquet"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no summary.")] = False,
) -> None:
    """Join the shards of a sweep into one result."""
    from fastroof.cli.sweep import print_summary
    from fastroof.sweep import merge_shards

    print_summary(merge_shards(shards, output), as_json=as_json, quiet=quiet)
