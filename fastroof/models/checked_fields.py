"""Fields of a model's parts, checked against what they are declared as, in parts made by hand too."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from fastroof.checks import is_number, is_whole_number, shown
from fastroof.errors import ModelError

__all__ = ["MOST", "checked_fields"]

MOST: Final = 2**31 - 1
"""No size of a model is larger, nor are its sizes in configurations."""

Part = TypeVar("Part", bound=type)
_Check = Callable[[Any], bool]


def checked_fields(part: Part) -> Part:
    """Have a dataclass refuse fields that are not of their declared types: stands below ``@dataclass``."""
    own: Any = getattr(part, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        """Refuse what its fields cannot be."""
        # once, all fields together, where a class that extends another calls that one's too
        if type(self).__post_init__ is __post_init__:
            _check_fields(self)
        if own is not None:
            own(self)

    part.__post_init__ = __post_init__  # type: ignore[attr-defined]
    return part


def _check_fields(part: Any) -> None:
    for name, check, needed, is_int in _checks(part.__class__):
        value = getattr(part, name)
        if not check(value):
            raise ModelError(f"{type(part).__name__}: {name} must be {needed}, got {shown(value)}")
        if is_int and type(value) is not int and is_whole_number(value, 0):
            object.__setattr__(part, name, int(value))


@functools.cache
def _checks(of: Any) -> tuple[tuple[str, _Check, str, bool], ...]:
    hints = get_type_hints(of)
    made = []
    for field in fields(of):
        check, needed = _check_of(hints[field.name])
        hint = hints[field.name]
        made.append((field.name, check, needed, hint is int or int in get_args(hint)))
    return tuple(made)


def _check_of(hint: Any) -> tuple[_Check, str]:
    """What tells a value of a type, and how a message calls it."""
    if hint is Any or isinstance(hint, TypeVar):
        return lambda value: True, "anything"
    if hint is None or hint is type(None):
        return lambda value: value is None, "None"
    if hint is bool:
        return lambda value: value is True or value is False, "True or False"
    if hint is int:
        return lambda value: is_whole_number(value, 0, MOST), f"a whole number from 0 to {MOST:,}"
    if hint is float:
        return is_number, "a finite number"
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        several = [_check_of(one) for one in arguments]
        return lambda value: any(check(value) for check, _ in several), " or ".join(
            said for _, said in several
        )
    if origin is typing.Literal:
        listed = ", ".join(map(repr, arguments))
        return lambda value: isinstance(value, str | int) and value in arguments, f"one of {listed}"
    if origin is tuple:
        return _check_of_tuple(arguments)
    kind = origin if origin is not None else hint
    if getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False):
        names = _methods(kind)
        return lambda value: all(
            hasattr(value, name) for name in names
        ), f"what answers as {kind.__name__} does"
    return lambda value: isinstance(value, kind), "a text" if kind is str else f"a {kind.__name__}"


def _methods(protocol: type) -> list[str]:
    # above protocols there are protocols alone, and what Python has there has no public functions
    return [name for name, _ in inspect.getmembers(protocol, inspect.isfunction) if not name.startswith("_")]


def _check_of_tuple(arguments: tuple[Any, ...]) -> tuple[_Check, str]:
    if len(arguments) == 2 and arguments[1] is ...:
        check, needed = _check_of(arguments[0])
        return lambda value: isinstance(value, tuple) and all(map(check, value)), f"a tuple, each {needed}"
    several = [_check_of(one)[0] for one in arguments]
    words = ", ".join(_check_of(one)[1] for one in arguments)

    def check_all(value: Any) -> bool:
        is_one = isinstance(value, tuple) and len(value) == len(several)
        return is_one and all(check(one) for check, one in zip(several, value, strict=True))

    return check_all, f"a tuple of {words}"
