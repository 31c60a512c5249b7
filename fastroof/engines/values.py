"""What values of profiles may be: each check raises PlanError with the name and what was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastroof.checks import is_number, whole_number
from fastroof.errors import PlanError

__all__ = ["check_number", "check_one_of", "check_size", "check_text"]

MOST: Final = 2**20
"""Most tokens or requests that a step holds."""

LEAST_FIGURE: Final = 1e-30
MOST_FIGURE: Final = 1e9
"""Between these lies every figure of a profile that is not 0, be it us, ns, MiB, GiB or a share.

A cost of 1e9 us is a quarter of an hour; what a fit finds to be nothing may be tiny.
"""


def check_number(name: str, value: Any) -> float:
    """Return a number of at least 0: one that is not 0 lies between the limits of all figures."""
    if not is_number(value) or value < 0:
        raise PlanError(f"{name} must be a number of at least 0, got {value!r}")
    if value != 0 and not LEAST_FIGURE <= value <= MOST_FIGURE:
        raise PlanError(f"{name} must be 0, or from {LEAST_FIGURE:g} to {MOST_FIGURE:g}, got {value!r}")
    return float(value)


def check_size(name: str, value: Any) -> None:
    """Refuse what is no whole number of at least 1."""
    whole_number(name, value, most=MOST, error=PlanError)


def check_one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuse what is none of the words that are allowed."""
    if value not in allowed:
        raise PlanError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def check_text(name: str, value: Any) -> None:
    """Refuse what is no text."""
    if not isinstance(value, str):
        raise PlanError(f"{name} must be a text, got {value!r}")
