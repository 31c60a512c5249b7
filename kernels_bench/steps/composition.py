"""A batch of a step as text: runs of equal numbers, ``4095x32;0`` for 32 requests at 4095 and one at 0.

A run is ``value`` or ``valuexcount``; runs are joined by ``;`` in the order of the requests. The text of
``new_tokens`` and that of ``context_len`` have one number a request each; their runs need not match.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from typing import Final

from fastroof.errors import MeasureError

__all__ = ["format_runs", "parse_runs"]

_RUN: Final = re.compile(r"(0|[1-9][0-9]*)(?:x([1-9][0-9]*))?")
MAX_REQUESTS: Final = 2**20
"""More requests in one step are a slip of the pen, and would fill the memory."""


def format_runs(values: Iterable[int]) -> str:
    """Write one number a request as runs.

    Parameters
    ----------
    values : iterable of int
        Each at least 0, in the order of the requests.

    Returns
    -------
    str
        The shortest text of its kind: neighbouring equal numbers are one run.

    Raises
    ------
    MeasureError
        If there is none, or one is negative.

    Examples
    --------
    >>> format_runs([1, 1, 1, 2048])
    '1x3;2048'
    """
    runs = [(int(value), len(list(same))) for value, same in groupby(values)]
    if not runs or min(value for value, _ in runs) < 0:
        raise MeasureError(f"a batch has at least one request and no negative sizes, got {runs}")
    return ";".join(f"{value}x{count}" if count > 1 else f"{value}" for value, count in runs)


def parse_runs(text: str) -> list[int]:
    """Read what :func:`format_runs` wrote.

    Parameters
    ----------
    text : str
        Runs joined by ``;``. Two neighbouring runs may have one value.

    Returns
    -------
    list of int
        One number a request.

    Raises
    ------
    MeasureError
        If it is no such text, or of more than 2**20 requests.

    Examples
    --------
    >>> parse_runs("1x3;2048")
    [1, 1, 1, 2048]
    """
    values: list[int] = []
    for run in text.split(";"):
        found = _RUN.fullmatch(run)
        if found is None:
            raise MeasureError(f"batch {text!r}: {run!r} is no run; need value or valuexcount, joined by ';'")
        count = int(found[2] or 1)
        if len(values) + count > MAX_REQUESTS:
            raise MeasureError(f"batch {text!r} has more than {MAX_REQUESTS:,} requests")
        values += [int(found[1])] * count
    return values
