"""Output of commands: tables for people, JSON for programs, units and origins in words."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import textwrap
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TextIO

from fastroof.units import GB, MS_PER_S, US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from rich.console import Console

    from fastroof import StepPlan
    from fastroof.models import Layout


PIPE_WIDTH: Final = 120
"""Width of a pipe or a file, unless ``COLUMNS`` sets another one."""

TERMINAL_WIDTH: Final = 80
"""Width of a terminal that reports none."""

LEAST_WIDTH: Final = 30
"""Least width of folded text, behind its indent."""

TERMINAL_HEIGHT: Final = 25
"""Passed with a width: rich gives every terminal that is called dumb 80 columns."""

ORIGIN_WORDS: Final = {
    "measured": "measured",
    "interpolated": "interpolated between measured points",
    "extrapolated": "extrapolated beyond the measured points",
    "borrowed": "borrowed from the rows of another head shape or engine",
    "modelled": "modelled, at least in part, rather than measured",
}


def console(*, stderr: bool = False) -> Console:
    """Return a console without markup and emoji."""
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
    """Return the characters of a line: ``COLUMNS``, else a terminal's own width, else a pipe's."""
    columns = os.environ.get("COLUMNS", "")[:6]
    if columns.isascii() and columns.isdigit() and int(columns) > 0:
        return int(columns)
    if not stream.isatty():
        return PIPE_WIDTH
    try:
        return os.get_terminal_size(stream.fileno()).columns or TERMINAL_WIDTH
    except (OSError, ValueError):
        return TERMINAL_WIDTH


def print_json(document: Any) -> None:
    """Print one JSON document; numbers that are not finite become null."""
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


def print_line(text: str = "", indent: int = 0, hang: int = 2) -> None:
    """Print lines, folded between words; what is folded is indented by ``hang`` more characters."""
    out = console()
    for line in text.split("\n"):
        first = " " * (indent + len(line) - len(line.lstrip()))
        width = max(out.width, len(first) + hang + LEAST_WIDTH)
        folded = textwrap.wrap(
            line.lstrip(), width, initial_indent=first, subsequent_indent=first + " " * hang,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        out.print("\n".join(folded), soft_wrap=True)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[str] = (),
    least: Sequence[str] = (),
) -> None:
    """Print a table; numbers to the right, the columns named in ``left`` to the left."""
    from rich import box
    from rich.table import Table

    out = console()
    cells = [tuple(row) for row in rows]
    fitted = fit(columns, cells, left, out.width, least)
    if not fitted.columns:
        for row in cells:
            print_facts({name: cell for name, cell in zip(columns, row, strict=True) if cell})
            print_line()
        return
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, int(fitted.gap > 2))
    )
    for name, wide, is_left in zip(fitted.columns, fitted.widths, fitted.left, strict=True):
        table.add_column(
            name, justify="left" if is_left else "right", no_wrap=True, width=wide, vertical="top"
        )
    for row in fitted.rows:
        table.add_row(*row)
    out.print(table)
    if fitted.alike:
        print_line("in every row: " + ", ".join(f"{name} {cell or '-'}" for name, cell in fitted.alike))
    if fitted.left_out:
        whole = (
            sum(max(map(shown_width, one)) + GAPS[0] for one in zip(columns, *cells, strict=True)) - GAPS[0]
        )
        names = ", ".join(fitted.left_out)
        print_line(f"left out on {out.width} columns: {names} (COLUMNS={whole} shows all)")


def print_records(
    records: Iterable[Any],
    columns: Mapping[str, Callable[[Any], str]],
    *,
    left: Sequence[str] = (),
    least: Sequence[str] = (),
) -> None:
    """Print a table with a row for each record; each column heading maps to what formats a record's cell."""
    rows = [[cell(record) for cell in columns.values()] for record in records]
    print_table(list(columns), rows, left=left, least=least)


def attribute(name: str, spec: str = "") -> Callable[[Any], str]:
    """Return the function that formats an attribute of a record as a cell; "-" if it is missing."""
    return lambda record: "-" if (value := getattr(record, name)) in (None, "") else f"{value:{spec}}"


def print_facts(facts: Mapping[str, str]) -> None:
    """Print names and values, one pair a line."""
    wide = max(map(len, facts))
    for name, value in facts.items():
        print_line(f"{name:<{wide}}  {value}", hang=wide + 2)


