"""The ``kernels-bench`` command.

Commands import what they need when they run, so that ``kernels-bench --help`` needs no torch and no GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Final

from fastroof.command_group import new_app
from kernels_bench import commands

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

COMMANDS: Final = (
    "providers",
    "smoke",
    "plan",
    "run",
    "allreduce",
    "steps",
    "bundle",
    "tables",
    "merge",
    "validate",
    "export",
)
"""Modules of :mod:`kernels_bench.commands`, in the order of a first use and of ``--help``."""

for _name in COMMANDS:
    importlib.import_module(f"{commands.__name__}.{_name}").register(app)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    app(args=None if argv is None else list(argv), prog_name="kernels-bench")
