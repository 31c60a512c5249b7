"""What results have in common: each is an Arrow table, so that pandas, polars and DuckDB take it as it is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from fastroof.columns import ORIGINS, Column

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ORIGIN", "RELATIVE_ERROR", "ArrowResult", "arrow_schema"]

ORIGIN: Final = Column("origin", "text", "", "how the latency was made: measured to modelled")
RELATIVE_ERROR: Final = Column(
    "relative_error", "float", "", "standard error of the time over it; empty where not asked for", 0
)


def arrow_schema(columns: Iterable[Column], metadata: Mapping[str, str]) -> pa.Schema:
    """Arrow schema of result columns: every field has its unit and meaning, the table its metadata."""
    import pyarrow as pa

    types = {"int": pa.int64(), "float": pa.float64(), "text": pa.string()}
    fields = [
        pa.field(c.name, types[c.kind], metadata={"unit": c.unit, "meaning": c.meaning}) for c in columns
    ]
    return pa.schema(fields, metadata=dict(metadata))


class ArrowResult:
    """A result whose answers are columns: numbers, or arrays of one shape.

    Whatever speaks the Arrow PyCapsule interface takes one: ``pyarrow.table(result)``,
    ``polars.DataFrame(result)``, ``pandas.DataFrame.from_arrow(result)``, DuckDB's ``from result``.

    Every result that answers with a time has a ``relative_error``: one standard error over the time, of the
    time's shape (an 80 % interval is 1.28 of them on either side, in ln); None where it was not asked for,
    nan where it is not known. In the table both are null, as is any number that there is not.

    Attributes
    ----------
    arrow_columns : tuple of Column
        Of its table: names, units and meanings.
    arrow_names : mapping of str to tuple of str
        What the codes of a column stand for, which the table spells out.
    made_from : mapping of str to str
        The table's metadata: fastroof's version, the tables' hash, and what else the result was made from.
    """

    arrow_columns: ClassVar[tuple[Column, ...]]
    arrow_names: ClassVar[Mapping[str, tuple[str, ...]]] = {"origin": ORIGINS}
    made_from: Mapping[str, str]

    @abstractmethod
    def columns(self) -> dict[str, Any]:
        """Answers by name, as they are: numbers, or arrays of one shape; None where not asked for."""

    def to_arrow(self) -> pa.Table:
        """Lay the answers out as an Arrow table, a row an element, in C order.

        Returns
        -------
        pyarrow.Table
            Units and meanings are metadata of its fields; what it was made from is metadata of the table.

        Examples
        --------
        >>> import fastroof
        >>> looked_up = fastroof.load_tables("h100").lookup("gemm", m=[64, 100], n=6144, k=4096)
        >>> looked_up.to_arrow()["origin"].to_pylist()
        ['measured', 'interpolated']
        """
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

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Hand the table over as an Arrow stream: the PyCapsule interface."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)
