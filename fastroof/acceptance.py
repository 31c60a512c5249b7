"""Acceptance of draft tokens: a mean number of tokens per step, or a rate per position."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

from fastroof.checks import is_number, shown, whole_number
from fastroof.errors import BatchError

MTP: Final = "mtp"
"""Name of the drafter that is the model's own multi-token prediction layer."""

AUTO: Final = "auto"
"""Value of ``accepted`` for the measured acceptance length of the model."""

MOST_DRAFT_TOKENS: Final = 1024


def acceptance_length(num_draft_tokens: int, accepted: Any) -> float:
    """Return the mean number of tokens per request and step, given as such or as rates by position."""
    whole_number("num_draft_tokens", num_draft_tokens, least=0, most=MOST_DRAFT_TOKENS, error=BatchError)
    if isinstance(accepted, tuple | list):
        wrong = [rate for rate in accepted if not is_number(rate) or not 0.0 <= rate <= 1.0]
        if len(accepted) != num_draft_tokens or wrong:
            given = f"the rate {shown(wrong[0])}" if wrong else f"{len(accepted)} rates"
            raise BatchError(
                f"accepted must be {num_draft_tokens} rates from 0 to 1, one per draft token, got {given}"
            )
        if any(later > rate for rate, later in pairwise(accepted)):
            raise BatchError(
                f"accepted must not rise from one position to the next, got {shown(tuple(accepted))}: "
                "a token is accepted only if all tokens before it are; multiply conditional rates up first"
            )
        return 1.0 + float(sum(accepted))
    if not is_number(accepted) or not 1.0 <= accepted <= num_draft_tokens + 1:
        raise BatchError(
            f"accepted must be a number from 1 to {num_draft_tokens + 1}, the mean tokens per step, a "
            f"tuple of {num_draft_tokens} rates by position, or {AUTO!r}, got {shown(accepted)}"
        )
    return float(accepted)


def parse_accepted(what: str, text: str) -> float | tuple[float, ...] | str:
    """Read an acceptance length: a number, rates by position with commas, or ``auto``; empty stays empty."""
    if text in ("", AUTO):
        return text
    try:
        rates = [float(rate) for rate in text.split(",")]
    except ValueError:
        raise BatchError(
            f"{what} needs a number, several with commas, or {AUTO}, got {shown(text)}"
        ) from None
    return rates[0] if len(rates) == 1 else tuple(rates)


def check_accepted(num_draft_tokens: int, accepted: Any) -> None:
    """Reject an invalid acceptance length; ``auto`` depends on a model, which is checked later."""
    if isinstance(accepted, str) and accepted == AUTO:
        whole_number("num_draft_tokens", num_draft_tokens, least=0, most=MOST_DRAFT_TOKENS, error=BatchError)
    else:
        acceptance_length(num_draft_tokens, accepted)
