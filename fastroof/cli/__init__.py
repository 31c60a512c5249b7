"""The command line: parses, shows progress, sets the exit code.

Nothing heavy is imported before a command runs, so that ``fastroof --help`` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from fastroof._version import __version__
from fastroof.cli import (
    bench,
    best,
    calibrate,
    catalogue,
    compare,
    export,
    lookup,
    merge,
    plot,
    report,
    serve,
    serving,
    size,
    step,
    sweep,
    tables,
    validate,
)
from fastroof.cli.errors import CommandGroup, help_if_alone

__all__ = ["app", "main"]

EPILOG = """\b
Examples:
  fastroof step --model llama-3.1-8b --decode 64x4096 --prefill 2048@0 --explain
  fastroof lookup gemm --m 64,128 --n 6144 --k 4096
  fastroof sweep
  fastroof plot roofline -o roofline.png

Times are microseconds unless a unit is printed beside them. --json prints one JSON document to
standard output; the keys are in each command's --help. Exit codes: 0 done, 1 tables are wrong
(tables validate), 2 an error, said in one line on standard error, 130 interrupted.
"""

app = typer.Typer(
    cls=CommandGroup,
    callback=None,
    add_completion=False,
    epilog=EPILOG,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fastroof {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """How long one LLM inference step takes on a GPU, from measured kernels."""
    help_if_alone(context)


for group in (
    step,
    serving,
    size,
    compare,
    lookup,
    catalogue,
    sweep,
    best,
    merge,
    report,
    tables,
    plot,
    calibrate,
    validate,
    bench,
    export,
    serve,
):
    group.register(app)


def main() -> None:
    """Run the command line; the console script ``fastroof``."""
    app()
