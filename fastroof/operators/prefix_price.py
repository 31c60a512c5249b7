"""What a prefix costs the prompts after it."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.operators.attention_work import prefix_within
from fastroof.pack.ragged import RaggedTable

__all__ = ["NO_PREFIX", "PrefixUs", "measured_price"]


class PrefixUs(NamedTuple):
    """Price of a prefix, us."""

    pair: float = 0.0
    token: float = 0.0
    window_pair: float = 0.0
    window_token: float = 0.0

    def times(self, factor: float, within: float | None = None) -> PrefixUs:
        """So many times the price, and so many times what is of the window."""
        near = factor if within is None else within
        return PrefixUs(
            factor * self.pair, factor * self.token, near * self.window_pair, near * self.window_token
        )


NO_PREFIX: Final = PrefixUs()

CHUNK: Final = 128.0
"""New tokens from which on prompts tell the price of a prefix: shorter ones hide it behind launches."""


def measured_price(table: RaggedTable, prices: PrefixUs, window: int) -> tuple[float, float]:
    """Multiples of the roofline time that measured prefixes take: beyond a window, and within it."""
    batch, q_len, prefix = table.points()
    fresh_us, origin = np.empty(len(batch)), np.zeros(len(batch), np.uint8)
    table.latency((batch, q_len, np.zeros_like(prefix)), fresh_us, origin)
    far = batch * prefix * (prices.pair * q_len + prices.token)
    near = np.zeros_like(far)
    if window:
        pairs, tokens = prefix_within(q_len, q_len + prefix, window)
        near = batch * (prices.window_pair * pairs + prices.window_token * tokens)
    told = (prefix > 0.0) & (q_len >= CHUNK)
    if not told.any():
        return 1.0, 1.0
    shares: Floats = (np.stack([far, near], axis=1) / table.latency_us[:, None])[told]
    paid = (1.0 - fresh_us / table.latency_us)[told]
    beyond = max(1.0, float(np.linalg.lstsq(shares, paid, rcond=None)[0][0]))
    within = np.linalg.lstsq(shares[:, 1:], paid - beyond * shares[:, 0], rcond=None)[0]
    return beyond, max(1.0, float(within[0]))
