"""What a run of engines returns: the outcomes of requests; which requests no engine can run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Flags, Floats, Ints, Longs
from fastroof.checks import is_number, shown
from fastroof.compiled.simulation.records import NONE, REJECTED, Rows
from fastroof.errors import SimulationError
from fastroof.simulation.kv_tiers import TierUse
from fastroof.simulation.settings import EngineSettings
from fastroof.traces.trace import Trace
from fastroof.traces.trace_sessions import descendants
from fastroof.units import US_PER_S

STATUS_NAMES: Final = ("finished", "timed_out", "rejected")
"""Names of statuses, by number."""

SERIES: Final = ("running", "waiting", "blocks", "busy", "new_tokens", "output_tokens")
"""Columns of ``Outcomes.series``: four integrals over time, us, and two counts of tokens."""

FOUND_COUNTERS: Final = ("looked_up_tokens", "found_tokens", "found_again_tokens", "evictions")
"""Counters of simulated prefix caches."""


class Outcomes(NamedTuple):
    """The outcome of each request, in the trace's order; counts of gaps by bin, the series, and counters.

    ``lives`` are those of replicas that autoscalers start. With a prefill and a decode pool, ``replica`` is
    that of the decode pool, and ``prefill`` and ``decode`` are each pool's own outcomes, by its own clock: of
    the decode pool those of the requests that it got, by arrival; None if it got none.
    """

    arrival_us: Floats
    first_us: Floats
    last_us: Floats
    preemptions: Ints
    status: Flags
    replica: Ints
    gaps: Longs
    series: Floats
    bin_us: float
    counters: dict[str, Any]
    cached_tokens: Ints | None = None
    tiers: TierUse | None = None
    lives: Rows | None = None
    prefill_replica: Ints | None = None
    transfer_us: Floats | None = None
    prefill: Outcomes | None = None
    decode: Outcomes | None = None

    def by_request(self, change: Callable[[Any, str], Any]) -> Outcomes:
        """Return outcomes whose values of requests are changed, by their names."""
        names = (
            "arrival_us", "first_us", "last_us", "preemptions", "status", "replica", "cached_tokens",
            "prefill_replica", "transfer_us",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in names}
        changed = {name: change(values, name) for name, values in given.items() if values is not None}
        tiers = self.tiers
        if tiers is not None:
            tiers = tiers._replace(tokens=change(tiers.tokens, "tokens"))
        return self._replace(**changed, tiers=tiers)


def added_up(counters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add the counters of several engines; the end is that of the last."""
    return {
        name: max(of_each) if name == "end_us" else sum(of_each)
        for name in counters[0]
        for of_each in [[one[name] for one in counters]]
    }


LEAST_SCALE: Final = 1e-9
MOST_SCALE: Final = 1e9
"""Range of time_scale."""


def check_time_scale(time_scale: Any) -> None:
    """Reject anything but a number in the range of time_scale."""
    if not is_number(time_scale) or not LEAST_SCALE <= float(time_scale) <= MOST_SCALE:
        raise SimulationError(
            f"time_scale must be a number from {LEAST_SCALE:g} to {MOST_SCALE:g}, got {shown(time_scale)}"
        )


def too_long(trace: Trace, settings: EngineSettings, more: int = 0) -> Bools:
    """Find requests that can never run: more tokens than all blocks, or than an unchunked step, hold.

    Each takes blocks for ``more`` tokens than it has.
    """
    tokens = trace.input_tokens.astype(np.int64) + trace.output_tokens
    beyond: Bools = tokens + more > settings.num_gpu_blocks * settings.block_size
    if not settings.chunked_prefill:
        # a preempted request recomputes its output so far with its prompt
        needed = trace.input_tokens - trace.cached_tokens if settings.reserve_output else tokens - 1
        beyond |= needed > settings.max_num_batched_tokens
    if trace.parents is not None and trace.parent_offsets is not None and beyond.any():
        # what comes after a request that is never served is not sent
        beyond = descendants(beyond, trace.parents, trace.parent_offsets)
    return beyond


def refuse_too_long(trace: Trace, settings: EngineSettings, alternative: str, more: int = 0) -> None:
    """Raise for the first request that can never run; the message ends with an alternative."""
    beyond = too_long(trace, settings, more)
    if not beyond.any():
        return
    i = int(beyond.argmax())
    prompt, output = int(trace.input_tokens[i]), int(trace.output_tokens[i])
    blocks = -(-(prompt + output + more) // settings.block_size)
    others_rejected = int(beyond.sum()) - 1
    others = f", nor can {others_rejected:,} others" if others_rejected else ""
    if blocks > settings.num_gpu_blocks:
        why = f"needs {blocks:,} blocks of {settings.block_size}, there are {settings.num_gpu_blocks:,}"
        help_ = "give more num_gpu_blocks or GPUs"
    else:
        why = f"has no room in a step of {settings.max_num_batched_tokens:,} tokens, and prompts are not cut"
        help_ = "give more max_num_batched_tokens, or chunked_prefill=True"
    raise SimulationError(
        f"request {int(trace.order[i])} of {trace.name} ({prompt:,} + {output:,} tokens) can never run"
        f"{others}: it {why}; {help_}, or {alternative}"
    )


_REJECTED: Final = {
    "first_us": math.nan, "last_us": math.nan, "status": REJECTED, "replica": NONE, "cached_tokens": NONE,
    "prefill_replica": NONE, "transfer_us": math.nan,
}  # fmt: skip
"""Values of rejected requests; 0 for others."""


def with_rejected(outcomes: Outcomes, trace: Trace, rejected: Bools) -> Outcomes:
    """Insert rejected requests into the outcomes of the others."""
    if not rejected.any():
        return outcomes

    def spread(values: Any, name: str) -> Any:
        every = np.full((len(rejected), *values.shape[1:]), _REJECTED.get(name, 0), values.dtype)
        if name == "arrival_us":
            every[:] = trace.arrival_s * US_PER_S
        every[~rejected] = values
        return every

    return outcomes.by_request(spread)
