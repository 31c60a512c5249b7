"""Links between the requests of a trace: who starts after whom, checked, and what follows from them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Floats, Ints, Longs
from fastroof.errors import TraceError

NO_PARENT: Final = -1
"""Parent of a request without one, in arrays with one parent per request."""


class Links(NamedTuple):
    """Links by the loops: requests without parents, the children of each, and their numbers of parents."""

    roots: Ints
    children: Ints
    child_offsets: Longs
    parents_each: Ints


def child_of_link(offsets: Longs) -> Longs:
    """Return the request that each link is of: the one that waits for the parent at the same place."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def children_of(parents: Longs, offsets: Longs) -> tuple[Longs, Longs]:
    """Return the children of all requests, one after the other, and where each request's start."""
    children = child_of_link(offsets)[np.argsort(parents, kind="stable")]
    return children, np.concatenate([[0], np.cumsum(np.bincount(parents, minlength=len(offsets) - 1))])


def links_of(parents: Longs, offsets: Longs) -> Links:
    """Return the links of a trace as the loops read them."""
    children, child_offsets = children_of(parents, offsets)
    each = np.diff(offsets).astype(np.int32)
    roots = np.flatnonzero(each == 0).astype(np.int32)
    return Links(roots, children.astype(np.int32), child_offsets.astype(np.int64), each)


def with_ends(links: Links, session: Longs) -> tuple[Links, Longs]:
    """Return links in which a row for each session follows its last requests, and how many these are.

    The rows of sessions come after those of all requests and one more.
    """
    counts = np.diff(links.child_offsets)
    last = np.flatnonzero(counts == 0)
    _, of_last, last_each = np.unique(session[last], return_inverse=True, return_counts=True)
    ended = (len(counts) + 1 + of_last).astype(np.int32)
    children = np.insert(links.children, links.child_offsets[last], ended)
    offsets = np.concatenate([[0], np.cumsum(np.maximum(counts, 1))])
    return links._replace(children=children, child_offsets=offsets), last_each


def places_of(starts: Longs, counts: Longs) -> Longs:
    """Return the places of rows' elements in an array that holds them one row after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    places: Longs = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    return places


def checked_parents(where: str, count: int, parents: Longs, offsets: Longs | None) -> tuple[Longs, Longs]:
    """Return the parents of all requests, one after the other, and where each request's start."""
    if offsets is None:
        if len(parents) != count:
            raise TraceError(f"{where}: arrival_s has {count} requests, parents {len(parents)}")
        has_one = parents != NO_PARENT
        offsets = np.concatenate([[0], np.cumsum(has_one)]).astype(np.int64)
        parents = parents[has_one]
    if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != len(parents):
        raise TraceError(f"{where}: parent_offsets must be {count + 1} numbers from 0 to {len(parents)}")
    if (np.diff(offsets) < 0).any():
        raise TraceError(f"{where}: parent_offsets must not decrease")
    child = child_of_link(offsets)
    for wrong, reason in (
        ((parents < 0) | (parents >= count), f"is not a row, 0 to {count - 1}"),
        (parents == child, "is the request itself"),
    ):
        if wrong.any():
            at = int(np.argmax(wrong))
            raise TraceError(f"{where}, row {child[at]}: parent {parents[at]} {reason}")
    return parents, offsets


class Order(NamedTuple):
    """The earliest arrival of each request, s, and how many others come before it one after the other."""

    arrival_s: Floats
    depth: Longs


def earliest(where: str, arrival_s: Floats, delay_s: Floats, parents: Longs, offsets: Longs) -> Order:
    """Return when requests could start if nothing took time; an error if some wait for each other."""
    children, child_offsets = children_of(parents, offsets)
    pending, depth = np.diff(offsets), np.zeros(len(arrival_s), np.int64)
    arrival_s, place = arrival_s.copy(), np.empty(len(arrival_s), np.int64)
    front = np.flatnonzero(pending == 0)
    visited = level = 0
    while len(front):
        visited += len(front)
        level += 1
        counts = child_offsets[front + 1] - child_offsets[front]
        kids = children[places_of(child_offsets[front], counts)]
        np.maximum.at(arrival_s, kids, np.repeat(arrival_s[front], counts) + delay_s[kids])
        np.subtract.at(pending, kids, 1)
        front = kids[pending[kids] == 0]
        # a join is there once for each parent; this takes a tenth of the time of numpy's unique
        place[front] = np.arange(len(front))
        front = front[place[front] == np.arange(len(front))]
        depth[front] = level
    if visited < len(arrival_s):
        row = int(np.argmax(pending > 0))
        raise TraceError(
            f"{where}, row {row}: its parents wait for it, or for others that wait for each other"
        )
    return Order(arrival_s, depth)


def only_follow(arrival_s: Floats, delay_s: Floats, parents: Longs, offsets: Longs) -> Bools:
    """Return which requests have no arrival but that which follows from parents and delays."""
    child = child_of_link(offsets)
    follows_s = np.full(len(arrival_s), -1.0)
    np.maximum.at(follows_s, child, arrival_s[parents] + delay_s[child])
    is_after: Bools = arrival_s <= follows_s
    return is_after


def components(parents: Longs, offsets: Longs) -> Longs:
    """Return the first row of the session of each request: all that are linked to it."""
    label, child = np.arange(len(offsets) - 1), child_of_link(offsets)
    while True:
        one, other = label[child], label[parents]
        if np.array_equal(one, other):
            return label
        least = np.minimum(one, other)
        np.minimum.at(label, one, least)
        np.minimum.at(label, other, least)
        while not np.array_equal(label[label], label):
            label = label[label]


def checked_session(where: str, session: Longs, parents: Longs, offsets: Longs) -> None:
    """Raise an error for the first request with a parent in another session."""
    child = child_of_link(offsets)
    wrong = session[child] != session[parents]
    if wrong.any():
        at = int(np.argmax(wrong))
        raise TraceError(
            f"{where}, row {child[at]}: its parent, row {parents[at]}, is in session "
            f"{session[parents[at]]}, the request in {session[child[at]]}"
        )


def reordered(order: Longs, parents: Longs, offsets: Longs) -> dict[str, Any]:
    """Return the links of requests in another order."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    starts, counts = offsets[:-1][order], np.diff(offsets)[order]
    return {
        "parents": place[parents[places_of(starts, counts)]],
        "parent_offsets": np.concatenate([[0], np.cumsum(counts)]),
    }


def of_rows(rows: slice | Longs, parents: Longs, offsets: Longs) -> dict[str, Any]:
    """Return links among some requests, in the order of the trace; those to others are dropped."""
    count = len(offsets) - 1
    selected = np.zeros(count, bool)
    selected[rows] = True
    place = np.cumsum(selected) - 1
    child = child_of_link(offsets)
    stays = selected[child] & selected[parents]
    each = np.bincount(child[stays], minlength=count)[selected]
    return {"parents": place[parents[stays]], "parent_offsets": np.concatenate([[0], np.cumsum(each)])}


def descendants(wrong: Any, parents: Longs, offsets: Longs) -> Any:
    """Return which requests are among ``wrong`` or after one of them; parents come before children."""
    wrong = wrong.copy()
    child = child_of_link(offsets)
    while True:
        more = child[wrong[parents] & ~wrong[child]]
        if not len(more):
            return wrong
        wrong[more] = True
