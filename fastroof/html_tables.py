"""Results as notebooks show them: small HTML tables of escaped text, without colours of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from fastroof.columns import Column

__all__ = ["MOST_ROWS", "cell_text", "facts_html", "html_table", "rows_html"]

MOST_ROWS: Final = 20
"""Rows that a table shows; how many more there are is its last line."""


def cell_text(value: Any) -> str:
    """Write a value as a person reads it: four digits of a float, all of an integer, nothing of none."""
    if value is None:
        return ""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def escape(text: str) -> str:
    """Return text as HTML that reads as that text, in elements and in attributes."""
    # here: its tables of entities are nothing that a command should wait for
    import html

    return html.escape(text)


def html_table(
    columns: Sequence[Column], rows: Iterable[Sequence[Any]], caption: str, count: int | None = None
) -> str:
    """Lay rows out as one HTML table."""
    shown = list(islice(rows, MOST_ROWS))
    count = len(shown) if count is None else count
    lines = ["<table>", f"<caption>{escape(caption)}</caption>", f"<thead><tr>{_heads(columns)}</tr></thead>"]
    lines.append("<tbody>")
    for row in shown:
        cells = (
            f'<td style="text-align: {"left" if column.kind == "text" else "right"}">'
            f"{escape(cell_text(value))}</td>"
            for column, value in zip(columns, row, strict=True)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    if count > len(shown):
        lines.append(f'<tr><td colspan="{len(columns)}">... {count - len(shown):,} more</td></tr>')
    return "\n".join([*lines, "</tbody>", "</table>"])


def _heads(columns: Sequence[Column]) -> str:
    heads = []
    for column in columns:
        title = f' title="{escape(column.meaning)}"' if column.meaning else ""
        unit = f"<br><small>{escape(column.unit)}</small>" if column.unit else ""
        heads.append(f'<th scope="col"{title}>{escape(column.name)}{unit}</th>')
    return "".join(heads)


def rows_html(
    columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], caption: str, count: int | None = None
) -> str:
    """Lay rows out that are values by name; columns that are empty in every row shown are left out."""
    shown = rows[:MOST_ROWS]
    filled = [c for c in columns if any(cell_text(row.get(c.name)) for row in shown)]
    return html_table(
        filled, ([row.get(c.name) for c in filled] for row in shown), caption, count or len(rows)
    )


def facts_html(facts: Iterable[tuple[str, Any, str]], caption: str) -> str:
    """Lay facts out, a row each: its name, its value and the value's unit."""
    rows = (
        f'<tr><th scope="row" style="text-align: left">{escape(name)}</th>'
        f'<td style="text-align: left">{escape(f"{cell_text(value)} {unit}".strip())}</td></tr>'
        for name, value, unit in facts
    )
    return "\n".join(
        ["<table>", f"<caption>{escape(caption)}</caption>", "<tbody>", *rows, "</tbody>", "</table>"]
    )
