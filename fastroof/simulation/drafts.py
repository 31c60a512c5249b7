"""Draft tokens of a simulated pool: acceptance rates, and which tokens each request keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Ints, Longs
from fastroof.checks import is_whole_number, shown
from fastroof.compiled.simulation.records import DRAFTED, Rows
from fastroof.errors import SimulationError
from fastroof.plan.speculation import SpeculatedPlan, SpeculativeDecoding, speculated
from fastroof.plan.step_plan import StepPlan
from fastroof.traces.trace import Trace

ONE: Final = 2**32
"""An acceptance rate of 1 as the loop compares it with 32 drawn bits."""

_HALVINGS: Final = 60


class Drafting(NamedTuple):
    """Draft tokens of a pool: the plan with its draft, rates by position, and given tokens per step."""

    speculation: SpeculativeDecoding
    loops: SpeculatedPlan
    rates: tuple[float, ...]
    kept: int | tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of_plan(
        cls, plan: StepPlan, speculation: SpeculativeDecoding | None, kept: Any = None
    ) -> Drafting | None:
        """Return the draft tokens of a plan's engine, None without any."""
        loops = speculated(plan, speculation)
        if speculation is None or loops.tokens == 1:
            if kept is not None:
                raise SimulationError("kept_tokens needs speculation with draft tokens")
            return None
        speculation = speculation.for_model(plan.model.name)
        rates: Any = speculation.accepted
        if not isinstance(rates, tuple):
            rates = geometric_rates(loops.tokens - 1, loops.accepted)
        return cls(speculation, loops, rates, None if kept is None else _checked_kept(kept, loops.tokens))

    def serving(self, trace: Trace) -> Drafting:
        """Return it with given tokens in the order of a trace's rows."""
        if not isinstance(self.kept, tuple):
            return self
        if len(self.kept) != len(trace):
            raise SimulationError(
                f"kept_tokens has {len(self.kept):,} sequences and trace {shown(trace.name)} {len(trace):,} "
                "requests; give one for each request of the file"
            )
        return self._replace(kept=tuple(self.kept[row] for row in trace.order.tolist()))

    def lookahead(self, is_mixed: bool, reserves_output: bool) -> int:
        """Return for how many tokens beyond those that it verifies a step takes blocks.

        vLLM has these for a draft's next tokens, if it has a KV cache; SGLang and TensorRT-LLM do not. A
        block whose first token predicts none takes one more.
        """
        has_draft = self.loops.draft is not None
        ahead = max(self.loops.tokens - 1, self.loops.passes.later)
        return ahead if has_draft and is_mixed and not reserves_output else 0


def geometric_rates(num_draft_tokens: int, length: float) -> tuple[float, ...]:
    """Return the rates by position with one conditional rate that have a mean acceptance length."""
    positions = np.arange(1, num_draft_tokens + 1)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if 1.0 + (middle**positions).sum() < length else (low, middle)
    return tuple((high**positions).tolist())


def _checked_kept(kept: Any, tokens: int) -> int | tuple[tuple[int, ...], ...]:
    """Return given numbers of tokens that are kept."""
    if is_whole_number(kept, most=tokens):
        return int(kept)
    if not isinstance(kept, list | tuple | np.ndarray) or not all(
        isinstance(one, list | tuple | np.ndarray) and len(one) for one in kept
    ):
        raise SimulationError(
            f"kept_tokens must be a number from 1 to {tokens}, or a sequence of them for each request; got "
            f"{shown(kept)}"
        )
    for row, each in enumerate(kept):
        wrong = [one for one in each if not is_whole_number(one, most=tokens)]
        if wrong:
            raise SimulationError(
                f"kept_tokens must be numbers from 1 to {tokens}, got {shown(wrong[0])} for request {row}"
            )
    return tuple(tuple(int(one) for one in each) for each in kept)


def draws(draftings: Sequence[Drafting | None], rows: Longs, outputs: Ints, seed: int) -> dict[str, Any]:
    """Return which draft tokens of requests are kept, by the names of a fleet's arrays.

    A request's key follows from the seed and its row in the trace that clients send.
    """
    found = [one for one in draftings if one is not None]
    drafted: Rows = np.zeros(len(rows) if found else 0, DRAFTED)
    rates = [round(rate * ONE) for one in found for rate in one.rates]
    kept: Ints = np.zeros(0, np.int32)
    if found:
        keys = np.random.default_rng(seed).integers(0, ONE, int(rows.max(initial=0)) + 1)
        drafted["key"] = keys[rows]
        # a pool that prefills decodes nothing
        given = None if draftings[-1] is None else draftings[-1].kept
        if given is not None:
            kept, drafted["kept_end"] = _kept_by_remaining(given, rows, outputs)
    return {"drafted": drafted, "rates": np.array(rates, np.int64), "kept": kept}


def _kept_by_remaining(
    given: int | tuple[tuple[int, ...], ...], rows: Longs, outputs: Ints
) -> tuple[Ints, Longs]:
    """Return the tokens that a step keeps wherever it begins in an output, and where each output ends.

    Steps follow each other from the second token on. One that begins within a step, as after a preemption,
    keeps the rest of that step.
    """
    ends = np.cumsum(outputs, dtype=np.int64)
    kept = np.ones(int(outputs.sum()), np.int32)
    sequences = len(given) if isinstance(given, tuple) else 0
    for output, end, row in zip(outputs.tolist(), ends.tolist(), rows.tolist(), strict=True):
        steps = np.atleast_1d(np.asarray(given if isinstance(given, int) else given[row % sequences]))
        stops = np.cumsum(np.resize(steps, output))
        places = np.arange(output - 1)
        # place 0 is the second token; an output's first comes with its prompt
        kept[end - output + 1 : end] = stops[np.searchsorted(stops, places, side="right")] - places
    return kept, ends
