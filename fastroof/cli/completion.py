"""What a shell is offered where somebody presses tab: commands, options, and the values that have a list.

A shell starts the command line with the words so far in its environment instead of its arguments: the
command that they name is the only one that is imported, as in :mod:`fastroof.cli`. Nothing here is imported
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from fastroof.command_group import SHELLS

__all__ = ["offer_values", "words_before"]


class Offer(NamedTuple):
    """A word that may stand here, as typer reads it."""

    value: str
    help: str | None = None
    type: str = "plain"


def words_before(variables: Mapping[str, str]) -> list[str]:
    """Return the words between the program and the one that is to be completed."""
    if "COMP_WORDS" in variables:
        count = variables.get("COMP_CWORD", "")
        until = int(count) if count.isascii() and count.isdigit() else 0
        return variables["COMP_WORDS"].split()[1:until]
    line = variables.get("_TYPER_COMPLETE_ARGS", "")
    words = line.split()[1:]
    return words if line.endswith(" ") else words[:-1]


def offer_values(command: Any) -> Any:
    """Return a command, or a group and its commands, whose options offer the values that there are."""
    for other in getattr(command, "commands", {}).values():
        offer_values(other)
    for param in getattr(command, "params", ()):
        for option in param.opts:
            if option in _VALUES:
                # where a specification runs has the name of an engine's option
                values = _places if param.default == "local" else _VALUES[option]
                param.shell_complete = partial(_offered, values)
    return command


def _offered(values: Callable[[], Sequence[str]], context: Any, incomplete: str) -> list[Offer]:
    return [Offer(value) for value in values() if value.startswith(incomplete)]


def _models() -> Sequence[str]:
    from fastroof.models import model_names

    return model_names()


def _gpus() -> Sequence[str]:
    from fastroof.config.gpu import gpu_names

    return gpu_names()


def _engines() -> Sequence[str]:
    from fastroof.engines import engine_names

    return engine_names()


def _dtypes() -> Sequence[str]:
    from fastroof.models.execution import AUTO, DTYPES

    return AUTO, *DTYPES


def _kv_dtypes() -> Sequence[str]:
    from fastroof.models.execution import AUTO, KV_DTYPES

    return AUTO, *KV_DTYPES


def _shells() -> Sequence[str]:
    return SHELLS


def _places() -> Sequence[str]:
    return "local", "ray"


_VALUES: Final[dict[str, Callable[[], Sequence[str]]]] = {
    "--model": _models,
    "--gpu": _gpus,
    "--runtime": _engines,
    "--engine": _engines,
    "--dtype": _dtypes,
    "--kv-dtype": _kv_dtypes,
    "--install-completion": _shells,
    "--show-completion": _shells,
}
"""Values by option; none is looked up before an option's value is asked for."""
