"""The ``kernels-bench`` command: parses, turns every error into one line, sets the exit code.

Commands import what they need when they run, so that ``kernels-bench --help`` needs no torch and no GPU.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from fastroof._version import __version__
from fastroof.errors import FastroofError
from kernels_bench import commands

__all__ = ["app", "main"]

EXIT_ERROR: Final = 2
EXIT_BROKEN_PIPE: Final = 1
EXIT_INTERRUPTED: Final = 130

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

# Typer does not export the base of its usage errors, only one of them.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class CommandGroup(TyperGroup):
    """The commands, with every error turned into one line and an exit code."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command line, and exit."""
        exits = options.get("standalone_mode", True)
        options["standalone_mode"] = False
        if not exits:
            return super().main(*args, **options)
        try:
            code = super().main(*args, **options)
            sys.stdout.flush()
        except FastroofError as error:
            sys.exit(_say_error(str(error)))
        except UsageError as error:
            sys.exit(_say_error(_usage_words(error)))
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            # Whoever read the output has left: nothing more is written, not even at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(EXIT_BROKEN_PIPE)
        except OSError as error:
            named = f": {error.filename}" if error.filename else ""
            sys.exit(_say_error(f"{error.strerror or error}{named}"))
        sys.exit(code if isinstance(code, int) else 0)


def _usage_words(error: Any) -> str:
    message = error.format_message().strip().rstrip(".")
    context = getattr(error, "ctx", None)
    where = f"; see {context.command_path} --help" if context is not None else ""
    return f"{message[:1].lower()}{message[1:]}{where}"


def _say_error(message: str) -> int:
    line = " ".join(part.strip() for part in message.splitlines() if part.strip())
    typer.echo(f"kernels-bench: error: {line}", err=True)
    return EXIT_ERROR


app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    epilog=EPILOG,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kernels-bench {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Measure kernels on a GPU and write the tables that fastroof reads."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


for _module in sorted(pkgutil.iter_modules(commands.__path__), key=lambda module: module.name):
    importlib.import_module(f"{commands.__name__}.{_module.name}").register(app)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; the console script ``kernels-bench``.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after the program's name; those of the process by default.

    Raises
    ------
    SystemExit
        Always, with the exit code.
    """
    app(args=None if argv is None else list(argv), prog_name="kernels-bench")
