"""The command line: parses, shows progress, sets the exit code.

Nothing heavy is imported before a command runs, so that ``fastroof --help`` answers quickly; and no other
command, where the first word names one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from fastroof.cli.completion import begin, fast_arguments
from fastroof.command_group import completion_variable, new_app

if TYPE_CHECKING:
    import typer

    app: typer.Typer

__all__ = ["COMMANDS", "app", "app_of", "main"]

COMMANDS: Final = (
    "step",
    "serving",
    "simulate",
    "fit",
    "capacity",
    "compare",
    "lookup",
    "models",
    "gpus",
    "engines",
    "sweep",
    "best",
    "report",
    "ui",
    "tables",
    "plot",
    "calibrate",
    "validate",
    "bench",
    "export",
    "backends",
    "warm",
    "doctor",
    "serve",
)
"""Every command, as it is called and as its module here is, in the order of ``--help``."""

EPILOG = """\b
Examples:
  fastroof step --model llama-3.1-8b --decode 64x4096 --prefill 2048@0 --explain
  fastroof lookup gemm --m 64,128 --n 6144 --k 4096
  fastroof sweep
  fastroof plot roofline -o roofline.png

Times are microseconds unless a unit is printed. --json prints one JSON document to
standard output; the keys are in each command's --help. Exit codes: 0 done, 1 tables are wrong
(tables validate), 2 an error, printed as one line on standard error, 130 interrupted.
"""

PURPOSE: Final = "How long one LLM inference step takes on a GPU, from measured kernels."


def app_of(commands: Iterable[str]) -> typer.Typer:
    """Return the command line with some of its commands."""
    made = new_app("fastroof", PURPOSE, EPILOG)
    for command in commands:
        module: Any = import_module(f"{__name__}.{command}")
        if hasattr(module, "register"):
            module.register(made)
        else:
            made.command(command, epilog=module.EPILOG, **getattr(module, "SETTINGS", {}))(
                getattr(module, command)
            )
    return made


def _commands_for(words: Sequence[str]) -> tuple[str, ...]:
    """The command that a command line begins with, else all: for help, and for words that name none."""
    return tuple(words[:1]) if words and words[0] in COMMANDS else COMMANDS


def main() -> None:
    """Run the command line of this process's arguments; it ends with it."""
    from typer.main import get_command

    begin()
    if completion_variable("fastroof") in os.environ:
        from fastroof.cli.completion import offer_values, words_before

        offer_values(get_command(app_of(_commands_for(words_before(os.environ)))))()
    commands = _commands_for(sys.argv[1:])
    with ExitStack() as shown:
        if os.isatty(2):
            from fastroof.interrupts import BeforeTheEnd
            from fastroof.progress import CommandPhase, remove_line

            shown.enter_context(BeforeTheEnd(remove_line))
            shown.enter_context(
                CommandPhase("fastroof" if commands is COMMANDS else f"fastroof {commands[0]}")
            )
        fast_arguments(get_command(app_of(commands)))()


def __getattr__(name: str) -> Any:
    # made on demand: for tests, and programs that embed the command line
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, app_of(COMMANDS))
