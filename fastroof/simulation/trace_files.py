"""Load traces from files, tables and arrays."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.arrays import Bools, Floats, Longs
from fastroof.checks import is_number, whole_number
from fastroof.errors import TraceError
from fastroof.simulation.raw_files import NamedColumns, raw_arrays, raw_file, raw_table, table_metadata
from fastroof.simulation.trace import MOST_TOKENS, Trace
from fastroof.simulation.trace_columns import RawColumns

if TYPE_CHECKING:
    import pyarrow as pa

EXAMPLE: Final = "example"
"""The built-in trace: the first 600 requests of Azure's conversations of 2023 (see example/README.md)."""

MOONCAKE_BLOCK: Final = 512
"""Default tokens per block of ``hash_ids``."""

_EXAMPLE_FILE: Final = Path(__file__).parent / "example" / "azure_2023_conv.csv"


def load_trace(
    source: str | os.PathLike[str] | Mapping[str, Any] | pa.Table | Trace,
    *,
    format: str | None = None,
    limit: int | None = None,
    rate_scale: float = 1.0,
    hash_block_size: int | None = None,
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
        ``"mooncake"`` (timestamp in ms, input_length, output_length, hash_ids), ``"burstgpt"`` (Timestamp in
        s, Request tokens, Response tokens) or ``"plain"`` (arrival_s, input_tokens, output_tokens and, if
        known, cached_tokens and hash_ids; or other common names: :mod:`fastroof.simulation.raw_files`). By
        default detected by the columns.
    limit : int, optional
        Maximum number of requests, the first by arrival.
    rate_scale : float, default 1
        Factor on the rate of arrivals.
    hash_block_size : int, optional
        Tokens per block of ``hash_ids``. Default: the table's metadata, else 512.

    Returns
    -------
    Trace
        Sorted by arrival, the first at 0. Rows of Azure, Mooncake and BurstGPT without prompt or output are
        failed requests: left out, and counted in ``left_out``. In plain traces they are an error.

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
            raw, columns, facts = _raw(source, format)
            if columns.hash_ids:
                if hash_block_size is None:
                    hash_block_size = facts.get("hash_block_size", MOONCAKE_BLOCK)
                facts["hash_block_size"] = whole_number("hash_block_size", hash_block_size, error=TraceError)
            trace = _checked_trace(raw, columns, facts)
    if limit is not None:
        trace = trace.limited(limit)
    return trace if is_number(rate_scale) and rate_scale == 1.0 else trace.rate_scaled(rate_scale)


def load_lengths(source: str | os.PathLike[str] | Mapping[str, Any] | pa.Table) -> Trace:
    """Load the lengths of requests from a trace, or from a table without arrivals, which are then 0."""
    with _within_memory(source):
        raw, columns, facts = _raw(source, None, needs_arrival=False)
        return _checked_trace(raw, columns._replace(hash_ids=""), {"name": facts["name"]})


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


def _raw(
    source: Any, format: str | None, *, needs_arrival: bool = True
) -> tuple[RawColumns, NamedColumns, dict[str, Any]]:
    """Return the raw columns, their roles, and the source's metadata."""
    if isinstance(source, str | os.PathLike):
        is_example = source == EXAMPLE
        path = _EXAMPLE_FILE if is_example else Path(source)
        raw, columns, facts = raw_file(path, format, needs_arrival=needs_arrival)
        if is_example:
            facts["name"] = EXAMPLE
        return raw, columns, facts
    if isinstance(source, Mapping):
        return (*raw_arrays(source, format, needs_arrival=needs_arrival), {"name": "arrays"})
    if hasattr(source, "__arrow_c_stream__"):
        table = raw_table(source)
        return (
            *raw_arrays(table, format, what="the table", needs_arrival=needs_arrival),
            table_metadata(table),
        )
    raise TraceError(
        "a trace must be a path, an Arrow table or a mapping of names to arrays (for a Workload, its "
        f"trace()), got {type(source).__name__}"
    )


def _checked_trace(raw: RawColumns, columns: NamedColumns, facts: dict[str, Any]) -> Trace:
    """Check the rows, with errors that name them, and make the trace."""
    if not len(raw.columns[columns.input_tokens]):
        raise TraceError(f"{raw.what} has no requests")
    sizes = {role: raw.tokens(getattr(columns, role)) for role in ("input_tokens", "output_tokens")}
    count = len(sizes["input_tokens"])
    arrival_s: Floats = np.zeros(count)
    if columns.arrival:
        arrival_s = raw.seconds(columns.arrival, columns.per_s)
    if columns.cached_tokens:
        sizes["cached_tokens"] = raw.tokens(columns.cached_tokens)
    kept, left_out = _request_rows(columns, sizes)
    for role, tokens in sizes.items():
        name, least = getattr(columns, role), 0 if role == "cached_tokens" else 1
        raw.refuse_where(
            kept & ((tokens < least) | (tokens > MOST_TOKENS)),
            lambda row, name=name, least=least, tokens=tokens: (  # type: ignore[misc]
                f"{name} must be tokens from {least} to {MOST_TOKENS:,}, got {tokens[row]}"
            ),
        )
    if "cached_tokens" in sizes:
        cached, prompts = sizes["cached_tokens"], sizes["input_tokens"]
        raw.refuse_where(
            kept & (cached >= prompts),
            lambda row: (
                f"{columns.cached_tokens} {cached[row]} must be less than the prompt's {prompts[row]}, "
                "as the last is always computed"
            ),
        )
    rows: dict[str, Any] = {}
    if columns.hash_ids:
        ids, offsets = _checked_blocks(raw, columns, sizes["input_tokens"], kept, facts["hash_block_size"])
        rows = {"hash_ids": ids, "hash_offsets": offsets}
    if not kept.any():
        why = "".join(f", {rows} left out with {reason}" for reason, rows in left_out.items())
        raise TraceError(f"{raw.what} has no requests{why}")
    arrival_s = arrival_s[kept]
    rows |= {"arrival_s": arrival_s - arrival_s.min()}
    rows |= {role: tokens[kept] for role, tokens in sizes.items()}
    return Trace(**rows, **facts, left_out=left_out)


def _request_rows(columns: NamedColumns, sizes: dict[str, Longs]) -> tuple[Bools, dict[str, int]]:
    """Return which rows are requests, and the number of rejected rows by reason."""
    kept: Bools = np.ones(len(sizes["input_tokens"]), bool)
    left_out = {}
    if columns.format.leaves_out_empty:
        for role in ("output_tokens", "input_tokens"):
            empty = kept & (sizes[role] == 0)
            if empty.any():
                left_out[f"{getattr(columns, role)} 0"] = int(np.count_nonzero(empty))
                kept &= ~empty
    return kept, left_out


def _checked_blocks(
    raw: RawColumns, columns: NamedColumns, prompts: Longs, kept: Bools, block_size: int
) -> tuple[Longs, Longs]:
    ids, offsets = raw.blocks(columns.hash_ids)
    counts, needed = np.diff(offsets), -(-prompts // block_size)
    raw.refuse_where(
        kept & (counts != needed),
        lambda row: (
            f"{columns.hash_ids} has {counts[row]} ids, and a prompt of {prompts[row]} tokens has "
            f"{needed[row]} blocks of {block_size}"
        ),
    )
    if kept.all():
        return ids, offsets
    return ids[np.repeat(kept, counts)], np.concatenate([[0], np.cumsum(counts[kept])])
