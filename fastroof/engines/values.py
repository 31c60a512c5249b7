"""Checks of profile values; each raises PlanError with the name and the given value."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from fastroof.checks import is_number, shown, true_or_false
from fastroof.errors import PlanError

MOST: Final = 2**20
"""Maximum tokens or requests of a step."""

LEAST_FIGURE: Final = 1e-30
MOST_FIGURE: Final = 1e9
"""Limits of every nonzero value of a profile, in us, ns, MiB, GiB or as a share.

A cost of 1e9 us is a quarter of an hour; a fit may yield a tiny value for a cost that is absent.
"""


def check_number(name: str, value: Any) -> float:
    """Return a number of at least 0; if not 0, it must be within the limits of all values."""
    if not is_number(value) or value < 0:
        raise PlanError(f"{name} must be a number of at least 0, got {value!r}")
    if value != 0 and not LEAST_FIGURE <= value <= MOST_FIGURE:
        raise PlanError(f"{name} must be 0, or from {LEAST_FIGURE:g} to {MOST_FIGURE:g}, got {value!r}")
    return float(value)


def check_names(name: str, value: Any) -> tuple[str, ...]:
    """Return a list of names as a tuple."""
    is_list = isinstance(value, Iterable) and not isinstance(value, str)
    if not is_list or not all(isinstance(one, str) for one in value):
        raise PlanError(f"{name} must be a list of names, got {shown(value, 80)}")
    return tuple(value)


def check_text(name: str, value: Any) -> None:
    """Reject values that are not text."""
    if not isinstance(value, str):
        raise PlanError(f"{name} must be text, got {shown(value)}")


def check_fields(part: Any, of: str = "", *, but: Collection[str] = ()) -> None:
    """Check numbers, texts, booleans, lists of names and ranges of versions of a part, by declared types.

    Other lists become tuples.
    """
    for key in fields(part):
        value, name = getattr(part, key.name), f"{key.name}{of}"
        if key.name in but:
            continue
        if key.type == "float":
            value = check_number(name, value)
        elif key.type == "bool":
            true_or_false(name, value, PlanError)
        elif key.type == "str":
            check_text(name, value)
            if key.name == "versions":
                check_range(value)
        elif key.type == "tuple[str, ...]":
            value = check_names(name, value)
        elif str(key.type).startswith("tuple[") and isinstance(value, list):
            value = tuple(value)
        object.__setattr__(part, key.name, value)


@dataclass(frozen=True)
class ServingErrors:
    """Errors of an engine's estimates on measured serving runs.

    Attributes
    ----------
    tpot, ttft : float
        One standard error of the time per output token, and of the time to first token without queueing,
        relative to the time (in ln): 80 % of the runs of a group of model, GPU, version and bench that no
        fit has seen are within 1.28 of them. 0 if unknown.
    burst_tpot, burst_ttft, waiting_tpot, waiting_ttft : float
        The same of bursts, and of loads whose requests wait for room. 0 if unknown.
    layer_us : float
        One standard error of a step in us per layer, which counts where it is the larger: in steps of short
        kernels, which the runs had none of.

    Raises
    ------
    PlanError
        If a value is not a number of at least 0.
    """

    tpot: float = 0.0
    ttft: float = 0.0
    burst_tpot: float = 0.0
    burst_ttft: float = 0.0
    waiting_tpot: float = 0.0
    waiting_ttft: float = 0.0
    layer_us: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, " of [errors]")


NO_ERRORS: Final = ServingErrors()
"""Unknown errors."""


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
    """Return the sort key of a version: 1.1.0rc2 before 1.1 and 1.1.0 (equal), before 1.1.0.post1."""
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
    """Raise PlanError unless it is a range of versions; an empty one includes every version."""
    if versions:
        _bounds(versions)


def holds_for(versions: str, version: str) -> bool:
    """Return whether a range includes a version."""
    key = _key(version)
    return not versions or all(_COMPARED[sign](key, bound) for sign, bound in _bounds(versions))


def of_version(parts: Iterable[Any], version: str) -> tuple[Any, ...]:
    """Return the parts of a profile that hold in a version, without their ranges; without one, in all."""
    return tuple(
        replace(one, versions="") if one.versions else one
        for one in parts
        if not one.versions or (version and holds_for(one.versions, version))
    )


def range_edges(ranges: Iterable[str]) -> list[str]:
    """Return the versions at which ranges of ``>=`` and ``<`` start or end, in order."""
    bounds = [bound.strip() for versions in ranges for bound in versions.split(",") if bound]
    edges = {_key(bound.lstrip("<>= ")): bound.lstrip("<>= ") for bound in bounds}
    return [edges[key] for key in sorted(edges)]


def range_around(ranges: Iterable[str], version: str) -> str:
    """Return the range around a version in which no range starts or ends.

    Examples
    --------
    >>> range_around([">=0.14", "<0.17", ">=0.17,<0.21"], "0.19.1")
    '>=0.17,<0.21'
    """
    edges = range_edges(ranges)
    begins = [f">={edge}" for edge in edges if _key(edge) <= _key(version)][-1:]
    return ",".join([*begins, *[f"<{edge}" for edge in edges if _key(edge) > _key(version)][:1]])


def is_beyond(version: str, known: str) -> bool:
    """Return whether a version is newer than a known one, and not a patch of it.

    Examples
    --------
    >>> is_beyond("0.28.1", "0.28"), is_beyond("0.29.0", "0.28"), is_beyond("1.3.0rc6", "1.3.0rc5")
    (False, True, True)
    """
    release, before, _ = _key(known)
    is_patch = before[0] == 1 and _key(version)[0][: len(release)] == release
    return _key(version) > _key(known) and not is_patch


UNKNOWN_VERSION: Final = "unknown"
"""Build of a run without a version: it has what all versions have."""

NEWEST: Final = "9999"
"""Version of an engine that is named without one: after all that were read."""


def includes_newest(versions: str) -> bool:
    """Return whether a range has no end."""
    return holds_for(versions, NEWEST)


def is_version(version: str) -> bool:
    """Return whether a text is a version that ranges can include: ``1.1.0rc2``, not ``nightly``."""
    return _VERSION.fullmatch(version) is not None
