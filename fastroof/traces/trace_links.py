"""Read who starts after whom from the columns of a trace: parents, sessions and delays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastroof.arrays import Floats, Longs
from fastroof.errors import TraceError
from fastroof.traces.trace import MOST_SECONDS, MOST_TOKENS
from fastroof.traces.trace_columns import RawColumns, is_string
from fastroof.traces.trace_formats import NamedColumns

ROW: Final = "\0row"
"""Column of the rows' places in the file, which stays with them when others are left out."""

NO_PARENTS: Final = ("", "-1", "none", "null", "nan")
"""Values of a column of parents that name none."""


class FileLinks(NamedTuple):
    """Links by row of a file: rows of the parents of each, its session, and its delay, s."""

    parents: list[list[int]]
    session: Longs
    delay_s: Floats
    grows: bool
    """Whether prompts are the new tokens of a turn alone, after those of the turns before it."""


def read_links(raw: RawColumns, columns: NamedColumns) -> tuple[RawColumns, FileLinks | None]:
    """Return the links of a file, if its columns have any, and its columns with the rows' places."""
    if not columns.has_links:
        return raw, None
    delay_s = np.zeros(raw.count)
    if columns.delay:
        delay_s = _delays(raw, columns)
    session: Longs = np.arange(raw.count)
    if columns.session:
        session = _numbered(raw, columns.session)
    parents = _parents(raw, columns) if columns.parent else _chained(session)
    if not columns.session:
        session = np.zeros(0, np.int64)
    grows = columns.format.grows and not columns.parent and not _holds_history(raw, columns)
    places = pa.chunked_array([pa.array(np.arange(raw.count))])
    return replace(raw, columns={**raw.columns, ROW: places}), FileLinks(parents, session, delay_s, grows)


def _delays(raw: RawColumns, columns: NamedColumns) -> Floats:
    """Return the delays of all rows, s; 0 without one."""
    name = columns.delay
    missing = raw.missing(name)
    try:
        filled = pc.if_else(pa.array(missing), None, raw.decoded(name)).cast(pa.float64())
    except pa.ArrowException:
        raise TraceError(f"{raw.what}: {name} must be numbers, got {raw.columns[name].type}") from None
    delays: Floats = pc.fill_null(filled, 0.0).to_numpy() / columns.delay_per_s
    raw.refuse_where(
        ~((delays >= 0) & (delays <= MOST_SECONDS)),
        lambda row: f"{name} must be from 0 to {MOST_SECONDS:g} s, got {delays[row]:g} s",
    )
    return delays.copy()


def _texts(raw: RawColumns, name: str) -> list[Any]:
    """Return a column's values as texts or lists of texts; None for missing values."""
    column = raw.decoded(name)
    if not (_is_text_or_number(column.type) or _is_list(column.type)):
        raise TraceError(f"{raw.what}: {name} must be numbers or texts, got {column.type}")
    if pa.types.is_floating(column.type):
        # missing integers make a column of floats
        return [None if value is None else f"{value:.17g}" for value in column.to_pylist()]
    values = column.to_pylist()
    if _is_list(column.type):
        return [None if value is None else [str(one) for one in value] for value in values]
    return [None if value is None else str(value).strip() for value in values]


def _is_text_or_number(kind: pa.DataType) -> bool:
    types = pa.types
    return is_string(kind) or bool(types.is_integer(kind) or types.is_floating(kind) or types.is_null(kind))


def _is_list(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list and _is_text_or_number(kind.value_type))


def _numbered(raw: RawColumns, name: str) -> Longs:
    """Return a column's values as numbers from 0 in the order of their first rows; each blank is its own."""
    numbers: dict[Any, int] = {}
    values = _texts(raw, name)
    if any(isinstance(value, list) for value in values):
        raise TraceError(f"{raw.what}: {name} must be numbers or texts, got lists")
    keys = ((None, row) if value in (None, "") else value for row, value in enumerate(values))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _chained(session: Longs) -> list[list[int]]:
    """Let each row follow the one before it in its session."""
    last: dict[int, int] = {}
    parents: list[list[int]] = []
    for row, number in enumerate(session.tolist()):
        parents.append([last[number]] if number in last else [])
        last[number] = row
    return parents


