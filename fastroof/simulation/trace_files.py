"""Traces from what there is: files of other programs, tables and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastroof.errors import TraceError
from fastroof.simulation.trace import Trace

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["load_trace"]


def load_trace(
    source: str | Path | Mapping[str, Any] | pa.Table,
    *,
    format: str | None = None,
    limit: int | None = None,
    rate_scale: float = 1.0,
) -> Trace:
    """Read the requests of a trace.

    Parameters
    ----------
    source : path, pyarrow.Table or mapping of str to array
        What holds ``arrival_s``, ``input_tokens``, ``output_tokens`` and, if known, ``cached_tokens``.
    format : str, optional
        What a file is; by default its columns tell.
    limit : int, optional
        Only the first so many requests by arrival.
    rate_scale : float, default 1
        How many times as fast the requests arrive.

    Returns
    -------
    Trace
        Sorted by arrival, the first at 0.

    Raises
    ------
    TraceError
        If there is no such file, it is no trace, or a row is no request.

    Examples
    --------
    >>> load_trace({"arrival_s": [3.0, 4.5], "input_tokens": [9, 8], "output_tokens": [1, 2]})
    Trace('arrays', 2 requests, 1.5 s)
    """
    if isinstance(source, Mapping):
        columns, name = {str(key): np.asarray(value) for key, value in source.items()}, "arrays"
    elif hasattr(source, "__arrow_c_stream__"):
        import pyarrow as pa

        table = pa.table(source)
        columns = {key: table[key].to_numpy() for key in table.column_names}
        name = (table.schema.metadata or {}).get(b"name", b"table").decode()
    else:
        raise TraceError("files are not read yet")
    missing = [key for key in ("arrival_s", "input_tokens", "output_tokens") if key not in columns]
    if missing:
        raise TraceError(f"a trace needs {', '.join(missing)}; got {', '.join(columns)}")
    arrival_s = columns["arrival_s"]
    trace = Trace(
        arrival_s - arrival_s.min() if len(arrival_s) else arrival_s,
        columns["input_tokens"],
        columns["output_tokens"],
        columns.get("cached_tokens"),  # type: ignore[arg-type]
        name=name,
    )
    if limit is not None:
        trace = trace.limited(limit)
    return trace if rate_scale == 1.0 else trace.rate_scaled(rate_scale)
