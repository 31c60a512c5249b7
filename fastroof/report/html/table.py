"""Rows and columns as the page's JSON holds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from fastroof.report.results_file import Results

__all__ = ["packed_columns", "rounded"]

DIGITS: Final = 6
"""Significant digits of what the page shows; the results file has them all."""


def rounded(value: Any) -> Any:
    """A number as the page holds it: None for what is not finite, few digits for the others."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        # a number without a fraction needs no decimal point
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 2**53 else short
    return value


def packed_columns(results: Results, rows: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Pack columns as the page reads them."""
    return [_packed(results, name, values) for name, values in rows.items()]


def _packed(results: Results, name: str, values: Sequence[Any]) -> dict[str, Any]:
    kind, unit, meaning = results.describe(name)
    column: dict[str, Any] = {"name": name, "kind": kind, "unit": unit, "meaning": meaning}
    if kind == "text":
        words = list(dict.fromkeys(values))
        if len(words) == 1:
            return column | {"constant": words[0]}
        place = {word: i for i, word in enumerate(words)}
        return column | {"words": words, "codes": [place[value] for value in values]}
    numbers = [rounded(value) for value in values]
    if len(set(numbers)) == 1:
        return column | {"constant": numbers[0]}
    return column | {"values": numbers}
