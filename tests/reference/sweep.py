"""A naive sweep: every step of a plan's grid by itself, and the best batch of each length by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Best(NamedTuple):
    """Best step of one length; batch_size 0 and step_us None if there is none."""

    kv_len: int
    batch_size: int
    step_us: float | None
    limited_by: str


def violated(plan: Any, batch_size: int, kv_len: int, limit_us: float | None) -> str | None:
    """Limit that one step breaks, memory before tpot."""
    if batch_size * kv_len > plan.memory.max_kv_tokens:
        return "memory"
    if limit_us is not None and plan.decode_us(batch_size, kv_len) > limit_us:
        return "tpot"
    return None


def best_steps(
    plan: Any, batch_sizes: Sequence[int], kv_lens: Sequence[int], limit_us: float | None
) -> tuple[list[Best], dict[str, int]]:
    """For each length the batch with the most tokens a second, of equals the smaller; what is infeasible."""
    rows = []
    infeasible = {"memory": 0, "tpot": 0}
    for kv_len in kv_lens:
        reasons = [violated(plan, b, kv_len, limit_us) for b in batch_sizes]
        for reason in filter(None, reasons):
            infeasible[reason] += 1
        feasible = [b for b, reason in zip(batch_sizes, reasons, strict=True) if reason is None]
        if not feasible:
            rows.append(Best(kv_len, 0, None, str(reasons[0])))
            continue
        best = max(feasible, key=lambda b: b / plan.decode_us(b, kv_len))
        after = batch_sizes.index(best) + 1
        limit = "batch grid" if after == len(batch_sizes) else reasons[after] or "throughput"
        rows.append(Best(kv_len, best, plan.decode_us(best, kv_len), limit))
    return rows, infeasible
