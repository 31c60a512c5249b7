"""The ``kernels-bench`` command.

Commands import what they need when they run, so that ``kernels-bench --help`` needs no torch and no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from fastroof.command_group import new_app
from kernels_bench.commands.allreduce import allreduce, collectives
from kernels_bench.commands.bundle import bundle
from kernels_bench.commands.plan import plan
from kernels_bench.commands.providers import providers
from kernels_bench.commands.run import resume, run
from kernels_bench.commands.smoke import smoke
from kernels_bench.commands.steps import steps
from kernels_bench.commands.tables import export, merge, tables, validate

EPILOG: Final = """\b
Examples:
  kernels-bench providers
  kernels-bench smoke
  kernels-bench plan --budget 600
  kernels-bench run -o out --budget 540 --deadline 600
  kernels-bench resume out
  kernels-bench run cpu -o out --providers cpu

Clocks, power and persistence settings are never changed. Errors are one line on standard error and exit
code 2; 130 is interrupted; other codes are in each command's --help.
"""

app = new_app("kernels-bench", "Measure kernels on a GPU and write the tables that fastroof reads.", EPILOG)

COMMANDS: Final[dict[Callable[..., None], str]] = {
    providers: "List the providers, and why some do not work here.",
    smoke: "Try every provider on one point of each operator; save nothing.",
    plan: "Show the points, seconds and memory of a grid.",
    run: "Measure the points of a grid, and write tables.",
    resume: "Continue a run that stopped early.",
    allreduce: "Measure all-reduce over several GPUs of this host.",
    collectives: "Measure all-gather, reduce-scatter and all-to-all.",
    steps: "Measure whole steps of vLLM.",
    bundle: "Pack what a borrowed host without network needs to measure.",
    tables: "Turn the journals of a run into tables.",
    merge: "Merge several runs of one GPU into one table set.",
    validate: "Check tables before they are used.",
    export: "Write measured tables in the format of another program.",
}
"""What each does, in the order of a first use and of ``--help``."""

for _command, _short_help in COMMANDS.items():
    app.command(short_help=_short_help)(_command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    app(args=None if argv is None else list(argv), prog_name="kernels-bench")
