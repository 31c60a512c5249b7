"""Tables that fit the width they have: what is folded, said once, left out or set row by row.

Numbers are never cut, and neither is the first column, which says whose row it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fastroof.cli.written_widths import fold, pieces, shown_width

__all__ = ["FittedTable", "fit"]

GAPS: Final = (3, 2)
"""Characters between two columns; the second where the first does not do."""

LINES: Final = ((1, 1), (3, 1), (3, 2), (3, 3))
"""Lines of the heads and of a row, the first that does: rows of more lines are read worse than records."""


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A table as it is printed."""

    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    widths: tuple[int, ...] = ()
    left: tuple[bool, ...] = ()
    gap: int = 3
    alike: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()
    records: tuple[str, ...] = ()


def fit(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Sequence[str],
    width: int,
    least: Sequence[str] = (),
) -> FittedTable:
    r"""Return a table that takes at most ``width`` characters."""
    sets_left = tuple(name in left for name in columns)
    whole = FittedTable(tuple(columns), tuple(map(tuple, rows)), (), sets_left)
    for tried, in_names in _smaller(whole, tuple(least)):
        fitted = _laid_out(tried, width, in_names=in_names)
        if fitted is not None:
            return fitted
    return FittedTable(records=tuple(_records(columns, rows, width)))


def _smaller(whole: FittedTable, least: Sequence[str]) -> Iterator[tuple[FittedTable, bool]]:
    """A table, each time with less in it, and whether names may be folded too."""
    yield whole, False
    once = _said_once(whole)
    if once.alike:
        yield once, False
    yield once, True
    for count in range(1, len(least) + 1):
        gone = [name for name in least[:count] if name in once.columns[1:]]
        if gone:
            yield replace(_without(once, gone), left_out=tuple(gone)), True


def _without(table: FittedTable, names: Sequence[str]) -> FittedTable:
    kept = [place for place, name in enumerate(table.columns) if name not in names]
    return replace(
        table,
        columns=tuple(table.columns[place] for place in kept),
        rows=tuple(tuple(row[place] for place in kept) for row in table.rows),
        left=tuple(table.left[place] for place in kept),
    )


def _said_once(table: FittedTable) -> FittedTable:
    """Without the columns, beside the first, that say the same in each of several rows."""
    if len(table.rows) < 2:
        return table
    alike = [
        (name, table.rows[0][place])
        for place, name in enumerate(table.columns)
        if place and len({row[place] for row in table.rows}) == 1
    ]
    return replace(_without(table, [name for name, _ in alike]), alike=tuple(alike))


def _laid_out(table: FittedTable, width: int, *, in_names: bool) -> FittedTable | None:
    """The table in the fewest lines that fit; None where a row would take more than are read well."""
    for head_lines, lines in LINES:
        widths = [
            _least_width(
                name, {row[place] for row in table.rows}, head_lines, lines,
                is_left=table.left[place], in_names=in_names and place > 0,
            )
            for place, name in enumerate(table.columns)
        ]  # fmt: skip
        for gap in GAPS:
            if sum(widths) + gap * (len(widths) - 1) <= width:
                return _folded(table, widths, gap, in_names=in_names)
    return None


def _least_width(
    head: str, cells: set[str], head_lines: int, lines: int, *, is_left: bool, in_names: bool
) -> int:
    """Characters in which a head and all cells of a column take no more lines than they may."""
    low = max((shown_width(piece) for piece in pieces(head)), default=0)
    high = max((shown_width(text) for text in (head, *cells)), default=0)
    for cell in cells:
        parts = [cell] if lines == 1 else pieces(cell, is_list=not is_left, in_names=in_names)
        low = max([low, *map(shown_width, parts)])
    if head_lines == 1:
        low = max(low, shown_width(head))

    def does(width: int) -> bool:
        return len(fold(head, width)) <= head_lines and all(
            len(fold(cell, width, is_list=not is_left, in_names=in_names)) <= lines for cell in cells
        )

    while low < high:
        middle = (low + high) // 2
        if does(middle):
            high = middle
        else:
            low = middle + 1
    return high


def _folded(table: FittedTable, widths: Sequence[int], gap: int, *, in_names: bool) -> FittedTable:
    def cell(place: int, text: str) -> str:
        named = in_names and place > 0
        return "\n".join(fold(text, widths[place], is_list=not table.left[place], in_names=named))

    return replace(
        table,
        columns=tuple("\n".join(fold(name, widths[place])) for place, name in enumerate(table.columns)),
        rows=tuple(tuple(cell(place, text) for place, text in enumerate(row)) for row in table.rows),
        widths=tuple(widths),
        gap=gap,
    )


def _records(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Each row as names and values; what there is none of is left out."""
    indent = max((shown_width(name) for name in columns), default=0) + 2
    needed = max((shown_width(part) for row in rows for cell in row for part in pieces(cell)), default=0)
    is_below = indent + needed > width
    for place, row in enumerate(rows):
        if place:
            yield ""
        for name, cell in zip(columns, row, strict=True):
            if not cell:
                continue
            if is_below:
                yield name
                yield from (f"  {line}" for line in fold(cell, max(width - 2, 1)))
                continue
            head = name
            for line in fold(cell, width - indent):
                yield f"{head}{' ' * (indent - shown_width(head))}{line}"
                head = ""
