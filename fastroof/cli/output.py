"""What commands print: tables for people, JSON for programs, units and origins in words."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TextIO

from fastroof.units import GB, MS_PER_S, US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "ORIGIN_WORDS",
    "UNLIMITED_WIDTH",
    "console",
    "counted",
    "duration",
    "percent",
    "print_facts",
    "print_json",
    "print_table",
    "scaled",
    "time_words",
]

UNLIMITED_WIDTH: Final = 10_000
"""Of a pipe or a file, whose lines are whole."""

TERMINAL_WIDTH: Final = 80
"""Of a terminal that does not say."""

TERMINAL_HEIGHT: Final = 25
"""Given along with a width: rich would take every terminal that calls itself dumb for one of 80 columns."""

ORIGIN_WORDS: Final = {
    "measured": "measured",
    "interpolated": "interpolated between measured points",
    "extrapolated": "extrapolated beyond the measured points",
    "borrowed": "borrowed from the rows of another head shape or engine",
    "modelled": "modelled, at least in part, rather than measured",
}


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: no markup, no emoji, and whole lines into a pipe."""
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    stream = sys.stderr if stderr else sys.stdout
    return PlainConsole(
        file=stream,
        width=_width_of(stream),
        height=TERMINAL_HEIGHT,
        markup=False,
        emoji=False,
        highlight=False,
    )


def _width_of(stream: TextIO) -> int:
    """Characters of a line: whole lines, but on a terminal what ``COLUMNS`` says, else its own width."""
    if not stream.isatty():
        return UNLIMITED_WIDTH
    asked = os.environ.get("COLUMNS", "")
    if asked.isascii() and asked.isdigit() and int(asked[:6]) > 0:
        return min(int(asked[:6]), UNLIMITED_WIDTH)
    try:
        return os.get_terminal_size(stream.fileno()).columns or TERMINAL_WIDTH
    except (OSError, ValueError):
        return TERMINAL_WIDTH


def print_json(document: Any) -> None:
    """Print one JSON document; what is not a finite number becomes null."""
    sys.stdout.write(json.dumps(_plain(document), indent=2, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, bool):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Iterable):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int) else str(value)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[str] = (),
    width: int | None = None,
    least: Sequence[str] = (),
) -> None:
    """Print a table; numbers to the right, the columns named in ``left`` to the left."""
    from rich import box
    from rich.table import Table

    from fastroof.cli.fitted_tables import fit

    out = console()
    if width is not None:
        out.width = width
    fitted = fit(columns, [tuple(row) for row in rows], left, out.width, least)
    for line in fitted.records:
        out.print(line, soft_wrap=True)
    if fitted.columns:
        table = Table(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, int(fitted.gap > 2))
        )
        for name, wide, is_left in zip(fitted.columns, fitted.widths, fitted.left, strict=True):
            table.add_column(
                name, justify="left" if is_left else "right", no_wrap=True, min_width=wide, vertical="top"
            )
        for row in fitted.rows:
            table.add_row(*row)
        out.print(table)
    said = []
    if fitted.alike:
        said.append("in every row: " + ", ".join(f"{name} {cell or '-'}" for name, cell in fitted.alike))
    if fitted.left_out:
        said.append(f"left out on {out.width} columns: {', '.join(fitted.left_out)}")
    for line in said:
        out.print(line)


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values, one pair a line."""
    wide = max(len(name) for name, _ in facts)
    out = console()
    for name, value in facts:
        out.print(f"{name:<{wide}}  {value}", soft_wrap=True)


def percent(share: float | None) -> str:
    """Write a share in percent; empty where there is none."""
    if share is None or math.isnan(share):
        return ""
    return f"{share * 100.0:.1f} %" if share >= 0.1 else f"{share * 100.0:.2f} %"


def time_words(latency_us: float) -> str:
    """Write a time in the unit it is read in best."""
    if latency_us >= US_PER_S:
        return f"{latency_us / US_PER_S:.4g} s"
    if latency_us >= US_PER_MS:
        return f"{latency_us / US_PER_MS:.4g} ms"
    return f"{latency_us:.4g} us"


def counted(count: int, noun: str) -> str:
    """Write a number of things: ``1 error``, ``2 errors``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    """Write how long something took."""
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{seconds * MS_PER_S:.0f} ms"


def scaled(value: float, unit: str) -> str:
    """Write an amount of FLOPs or bytes with the prefix that suits it: ``12.3 GB``."""
    for prefix, factor in (("T", 1e3 * GB), ("G", GB), ("M", GB / 1e3), ("k", GB / 1e6)):
        if abs(value) >= factor:
            digits = ".3g" if value < 1e3 * factor else ",.0f"
            return f"{value / factor:{digits}} {prefix}{unit}"
    return f"{value:.0f} {unit}" if value else ""
