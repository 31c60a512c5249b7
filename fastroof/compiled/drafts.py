"""What a draft model takes of mean steps, where there is one: its callers ask first, which is cheaper.

After a step of its target the draft reads the tokens of that step, prompts included, and says a token a
request; then it goes on alone, a token a request and step. The first of its steps is taken for one of decodes
where no prompt is in it: a request's verified tokens cost about what one does.
"""

from __future__ import annotations

import math

from fastroof.arrays import Floats
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.mean_steps import (
    mean_decode_attention_us,
    mean_decode_step_us,
    mean_mixed_step_us,
    mixed_decode_attention_us,
    prompt_steps_us,
)
from fastroof.compiled.steps import window_prices_us
from fastroof.compiled.verification import Speculation, one_token, open_draft
from fastroof.compiled.windows import prefix_in_window

__all__ = ["draft_decode_us", "draft_mixed_us", "draft_prefix_us", "draft_prompt_us"]


@jit_inline
def _draft_isl(speculation: Speculation, isl: float) -> float:
    """Prompt length at which decodes are as long as those of the draft, half-way through its steps."""
    return isl + 0.5 * (speculation.tokens - 1.0) - 0.5 * (speculation.accepted - 1.0)


@jit
def draft_decode_us(arena: Floats, speculation: Speculation, decodes: float, isl: float, osl: float) -> float:
    """The draft's steps before a verification of ``decodes`` requests anywhere in their output, us."""
    if decodes <= 0.0:
        return 0.0
    draft = open_draft(arena, speculation.draft_at)
    at = _draft_isl(speculation, isl)
    return speculation.draft_steps * mean_decode_step_us(arena, draft, one_token(draft), decodes, at, osl)


@jit
def draft_mixed_us(
    arena: Floats,
    speculation: Speculation,
    decodes: float,
    new_tokens: float,
    isl: float,
    osl: float,
    room: float,
) -> float:
    """The draft's steps after one of ``decodes`` requests and ``new_tokens`` of prompts, us."""
    draft = open_draft(arena, speculation.draft_at)
    alone = one_token(draft)
    at = _draft_isl(speculation, isl)
    attention_us = mean_decode_attention_us(arena, draft, alone, decodes, at, osl)
    attention_us = mixed_decode_attention_us(arena, draft, alone, attention_us, decodes, at, osl)
    first_us = mean_mixed_step_us(arena, draft, alone, attention_us, decodes, new_tokens, isl, room)
    seqs = decodes + new_tokens / isl
    return first_us + (speculation.draft_steps - 1.0) * mean_decode_step_us(
        arena, draft, alone, seqs, at, osl
    )


@jit
def draft_prompt_us(
    arena: Floats,
    speculation: Speculation,
    isl: float,
    osl: float,
    room: float,
    others: float,
    decodes: float,
) -> float:
    """The draft's part of the steps in which one prompt is prefilled, us; see ``prompt_steps_us``."""
    draft = open_draft(arena, speculation.draft_at)
    alone = one_token(draft)
    at = _draft_isl(speculation, isl)
    attention_us = mean_decode_attention_us(arena, draft, alone, decodes, at, osl)
    attention_us = mixed_decode_attention_us(arena, draft, alone, attention_us, decodes, at, osl)
    own = prompt_steps_us(arena, draft, alone, isl, room, others, decodes, attention_us)
    more_us = mean_decode_step_us(arena, draft, alone, decodes + 1.0, at, osl)
    return own.us + math.ceil(isl / room) * (speculation.draft_steps - 1.0) * more_us


@jit
def draft_prefix_us(
    arena: Floats, speculation: Speculation, new: float, cached: float, chunks: float, prompts: float
) -> tuple[float, float]:
    """Return the draft's attention time over ``cached`` tokens, us: per prompt batch and per sequence."""
    draft = open_draft(arena, speculation.draft_at)
    crossed, read = prefix_in_window(float(draft.window), new, cached, chunks)
    pair_us, token_us = window_prices_us(arena, draft)
    pairs_us = draft.prefix_pair_us * new * cached + pair_us * crossed
    reads_us = draft.prefix_token_us * cached + token_us * read / chunks
    return prompts * pairs_us + max(prompts, 1.0) * reads_us, pairs_us + chunks * reads_us
