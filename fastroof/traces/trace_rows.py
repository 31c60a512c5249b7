"""Which rows of a trace's file are requests to serve, by conditions and statuses, and the trace they make."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastroof.arrays import Bools, Floats, Longs
from fastroof.checks import MOST_SUGGESTED, one_line, shown
from fastroof.errors import TraceError
from fastroof.traces.trace import MOST_TOKENS, Trace
from fastroof.traces.trace_columns import RawColumns
from fastroof.traces.trace_formats import NamedColumns
from fastroof.traces.trace_links import grown_prompts, linked_rows, read_links

COMPARISONS: Final = {
    "=": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal",
}  # fmt: skip
"""Comparisons of conditions, and Arrow's functions for them."""

CONDITION_FORMS: Final = "COLUMN=VALUE, or with !=, <, <=, > or >= instead of ="
_CONDITION: Final = re.compile(r"\s*([^=<>!]+?)\s*(!=|<=|>=|=|<|>)\s*(.*?)\s*", re.DOTALL)

LEAST_HTTP_STATUS: Final = 100
LEAST_HTTP_ERROR: Final = 400
MOST_HTTP_STATUS: Final = 599
FAILURES: Final = (
    "false", "error", "failed", "failure", "timeout", "cancelled", "canceled", "aborted", "rejected",
)  # fmt: skip
"""Status words that mark a failed request, in lower case."""

_MOST_STATUSES: Final = 20


class Condition(NamedTuple):
    """A comparison of a column with a value, and how the user wrote it."""

    column: str
    comparison: str
    value: str
    text: str


def parse_conditions(given: Any) -> tuple[Condition, ...]:
    """Read conditions on rows: text, several of them, or a mapping of columns to values."""
    if given is None:
        return ()
    if isinstance(given, Mapping):
        pairs = [(str(column), _text(value)) for column, value in given.items()]
        return tuple(Condition(column, "=", value, f"{column}={value}") for column, value in pairs)
    conditions = []
    for text in [given] if isinstance(given, str) or not isinstance(given, Sequence) else given:
        match = _CONDITION.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise TraceError(
                f"where must be {CONDITION_FORMS}, such as model=gpt-oss-120b; got {shown(text)}"
            )
        conditions.append(Condition(match[1], match[2], match[3], text.strip()))
    return tuple(conditions)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def rows_where(
    raw: RawColumns, columns: NamedColumns, conditions: Sequence[Condition]
) -> tuple[RawColumns, dict[str, int]]:
    """Return the rows that keep all conditions, and the number of the others by the first that they break."""
    left_out = {}
    for condition, column in zip(conditions, columns.others, strict=True):
        selected = _keeps(raw, column, condition)
        if not selected.any():
            raise TraceError(f"{raw.what} has no rows with {condition.text}: {_values(raw.columns[column])}")
        if not selected.all():
            left_out[f"not {condition.text}"] = int(np.count_nonzero(~selected))
            raw = raw.rows(selected)
    return raw, left_out


def _keeps(raw: RawColumns, name: str, condition: Condition) -> Bools:
    """Return which rows keep a condition; a missing value only differs."""
    column = raw.decoded(name)
    is_text = condition.comparison in ("=", "!=") and not pa.types.is_floating(column.type)
    try:
        if is_text:
            texts = column.cast(pa.string())
            keeps = pc.call_function(
                COMPARISONS[condition.comparison],
                [pc.utf8_trim_whitespace(texts), pa.scalar(condition.value)],
            )
        else:
            is_blank = raw.missing(name)
            numbers = pc.if_else(pa.array(is_blank), None, column).cast(pa.float64())
            keeps = pc.call_function(
                COMPARISONS[condition.comparison], [numbers, pa.scalar(float(condition.value))]
            )
    except ValueError as error:
        # pyarrow's errors of values are ValueErrors, as float's is
        kind = "texts" if is_text else "numbers"
        raise TraceError(f"{raw.what}: {condition.text} compares {kind} ({one_line(error, 100)})") from None
    except (pa.ArrowException, TypeError):
        raise TraceError(f"{raw.what}: {condition.text} cannot compare values of {column.type}") from None
    differs = condition.comparison == "!="
    selected: Bools = pc.fill_null(keeps, differs).to_numpy().astype(bool)
    return selected


