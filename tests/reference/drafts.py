"""Draft tokens, naively: what a step of requests that verify them keeps, and how long it takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fastroof.compiled import mean_steps, steps, verification
from fastroof.compiled.request_sums import WindowSums
from tests.reference.scheduler import Step

BITS = 2**32


def mixed_bits(bits: int) -> int:
    """32 bits that depend on all of 32 others."""
    for _ in range(2):
        bits = ((bits >> 16) ^ bits) * 0x45D9F3B % BITS
    return (bits >> 16) ^ bits


@dataclass(eq=False)
class Drafts:
    """Draft tokens of a pool: how many a request verifies, with its own, and who keeps how many.

    ``arena`` has the plan, what verification takes and the draft; ``lookahead`` are tokens more that a step
    takes blocks for. ``rates`` are those of positions; ``given`` is what each step of a request keeps.
    """

    arena: Any
    tokens: int
    lookahead: int
    rates: tuple[float, ...]
    seed: int
    outputs: list[int]
    given: Any = None

    @cached_property
    def keys(self) -> list[int]:
        return np.random.default_rng(self.seed).integers(0, BITS, len(self.outputs)).tolist()

    def kept(self, index: int, remaining: int) -> int:
        """Tokens that a request keeps of a step, so many before its end."""
        if self.given is not None:
            return min(self._given(index, self.outputs[index] - remaining), remaining)
        drawn = mixed_bits(mixed_bits(remaining) ^ self.keys[index])
        accepted = sum(drawn < round(rate * BITS) for rate in self.rates)
        return min(1 + accepted, remaining)

    def _given(self, index: int, made: int) -> int:
        """What remains of the step in which a token is, of those that follow each other after the first."""
        own = [self.given] if isinstance(self.given, int) else self.given[index]
        end, turn = 1, 0
        while end <= made:
            end += own[turn % len(own)]
            turn += 1
        return int(end - made)

    def times_us(self, step: Step, floor_us: float | None = None) -> tuple[float, float]:
        """What a step takes, and the draft before or after it, us; with another floor than the plan's."""
        plan = steps.open_plan(self.arena)
        if floor_us is not None:
            plan = steps.with_floor(plan, floor_us)
        speculation = verification.open_speculation(self.arena, plan)
        every = list(zip(step.new_tokens, step.context_len, step.verifies, strict=True))
        verifying = [context for _, context, verifies in every if verifies]
        prompts = [(new, context) for new, context, verifies in every if not verifies]
        single = [context for new, context in prompts if new == 1 and context]
        chunks = [(new, context) for new, context in prompts if new > 1 or not context]
        lengths = [context + self.tokens for context in verifying] + [context + 1 for context in single]
        rows = self.tokens * len(verifying) + len(single)
        queries = float(rows) / float(len(lengths)) if verifying else 1.0
        seen = sum(min(length, plan.window) for length in lengths)
        decodes = mean_steps.Decodes(float(len(lengths)), float(sum(lengths)), float(seen))
        of_chunks = mean_steps.ChunkSums(
            float(sum(new for new, _ in chunks)),
            float(sum(new * (new + 1) // 2 for new, _ in chunks)),
            float(sum(new * context for new, context in chunks)),
            float(sum(context for _, context in chunks)),
        )
        seqs = float(len(every))
        in_window = windowed(chunks, plan.window)
        verification_of = speculation._replace(tokens=queries, head_tokens=queries)
        target_us = mean_steps.summed_mean_step_us(
            self.arena, plan, verification_of, decodes, of_chunks, in_window, seqs
        )
        if speculation.draft_at == 0:
            return target_us, 0.0
        in_window = windowed(chunks, verification.open_drafter(self.arena, speculation.draft_at).plan.window)
        kv_sum = float(sum(context + 1 for context in verifying + single))
        draft_us = mean_steps.drafting_us(
            self.arena, speculation, decodes.number, kv_sum, of_chunks, in_window, seqs
        )
        return target_us, draft_us


def windowed(chunks: list[tuple[int, int]], window: int) -> WindowSums:
    """Sums over chunks within a window, token by token."""
    own = crossed = read = 0
    for new, context in chunks if window else ():
        for place in range(new):
            sees = min(context + place + 1, window)
            own += min(place + 1, sees)
            crossed += max(sees - place - 1, 0)
        read += min(context, window - 1)
    return WindowSums(0.0, float(own), float(crossed), float(read))
