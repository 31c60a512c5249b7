"""Ranges of versions, as a profile names them: ``>=0.12,<0.14``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, Final

from fastroof.errors import PlanError

__all__ = ["check_range", "holds_for", "is_version"]

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
        raise PlanError(f"{version!r} is no version such as 0.12.0 or 1.1.0rc2")
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