def _values(column: pa.ChunkedArray) -> str:
    """Return the values of a column in words, the most frequent first."""
    try:
        counts = pc.value_counts(column).to_pylist()
    except (pa.ArrowException, ValueError):  # times in ns have no Python value without pandas
        return f"it holds {column.type}"
    ranked = sorted(counts, key=lambda one: -one["counts"])[:MOST_SUGGESTED]
    more = ", ..." if len(counts) > len(ranked) else ""
    return "it holds " + ", ".join(shown(one["values"], 40) for one in ranked) + more


def without_failed(raw: RawColumns, columns: NamedColumns) -> tuple[RawColumns, dict[str, int]]:
    """Return the rows of requests that were served, and the number of failed ones by reason."""
    left_out: dict[str, int] = {}
    if columns.status:
        raw, left_out = _without_errors(raw, columns.status)
    names = [columns.output_tokens] + [columns.input_tokens] * columns.format.leaves_out_empty
    for name in names:
        empty = raw.zeros(name)
        if empty.any():
            left_out[f"{name} 0"] = int(np.count_nonzero(empty))
            raw = raw.rows(~empty)
    missing = raw.missing(columns.output_tokens)
    if missing.any():
        left_out[f"{columns.output_tokens} missing"] = int(np.count_nonzero(missing))
        raw = raw.rows(~missing)
    return raw, left_out


def _without_errors(raw: RawColumns, name: str) -> tuple[RawColumns, dict[str, int]]:
    """Return the rows whose status is not that of a failure, by HTTP codes, truth or words."""
    try:
        texts = pc.utf8_lower(pc.utf8_trim_whitespace(raw.decoded(name).cast(pa.string())))
    except pa.ArrowException:
        # lists and other types mark no failure
        return raw, {}
    statuses = {text.as_py() for text in pc.unique(texts)} - {None, ""}
    if len(statuses) > _MOST_STATUSES:
        return raw, {}
    codes = {text: int(text) for text in statuses if re.fullmatch("[0-9]{3}", text)}
    if len(codes) == len(statuses) and all(
        LEAST_HTTP_STATUS <= code <= MOST_HTTP_STATUS for code in codes.values()
    ):
        failed = sorted(text for text, code in codes.items() if code >= LEAST_HTTP_ERROR)
    else:
        failed = sorted(statuses.intersection(FAILURES))
    left_out, selected = {}, np.ones(len(texts), bool)
    for status in failed:
        wrong: Bools = pc.fill_null(pc.equal(texts, status), False).to_numpy().astype(bool)
        left_out[f"{name} {status}"] = int(np.count_nonzero(wrong))
        selected &= ~wrong
    return (raw.rows(selected) if failed else raw), left_out


def checked_trace(
    raw: RawColumns,
    columns: NamedColumns,
    facts: dict[str, Any],
    conditions: tuple[Condition, ...],
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
            # ids of a turn's new tokens do not identify what its whole prompt shares
            columns = columns._replace(hash_ids="")
            lengths = sizes["input_tokens"], sizes["output_tokens"]
            sizes["input_tokens"] = grown_prompts(raw, columns.input_tokens, *lengths, rows)
            rows["history_tokens"] = sizes["input_tokens"] - lengths[0]
    if columns.arrival:
        arrival_s = _arrivals(raw, columns, rows.get("parent_offsets"))
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
        # links between rows are checked by the trace, whose errors name it instead of the file
        raise TraceError(str(error).replace(f"trace {shown(facts['name'])}", raw.what, 1)) from None


def _arrivals(raw: RawColumns, columns: NamedColumns, parent_offsets: Longs | None) -> Floats:
    """Return arrivals in seconds after the earliest; 0 where a request with parents has none."""
    if parent_offsets is None:
        return raw.seconds(columns.arrival, columns.per_s)
    blank = raw.missing(columns.arrival) & (np.diff(parent_offsets) > 0)
    if not blank.any():
        return raw.seconds(columns.arrival, columns.per_s)
    arrival_s: Floats = np.zeros(raw.count)
    if not blank.all():
        arrival_s[~blank] = raw.rows(~blank).seconds(columns.arrival, columns.per_s)
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
                f"{' or '.join(map(str, fitting))}: give hash_block_size"
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
