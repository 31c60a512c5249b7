"""Text cells of CSV that a spreadsheet would run as formulas, and what keeps it from that."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["guarded", "guarded_columns", "unguarded"]

# apostrophes in front count too, so that what is guarded twice comes back
_FORMULA: Final = r"^('*[=+\-@\t\r\n])"


def guarded(cell: str) -> str:
    """Prefix text that a spreadsheet would read as a formula with an apostrophe."""
    return f"'{cell}" if re.match(_FORMULA, cell) else cell


def unguarded(cell: str) -> str:
    """Take off what :func:`guarded` put before a cell."""
    return cell[1:] if cell.startswith("'") and re.match(_FORMULA, cell) else cell


def guarded_columns(table: pa.Table) -> pa.Table:
    """Guard the text columns of a table; numbers stay as they are."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for at, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            safe = pc.replace_substring_regex(table.column(at), pattern=_FORMULA, replacement=r"'\1")
            table = table.set_column(at, field, safe)
    return table
