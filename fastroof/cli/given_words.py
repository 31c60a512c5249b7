"""Words of a command line that are what they are to be: taken without a validator.

Newer versions of typer make a validator of pydantic for every parameter of a command, given or not, which
takes as long as typer and rich themselves. Text, whole numbers and numbers as people write them need none.
Whatever else is given goes typer's way, and so do all errors.
"""

from __future__ import annotations

import re
from typing import Any, Final

__all__ = ["take_as_given"]

_SPELLINGS: Final[dict[type, re.Pattern[str]]] = {
    int: re.compile(r"0|[1-9][0-9]{0,8}"),
    float: re.compile(r"(0|[1-9][0-9]{0,8})(\.[0-9]{1,9})?"),
}
_TEXTS: Final = list[str]


class _AsGiven:
    """Stands in the place of a parameter's validator until a word needs one."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return what typer's own would."""
        kind = self.kind
        if kind == _TEXTS:
            if isinstance(value, list | tuple) and all(type(word) is str for word in value):
                return list(value)
            if value is None and param.multiple:
                return ()
        elif not param.multiple and param.nargs == 1:
            if value is None or type(value) is kind:
                return value
            spelling = _SPELLINGS.get(kind)
            if type(value) is str and spelling is not None and spelling.fullmatch(value):
                return kind(value)
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def take_as_given(command: Any) -> Any:
    """Return a command, or a group and its commands, that makes validators where a word needs one."""
    for other in getattr(command, "commands", {}).values():
        take_as_given(other)
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
    is_special = any(getattr(limits, name, None) is not None for name in ("parser", "min", "max"))
    if limits is not None and not is_special and (kind in (str, int, float, bool) or kind == _TEXTS):
        param._runtime_param = _AsGiven(kind)
    return param
