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
    """What GPUs send each other for the experts of a layer.

    Attributes
    ----------
    alltoall : str
        One of :data:`ALLTOALL`; elsewhere tokens are gathered and sums scattered, or all-reduced.
    alltoall_needs_dp : bool
        Whether only ranks of attention data parallelism send tokens so.
    libraries : tuple of (str, str)
        The library that sends tokens in steps of decodes alone, and in steps with prefill; both
        :data:`SENDING_EXPERTS` where the experts' kernel does.
    comm_dtypes : tuple of str
        Formats of experts in which such a library sends; others go as it sends unasked.
    gathered_bytes : tuple of (str, float)
        Bytes of an element that is gathered, by the format of the experts, where it is quantised before.
    token_shares : str
        One of :data:`TOKEN_SHARES`.
    attention_sum : str
        One of :data:`ATTENTION_SUMS`.
    copies_embedding : bool
        Whether every GPU has the whole embedding where attention is data parallel.
    """

    alltoall: str = "never"
    alltoall_needs_dp: bool = False
    libraries: tuple[str, str] = ("", "")
    comm_dtypes: tuple[str, ...] = ()
    gathered_bytes: tuple[tuple[str, float], ...] = ()
    token_shares: str = "never"
    attention_sum: str = "all_reduce"
    copies_embedding: bool = False
