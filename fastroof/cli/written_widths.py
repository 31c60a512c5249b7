"""Text in the characters that a terminal has: how wide it is, and where it may be folded."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["fold", "pieces", "shown_width"]

# Between the parts of a name, but not within a date, a version (never between two digits) or 4.5e-20.
_IN_NAMES: Final = re.compile(r"(?<=[A-Za-z)][-_/,])(?<!\d[eE]-)(?=\S)|(?<=\S[-_/,])(?=[A-Za-z(])")
_WORDS: Final = re.compile(r"(?<=\S) +(?=\S)")
_LISTED: Final = re.compile(r"(?<=[^\d\s]) +(?=[^\d\s])|(?<=,) +(?=\S)")


def shown_width(text: str) -> int:
    """Return how many characters of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def pieces(text: str, *, is_list: bool = False, in_names: bool = False) -> list[str]:
    """Return the parts of a text that stay whole."""
    return [part for part, _ in _parts(text, is_list=is_list, in_names=in_names)]


def _parts(text: str, *, is_list: bool, in_names: bool) -> list[tuple[str, str]]:
    """Parts that stay whole, each with what joins it to the one before."""
    parted: list[tuple[str, str]] = []
    joint = ""
    for word in (_LISTED if is_list else _WORDS).split(text):
        for part in _IN_NAMES.split(word) if in_names and not is_list else [word]:
            parted.append((part, joint))
            joint = ""
        joint = " "
    return parted


def fold(text: str, width: int, *, is_list: bool = False, in_names: bool = False) -> list[str]:
    """Return the lines of a text, each of at most ``width`` characters where its parts are."""
    if shown_width(text) <= width:
        return [text]
    lines = [""]
    for part, joint in _parts(text, is_list=is_list, in_names=in_names):
        if lines[-1] and shown_width(lines[-1] + joint + part) > width:
            lines.append(part)
        else:
            lines[-1] += (joint if lines[-1] else "") + part
    return lines
