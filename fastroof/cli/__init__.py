"""The command line: parses, shows progress, sets the exit code.

Nothing heavy is imported before a command runs, so that ``fastroof --help`` answers at once.
"""

from __future__ import annotations

from fastroof.cli import (
    backends,
    bench,
    best,
    calibrate,
    capacity,
    compare,
    engines,
    export,
    gpus,
    lookup,
    merge,
    models,
    plot,
    report,
    serve,
    serving,
    simulate,
    size,
    step,
    sweep,
    tables,
    validate,
)
from fastroof.command_group import new_app

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

app = new_app("fastroof", "How long one LLM inference step takes on a GPU, from measured kernels.", EPILOG)

for command in (
    step,
    serving,
    simulate,
    size,
    capacity,
    compare,
    lookup,
    models,
    gpus,
    engines,
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
    backends,
    serve,
):
    command.register(app)


def main() -> None:
    """Run the command line; the console script ``fastroof``."""
    app()
