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
    """Return how many characters of a terminal a text takes.

    Examples
    --------
    >>> shown_width("us"), shown_width("模型")
    (2, 4)
    """
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def pieces(text: str, *, is_list: bool = False, in_names: bool = False) -> list[str]:
    """Return the parts of a text that stay whole.

    Parameters
    ----------
    text : str
        One line.
    is_list : bool, default False
        Whether it is figures: a figure and its unit stay together, members of a list part.
    in_names : bool, default False
        Whether names part too, after a hyphen, an underscore, a slash or a comma that is not between digits.

    Examples
    --------
    >>> pieces("18432, 8 of 256", is_list=True), pieces("2.1 GB", is_list=True)
    (['18432,', '8 of 256'], ['2.1 GB'])
    >>> pieces("vllm-0.12.0-qwen3-32b-bf16", in_names=True), pieces("2026-11-24", in_names=True)
    (['vllm-', '0.12.0-', 'qwen3-32b-', 'bf16'], ['2026-11-24'])
    >>> pieces("4.5e-20", in_names=True)
    ['4.5e-20']
    """
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
    """Return the lines of a text, each of at most ``width`` characters where its parts are.

    Examples
    --------
    >>> fold("64 window 512, 64 CSA 512", 14, is_list=True)
    ['64 window 512,', '64 CSA 512']
    """
    if shown_width(text) <= width:
        return [text]
    lines = [""]
    for part, joint in _parts(text, is_list=is_list, in_names=in_names):
        if lines[-1] and shown_width(lines[-1] + joint + part) > width:
            lines.append(part)
        else:
            lines[-1] += (joint if lines[-1] else "") + part
    return lines
