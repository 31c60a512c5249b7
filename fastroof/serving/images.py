"""Serving estimates of prompts with images, whose encoder lengthens the steps that prefill."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from fastroof.compiled import steps
from fastroof.errors import BatchError, PlanError
from fastroof.plan import StepPlan
from fastroof.serving.estimate import estimate
from fastroof.serving.scenarios import broadcast, field_values
from fastroof.serving.serving_estimate import ServingEstimate


def estimate_with_images(
    plan: StepPlan,
    isl: Any,
    osl: Any,
    clients: Any,
    *,
    images: Iterable[tuple[int, int]],
    **options: Any,
) -> ServingEstimate:
    """Estimate what clients see whose prompts contain images in addition to text.

    Parameters
    ----------
    plan : StepPlan
        A model with a vision encoder, of one pipeline stage.
    isl : number or array_like
        Mean tokens of a prompt's text; the tokens of its images are added.
    osl, clients : number or array_like
        As in :func:`estimate`; all three are broadcast.
    images : iterable of (width, height)
        The images of every prompt: (width, height) in pixels.
    **options
        Other scalar options of :func:`estimate`.

    Returns
    -------
    ServingEstimate
        As from :func:`estimate`. Decode-only steps are the plan's; steps with prompts include the encoder's
        time.

    Raises
    ------
    BatchError, PlanRangeError
        As in :func:`estimate`.
    ModelError, MissingTableError
        As in :meth:`fastroof.StepPlan.encode`.
    PlanError
        If the plan has pipeline stages.

    Notes
    -----
    Engines run the encoder in the step that prefills an image's first token. Here its time is spread evenly
    over the tokens of a prompt: a step with m tokens takes m times ``encoder / isl`` longer, so that a prompt
    by itself takes its encoder's time by the last token, however it is split. Decodes next to prompts are
    counted in m, which adds a few per cent. One request's images are encoded together; those of
    several are not. Images are new in every request, but a prefix cache finds their share of the prompt.

    Examples
    --------
    >>> import fastroof
    >>> plan = fastroof.compile_plan("qwen3-vl-8b", "h100")
    >>> seen = estimate_with_images(plan, 100, 128, [1, 16], images=[(1024, 768)])
    >>> seen.ttft_ms.round().tolist()
    [44.0, 106.0]
    """
    if plan.layout.pp > 1:
        raise PlanError("images require pp 1: with more stages the first would run all of the encoder")
    encoded = plan.encode(images)
    shape, (lengths, outputs, clients) = broadcast({"isl": isl, "osl": osl, "clients": clients})
    wrong = ~(lengths >= 1.0)
    if wrong.any():
        raise BatchError(f"isl must be at least 1 token of text, got {lengths[np.argmax(wrong)]:g}")
    rows: dict[str, Any] = {}
    for length in np.unique(lengths):
        of_length = lengths == length
        tokens = length + encoded.tokens
        found = estimate(
            plan_that_encodes(plan, encoded.latency_us / tokens), tokens, outputs[of_length],
            clients[of_length], **options,
        )  # fmt: skip
        for name, values in found.columns().items():
            if values is not None:
                rows.setdefault(name, np.empty(len(lengths)))[of_length] = values
    return ServingEstimate(**field_values(rows, shape), made_from=found.made_from)


def plan_that_encodes(plan: StepPlan, encoder_us_per_token: float) -> StepPlan:
    """Return a plan whose prefill steps take longer per token; its rows stay unchanged."""
    arena = plan.arena
    tokens_at, decode_at = int(arena[steps.TOKENS_AT]), int(arena[steps.DECODE_TOKENS_AT])
    count = plan.max_num_batched_tokens + 1
    made = np.concatenate([arena, arena[decode_at : decode_at + count]])
    made[tokens_at : tokens_at + count] += encoder_us_per_token * np.arange(count)
    made[steps.DECODE_TOKENS_AT], made[steps.ARENA_SIZE] = len(arena), len(made)
    made.flags.writeable = False
    return replace(plan, arena=made)
