"""Checks of given values, and the one-line errors for invalid ones."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Collection, Sequence
from numbers import Integral, Real
from typing import Any, Final

from fastroof.errors import FastroofError


def shown(value: Any, most: int = 60) -> str:
    """Return the beginning of a value's ``repr`` for a message, in one line; this never fails."""
    if type(value) in (list, tuple, str, bytes, bytearray) and len(value) > most:
        value = value[:most]
    try:
        written = repr(value)
        # arrays and tables have several lines
        return (" ".join(written.split()) if "\n" in written else written)[:most]
    except Exception:
        # a failing repr must not hide the error being reported
        if isinstance(value, int):
            return f"an integer of {value.bit_length():,} bits"
        return f"a {type(value).__name__}"


def one_line(error: BaseException | str, most: int = 200) -> str:
    """Return the beginning of another library's message, which may have several lines, in one."""
    return " ".join(str(error).split())[:most]


def is_whole_number(value: Any, least: int = 1, most: int | None = None) -> bool:
    """Return whether a value is an integer (Python or NumPy, not bool) from ``least`` to ``most``."""
    # type() recognises an int, the usual case, without the slow abstract class
    is_whole = type(value) is int or (isinstance(value, Integral) and _is_integer(value))
    return is_whole and bool(least <= value and (most is None or value <= most))


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number (Python or NumPy, not bool) that a float can hold."""
    if not isinstance(value, Real) or (isinstance(value, Integral) and not _is_integer(value)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _is_integer(value: Integral) -> bool:
    """Return whether an ``Integral`` is an integer; bools and NumPy durations are registered as such too."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def check_flag(name: str, value: Any, error: type[FastroofError] = FastroofError) -> None:
    """Reject anything but True and False: the truth of an array or a text would be a guess."""
    if value is not True and value is not False and type(value).__name__ not in ("bool", "bool_"):
        raise error(f"{name} must be True or False, got {shown(value)}")


def true_or_false(name: str, value: Any, error: type[FastroofError] = FastroofError) -> bool:
    """Return a given boolean of a file or message, or raise with the valid values."""
    if type(value) is not bool:
        raise error(f"{name} must be true or false, got {shown(value)}")
    return value


def check_progress(value: Any, counted: str, error: type[FastroofError] = FastroofError) -> None:
    """Reject anything but None or a progress callback."""
    if value is not None and not callable(value):
        raise error(f"progress must be a function that is called with {counted}, got {shown(value)}")


MOST_SUGGESTED: Final = 5


def unknown_word(what: str, given: str, known: Collection[str], listing: str = "") -> str:
    """Return a one-line error for an unknown word: the closest known ones, and what lists all."""
    return suggestion(what, given, difflib.get_close_matches(given, known, n=MOST_SUGGESTED), known, listing)


def suggestion(
    what: str, given: object, close: Sequence[str], known: Collection[str], listing: str = ""
) -> str:
    """Return the error of :func:`unknown_word` with suggestions by the caller, the closest first."""
    hint = f"did you mean {', '.join(close[:MOST_SUGGESTED])}?" if close else ""
    every = f"`{listing}` lists all {len(known)}" if listing else f"valid: {', '.join(known)}"
    return f"unknown {what} {shown(given)}; " + (f"{hint} ({every})" if hint else every)


def one_of(
    name: str, value: Any, choices: Collection[str], error: type[FastroofError] = FastroofError
) -> str:
    """Return the given word if it is one of the choices, or raise with the valid ones."""
    if not isinstance(value, str) or value not in choices:
        raise error(f"{name} must be one of {', '.join(choices)}, got {shown(value)}")
    return str(value)


def whole_number(
    name: str, value: Any, least: int = 1, most: int | None = None, error: type[FastroofError] = FastroofError
) -> int:
    """Return a given whole number, or raise with the valid values."""
    if type(value) is int and least <= value and (most is None or value <= most):
        return value  # the usual case: the abstract class would make one-step calls 10 % slower
    if not is_whole_number(value, least, most):
        needed = f"of at least {least:,}" if most is None else f"from {least:,} to {most:,}"
        raise error(f"{name} must be a whole number {needed}, got {shown(value)}")
    return int(value)


def beyond_context(name: str, max_position: int, longest: float) -> str | None:
    """Return why engines refuse a request of so many tokens; None if the model's context holds them."""
    if longest <= max_position:
        return None
    return (
        f"a request of {longest:,.0f} tokens is longer than the context of {name}, "
        f"{max_position:,} (max_position_embeddings, with rope scaling): engines refuse it"
    )
