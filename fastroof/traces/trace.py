"""Traces: the arrivals of requests, and the lengths of their prompts and outputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from fastroof.arrays import Array, Floats, Longs
from fastroof.arrow import arrow_schema
from fastroof.checks import is_number, shown, whole_number
from fastroof.columns import Column
from fastroof.errors import TraceError
from fastroof.stopping import check_stopped
from fastroof.traces import trace_sessions
from fastroof.traces.trace_checks import (
    are_parents_first,
    check_left_out,
    checked_hashes,
    is_text,
    numbers_in_a_row,
    refuse_where,
    sorted_by_arrival,
)

if TYPE_CHECKING:
    import pyarrow as pa


Sizes = npt.NDArray[np.int32]
"""Tokens, one number per request."""


MOST_CLIENTS: Final = 2**31
MOST_TOKENS: Final = 2**24
"""Maximum tokens of a prompt or an output: above any model's context, so that sums stay within int32."""

MOST_SECONDS: Final = 1e10
"""Latest arrival, three centuries: float64 resolves microseconds up to there."""

TRACE_COLUMNS: Final = (
    Column("arrival_s", "float", "s", "arrival of the request; 0 for the first of a file", 0),
    Column("input_tokens", "int", "tokens", "prompt tokens"),
    Column("output_tokens", "int", "tokens", "output tokens, including the first"),
    Column("cached_tokens", "int", "tokens", "prompt tokens in the prefix cache", 0),
)
"""Columns of :meth:`Trace.table`, which :func:`fastroof.load_trace` reads back."""

