"""Options of commands that take speculative decoding and prefix-cache hits, and what they mean together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastroof.acceptance import MTP
from fastroof.errors import BatchError

if TYPE_CHECKING:
    from fastroof import SpeculativeDecoding, StepPlan

__all__ = ["Accepted", "Draft", "NumDraftTokens", "PrefixHit", "asked_speculation"]

NumDraftTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens that are drafted for a request before each step.")
]
Accepted = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS", help="Mean tokens that a step says of a request; or rates by position, as 0.8,0.5."
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="PLAN", help="What drafts: mtp, or MODEL[,tp=1,dtype=bf16].  [default: takes no time]"
    ),
]
PrefixHit = Annotated[
    float | None, typer.Option(metavar="SHARE", help="Share of a prompt that is found in the prefix cache.")
]


def asked_speculation(
    num_draft_tokens: int | None,
    accepted: str | None,
    draft: str | None,
    places: tuple[str | None, str | None, str | None],
    runtime: str,
    **options: Any,
) -> SpeculativeDecoding | None:
    """Read the options of speculative decoding."""
    if num_draft_tokens is None:
        spare = [name for name, value in (("--accepted", accepted), ("--draft", draft)) if value is not None]
        if spare:
            raise BatchError(
                f"--num-draft-tokens is missing, without which there is no {' and '.join(spare)}"
            )
        return None
    if accepted is None:
        raise BatchError("--num-draft-tokens needs --accepted too: how many tokens a step says in the mean")
    from fastroof import SpeculativeDecoding

    drafter: StepPlan | str | None = draft
    if draft is not None and draft != MTP:
        from fastroof.cli.named_plans import named_plans

        said = {part.partition("=")[0] for part in draft.split(",")[1:]}
        others = [f"{name}={value}" for name, value in options.items() if name not in said]
        (drafter,) = named_plans([",".join([draft, *others])], *places, runtime=runtime).values()
    try:
        rates = [float(rate) for rate in accepted.split(",")]
    except ValueError:
        raise BatchError(f"--accepted needs a number, or several with commas, got {accepted!r}") from None
    return SpeculativeDecoding(num_draft_tokens, rates[0] if len(rates) == 1 else tuple(rates), drafter)
