"""Base of all results: each converts to an Arrow table, which pandas, polars and DuckDB read directly."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, field
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from fastroof.columns import ORIGINS, Column
from fastroof.errors import FastroofError

if TYPE_CHECKING:
    import pyarrow as pa


MOST_ROWS: Final = 20
"""Maximum number of rows that an HTML table shows; its last line counts the others."""


def cell_text(value: Any) -> str:
    """Format a value for people: floats with four digits, integers in full, None as an empty string."""
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
    """Escape text for HTML elements and attributes."""
    # imported here: its tables of entities would slow every command down
    import html

    return html.escape(text)


def html_table(
    columns: Sequence[Column], rows: Iterable[Sequence[Any]], caption: str, count: int | None = None
) -> str:
    """Format rows as one HTML table."""
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
    """Format rows of values by name as an HTML table, without columns that are empty in all shown rows."""
    shown = rows[:MOST_ROWS]
    filled = [c for c in columns if any(cell_text(row.get(c.name)) for row in shown)]
    return html_table(
        filled, ([row.get(c.name) for c in filled] for row in shown), caption, count or len(rows)
    )


def facts_html(facts: Iterable[tuple[str, Any, str]], caption: str) -> str:
    """Format facts as an HTML table, one row per fact: name, value and unit."""
    rows = (
        f'<tr><th scope="row" style="text-align: left">{escape(name)}</th>'
        f'<td style="text-align: left">{escape(f"{cell_text(value)} {unit}".strip())}</td></tr>'
        for name, value, unit in facts
    )
    return "\n".join(
        ["<table>", f"<caption>{escape(caption)}</caption>", "<tbody>", *rows, "</tbody>", "</table>"]
    )


ORIGIN: Final = Column("origin", "text", "", "how the latency was made: measured to modelled")
RELATIVE_ERROR: Final = Column(
    "relative_error", "float", "", "standard error of the time / time; empty if not requested", 0
)


def arrow_schema(columns: Iterable[Column], metadata: Mapping[str, str]) -> pa.Schema:
    """Return the Arrow schema of result columns, with each field's unit and meaning as its metadata."""
    import pyarrow as pa

    types = {"int": pa.int64(), "float": pa.float64(), "text": pa.string()}
    fields = [
        pa.field(c.name, types[c.kind], metadata={"unit": c.unit, "meaning": c.meaning}) for c in columns
    ]
    return pa.schema(fields, metadata=dict(metadata))


def rows_table(
    columns: Iterable[Column], rows: Sequence[Mapping[str, Any]], metadata: Mapping[str, str]
) -> pa.Table:
    """Convert rows of values by name to an Arrow table; missing values and nan become null."""
    import pyarrow as pa

    schema = arrow_schema(columns, metadata)
    values = [pa.array([row.get(f.name) for row in rows], f.type, from_pandas=True) for f in schema]
    return pa.table(values, schema=schema)


def _frames_of(package: str, method: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise FastroofError(
            f"{method} needs {package}, which is not installed: pip install {package}; "
            "to_arrow works without it"
        ) from error


class ArrowRows(ABC):
    """Base of objects with rows: they convert to an Arrow table, a pandas or a polars frame in one call."""

    @abstractmethod
    def to_arrow(self) -> pa.Table:
        """Return the rows as an Arrow table; units and meanings are metadata of its fields."""

    def to_pandas(self) -> Any:
        """Return the rows of :meth:`to_arrow` as a ``pandas.DataFrame``."""
        _frames_of("pandas", "to_pandas")
        return self.to_arrow().to_pandas()

    def to_polars(self) -> Any:
        """Return the rows of :meth:`to_arrow` as a ``polars.DataFrame``."""
        return _frames_of("polars", "to_polars").from_arrow(self.to_arrow())

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Export the table as an Arrow stream, by the PyCapsule interface."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)


def answer(unit: str, meaning: str, minimum: int = 1, **default: Any) -> Any:
    """Return a field of an :class:`ArrowResult` that is a column of floats of its name."""
    return field(metadata={"column": (unit, meaning, minimum)}, **default)


class ArrowResult(ArrowRows):
    """A result whose answers are columns: numbers, or arrays of one shape."""

    arrow_columns: ClassVar[tuple[Column, ...]]
    arrow_names: ClassVar[Mapping[str, tuple[str, ...]]] = {"origin": ORIGINS}
    made_from: Mapping[str, str]
    _html_names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        """Make the columns of a class whose fields are :func:`answer`."""
        made = {name: one.metadata for name, one in vars(cls).items() if isinstance(one, Field)}
        columns = [Column(name, "float", *one["column"]) for name, one in made.items() if "column" in one]
        if columns:
            cls.arrow_columns = tuple(columns)

    def columns(self) -> dict[str, Any]:
        """Return the answers by name, unchanged: numbers, or arrays of one shape; None if not requested."""
        return {column.name: getattr(self, column.name) for column in self.arrow_columns}

    def to_arrow(self) -> pa.Table:
        """Return the answers as an Arrow table, one row per element, in C order."""
        import pyarrow as pa

        schema = arrow_schema(self.arrow_columns, self.made_from)
        values = {name: None if v is None else np.ravel(v) for name, v in self.columns().items()}
        count = next(len(v) for v in values.values() if v is not None)

        def column(field: pa.Field) -> pa.Array:
            value, names = values[field.name], self.arrow_names.get(field.name)
            if value is None:
                return pa.nulls(count, field.type)
            if names is not None:
                value = np.array(names, object)[value.astype(np.int64)]
            return pa.array(value, field.type, from_pandas=True)

        return pa.table([column(field) for field in schema], schema=schema)

    def _repr_html_(self) -> str:
        """Return the first rows as HTML for notebooks, without empty columns and with origins by name."""
        values = {name: None if v is None else np.ravel(v) for name, v in self.columns().items()}
        count = next(len(v) for v in values.values() if v is not None)

        def cell(name: str, row: int) -> Any:
            value, names = values[name], self.arrow_names.get(name)
            if value is None:
                return None
            return value[row] if names is None else names[int(value[row])]

        shown = [c for c in self.arrow_columns if not self._html_names or c.name in self._html_names]
        rows = [{c.name: cell(c.name, row) for c in shown} for row in range(min(count, MOST_ROWS))]
        return rows_html(shown, rows, self._html_caption(count), count)

    def _html_caption(self, count: int) -> str:
        """Return the caption of the HTML table."""
        made = {name.removeprefix("fastroof."): value for name, value in self.made_from.items()}
        what = " on ".join(made[name] for name in ("model", "gpu") if name in made)
        caption = f"{type(self).__name__}, {count:,} {'row' if count == 1 else 'rows'}"
        return f"{caption}: {what}" if what else caption