def layout_suffix(layout: Layout) -> str:
    """Return a layout in brackets, to follow its GPUs; empty if it is tensor parallelism alone."""
    return "" if layout.world_size == layout.tp == layout.moe_tp else f" ({layout})"


def plan_words(plan: StepPlan, where: str) -> str:
    """Return the model, GPUs, formats and engine of a plan in words."""
    formats = f"{plan.dtype} weights, {plan.kv_dtype} KV cache{plan.lora_text}"
    return f"{plan.model.name} on {where}, {formats}, engine {plan.profile.title}"


def plan_facts(plan: StepPlan, **workers: int) -> dict[str, Any]:
    """Return the model, GPU, layout, formats and engine of a plan for JSON."""
    layout = plan.layout
    return {
        "version": plan.version, "model": plan.model.name, "gpu": plan.gpu.name, "tp": plan.tp,
        "pp": layout.pp, "dp": layout.dp, "ep": layout.ep, "moe_tp": layout.moe_tp, **workers,
        "dtype": plan.dtype, "kv_dtype": plan.kv_dtype, **plan.lora_facts, **plan.profile.facts,
    }  # fmt: skip


def percent(share: float | None) -> str:
    """Format a share in percent; empty if missing."""
    if share is None or math.isnan(share):
        return ""
    return f"{share * 100.0:.1f} %" if share >= 0.1 else f"{share * 100.0:.2f} %"


def time_words(latency_us: float) -> str:
    """Format a time in a readable unit."""
    if latency_us == 0.0:
        return "0 s"
    if latency_us >= US_PER_S:
        seconds = latency_us / US_PER_S
        return f"{seconds:,.0f} s" if seconds >= 1000.0 else f"{seconds:.4g} s"
    if latency_us >= US_PER_MS:
        return f"{latency_us / US_PER_MS:.4g} ms"
    return f"{latency_us:.4g} us"


def counted(count: int, noun: str) -> str:
    """Format a count: ``1 error``, ``2 errors``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    """Format a duration."""
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{seconds * MS_PER_S:.0f} ms"


def scaled(value: float, unit: str) -> str:
    """Format an amount of FLOPs or bytes with a prefix: ``12.3 GB``."""
    for prefix, factor in (("T", 1e3 * GB), ("G", GB), ("M", GB / 1e3), ("k", GB / 1e6)):
        if abs(value) >= factor:
            digits = ".3g" if value < 1e3 * factor else ",.0f"
            return f"{value / factor:{digits}} {prefix}{unit}"
    return f"{value:.0f} {unit}" if value else ""


TIMES: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}


def limit_words(name: str) -> str:
    """Write a limit's name: ``p99 TTFT`` for ``ttft_p99_ms``."""
    what, _, rest = name.partition("_")
    if what not in TIMES or not rest.endswith("_ms"):
        return name
    return f"{rest.removesuffix('_ms').replace('_', '.')} {TIMES[what]}"


def range_words(row: Mapping[str, Any]) -> str:
    """Format how an error of the steps changes a rate."""
    if row["relative_error"] is None:
        return "unknown"
    return f"{row['low']:,.4g} to {row['high']:,.4g}"


_WORDS: Final = re.compile(r"(?<=\S) +(?=\S)")
_LISTED: Final = re.compile(r"(?<=[^\d\s]) +(?=[^\d\s])|(?<=,) +(?=\S)")


def shown_width(text: str) -> int:
    """Return how many characters of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def pieces(text: str, *, is_list: bool = False) -> list[str]:
    """Return the parts of a text that are not split."""
    return (_LISTED if is_list else _WORDS).split(text)


def fold(text: str, width: int, *, is_list: bool = False) -> list[str]:
    """Return the lines of a text, each of at most ``width`` characters where its parts are."""
    if shown_width(text) <= width:
        return [text]
    first, *others = pieces(text, is_list=is_list)
    lines = [first]
    for part in others:
        if shown_width(f"{lines[-1]} {part}") > width:
            lines.append(part)
        else:
            lines[-1] += f" {part}"
    return lines


GAPS: Final = (3, 2)
"""Characters between two columns: usual and narrow."""

HEAD_LINES: Final = (1, 3)
ROW_LINES: Final = (1, 2, 3, 4, 6, 9)
"""Lines of the heads and of a row, the first that fits: columns are left out before rows are folded."""


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A printed table."""

    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    widths: tuple[int, ...] = ()
    left: tuple[bool, ...] = ()
    gap: int = 3
    alike: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()


