"""What a loop's code stands for: the first size that cannot be timed, and what would do."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastroof.arrays import Ints
from fastroof.compiled import steps
from fastroof.errors import BatchError, PlanRangeError
from fastroof.run.batch import StepBatch
from fastroof.run.timed_plan import TimedPlan

__all__ = ["raise_requests", "raise_sizes"]


def _first(wrong: Any) -> int:
    return int(np.flatnonzero(wrong)[0])


def _refuse_tokens(plan: TimedPlan, tokens: int, where: str) -> None:
    raise PlanRangeError(
        f"{where} has {tokens} tokens, the plan times up to {plan.max_tokens}: "
        f"compile_plan(..., max_tokens={tokens}) or more"
    )


def _refuse_seqs(plan: TimedPlan, seqs: int, where: str) -> None:
    raise PlanRangeError(
        f"{where} has {seqs} sequences, the plan times up to {plan.max_seqs}: "
        f"compile_plan(..., max_seqs={seqs}) or more"
    )


def raise_sizes(plan: TimedPlan, sizes: dict[str, Ints], before: int) -> None:
    """Say what is wrong with the first bad size of equal steps, if any is, and what would do."""
    limit = steps.MAX_KV_LEN
    for name, array in sizes.items():
        least = 0 if name == "context_len" else 1
        if (array < least).any():
            i = _first(array < least)
            raise BatchError(f"{name} must be at least {least}, got {array[i]} at position {before + i}")
    seqs = sizes["batch_size"]
    new = sizes["tokens"] if "tokens" in sizes else sizes.get("new_tokens", np.ones_like(seqs))
    context = sizes["kv_len"] - np.minimum(new, limit) if "kv_len" in sizes else sizes["context_len"]
    if (context < 0).any():
        i = _first(context < 0)
        raise BatchError(
            f"kv_len counts the tokens that a step verifies, {int(new[i])}, and must be at least as many, "
            f"got {int(sizes['kv_len'][i])} at position {before + i}"
        )
    too_long = (new > limit) | (context > limit - np.minimum(new, limit))
    if too_long.any():
        i = _first(too_long)
        what = "kv_len" if "kv_len" in sizes else "context_len + new_tokens"
        kv_len = int(context[i]) + int(new[i])
        raise BatchError(f"{what} must be at most {limit}, got {kv_len} at position {before + i}")
    if (seqs > plan.max_seqs).any():
        i = _first(seqs > plan.max_seqs)
        _refuse_seqs(plan, int(seqs[i]), f"the step at position {before + i}")
    tokens = seqs * np.minimum(new, limit)
    if (tokens > plan.max_tokens).any():
        i = _first(tokens > plan.max_tokens)
        _refuse_tokens(plan, int(tokens[i]), f"the step at position {before + i}")


def raise_requests(plan: TimedPlan, batch: StepBatch) -> None:
    """Find the first bad request or step of a ragged batch, and say what would do."""
    StepBatch(batch.new_tokens, batch.context_len, batch.offsets)  # someone may have written to its arrays
    new, context = batch.new_tokens.astype(np.int64), batch.context_len.astype(np.int64)
    limit = steps.MAX_KV_LEN
    checks = (
        (new < 1, "new_tokens must be at least 1, got {new}"),
        (context < 0, "context_len must be at least 0, got {context}"),
        (
            np.minimum(new, limit + 1) + np.minimum(context, limit) > limit,
            f"context_len + new_tokens must be at most {limit}, got {{context}} + {{new}}",
        ),
    )
    for wrong, message in checks:
        if wrong.any():
            r = _first(wrong)
            step = int(np.searchsorted(batch.offsets, r, side="right")) - 1
            where = f"in request {r - int(batch.offsets[step])} of step {step}"
            raise BatchError(f"{message.format(new=new[r], context=context[r])} {where}")
    seqs = np.diff(batch.offsets)
    if (seqs > plan.max_seqs).any():
        i = _first(seqs > plan.max_seqs)
        _refuse_seqs(plan, int(seqs[i]), f"step {i}")
    running = np.r_[0, np.cumsum(new)]
    tokens = running[batch.offsets[1:]] - running[batch.offsets[:-1]]
    i = _first(tokens > plan.max_tokens)
    _refuse_tokens(plan, int(tokens[i]), f"step {i}")