HASH_IDS: Final = "hash_ids"
"""Column of lists of block ids, if a trace has them."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests, sorted by arrival; equal arrivals keep their order.

    Parameters
    ----------
    arrival_s : array of float, shape (requests,)
        Arrivals, seconds from the start, in any order; at least 0. All 0 in a closed loop, whose arrivals are
        found by simulation.
    input_tokens, output_tokens : array of int, shape (requests,)
        Tokens of prompts and outputs, at least 1 each.
    cached_tokens : array of int, shape (requests,), optional
        Prompt tokens in the prefix cache, fewer than the prompt. Default 0.
    hash_ids : array of int, shape (blocks,), optional
        Ids of the blocks of all prompts, one after the other: two prompts are equal up to a block if their
        ids are.
    hash_offsets : array of int, shape (requests + 1,), optional
        Where each request's ids start, from 0 to the number of ids.
    hash_block_size : int, default 0
        Tokens per block; request i has ``ceil(input_tokens[i] / hash_block_size)`` ids, the last block may be
        partial. 0 without ids.
    parents : array of int, optional
        Rows of the requests that each one waits for. Shape (requests,) with -1 for none, or, with
        ``parent_offsets``, those of all requests one after the other. A request starts ``delay_s`` after the
        last of its parents has ended, and not before its ``arrival_s``.
    parent_offsets : array of int, shape (requests + 1,), optional
        Where each request's parents start, from 0 to their number.
    delay_s : array of float, shape (requests,), optional
        Seconds from the end of a request's last parent to its start: time to think, or of a tool. Default 0.
    session : array of int, shape (requests,), optional
        Number of each request's session, that of its parents. By default all requests that are linked.
    history_tokens : array of int, shape (requests,), optional
        Leading tokens of each prompt that are those of its first parent's prompt and answer or, without
        parents, of all such prompts: what a prefix cache can find, if there are no ids.
    name : str
        Name in reports.
    clients : int, optional
        In a closed loop, the number of clients that send the requests in turn, each after the answer to its
        last. With parents each has one session after the other, which starts with one request.
    think_s : float, default 0
        In a closed loop, seconds between the end of an answer and the client's next request, or session.
    left_out : mapping of str to int
        Number of rows of the file that are not requests, by reason.
    order : array of int, shape (requests,), optional
        Position in the file of each sorted request, a permutation. By default requests are sorted here.
    period_s : float, optional
        Seconds that the trace covers and after which it is repeated: requests over period are its rate. A
        slice has it from its bounds. By default it ends a mean gap after the last request or session start.

    Raises
    ------
    TraceError
        If an array is not numeric, lengths differ, or a request is invalid; the message names the row.

    Notes
    -----
    The arrays are copies and writable, as compiled loops need them; changes are not checked.

    Examples
    --------
    >>> trace = Trace(arrival_s=[0.5, 0.0], input_tokens=[100, 2000], output_tokens=[10, 20])
    >>> trace.input_tokens.tolist(), trace.order.tolist(), trace.duration_s
    ([2000, 100], [1, 0], 0.5)
    """

    arrival_s: Floats
    input_tokens: Sizes
    output_tokens: Sizes
    cached_tokens: Sizes = None  # type: ignore[assignment]  # zeros by default
    hash_ids: Longs | None = None
    hash_offsets: Longs | None = None
    hash_block_size: int = 0
    parents: Longs | None = None
    parent_offsets: Longs | None = None
    delay_s: Floats | None = None
    session: Longs | None = None
    history_tokens: Sizes | None = None
    name: str = "trace"
    clients: int | None = None
    think_s: float = 0.0
    left_out: Mapping[str, int] = field(default_factory=dict)
    order: Longs = None  # type: ignore[assignment]  # by default made here
    period_s: float | None = None

    def __post_init__(self) -> None:
        where = f"trace {shown(self.name)}"
        if not isinstance(self.name, str) or not is_text(self.name):
            raise TraceError(f"a trace's name must be a string, got {shown(self.name)}")
        check_left_out(where, self.left_out)
        arrival_s = numbers_in_a_row(where, "arrival_s", self.arrival_s, "fiu").astype(np.float64)
        count = len(arrival_s)
        if not count:
            raise TraceError(f"{where} has no requests: give at least one")
        refuse_where(where, "arrival_s", arrival_s, ~((arrival_s >= 0) & (arrival_s <= MOST_SECONDS)),
                f"must be seconds from 0 to {MOST_SECONDS:g}")  # fmt: skip
        arrays: dict[str, Any] = {"arrival_s": arrival_s}
        for name in ("input_tokens", "output_tokens", "cached_tokens"):
            check_stopped()
            got = getattr(self, name)
            if name == "cached_tokens" and got is None:
                got = np.zeros(count, np.int32)
            sizes = numbers_in_a_row(where, name, got, "iu", count)
            least = 0 if name == "cached_tokens" else 1
            refuse_where(where, name, sizes, (sizes < least) | (sizes > MOST_TOKENS),
                    f"must be tokens from {least} to {MOST_TOKENS:,}")  # fmt: skip
            arrays[name] = sizes.astype(np.int32)
        refuse_where(where, "cached_tokens", arrays["cached_tokens"],
                arrays["cached_tokens"] >= arrays["input_tokens"],
                "must be less than the prompt's tokens, as the last is always computed")  # fmt: skip
        if self.clients is not None:
            whole_number("clients", self.clients, 1, MOST_CLIENTS, TraceError)
        if not is_number(self.think_s) or self.think_s < 0:
            raise TraceError(f"{where}: think_s must be seconds of at least 0, got {shown(self.think_s)}")
        if self.period_s is not None:
            if not is_number(self.period_s) or not 0 <= self.period_s <= MOST_SECONDS:
                got = f"got {shown(self.period_s)}"
                raise TraceError(f"{where}: period_s must be seconds from 0 to {MOST_SECONDS:g}, {got}")
            object.__setattr__(self, "period_s", float(self.period_s))
        blocks = self.hash_ids, self.hash_offsets, self.hash_block_size
        arrays |= checked_hashes(where, *blocks, arrays["input_tokens"], MOST_TOKENS)
        arrays |= self._checked_links(where, arrival_s)
        arrival_s = arrays["arrival_s"]
        check_stopped()
        if self.order is None:
            arrays = sorted_by_arrival(arrays)
        else:
            order = numbers_in_a_row(where, "order", self.order, "iu").astype(np.int64)
            if not np.array_equal(np.sort(order), np.arange(count)):
                raise TraceError(f"{where}: order must hold 0 to {count - 1} once each")
            if (np.diff(arrival_s) < 0).any():
                raise TraceError(f"{where}: order goes with sorted arrivals; leave it out to sort them")
            arrays.pop("depth", None)
            if not are_parents_first(arrays):
                raise TraceError(f"{where}: order goes with parents before the requests that wait for them")
            arrays["order"] = order
        for name, array in arrays.items():
            object.__setattr__(self, name, array)
        object.__setattr__(self, "left_out", dict(self.left_out))

    def _checked_links(self, where: str, arrival_s: Floats) -> dict[str, Any]:
        count = len(arrival_s)
        fields: dict[str, Any] = {}
        for name, kinds, kind in (
            ("delay_s", "fiu", np.float64),
            ("session", "iu", np.int64),
            ("history_tokens", "iu", np.int64),
        ):
            if getattr(self, name) is not None:
                fields[name] = numbers_in_a_row(where, name, getattr(self, name), kinds, count).astype(kind)
        if "history_tokens" in fields:
            history = fields["history_tokens"]
            refuse_where(where, "history_tokens", history, (history < 0) | (history > MOST_TOKENS),
                    f"must be tokens from 0 to {MOST_TOKENS:,}")  # fmt: skip
            fields["history_tokens"] = history.astype(np.int32)
        if self.parents is None:
            if self.parent_offsets is not None or "delay_s" in fields:
                alone = "delay_s" if self.parent_offsets is None else "parent_offsets"
                raise TraceError(f"{where}: {alone} goes with parents, the rows that each request waits for")
            return fields
        parents = numbers_in_a_row(where, "parents", self.parents, "iu").astype(np.int64)
        offsets = self.parent_offsets
        if offsets is not None:
            offsets = numbers_in_a_row(where, "parent_offsets", offsets, "iu").astype(np.int64)
        parents, offsets = trace_sessions.checked_parents(where, count, parents, offsets)
        delay_s = fields.setdefault("delay_s", np.zeros(count))
        refuse_where(where, "delay_s", delay_s, ~((delay_s >= 0) & (delay_s <= MOST_SECONDS)),
                f"must be seconds from 0 to {MOST_SECONDS:g}")  # fmt: skip
        refuse_where(where, "delay_s", delay_s, (delay_s > 0) & (np.diff(offsets) == 0),
                "must be 0 without a parent to follow")  # fmt: skip
        found = trace_sessions.earliest(where, arrival_s, delay_s, parents, offsets)
        refuse_where(where, "arrival_s", found.arrival_s, found.arrival_s > MOST_SECONDS,
                f"must be seconds from 0 to {MOST_SECONDS:g} with the delays before it")  # fmt: skip
        if "session" in fields:
            trace_sessions.checked_session(where, fields["session"], parents, offsets)
        else:
            fields["session"] = trace_sessions.components(parents, offsets)
        if self.clients is not None:
            _, roots_each = np.unique(fields["session"][np.diff(offsets) == 0], return_counts=True)
            if (roots_each > 1).any():
                raise TraceError(
                    f"{where}: clients start a session with one request, but some of its "
                    f"{len(roots_each):,} sessions start with several"
                )
        return {**fields, "parents": parents, "parent_offsets": offsets} | found._asdict()

    @cached_property
    def turns(self) -> Longs:
        """Turn of each request: 1 more than the requests that come before it one after the other."""
        if self.parents is None or self.parent_offsets is None or self.delay_s is None:
            return np.ones(len(self), np.int64)
        links = self.parents, self.parent_offsets
        return trace_sessions.earliest(self.name, self.arrival_s, self.delay_s, *links).depth + 1

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def has_parents(self) -> bool:
        """Whether requests start after others."""
        return self.parents is not None

    @cached_property
    def links(self) -> trace_sessions.Links:
        """Links of requests as the loops read them."""
        assert self.parents is not None
        assert self.parent_offsets is not None
        return trace_sessions.links_of(self.parents, self.parent_offsets)

    @property
    def is_closed(self) -> bool:
        """Whether this is a closed loop of clients, each sending after its last answer."""
        return self.clients is not None

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0])

    @property
    def requests_per_s(self) -> float:
        """Mean rate of arrivals, over the period if it is given; inf if all arrive at once."""
        requests, over_s = len(self), self.period_s
        if over_s is None:
            requests, over_s = requests - 1, self.duration_s
        return requests / over_s if over_s else math.inf

    def rate_scaled(self, factor: float) -> Trace:
        """Return the same requests at ``factor`` times the rate.

        Parameters
        ----------
        factor : float
            Above 0; 2 is twice the rate.

        Returns
        -------
        Trace
            The same except for ``arrival_s`` and ``period_s``.

        Raises
        ------
        TraceError
            If the factor is not a number above 0, arrivals would be too late, or the trace is a closed loop,
            which has no rate.

        Examples
        --------
        >>> Trace([0.0, 1.0], [8, 8], [1, 1]).rate_scaled(4).arrival_s.tolist()
        [0.0, 0.25]
        """
        if not is_number(factor) or factor <= 0:
            raise TraceError(f"rate_scale must be a number above 0, got {shown(factor)}")
        factor = float(factor)
        if self.is_closed:
            raise TraceError(
                f"trace {shown(self.name)} is a closed loop, which has clients and no rate to scale"
            )
        with np.errstate(over="ignore"):
            arrival_s = self.arrival_s / factor
        if self.parents is not None and self.parent_offsets is not None and self.delay_s is not None:
            links = self.delay_s, self.parents, self.parent_offsets
            arrival_s = np.where(trace_sessions.only_follow(self.arrival_s, *links), 0.0, arrival_s)
        period_s = None if self.period_s is None else self.period_s / factor
        if not max(arrival_s[-1], period_s or 0.0) <= MOST_SECONDS:
            raise TraceError(
                f"trace {shown(self.name)}: at {factor!r} times its rate it lasts over {MOST_SECONDS:g} s"
            )
        if self.parents is not None:
            # requests may pass each other, as delays stay
            fields: dict[str, Any] = {"arrival_s": arrival_s, "order": None, "period_s": period_s}
            scaled = replace(self, **fields)
            object.__setattr__(scaled, "order", self.order[scaled.order])
            return scaled
        # nothing else changes, so nothing is checked again: searches scale often
        scaled = copy.copy(self)
        object.__setattr__(scaled, "arrival_s", arrival_s)
        object.__setattr__(scaled, "period_s", period_s)
        return scaled

    def by_clients(self, clients: int) -> Trace:
        """Return the same requests from clients of a closed loop, instead of their arrivals.

        Parameters
        ----------
        clients : int
            Number of clients, which all start at once. Each sends its next request after the answer to its
            last, or starts its next session after the end of its last: the next of the trace that none has.

        Returns
        -------
        Trace
            Without arrivals and period; delays within sessions stay.

        Raises
        ------
        TraceError
            If the number is invalid, or a session starts with several requests.

        Examples
        --------
        >>> Trace([0.0, 9.0], [8, 8], [1, 1]).by_clients(1)
        Trace('trace', 2 requests, 1 clients)
        """
        fields: dict[str, Any] = {
            "arrival_s": np.zeros(len(self)), "clients": clients, "period_s": None, "order": None,
        }  # fmt: skip
        closed = replace(self, **fields)
        object.__setattr__(closed, "order", self.order[closed.order])
        return closed

    def limited(self, limit: int) -> Trace:
        """Return the first requests by arrival.

        Parameters
        ----------
        limit : int
            Maximum number of requests, at least 1.

        Returns
        -------
        Trace
            The remaining rows keep the file's order; their period is not known.

        Raises
        ------
        TraceError
            If the limit is not a whole number of at least 1.

        Examples
        --------
        >>> Trace([0.0, 1.0], [8, 9], [1, 1]).limited(1).input_tokens.tolist()
        [8]
        """
        limit = whole_number("limit", limit, error=TraceError)
        return self if limit >= len(self) else self._part(slice(0, limit))

    def sliced(self, start_s: float = 0.0, stop_s: float = math.inf) -> Trace:
        """Return the requests that arrive from ``start_s`` until before ``stop_s``.

        Parameters
        ----------
        start_s, stop_s : float
            Seconds.

        Returns
        -------
        Trace
            Arrivals count from ``start_s``. The period is ``stop_s - start_s`` if ``stop_s`` is given.

        Raises
        ------
        TraceError
            If no request arrives in that time.

        Examples
        --------
        >>> Trace([0.0, 1.0, 2.5], [8, 9, 7], [1, 1, 1]).sliced(1, 3).arrival_s.tolist()
        [0.0, 1.5]
        """
        is_end = is_number(stop_s) or (isinstance(stop_s, float) and stop_s == math.inf)
        if not (is_number(start_s) and start_s >= 0 and is_end):
            raise TraceError(
                f"start_s and stop_s must be seconds of at least 0, got {shown(start_s)}, {shown(stop_s)}"
            )
        start_s, stop_s = float(start_s), float(stop_s)
        first, last = np.searchsorted(self.arrival_s, (start_s, stop_s)).tolist()
        if first >= last:
            raise TraceError(
                f"trace {shown(self.name)} has no requests from {start_s:g} to {stop_s:g} s: it has "
                f"{len(self)} from {self.arrival_s[0]:g} to {self.arrival_s[-1]:g} s"
            )
        part = self._part(slice(first, last))
        period_s = None if stop_s == math.inf else stop_s - start_s
        return replace(part, arrival_s=part.arrival_s - start_s, period_s=period_s)

    def _part(self, rows: slice) -> Trace:
        """Return some consecutive requests."""
        columns: dict[str, Any] = {
            name: getattr(self, name)[rows]
            for name in ("arrival_s", "input_tokens", "output_tokens", "cached_tokens")
        }
        if self.hash_ids is not None and self.hash_offsets is not None:
            offsets = self.hash_offsets[rows.start : rows.stop + 1]
            columns |= {
                "hash_ids": self.hash_ids[offsets[0] : offsets[-1]],
                "hash_offsets": offsets - offsets[0],
            }
        if self.parents is not None and self.parent_offsets is not None and self.delay_s is not None:
            links = trace_sessions.of_rows(rows, self.parents, self.parent_offsets)
            is_root = np.diff(links["parent_offsets"]) == 0
            columns |= links | {"delay_s": np.where(is_root, 0.0, self.delay_s[rows])}
        for name in ("session", "history_tokens"):
            if getattr(self, name) is not None:
                columns[name] = getattr(self, name)[rows]
        order = np.empty(rows.stop - rows.start, np.int64)
        order[np.argsort(self.order[rows])] = np.arange(len(order))
        return replace(self, **columns, order=order, period_s=None)

    def in_file_order(self, values: Array) -> Array:
        """Reorder values of sorted requests to the order of the file's rows.

        Parameters
        ----------
        values : ndarray, shape (requests, ...)
            In the order of ``arrival_s``.

        Returns
        -------
        ndarray
            A new array; row i is that of the file's request i.

        Examples
        --------
        >>> trace = Trace([0.5, 0.0], [8, 9], [1, 1])
        >>> trace.in_file_order(trace.input_tokens).tolist()
        [8, 9]
        """
        placed = np.empty_like(values)
        placed[self.order] = values
        return placed

    def table(self) -> pa.Table:
        """Return the requests as an Arrow table, a row each, in the file's order.

        Returns
        -------
        pyarrow.Table
            The columns of :data:`TRACE_COLUMNS` and, if present, ``hash_ids``, a list per row; fields have
            units as metadata. ``load_trace`` reads it back.

        Examples
        --------
        >>> Trace([0.5, 0.0], [8, 9], [1, 1]).table()["arrival_s"].to_pylist()
        [0.5, 0.0]
        """
        import pyarrow as pa

        made_from = {"name": self.name}
        if self.is_closed:
            made_from |= {"clients": str(self.clients), "think_s": repr(self.think_s)}
        if self.period_s is not None:
            made_from["period_s"] = repr(self.period_s)
        schema = arrow_schema(TRACE_COLUMNS, made_from)
        columns: dict[str, Any] = {
            field.name: pa.array(self.in_file_order(getattr(self, field.name)), field.type)
            for field in schema
        }

        def lists(offsets: Longs, values: Longs) -> pa.Array:
            in_order = pa.LargeListArray.from_arrays(offsets, values)
            return in_order.take(pa.array(self.in_file_order(np.arange(len(self)))))

        if self.hash_ids is not None and self.hash_offsets is not None:
            columns[HASH_IDS] = lists(self.hash_offsets, self.hash_ids)
        for name in ("session", "history_tokens"):
            if getattr(self, name) is not None:
                columns[name] = pa.array(self.in_file_order(getattr(self, name)))
        if self.parents is not None and self.parent_offsets is not None and self.delay_s is not None:
            # parents are rows of the file
            columns["parent"] = lists(self.parent_offsets, self.order[self.parents])
            columns["delay_s"] = pa.array(self.in_file_order(self.delay_s))
        facts = {HASH_IDS: {"hash_block_size": str(self.hash_block_size)}}
        for name in list(columns)[len(schema) :]:
            schema = schema.append(pa.field(name, columns[name].type, metadata=facts.get(name)))
        return pa.table(columns, schema=schema)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Export the table as an Arrow stream: the PyCapsule interface."""
        return self.table().__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        extent = f"{self.clients} clients" if self.is_closed else f"{self.duration_s:.4g} s"
        return f"Trace({self.name!r}, {len(self)} requests, {extent})"
