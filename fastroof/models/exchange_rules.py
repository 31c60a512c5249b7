"""How an engine brings tokens to experts on other GPUs: plain values, which its profile has."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["ALLTOALL", "ATTENTION_SUMS", "SENDING_EXPERTS", "TOKEN_SHARES", "ExchangeRules"]

ALLTOALL: Final = ("never", "over_topk", "always")
"""Whether tokens are sent to their experts alone: also where expert groups outnumber a token's experts."""

TOKEN_SHARES: Final = ("never", "with_ep", "always")
"""Whether the GPUs of a rank, where attention is split by tp and dp at once, each take a share of its tokens
to the experts: also only with groups of experts."""

SENDING_EXPERTS: Final = "megamoe"
"""What stands in the place of a library where the experts' own kernel sends tokens."""

ATTENTION_SUMS: Final = ("all_reduce", "reduce_scatter")
"""How the sums of attention are formed where tokens are then shared."""


class ExchangeRules(NamedTuple):
    """What GPUs send each other for the experts of a layer."""

    alltoall: str = "never"
    alltoall_needs_dp: bool = False
    libraries: tuple[str, str] = ("", "")
    comm_dtypes: tuple[str, ...] = ()
    gathered_bytes: tuple[tuple[str, float], ...] = ()
    token_shares: str = "never"
    attention_sum: str = "all_reduce"
    copies_embedding: bool = False
