"""A simulation's requests as a table and as a file: a row a request, in the order of the trace's file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from fastroof.arrow import arrow_schema
from fastroof.columns import Column
from fastroof.errors import FastroofError
from fastroof.simulation.outcomes import STATUS_WORDS
from fastroof.simulation.request_times import RequestTimes
from fastroof.units import US_PER_S
from fastroof.whole_files import check_file_place, whole_file, write_errors

if TYPE_CHECKING:
    from fastroof.simulation.outcomes import Outcomes
    from fastroof.simulation.trace import Trace

__all__ = ["CACHED_COLUMN", "REQUEST_COLUMNS", "checked_requests_path", "request_table", "write_table"]

REQUEST_COLUMNS: Final = (
    Column("arrival_s", "float", "s", "when the request was sent", 0),
    Column("input_tokens", "int", "tokens", "tokens of its prompt"),
    Column("output_tokens", "int", "tokens", "tokens of its answer, the first included"),
    Column("ttft_ms", "float", "ms", "time to first token; empty where it never came"),
    Column("tpot_ms", "float", "ms", "time per output token after the first; empty where there is none"),
    Column("e2e_ms", "float", "ms", "time to the last token; empty where it never came"),
    Column("preemptions", "int", "", "how often it lost its KV cache and computed it again", 0),
    Column("replica", "int", "", "which replica served it, from 0; empty where none did", 0),
    Column("status", "text", "", "finished, timed_out or rejected"),
)
"""Columns of :attr:`Simulation.requests`."""

CACHED_COLUMN: Final = Column(
    "cached_tokens",
    "int",
    "tokens",
    "tokens of its prompt that it found in the prefix cache; empty if unknown",
    0,
)
"""One more, where a prefix cache was simulated."""


def request_table(
    trace: Trace, outcomes: Outcomes, times: RequestTimes, made_from: Mapping[str, str]
) -> pa.Table:
    """Lay requests out as a table, in the order of the trace's file."""
    values: dict[str, Any] = {
        "arrival_s": outcomes.arrival_us / US_PER_S,
        "input_tokens": trace.input_tokens,
        "output_tokens": trace.output_tokens,
        "ttft_ms": times.ttft_ms,
        "tpot_ms": times.tpot_ms,
        "e2e_ms": times.e2e_ms,
        "preemptions": outcomes.preemptions,
    }
    found = outcomes.cached_tokens
    shown = REQUEST_COLUMNS if found is None else (*REQUEST_COLUMNS, CACHED_COLUMN)
    schema = arrow_schema(shown, made_from)
    columns = {
        name: pa.array(trace.in_file_order(value), schema.field(name).type, from_pandas=True)
        for name, value in values.items()
    }
    replica = trace.in_file_order(outcomes.replica)
    columns["replica"] = pa.array(replica, schema.field("replica").type, mask=replica < 0)
    if found is not None:
        cached = trace.in_file_order(found)
        columns["cached_tokens"] = pa.array(cached, schema.field("cached_tokens").type, mask=cached < 0)
    codes = pa.array(trace.in_file_order(np.asarray(outcomes.status)).astype(np.int8))
    columns["status"] = pa.DictionaryArray.from_arrays(codes, list(STATUS_WORDS)).cast(pa.string())
    return pa.table([columns[field.name] for field in schema], schema=schema)


def checked_requests_path(path: str | Path) -> Path:
    """Return where requests can be written to, before any time goes into what they will be."""
    path = Path(path)
    if path.suffix.lower() not in (".parquet", ".csv"):
        # a number is what other programs' option of this name takes
        drawn = "; num_requests (--num-requests) says how many are drawn" if str(path).isdigit() else ""
        raise FastroofError(f"requests {path} must end in .parquet or .csv{drawn}")
    check_file_place(path, f"requests {path}")
    return path


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table of requests whole or not at all, as the name's end says."""
    with write_errors(f"requests {path}"), whole_file(path) as unfinished:
        if path.suffix.lower() == ".csv":
            from pyarrow import csv

            csv.write_csv(table, unfinished)
        else:
            from fastroof.parquet import write_parquet

            write_parquet(table, unfinished)
