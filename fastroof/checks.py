"""Whether what was given is a number of the kind that is needed, and how an error says that it is not."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Collection, Sequence
from numbers import Integral, Real
from typing import Any, Final

from fastroof.errors import FastroofError


def shown(value: Any, most: int = 60) -> str:
    """Return how a message shows what was given: the beginning of its ``repr``, whatever it is."""
    if type(value) in (list, tuple, str, bytes, bytearray) and len(value) > most:
        value = value[:most]
    try:
        return repr(value)[:most]
    except Exception:
        # an error of an error says nothing
        if isinstance(value, int):
            return f"an integer of {value.bit_length():,} bits"
        return f"a {type(value).__name__}"


def is_whole_number(value: Any, least: int = 1, most: int | None = None) -> bool:
    """Whether a value is an integer, Python's or NumPy's and no bool, from ``least`` to ``most``."""
    # an int, the usual case, is recognised without the abstract class
    is_whole = type(value) is int or (isinstance(value, Integral) and _is_integer(value))
    return is_whole and bool(least <= value and (most is None or value <= most))


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, Python's or NumPy's and no bool, that a float can hold."""
    if not isinstance(value, Real) or (isinstance(value, Integral) and not _is_integer(value)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _is_integer(value: Integral) -> bool:
    """Whether a value that claims to be an integer is one; bools and NumPy durations claim so too."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def check_flag(name: str, value: Any, error: type[FastroofError] = FastroofError) -> None:
    """Refuse what is neither True nor False: what an array or a text means, ``if`` would guess."""
    if value is not True and value is not False and type(value).__name__ not in ("bool", "bool_"):
        raise error(f"{name} must be True or False, got {shown(value)}")


def check_progress(value: Any, counted: str, error: type[FastroofError] = FastroofError) -> None:
    """Refuse anything but None or a progress callback."""
    if value is not None and not callable(value):
        raise error(f"progress must be a function that is called with {counted}, got {shown(value)}")


MOST_SUGGESTED: Final = 5


def unknown_word(what: str, given: str, known: Collection[str], listing: str = "") -> str:
    """Return one line for a word that is not among those known: the closest ones, and what lists all."""
    return suggestion(what, given, difflib.get_close_matches(given, known, n=MOST_SUGGESTED), known, listing)


def suggestion(what: str, given: str, close: Sequence[str], known: Collection[str], listing: str = "") -> str:
    """Return :func:`unknown_word` with its suggestions chosen by the caller, the closest first."""
    hint = f"did you mean {', '.join(close[:MOST_SUGGESTED])}?" if close else ""
    every = f"`{listing}` lists all {len(known)}" if listing else f"valid: {', '.join(known)}"
    return f"unknown {what} {shown(given)}; " + (f"{hint} ({every})" if hint else every)


def one_of(
    name: str, value: Any, choices: Collection[str], error: type[FastroofError] = FastroofError
) -> str:
    """Return one of some words that was given, or say which there are."""
    if not isinstance(value, str) or value not in choices:
        raise error(f"{name} must be one of {', '.join(choices)}, got {shown(value)}")
    return str(value)


def whole_number(
    name: str, value: Any, least: int = 1, most: int | None = None, error: type[FastroofError] = FastroofError
) -> int:
    """Return a given whole number, or raise with the valid values."""
    if type(value) is int and least <= value and (most is None or value <= most):
        return value  # nearly always: one step a call would take a tenth longer by way of the abstract class
    if not is_whole_number(value, least, most):
        needed = f"of at least {least:,}" if most is None else f"from {least:,} to {most:,}"
        raise error(f"{name} must be a whole number {needed}, got {shown(value)}")
    return int(value)