def _parents(raw: RawColumns, columns: NamedColumns) -> list[list[int]]:
    """Return the rows of each row's parents, which a column names by their ids or their rows from 0."""
    parent_names = _texts(raw, columns.parent)
    row_of: dict[str, int] = {}
    if columns.request_id:
        for row, one in enumerate(_texts(raw, columns.request_id)):
            if not isinstance(one, str) or one in row_of:
                shown = "missing" if one is None else f"{one!r} again"
                raw.refuse(row, f"{columns.request_id} must differ in every row, is {shown}")
            row_of[one] = row
    parents: list[list[int]] = []
    for row, value in enumerate(parent_names):
        ids = [] if value is None else value if isinstance(value, list) else value.split()
        own = []
        for one in ids:
            if one.lower() in NO_PARENTS:
                continue
            found = row_of.get(one) if columns.request_id else _row(one, raw.count)
            if found is None and columns.format.has_orphans:
                continue
            if found is None:
                where = f"no {columns.request_id}" if columns.request_id else f"no row, 0 to {raw.count - 1}"
                raw.refuse(row, f"{columns.parent} {one[:40]!r} is {where} of the file")
            if found == row:
                raw.refuse(row, f"{columns.parent} {one[:40]!r} is the row itself")
            own.append(found)
        parents.append(own)
    return parents


def _row(text: str, count: int) -> int | None:
    """Return the row that a text names, if any."""
    is_row = text.isdecimal() and len(text) < 19 and int(text) < count
    return int(text) if is_row else None


def _holds_history(raw: RawColumns, columns: NamedColumns) -> bool:
    """Whether the file states that prompts include the turns before them."""
    if columns.context_mode not in raw.columns:
        return False
    return "message_array_with_responses" in set(map(str, raw.decoded(columns.context_mode).to_pylist()))


def linked_rows(raw: RawColumns, links: FileLinks) -> dict[str, Any]:
    """Return the arguments of a Trace of the rows that are left; others pass their parents on."""
    rows = raw.columns[ROW].to_numpy()
    place = {row: at for at, row in enumerate(rows.tolist())}
    found: dict[int, list[int]] = {}

    def parents_of(row: int) -> list[int]:
        ids: list[int] = []
        seen = set()
        queue = list(links.parents[row])
        while queue:
            one = queue.pop(0)
            if one in seen:
                continue
            seen.add(one)
            if one in place:
                ids.append(place[one])
            else:
                queue += found.get(one, links.parents[one])
        return ids

    parents = [parents_of(row) for row in rows.tolist()]
    counts = [len(own) for own in parents]
    delay_s = np.where(np.array(counts, np.int64) > 0, links.delay_s[rows], 0.0)
    fields: dict[str, Any] = {
        "parents": np.array([one for own in parents for one in own], np.int64),
        "parent_offsets": np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        "delay_s": delay_s,
    }
    if len(links.session):
        fields["session"] = links.session[rows]
    return fields


def grown_prompts(raw: RawColumns, name: str, prompts: Longs, outputs: Longs, extra: dict[str, Any]) -> Longs:
    """Return prompts with the prompt and the answer of the turn before them, which holds those before it."""
    lengths = prompts.astype(np.int64)
    parents, offsets = extra["parents"].tolist(), extra["parent_offsets"].tolist()
    for row in range(len(lengths)):
        if offsets[row + 1] > offsets[row]:
            before = parents[offsets[row]]
            lengths[row] += lengths[before] + outputs[before]

    raw.refuse_where(
        lengths > MOST_TOKENS,
        lambda row: f"{name} with the turns before it is above {MOST_TOKENS:,} tokens: {lengths[row]:,}",
    )
    return lengths
