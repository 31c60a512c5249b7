"""A naive step of layers within a window: token by token, and attention from the nodes of packed grids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fastroof.operators.attention import ATTENTION
from fastroof.operators.attention_work import prefix_bound_us
from fastroof.plan.attention import heads_of

Request = tuple[int, int]


class Sums(NamedTuple):
    """What windowed layers see of a step's requests."""

    seen: int
    own_pairs: int
    prefix_pairs: int
    prefix_tokens: int


def is_decode(request: Request) -> bool:
    """Whether a request is one new token after a context."""
    return request[0] == 1 and request[1] > 0


def sums(requests: Sequence[Request], window: int) -> Sums:
    """Count tokens one query at a time; without a window where it is 0."""
    seen = own = crossed = read = 0
    for new, context in requests:
        if is_decode((new, context)):
            seen += min(context + 1, window or context + 1)
            continue
        for i in range(1, new + 1):
            sees = min(context + i, window or context + i)
            alone = min(i, window or i)
            own += alone
            crossed += sees - alone
        # the first query sees the most of the prefix, itself and what is before it
        read += min(context, (window or context + 1) - 1)
    return Sums(seen, own, crossed, read)


def attention_us(plan: Any, tables: Any, requests: Sequence[Request], number: int) -> float:
    call = plan.attention[number].call
    heads, window = heads_of(call), call.window
    decodes = [r for r in requests if is_decode(r)]
    chunks = [r for r in requests if not is_decode(r)]
    counted = sums(requests, window)
    total = 0.0
    if decodes:
        n = len(decodes)
        mean_kv = sum(context + 1 for _, context in decodes) / n
        total += node_us(tables, "attention_decode", heads, n, mean_kv)
        if window:
            total += node_us(tables, "attention_decode", heads, n, counted.seen / n)
            total -= node_us(tables, "attention_decode", heads, n, min(mean_kv, window))
    if chunks:
        new = sum(q for q, _ in chunks)
        mean_seen = counted.own_pairs / new
        q_len = 2.0 * mean_seen - 1.0
        if window and q_len > window:
            q_len = 0.5 * window * (window - 1) / (window - mean_seen)
        total += node_us(tables, "attention_prefill", heads, new / q_len, q_len)
        pair_us, token_us = prefix_bound_us(heads, tables.gpu)
        ratio = ATTENTION["attention_prefill"].grid(tables, heads).longest_ratio
        total += ratio * (pair_us * counted.prefix_pairs + token_us * counted.prefix_tokens)
    return call.times * total


def node_us(tables: Any, operator: str, heads: Any, batch: float, x: float) -> float:
    """Interpolate between the four nodes of a packed grid around a point, by the growth of its roofline."""
    grid = ATTENTION[operator].grid(tables, heads).grid
    i = max(k for k, y in enumerate(grid.y_axis[:-1]) if y <= batch)
    j = max(k for k, z in enumerate(grid.x_axis[:-1]) if z <= x)
    y0, y1 = grid.y_axis[i : i + 2]
    x0, x1 = grid.x_axis[j : j + 2]
    rise = float(grid.roofline(1, x1) - grid.roofline(1, x0))
    grown = float(grid.roofline(1, x) - grid.roofline(1, x0))
    w = (x - x0) / (x1 - x0) if x1 > grid.roofline.window else grown / rise
    v = (batch - y0) / (y1 - y0)
    us = grid.cells[..., 0]
    low = us[i, j] + w * (us[i, j + 1] - us[i, j])
    high = us[i + 1, j] + w * (us[i + 1, j + 1] - us[i + 1, j])
    return float(low + v * (high - low))


def attention_of_step_us(plan: Any, tables: Any, requests: Sequence[Request]) -> float:
    return sum(attention_us(plan, tables, requests, i) for i in range(len(plan.attention)))
