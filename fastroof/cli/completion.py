"""Shell completion of commands, options and known values.

A shell starts the command line with the words so far in its environment instead of its arguments: the
command that they name is the only one that is imported, as in :mod:`fastroof.cli`. Nothing here is imported
otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastroof.command_group import SHELLS


class Offer(NamedTuple):
    """A possible completion, as typer reads it."""

    value: str
    help: str | None = None
    type: str = "plain"


def words_before(variables: Mapping[str, str]) -> list[str]:
    """Return the words between the program and the one to complete."""
    if "COMP_WORDS" in variables:
        count = variables.get("COMP_CWORD", "")
        until = int(count) if count.isascii() and count.isdigit() else 0
        return variables["COMP_WORDS"].split()[1:until]
    line = variables.get("_TYPER_COMPLETE_ARGS", "")
    words = line.split()[1:]
    return words if line.endswith(" ") else words[:-1]


def offer_values(command: Any) -> Any:
    """Return a command, or a group and its commands, whose options complete known values."""
    for other in getattr(command, "commands", {}).values():
        offer_values(other)
    for param in getattr(command, "params", ()):
        for option in param.opts:
            if option in _VALUES:
                param.shell_complete = partial(_offered, _VALUES[option])
    return command


def _offered(values: Callable[[], Sequence[str]], context: Any, incomplete: str) -> list[Offer]:
    return [Offer(value) for value in values() if value.startswith(incomplete)]


def _engines() -> Sequence[str]:
    from fastroof.engines import engine_names, serving_engines

    return tuple(sorted({*engine_names(), *serving_engines()}))


def _formats(name: str) -> Sequence[str]:
    execution = import_module("fastroof.models.execution")
    return execution.AUTO, *getattr(execution, name)


_VALUES: Final[dict[str, Callable[[], Sequence[str]]]] = {
    "--model": lambda: import_module("fastroof.models").model_names(),
    "--gpu": lambda: import_module("fastroof.config.gpu").gpu_names(),
    "--engine": _engines,
    "--dtype": lambda: _formats("DTYPES"),
    "--kv-dtype": lambda: _formats("KV_DTYPES"),
    "--install-completion": lambda: SHELLS,
    "--show-completion": lambda: SHELLS,
}
"""Values by option, looked up only when an option's value is completed."""


_SPELLINGS: Final[dict[type, re.Pattern[str]]] = {
    int: re.compile(r"0|[1-9][0-9]{0,8}"),
    float: re.compile(r"(0|[1-9][0-9]{0,8})(\.[0-9]{1,9})?"),
}
_TEXTS: Final = list[str]
_FAST: Final = (str, int, float, bool, Path, _TEXTS, list[int])


class _FastArgument:
    """Placeholder for a parameter's validator until a completion needs it."""

    def __init__(self, kind: Any, least: float | None, most: float | None) -> None:
        self.kind = kind
        self.least = -math.inf if least is None else least
        self.most = math.inf if most is None else most

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the result of typer's validator."""
        kind = self.kind
        if value is None and (param.multiple or param.nargs == 1):
            return () if param.multiple else None
        if kind == _TEXTS:
            if isinstance(value, list | tuple) and all(type(word) is str for word in value):
                return list(value)
        elif not param.multiple and param.nargs == 1:
            spelling = _SPELLINGS.get(kind)
            if type(value) is str and spelling is not None and spelling.fullmatch(value):
                value = kind(value)
            if type(value) is kind and (kind not in _SPELLINGS or self.least <= value <= self.most):
                return value
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def fast_arguments(command: Any) -> Any:
    """Return a command, or a group and its commands, that makes validators on demand."""
    for other in getattr(command, "commands", {}).values():
        fast_arguments(other)
    for param in getattr(command, "params", ()):
        _take(param)
    make_help = getattr(command, "get_help_option", None)
    if make_help is not None:
        # --help is made when a command line is read
        command.get_help_option = lambda ctx: _take(make_help(ctx))
    return command


def _take(param: Any) -> Any:
    described = getattr(param, "type_descriptor", None)
    if described is None or getattr(param, "_runtime_param", param) is not None:
        return param
    kind, limits = getattr(described, "annotation", None), getattr(described, "parameter_info", None)
    if limits is not None and getattr(limits, "parser", None) is None and kind in _FAST:
        bounds = (getattr(limits, name, None) for name in ("min", "max"))
        param._runtime_param = _FastArgument(kind, *bounds)
    return param


_begun: Final[list[bool]] = []


def begin() -> None:
    """Mark that this process runs one command line and ends."""
    _begun.append(True)


def run_few_loops_plain() -> None:
    """Run loops as Python in a process that runs one command: importing numba takes longer."""
    if _begun:
        from fastroof.compiled.layout import run_plain

        run_plain()
