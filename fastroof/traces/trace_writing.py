"""Write traces in the formats of other programs."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from fastroof.atomic_files import write_output
from fastroof.checks import one_of
from fastroof.errors import TraceError
from fastroof.traces.trace import HASH_IDS, TRACE_COLUMNS, Trace
from fastroof.units import MS_PER_S, NS_PER_S

WRITTEN: Final = {"plain": ".csv", "mooncake": ".jsonl", "llmservingsim": ".jsonl"}
"""Formats in which traces are written, and their suffixes."""


def write_trace(trace: Trace, path: str | os.PathLike[str], format: str = "plain") -> list[str]:
    """Write the requests of a trace in the format of another program, in order of arrival.

    Parameters
    ----------
    trace : Trace
        Not a closed loop, whose arrivals are not known.
    path : path
        The file. An existing one is replaced.
    format : str, default "plain"
        ``"llmservingsim"`` (JSON lines: input_toks, output_toks, arrival_time_ns), ``"mooncake"`` (JSON
        lines: timestamp in ms, input_length, output_length, hash_ids; Dynamo and aiperf read it too) or
        ``"plain"`` (CSV: arrival_s, input_tokens, output_tokens, cached_tokens).

    Returns
    -------
    list of str
        What of the trace the format has no place for.

    Raises
    ------
    TraceError
        If the format is unknown, its suffix another, the trace a closed loop, or the file cannot be written.

    Notes
    -----
    :func:`fastroof.load_trace` reads all of them back: arrivals to the nanosecond, lengths exactly.

    Examples
    --------
    >>> trace = Trace([0.0, 0.5], [100, 2000], [10, 20])
    >>> path = getfixture("tmp_path") / "requests.jsonl"
    >>> write_trace(trace, path, "llmservingsim"), path.read_text().splitlines()[1]
    ([], '{"input_toks": 2000, "output_toks": 20, "arrival_time_ns": 500000000}')
    """
    suffix = WRITTEN[one_of("format", format, WRITTEN, TraceError)]
    path = Path(path)
    if path.suffix != suffix:
        raise TraceError(f"{path}: {format} traces are {suffix} files")
    if trace.is_closed:
        raise TraceError(f"{trace.name} is a closed loop, whose arrivals depend on the answers: draw a rate")
    rows = list(_rows(trace, format))
    if suffix == ".jsonl":
        content = "".join(f"{json.dumps(row)}\n" for row in rows)
    else:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        content = text.getvalue()
    write_output(path, content, "trace", TraceError)
    without = []
    if trace.cached_tokens.any() and format != "plain":
        without.append("cached_tokens")
    if trace.hash_ids is not None and format != "mooncake":
        without.append(HASH_IDS)
    if trace.has_parents:
        without.append("parents")
    return without


def _rows(trace: Trace, format: str) -> Iterator[dict[str, Any]]:
    names = [column.name for column in TRACE_COLUMNS]
    columns = [getattr(trace, name).tolist() for name in names]
    for number, (arrival_s, prompt, output, cached) in enumerate(zip(*columns, strict=True)):
        if format == "llmservingsim":
            arrival = round(arrival_s * NS_PER_S)
            yield {"input_toks": prompt, "output_toks": output, "arrival_time_ns": arrival}
        elif format == "mooncake":
            row = {"timestamp": arrival_s * MS_PER_S, "input_length": prompt, "output_length": output}
            if trace.hash_ids is not None and trace.hash_offsets is not None:
                start, stop = trace.hash_offsets[number : number + 2]
                row[HASH_IDS] = trace.hash_ids[start:stop].tolist()
            yield row
        else:
            yield dict(zip(names, (arrival_s, prompt, output, cached), strict=True))
