"""What a prefix costs the prompts after it."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["NO_PREFIX", "PrefixUs"]


class PrefixUs(NamedTuple):
    """Price of a prefix, us.

    Attributes
    ----------
    pair, token : float
        A (query, prefix token) pair, and a prefix token, however long the prefix.
    window_pair, window_token : float
        The same of pairs and tokens within the window.
    """

    pair: float = 0.0
    token: float = 0.0
    window_pair: float = 0.0
    window_token: float = 0.0

    def times(self, factor: float) -> PrefixUs:
        """So many times the price."""
        return PrefixUs(*(factor * us for us in self))


NO_PREFIX: Final = PrefixUs()
