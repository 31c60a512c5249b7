"""Load traces from files, tables and arrays."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.checks import is_number, shown, whole_number
from fastroof.errors import TraceError
from fastroof.traces.raw_files import raw_arrays, raw_file, raw_table, table_metadata
from fastroof.traces.trace import MOST_TOKENS, Trace
from fastroof.traces.trace_columns import RawColumns
from fastroof.traces.trace_formats import NamedColumns, Reading, own_columns
from fastroof.traces.trace_links import grown_prompts, linked_rows, read_links
from fastroof.traces.trace_rows import Condition, parse_conditions, rows_where, without_failed

if TYPE_CHECKING:
    import pyarrow as pa

EXAMPLE: Final = "example"
"""The built-in trace: the first 600 requests of Azure's conversations of 2023 (see example/README.md)."""

_EXAMPLE_FILE: Final = Path(__file__).parent / "example" / "azure_2023_conv.csv"


def load_trace(
    source: str | os.PathLike[str] | Mapping[str, Any] | pa.Table | Trace,
    *,
    format: str | None = None,
    columns: str | Mapping[str, str] | None = None,
    where: str | Sequence[str] | Mapping[str, object] | None = None,
    time_zone: str | None = None,
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
        and delay in ms), ``"burstgpt"`` (Timestamp in s, Request
        tokens, Response tokens), ``"llmservingsim"`` (arrival_time_ns, input_toks, output_toks),
        ``"splitwise"`` (arrival_timestamp in s, prompt_size, token_size) or ``"plain"`` (arrival_s,
        input_tokens, output_tokens and, if known, cached_tokens, hash_ids, status and, of sessions, session,
        parent, delay_s; or other common names: :mod:`fastroof.traces.trace_formats`). By default detected
        by the columns. Files of agents (``hash_id_scope``; :mod:`fastroof.traces.trace_agentx`) have
        names of their own.
    columns : str or mapping of str to str, optional
        Columns by role, instead of the format's: ``"arrival=started_at,input=prompt_tokens"``, or a mapping.
        Roles are arrival, input, output, cached, hash_ids, status, session, parent, id, delay and history;
        arrivals that are numbers need their unit, as in ``arrival_ms``, and so may delays.
    where : str, sequence of str or mapping, optional
        Conditions on rows, which must keep all of them: ``"model=gpt-oss-120b"``, or with ``!=``, ``<``,
        ``<=``, ``>`` or ``>=``; or values by column.
    time_zone : str, optional
        Zone of dates and times without one, such as ``"Europe/Berlin"``. Matters where clocks change.
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
        with _within_memory(source):
            conditions = parse_conditions(where)
            reading = Reading(format, own_columns(columns), tuple(one.column for one in conditions))
            raw, named, facts = _raw(source, reading)
            if hash_block_size is not None and named.hash_ids:
                facts["hash_block_size"] = whole_number("hash_block_size", hash_block_size, error=TraceError)
            trace = _checked_trace(raw, named, facts, conditions, time_zone)
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
    with _within_memory(source):
        conditions = parse_conditions(where)
        others = tuple(one.column for one in conditions)
        raw, named, facts = _raw(source, Reading(None, own_columns(columns), others, needs_arrival=False))
        alone = named._replace(hash_ids="", session="", parent="")
        return _checked_trace(raw, alone, {"name": facts["name"]}, conditions, None)


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