def fit(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Sequence[str],
    width: int,
    least: Sequence[str] = (),
) -> FittedTable:
    """Return a table that takes at most ``width`` characters; without columns if rows would be too tall."""
    sets_left = tuple(name in left for name in columns)
    whole = FittedTable(tuple(columns), tuple(map(tuple, rows)), (), sets_left)
    smaller = list(_smaller(whole, least))
    for lines in ROW_LINES:
        # rows that are folded leave out what all of them have
        for tried in smaller[lines > 1 :]:
            fitted = _laid_out(tried, width, lines)
            if fitted is not None:
                return fitted
    return FittedTable()


def _smaller(whole: FittedTable, least: Sequence[str]) -> Iterator[FittedTable]:
    """Yield the table with less and less in it."""
    yield whole
    once = _shown_once(whole)
    yield once
    for count in range(1, len(least) + 1):
        dropped = tuple(name for name in least[:count] if name in once.columns[1:])
        yield replace(_without(once, dropped), left_out=dropped)


def _without(table: FittedTable, names: Sequence[str]) -> FittedTable:
    kept = [place for place, name in enumerate(table.columns) if name not in names]
    return replace(
        table,
        columns=tuple(table.columns[place] for place in kept),
        rows=tuple(tuple(row[place] for place in kept) for row in table.rows),
        left=tuple(table.left[place] for place in kept),
    )


def _shown_once(table: FittedTable) -> FittedTable:
    """Return the table without columns that are equal in all rows, except the first."""
    if len(table.rows) < 2:
        return table
    alike = [
        (name, table.rows[0][place])
        for place, name in enumerate(table.columns)
        if place and len({row[place] for row in table.rows}) == 1
    ]
    return replace(_without(table, [name for name, _ in alike]), alike=tuple(alike))


def _laid_out(table: FittedTable, width: int, lines: int) -> FittedTable | None:
    """Return the table with rows of at most so many lines; None if it does not fit."""
    for head_lines in HEAD_LINES:
        widths = [
            _least_width(name, {row[place] for row in table.rows}, head_lines, lines, is_left=is_left)
            for place, (name, is_left) in enumerate(zip(table.columns, table.left, strict=True))
        ]
        for gap in GAPS:
            spare = width - sum(widths) - gap * (len(widths) - 1)
            if spare >= 0:
                return _folded(table, _widened(table, widths, spare), gap)
    return None


def _widened(table: FittedTable, widths: Sequence[int], spare: int) -> list[int]:
    """Return the widths with what is left of a line given to the most folded columns."""
    wider = list(widths)
    folded = [
        max((shown_width(row[place]) for row in table.rows), default=0) - wide
        for place, wide in enumerate(widths)
    ]
    for place in sorted(range(len(folded)), key=folded.__getitem__, reverse=True):
        more = max(min(spare, folded[place]), 0)
        wider[place] += more
        spare -= more
    return wider


def _least_width(head: str, cells: set[str], head_lines: int, lines: int, *, is_left: bool) -> int:
    """Return the narrowest width at which a column's head and cells fit the allowed lines."""
    low = max((shown_width(piece) for piece in pieces(head)), default=0)
    high = max((shown_width(text) for text in (head, *cells)), default=0)
    for cell in cells:
        parts = [cell] if lines == 1 else pieces(cell, is_list=not is_left)
        low = max([low, *map(shown_width, parts)])
    if head_lines == 1:
        low = max(low, shown_width(head))

    def does(width: int) -> bool:
        return len(fold(head, width)) <= head_lines and all(
            len(fold(cell, width, is_list=not is_left)) <= lines for cell in cells
        )

    return low + bisect_left(range(low, high), True, key=does)


def _folded(table: FittedTable, widths: Sequence[int], gap: int) -> FittedTable:
    def cell(place: int, text: str) -> str:
        return "\n".join(fold(text, widths[place], is_list=not table.left[place]))

    return replace(
        table,
        columns=tuple("\n".join(fold(name, widths[place])) for place, name in enumerate(table.columns)),
        rows=tuple(tuple(cell(place, text) for place, text in enumerate(row)) for row in table.rows),
        widths=tuple(widths),
        gap=gap,
    )
