"""What values of profiles may be: each check raises PlanError with the name and what was given."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from fastroof.checks import is_number, whole_number
from fastroof.errors import PlanError

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
    """Refuse anything but an integer of at least 1."""
    whole_number(name, value, most=MOST, error=PlanError)


def check_one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuse anything but the allowed names."""
    if value not in allowed:
        raise PlanError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def check_text(name: str, value: Any) -> None:
    """Refuse anything but text."""
    if not isinstance(value, str):
        raise PlanError(f"{name} must be a text, got {value!r}")


@dataclass(frozen=True)
class ServingErrors:
    """Errors of an engine's estimates, as measured serving shows them.

    Attributes
    ----------
    tpot, ttft : float
        One standard error of the time per output token, and of the time to first token where requests do
        not queue, over the time (in ln): 80 % of the runs of models, GPUs and versions that a fit has not
        seen are within 1.28 of them. 0 where unknown.

    Raises
    ------
    PlanError
        If one is not a number of at least 0.
    """

    tpot: float = 0.0
    ttft: float = 0.0

    def __post_init__(self) -> None:
        """Refuse an invalid error."""
        for error in fields(self):
            value = check_number(f"{error.name} of [errors]", getattr(self, error.name))
            object.__setattr__(self, error.name, value)


NO_ERRORS: Final = ServingErrors()
"""Nothing is known."""


_VERSION: Final = re.compile(r"(\d+(?:\.\d+)*)(?:[.-]?(a|b|rc)(\d+))?(?:\.post(\d+))?(?:\+.*)?")
_COMPARED: Final[dict[str, Callable[[Any, Any], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_BOUND: Final = re.compile(rf"({'|'.join(_COMPARED)})\s*(\S+)")

_Key = tuple[tuple[int, ...], tuple[int, str, int], int]


def _key(version: str) -> _Key:
    """What versions are ordered by: 1.1.0rc2 before 1.1 and 1.1.0, which are one, before 1.1.0.post1."""
    match = _VERSION.fullmatch(version)
    if match is None:
        raise PlanError(f"{version!r} is not a version such as 0.12.0 or 1.1.0rc2")
    release = [int(number) for number in match[1].split(".")]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    before = (0, match[2], int(match[3])) if match[2] else (1, "", 0)
    return tuple(release), before, int(match[4] or -1)


def _bounds(versions: str) -> list[tuple[str, _Key]]:
    bounds = []
    for text in versions.split(","):
        match = _BOUND.fullmatch(text.strip())
        if match is None:
            raise PlanError(f"versions must be bounds such as >=0.12,<0.14, got {versions!r}")
        bounds.append((match[1], _key(match[2])))
    return bounds


def check_range(versions: str) -> None:
    """Raise PlanError unless it is a range of versions; an empty one is every version."""
    if versions:
        _bounds(versions)


def holds_for(versions: str, version: str) -> bool:
    """Whether a range holds a version."""
    wanted = _key(version)
    return not versions or all(_COMPARED[sign](wanted, bound) for sign, bound in _bounds(versions))


def is_version(version: str) -> bool:
    """Whether a text is a version that ranges can hold, as ``1.1.0rc2`` is and ``nightly`` is not."""
    return _VERSION.fullmatch(version) is not None