def _checked_trace(
    raw: RawColumns,
    columns: NamedColumns,
    facts: dict[str, Any],
    conditions: tuple[Condition, ...],
    time_zone: str | None,
) -> Trace:
    """Check the rows, with errors that name them, and make the trace."""
    if not raw.count:
        raise TraceError(f"{raw.what} has no requests")
    raw, links = read_links(raw, columns)
    raw, others = rows_where(raw, columns, conditions)
    raw, failed = without_failed(raw, columns)
    left_out = others | failed
    if not raw.count:
        why = "".join(f", {rows} left out with {reason}" for reason, rows in left_out.items())
        raise TraceError(f"{raw.what} has no requests{why}")
    sizes = {role: raw.tokens(getattr(columns, role)) for role in ("input_tokens", "output_tokens")}
    arrival_s: Floats = np.zeros(raw.count)
    rows: dict[str, Any] = {}
    if links is not None:
        rows = linked_rows(raw, links)
        if links.grows:
            # ids of a turn's own tokens do not tell what its whole prompt shares
            columns = columns._replace(hash_ids="")
            lengths = sizes["input_tokens"], sizes["output_tokens"]
            sizes["input_tokens"] = grown_prompts(raw, columns.input_tokens, *lengths, rows)
            rows["history_tokens"] = sizes["input_tokens"] - lengths[0]
    if columns.arrival:
        arrival_s = _arrivals(raw, columns, time_zone, rows.get("parent_offsets"))
    if columns.cached_tokens:
        sizes["cached_tokens"] = raw.tokens(columns.cached_tokens)
    for role, tokens in sizes.items():
        name, least = getattr(columns, role), 0 if role == "cached_tokens" else 1
        raw.refuse_where(
            (tokens < least) | (tokens > MOST_TOKENS),
            lambda row, name=name, least=least, tokens=tokens: (  # type: ignore[misc]
                f"{name} must be tokens from {least} to {MOST_TOKENS:,}, got {tokens[row]}"
            ),
        )
    if "cached_tokens" in sizes:
        cached, prompts = sizes["cached_tokens"], sizes["input_tokens"]
        raw.refuse_where(
            cached >= prompts,
            lambda row: (
                f"{columns.cached_tokens} {cached[row]} must be less than the prompt's {prompts[row]}, "
                "as the last is always computed"
            ),
        )
    if columns.history_tokens:
        rows["history_tokens"] = raw.tokens(columns.history_tokens)
    block_size = facts.pop("hash_block_size", None)
    if columns.hash_ids:
        rows |= _checked_blocks(raw, columns, sizes["input_tokens"], block_size)
    rows |= {"arrival_s": arrival_s - arrival_s.min()} | sizes
    try:
        return Trace(**rows, **facts, left_out=left_out)
    except TraceError as error:
        # links of rows that cannot be told from one row alone
        raise TraceError(str(error).replace(f"trace {shown(facts['name'])}", raw.what, 1)) from None


def _arrivals(
    raw: RawColumns, columns: NamedColumns, time_zone: str | None, parent_offsets: Longs | None
) -> Floats:
    """Return arrivals in seconds after the earliest; 0 where a request with parents has none."""
    if parent_offsets is None:
        return raw.seconds(columns.arrival, columns.per_s, time_zone)
    blank = raw.missing(columns.arrival) & (np.diff(parent_offsets) > 0)
    if not blank.any():
        return raw.seconds(columns.arrival, columns.per_s, time_zone)
    arrival_s: Floats = np.zeros(raw.count)
    if not blank.all():
        arrival_s[~blank] = raw.rows(~blank).seconds(columns.arrival, columns.per_s, time_zone)
    return arrival_s


def _checked_blocks(
    raw: RawColumns, columns: NamedColumns, prompts: Longs, block_size: int | None
) -> dict[str, Any]:
    """Return the ids of blocks; their size is the format's, or the one that fits the numbers of ids."""
    ids, offsets = raw.blocks(columns.hash_ids)
    counts = np.diff(offsets)
    usual = columns.format.hash_block_size
    size = usual if block_size is None else block_size
    wrong = counts != -(-prompts // size)
    if block_size is None and wrong.any():
        fitting = _fitting_blocks(prompts, counts)
        if len(fitting) > 1:
            raise TraceError(
                f"{raw.what}: {columns.hash_ids} are not of {usual} tokens each; they could be of "
                f"{' or '.join(map(str, fitting))}: give hash_block_size (--hash-block-size)"
            )
        if fitting:
            size, wrong = fitting[0], np.zeros(len(counts), bool)
    raw.refuse_where(
        wrong,
        lambda row: (
            f"{columns.hash_ids} has {counts[row]} ids, and a prompt of {prompts[row]} tokens has "
            f"{-(-prompts[row] // size)} blocks of {size}"
        ),
    )
    return {"hash_ids": ids, "hash_offsets": offsets, "hash_block_size": size}


def _fitting_blocks(prompts: Longs, counts: Longs) -> list[int]:
    """Return the powers of two that are sizes of blocks with which all prompts have their numbers of ids."""
    sizes = 2 ** np.arange(MOST_TOKENS.bit_length(), dtype=np.int64)
    return [int(size) for size in sizes if (counts == -(-prompts // size)).all()]
