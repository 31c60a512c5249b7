"""Command-line basics: ``--help``, ``--version``, shell completion, errors, exit codes and groups of options.

An error is one line on standard error and an exit code, never a traceback. ``@taking(plan=OPTIONS)`` replaces
the parameter ``plan`` of a command by a group's options, which the command then gets as a dict.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import typer
from typer.core import TyperGroup

from fastroof._version import __version__
from fastroof.errors import FastroofError
from fastroof.interrupts import EXIT_INTERRUPTED, raise_again

SHELLS: Final = ("bash", "zsh", "fish")
"""Shells with completion."""

EXIT_ERROR: Final = 2
EXIT_BROKEN_PIPE: Final = 1

# Typer exports one usage error, but not their base class.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class CommandGroup(TyperGroup):
    """A group of commands that turns every error into one line and an exit code."""

    program: ClassVar[str]

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line and exit."""
        complete_var = complete_var or completion_variable(self.program)
        if complete_var in os.environ:
            _typer_completion().completion_init()
        run = partial(super().main, args, prog_name, complete_var, False, windows_expand_args, **extra)
        if not standalone_mode:
            return run()
        _replace_closed_streams()
        try:
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, io.TextIOWrapper):
                    # a file name that the terminal cannot show must not cause a failure
                    stream.reconfigure(errors="backslashreplace")
            with _warnings_as_lines(self.program):
                raise_again()
                code = run()
            sys.stdout.flush()
        except FastroofError as error:
            sys.exit(self._print_error(str(error)))
        except UsageError as error:
            sys.exit(self._print_error(_usage_message(error)))
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            # the reader of the output is gone: write nothing more, not even at exit
            _drop_output()
            sys.exit(EXIT_BROKEN_PIPE)
        except OSError as error:
            try:
                sys.stdout.flush()
            except OSError:
                _drop_output()
            named = f": {error.filename}" if error.filename else ""
            sys.exit(self._print_error(f"{error.strerror or error}{named}"))
        except MemoryError as error:
            sys.exit(self._print_error(f"not enough memory ({error})" if str(error) else "not enough memory"))
        if code == EXIT_INTERRUPTED:
            typer.echo(err=True)
        sys.exit(code if isinstance(code, int) else 0)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read a command line; the shell may be left out after a completion option."""
        if len(args) == 1 and args[0] in ("--install-completion", "--show-completion"):
            args = [*args, Path(os.environ.get("SHELL", "")).name]
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def _print_error(self, message: str) -> int:
        typer.echo(f"{self.program}: error: {_one_line(message)}", err=True)
        return EXIT_ERROR


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _replace_closed_streams() -> None:
    """Replace standard streams that were closed when the program started."""
    for name, flags, mode in (
        ("stdin", os.O_RDONLY, "r"),
        ("stdout", os.O_RDONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))


class Commands(typer.Typer):
    """Commands with grouped help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(rich_markup_mode=None, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Any:
        """Return a decorator that adds a command."""
        from fastroof.option_help import HelpfulCommand

        return super().command(name, **{"cls": HelpfulCommand, **settings})


def new_app(program: str, purpose: str, epilog: str) -> typer.Typer:
    """Return a command line that has no commands yet."""

    class ProgramGroup(CommandGroup):
        pass

    ProgramGroup.program = program
    app = Commands(
        cls=ProgramGroup,
        add_completion=False,
        epilog=epilog,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback(invoke_without_command=True, help=purpose)(_start)
    return app


def _print_version(context: typer.Context, is_requested: bool) -> None:
    if is_requested:
        group: Any = context.command
        typer.echo(f"{group.program} {__version__}")
        raise typer.Exit


def completion_variable(program: str) -> str:
    """Return the environment variable by which a shell requests completions."""
    return f"_{program}_COMPLETE".replace("-", "_").upper()


def _typer_completion() -> Any:
    # imported only for completion: it takes as long as a small command
    return import_module("typer.completion")


def _known_shell(shell: str) -> str:
    if shell not in SHELLS:
        raise typer.BadParameter(
            f"needs one of {', '.join(SHELLS)}, got {shell!r} (default: the shell in SHELL)"
        )
    return shell


def _install_completion(context: typer.Context, shell: str | None) -> None:
    if shell is None or context.resilient_parsing:
        return
    program = str(getattr(context.command, "program", ""))
    _, file = _typer_completion().install(_known_shell(shell), program, completion_variable(program))
    typer.echo(f"installed completion of {program} in {file}; restart {shell} to use it")
    raise typer.Exit


def _show_completion(context: typer.Context, shell: str | None) -> None:
    if shell is None or context.resilient_parsing:
        return
    program = str(getattr(context.command, "program", ""))
    script = _typer_completion().get_completion_script(
        prog_name=program, complete_var=completion_variable(program), shell=_known_shell(shell)
    )
    typer.echo(script)
    raise typer.Exit


def _start(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    _install: Annotated[
        str | None,
        typer.Option(
            "--install-completion",
            metavar="[SHELL]",
            callback=_install_completion,
            is_eager=True,
            help="Install completion for bash, zsh or fish.",
        ),
    ] = None,
    _show: Annotated[
        str | None,
        typer.Option(
            "--show-completion",
            metavar="[SHELL]",
            callback=_show_completion,
            is_eager=True,
            help="Print the completion script.",
        ),
    ] = None,
) -> None:
    help_if_alone(context)


def _usage_message(error: Any) -> str:
    """Return Typer's message, and the command that prints the help."""
    context = getattr(error, "ctx", None)
    option = ""
    if context is not None and hasattr(error, "option_name") and hasattr(error, "possibilities"):
        from fastroof.option_help import meant

        known = [flag for one in context.command.params for flag in one.opts if flag.startswith("--")]
        option, error.possibilities = meant(error.option_name, known), None
    message = error.format_message().strip().rstrip(".") + (f"; did you mean {option}?" if option else "")
    where = f"; see {context.command_path} --help" if context is not None else ""
    return f"{message[:1].lower()}{message[1:]}{where}"


def warn(message: str, program: str = "fastroof") -> None:
    """Print a one-line warning on standard error."""
    typer.echo(f"{program}: warning: {_one_line(message)}", err=True)


def _one_line(message: str) -> str:
    line_text = ""
    for line in filter(str.strip, message.splitlines()):
        # indented lines list problems
        is_item = line[0].isspace() and not line_text.endswith(":")
        line_text += ("; " if is_item else " ") + line.strip()
    return line_text.strip()


@contextmanager
def _warnings_as_lines(program: str) -> Iterator[None]:
    """Print warnings for users as one line each, regardless of Python's own warning filters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=UserWarning, module="fastroof|kernels_bench")
        shown = warnings.showwarning
        # each plan of a sweep has the warnings of its card
        warn_once = lru_cache(lambda text: warn(text, program))

        def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if category is UserWarning:
                warn_once(str(message))
            else:
                shown(message, category, *rest, **more)

        warnings.showwarning = show
        yield


def help_if_alone(context: typer.Context) -> None:
    """Print a group's help if it was called without a command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def options_given(context: typer.Context) -> dict[str, str]:
    """Return the options on the command line, by the names of their parameters."""
    named = ((one.name or "", max(one.opts, key=len)) for one in context.command.params)
    sources = ((name, option, context.get_parameter_source(name)) for name, option in named)
    return {name: option for name, option, source in sources if source and source.name == "COMMANDLINE"}


Group = Mapping[str, tuple[Any, Any]]
"""Type and default of each option by the name of its parameter; ... if required."""

GroupValues = dict[str, Any]
"""Values of a group's options by name."""


def taking(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command groups of options, each replacing the parameter of its name."""

    def with_groups(function: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        for one in inspect.signature(function, eval_str=True).parameters.values():
            if one.name in groups:
                parameters += [_parameter(name, *option) for name, option in groups[one.name].items()]
            else:
                parameters.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        def command(**given: Any) -> None:
            taken = {group: {name: given.pop(name) for name in options} for group, options in groups.items()}
            function(**given, **taken)

        made: Any = command
        made.__name__, made.__doc__ = function.__name__, function.__doc__
        made.__signature__ = inspect.Signature(parameters)
        made.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return with_groups


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    empty = inspect.Parameter.empty
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=empty if default is ... else default, annotation=kind
    )
