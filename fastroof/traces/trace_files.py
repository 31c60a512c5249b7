"""Load traces from files, tables and arrays."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastroof.checks import is_number, whole_number
from fastroof.errors import TraceError
from fastroof.traces.trace import Trace
from fastroof.traces.trace_formats import NamedColumns, Reading, own_columns

if TYPE_CHECKING:
    import pyarrow as pa

    from fastroof.traces.trace_columns import RawColumns

EXAMPLE: Final = "example"
"""The built-in trace: the first 600 requests of Azure's conversations of 2023 (see example/README.md)."""

_EXAMPLE_FILE: Final = Path(__file__).parent / "example" / "azure_2023_conv.csv"


def load_trace(
    source: str | os.PathLike[str] | Mapping[str, Any] | pa.Table | Trace,
    *,
    format: str | None = None,
    columns: str | Mapping[str, str] | None = None,
    where: str | Sequence[str] | Mapping[str, object] | None = None,
    limit: int | None = None,
    rate_scale: float = 1.0,
    hash_block_size: int | None = None,
    period_s: float | None = None,
) -> Trace:
    """Load a trace of requests.

    Parameters
    ----------
    source : path, table, mapping of str to array, or Trace
        A file in CSV, JSON lines, Parquet or Arrow format, text formats also compressed (.gz, .zst, .bz2); a
        table with the Arrow interface (pyarrow, pandas, polars); arrays by name; or ``"example"``, a built-in
        trace of 600 requests.
    format : str, optional
        The columns' format: ``"azure"`` (TIMESTAMP, ContextTokens, GeneratedTokens; 2023 and 2024),
        ``"bailian"`` (chat_id, parent_chat_id, turn, timestamp in s, input_length, output_length, hash_ids),
        ``"mooncake"`` (timestamp in ms, input_length, output_length, hash_ids and, of sessions, session_id
        and delay in ms), ``"burstgpt"`` (Timestamp in s, Request tokens, Response tokens),
        ``"aiperf"`` (its file of single requests, profile_export.jsonl), ``"llmservingsim"``
        (arrival_time_ns, input_toks, output_toks), ``"splitwise"`` (arrival_timestamp in
        s, prompt_size, token_size) or ``"plain"`` (arrival_s, input_tokens, output_tokens and, if known,
        cached_tokens, hash_ids, status and, of sessions, session, parent, delay_s; or other common names:
        :mod:`fastroof.traces.trace_formats`). By default detected by the columns. Files of agents
        (``hash_id_scope``; :mod:`fastroof.traces.trace_agentx`) have fixed names.
    columns : str or mapping of str to str, optional
        Columns by role, instead of the format's: ``"arrival=started_at,input=prompt_tokens"``, or a mapping.
        Roles are arrival, input, output, cached, hash_ids, status, session, parent, id, delay and history;
        arrivals that are numbers need their unit, as in ``arrival_ms``, and so may delays.
    where : str, sequence of str or mapping, optional
        Conditions on rows, which must keep all of them: ``"model=gpt-oss-120b"``, or with ``!=``, ``<``,
        ``<=``, ``>`` or ``>=``; or values by column.
    limit : int, optional
        Maximum number of requests, the first by arrival.
    rate_scale : float, default 1
        Factor on the rate of arrivals.
    hash_block_size : int, optional
        Tokens per block of ``hash_ids``. Default: the table's metadata, else the format's (Bailian 16, others
        512), or the power of two that fits the numbers of ids.
    period_s : float, optional
        Seconds that the requests taken cover, before ``rate_scale``; as of a :class:`Trace`.

    Returns
    -------
    Trace
        Sorted by arrival, the first at 0. Failed requests are left out, and counted in ``left_out``: rows
        without an output (in other formats than plain also without a prompt), and those whose status is an
        HTTP code from 400 on, false, or a word such as error or timeout.

    Raises
    ------
    TraceError
        If the file cannot be read, is not a trace, or a row is invalid; the message names file and row.

    Examples
    --------
    >>> load_trace({"arrival_s": [3.0, 4.5], "input_tokens": [9, 8], "output_tokens": [1, 2]})
    Trace('arrays', 2 requests, 1.5 s)
    >>> load_trace("example", limit=100, rate_scale=2)
    Trace('example', 100 requests, 21.34 s)
    """
    if isinstance(source, Trace):
        trace = source
    else:
        # imported here: Arrow takes longer to import than a drawn workload to simulate
        from fastroof.traces.trace_rows import checked_trace, parse_conditions

        with _within_memory(source):
            conditions = parse_conditions(where)
            reading = Reading(format, own_columns(columns), tuple(one.column for one in conditions))
            raw, named, facts = _raw(source, reading)
            if hash_block_size is not None and named.hash_ids:
                facts["hash_block_size"] = whole_number("hash_block_size", hash_block_size, error=TraceError)
            trace = checked_trace(raw, named, facts, conditions)
    if limit is not None:
        trace = trace.limited(limit)
    if period_s is not None:
        trace = replace(trace, period_s=period_s)
    return trace if is_number(rate_scale) and rate_scale == 1.0 else trace.rate_scaled(rate_scale)


def load_lengths(
    source: str | os.PathLike[str] | Mapping[str, Any] | pa.Table,
    *,
    columns: str | Mapping[str, str] | None = None,
    where: str | Sequence[str] | Mapping[str, object] | None = None,
) -> Trace:
    """Load the lengths of requests from a trace, or from a table without arrivals, which are then 0."""
    from fastroof.traces.trace_rows import checked_trace, parse_conditions

    with _within_memory(source):
        conditions = parse_conditions(where)
        others = tuple(one.column for one in conditions)
        raw, named, facts = _raw(source, Reading(None, own_columns(columns), others, needs_arrival=False))
        alone = named._replace(hash_ids="", session="", parent="")
        return checked_trace(raw, alone, {"name": facts["name"]}, conditions)


@contextmanager
def _within_memory(source: Any) -> Iterator[None]:
    """Turn a MemoryError into a TraceError."""
    try:
        yield
    except MemoryError as error:
        what = f"trace {os.fspath(source)}" if isinstance(source, str | os.PathLike) else "the trace"
        reason = f" ({error!s:.200})" if str(error) else ""
        raise TraceError(
            f"{what} does not fit in memory{reason}; give fewer rows or use a machine with more memory"
        ) from None


def _raw(source: Any, reading: Reading) -> tuple[RawColumns, NamedColumns, dict[str, Any]]:
    """Return the raw columns, their roles, and the source's metadata."""
    from fastroof.traces.raw_files import raw_arrays, raw_file, raw_table, table_metadata

    if isinstance(source, str | os.PathLike):
        is_example = source == EXAMPLE
        path = _EXAMPLE_FILE if is_example else Path(source)
        raw, columns, facts = raw_file(path, reading)
        if is_example:
            facts["name"] = EXAMPLE
        return raw, columns, facts
    if isinstance(source, Mapping):
        return (*raw_arrays(source, reading), {"name": "arrays"})
    if hasattr(source, "__arrow_c_stream__"):
        table = raw_table(source)
        return (*raw_arrays(table, reading, what="the table"), table_metadata(table))
    raise TraceError(
        "a trace must be a path, an Arrow table or a mapping of names to arrays (for a Workload, its "
        f"trace()), got {type(source).__name__}"
    )
