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
    """Put an apostrophe before text that begins a formula: with ``=``, ``+``, ``-``, ``@``, tab or line end.

    Parameters
    ----------
    cell : str
        Text, not a number: ``-1`` as text would be guarded too.

    Examples
    --------
    >>> guarded("=1+1"), guarded("llama-3.1-8b")
    ("'=1+1", 'llama-3.1-8b')
    """
    return f"'{cell}" if re.match(_FORMULA, cell) else cell


def unguarded(cell: str) -> str:
    """Take off what :func:`guarded` put before a cell.

    Examples
    --------
    >>> unguarded("'=1+1"), unguarded("'tis")
    ('=1+1', "'tis")
    """
    return cell[1:] if cell.startswith("'") and re.match(_FORMULA, cell) else cell


def guarded_columns(table: pa.Table) -> pa.Table:
    """Guard the text columns of a table; numbers stay as they are.

    Examples
    --------
    >>> import pyarrow as pa
    >>> guarded_columns(pa.table({"model": ["-x", "y", None], "change": [-1, 0, 1]})).to_pydict()
    {'model': ["'-x", 'y', None], 'change': [-1, 0, 1]}
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    for at, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            safe = pc.replace_substring_regex(table.column(at), pattern=_FORMULA, replacement=r"'\1")
            table = table.set_column(at, field, safe)
    return table
