"""What a prefix costs prompts of sparse attention, as measured prompts after one pay it.

The indexer's part of a price grows with a prefix without end, attention's up to what it picks; and a prompt
that has one runs other kernels than one without. So the four parts of a price are fitted to the table, none
below what B says of it. How far off they are is in fastroof/operators/README.md.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.operators.attention_work import prefix_within
from fastroof.operators.prefix_price import PrefixUs
from fastroof.pack.ragged import RaggedTable

if TYPE_CHECKING:
    from fastroof.operators.operator import Key
    from fastroof.operators.ragged import RaggedPrefill
    from fastroof.tables import Tables

__all__ = ["fitted_price", "sparse_prefix_us"]

ROUNDS: Final = 20
"""Of reweighting, by which least squares of shares become least absolute shares."""

NEGLIGIBLE: Final = 0.02
"""A share of a latency below which errors count alike."""


def sparse_prefix_us(operator: RaggedPrefill, tables: Tables, key: Key, window: int) -> PrefixUs:
    """Price of a prefix: fitted where prompts after long ones were measured, else B's times latency / B."""
    lender = operator.step_kernels(tables, key)[0].key
    own, lent = (operator.prefix_prices(one, tables.gpu, window) for one in (key, lender))
    fitted = tables.kept(
        ("fitted prefix", operator.name, lender, window),
        lambda: fitted_price(tables.packed(operator, lender), lent, window),
    )
    if fitted is None:
        return own.times(operator.prefix_ratio(tables, key))
    return PrefixUs(*(us * (a / b if b > 0.0 else 1.0) for us, a, b in zip(fitted, own, lent, strict=True)))


def fitted_price(table: RaggedTable, least: PrefixUs, window: int) -> PrefixUs | None:
    """Fit the four parts of a price to measured prompts after a prefix."""
    batch, q_len, prefix = table.points()
    if not window or prefix.max() <= window:
        return None
    fresh_us, origin = np.empty(len(batch)), np.zeros(len(batch), np.uint8)
    table.latency((batch, q_len, np.zeros_like(prefix)), fresh_us, origin)
    pairs, tokens = prefix_within(q_len, q_len + prefix, window)
    parts = batch[:, None] * np.stack([q_len * prefix, prefix, pairs, tokens], axis=1)
    some = prefix > 0.0
    shares = parts[some] / table.latency_us[some, None]
    paid = 1.0 - fresh_us[some] / table.latency_us[some]
    bound = np.array(least)
    return PrefixUs(*(bound + _least_absolute(shares, paid - shares @ bound)).tolist())


def _least_absolute(parts: Floats, wanted: Floats) -> Floats:
    """Weights of the parts, none negative, by which they come nearest to what is wanted."""
    scale = np.sqrt((parts**2).mean(axis=0))
    scale[scale == 0.0] = 1.0
    parts = parts / scale
    weights, found = np.ones(len(wanted)), np.zeros(parts.shape[1])
    for _ in range(ROUNDS):
        weighted = parts * weights[:, None]
        found = _least_squares(weighted.T @ parts, weighted.T @ wanted)
        weights = 1.0 / np.maximum(np.abs(parts @ found - wanted), NEGLIGIBLE)
    return np.asarray(found / scale)


def _least_squares(squares: Floats, products: Floats) -> Floats:
    """Minimum of a quadratic over weights that are not negative: of every set of them that may be above 0."""
    count = len(products)
    best, least = np.zeros(count), 0.0
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            some = list(chosen)
            weights = np.linalg.lstsq(squares[np.ix_(some, some)], products[some], rcond=None)[0]
            value = -float(products[some] @ weights)
            if (weights >= 0.0).all() and value < least:
                best, least = np.zeros(count), value
                best[some] = weights
    return best
