"""The largest batches and contexts of decode steps within memory and a time per output token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.checks import is_number, shown
from fastroof.errors import BatchError
from fastroof.memory.plan_memory import PlanMemory
from fastroof.plan import StepPlan
from fastroof.run.batch import int_array
from fastroof.units import US_PER_MS, US_PER_S

_FIRST_LEN: Final = 1024
_CHUNK: Final = 2**16


class LargestSize(NamedTuple):
    """The largest decode step of one kind, and what limits it.

    Attributes
    ----------
    given : str
        ``kv_len``: the largest batch of that context; ``batch_size``: the longest context of that batch.
    batch_size, kv_len : int
        Requests of a step, of each rank and pipeline stage, and tokens that each attends to. The one that was
        not given is 0 if no size is within the limits.
    step_ms : float or None
        Time of the step, ms.
    tokens_per_s_per_gpu : float or None
        Output tokens/s with such a batch in every stage.
    kv_share : float or None
        Share of the KV cache that these requests hold.
    limited_by : str
        What a larger step would exceed: ``memory``, ``tpot``, ``max_num_seqs``, ``max_num_batched_tokens`` or
        ``max_model_len``.
    """

    given: str
    batch_size: int
    kv_len: int
    step_ms: float | None
    tokens_per_s_per_gpu: float | None
    kv_share: float | None
    limited_by: str


class Limits(NamedTuple):
    """What a decode step is timed by, and the limits that it has to meet."""

    plan: StepPlan
    memory: PlanMemory
    max_model_len: int
    tpot_ms: float

    def last_within(self, first: int, last: int, *, kv_len: int = 0, batch: int = 0) -> int:
        """Return the largest size in a range whose step is within the time, 0 if none is."""
        sizes = np.arange(first, last + 1)
        times_us = self.plan.decode_us(batch or sizes, kv_len or sizes)
        return int(sizes[times_us / US_PER_MS <= self.tpot_ms].max(initial=0))

    def largest_batch(self, kv_len: int) -> LargestSize:
        """Return the largest batch of a context."""
        most = {
            # the batches of all stages share the room
            "memory": self.memory.max_sequences(kv_len) // self.plan.layout.pp,
            "max_num_seqs": self.plan.max_num_seqs,
            "max_num_batched_tokens": self.plan.max_num_batched_tokens,
        }
        limit = min(most, key=lambda name: most[name])
        found = self.last_within(1, most[limit], kv_len=kv_len)
        return self._row("kv_len", found, kv_len, limit if found == most[limit] else "tpot")

    def longest_context(self, batch: int) -> LargestSize:
        """Return the longest context of a batch."""
        held = self.memory.largest_length(batch * self.plan.layout.pp)
        most = min(held, self.max_model_len)
        found = 0
        for stop in range(most, 0, -_CHUNK):
            found = self.last_within(max(stop - _CHUNK, 0) + 1, stop, batch=batch)
            if found:
                break
        limit = "memory" if held < self.max_model_len else "max_model_len"
        return self._row("batch_size", batch, found, limit if found == most else "tpot")

    def _row(self, given: str, batch: int, kv_len: int, limited_by: str) -> LargestSize:
        if not (batch and kv_len):
            return LargestSize(given, batch, kv_len, None, None, None, limited_by)
        plan = self.plan
        # with a batch in each stage, as fast as the slowest
        tokens_per_s = batch * plan.batches_in_flight / plan.bottleneck.decode_us(batch, kv_len) * US_PER_S
        held = batch * plan.layout.pp * self.memory.parts_per_request(kv_len)
        return LargestSize(
            given,
            batch,
            kv_len,
            plan.decode_us(batch, kv_len) / US_PER_MS,
            tokens_per_s / plan.layout.world_size,
            held / self.memory.parts,
            limited_by,
        )


def largest_sizes(limits: Limits, kv_len: Any = None, batch_size: Any = None) -> Iterator[LargestSize]:
    """Yield the largest batch of each context, then the longest context of each batch.

    Without either, those of a few contexts up to the longest, and of as many requests as a step may have.
    Measured kernel times are not monotonic: all sizes are tried, and the largest within the limits is the
    answer, even if smaller ones are not.
    """
    longest = limits.max_model_len
    most = {
        "max_num_seqs": limits.plan.max_num_seqs,
        "max_num_batched_tokens": limits.plan.max_num_batched_tokens,
    }
    tightest = min(most, key=lambda name: most[name])
    if kv_len is None and batch_size is None:
        fourfold = range(0, (longest - 1).bit_length() - _FIRST_LEN.bit_length() + 1, 2)
        kv_len, batch_size = [*(_FIRST_LEN << power for power in fourfold), longest], most[tightest]
    for length in _checked("kv_len", kv_len, "max_model_len", longest):
        yield limits.largest_batch(length)
    for batch in _checked("batch_size", batch_size, tightest, most[tightest]):
        yield limits.longest_context(batch)


def _checked(name: str, given: Any, limit: str, most: int) -> list[int]:
    sizes: list[int] = [] if given is None else np.atleast_1d(int_array(name, given)).ravel().tolist()
    for size in sizes:
        if not 1 <= size <= most:
            raise BatchError(f"{name} must be from 1 to {most:,} ({limit}), got {size:,}")
    return sizes


def checked_tpot_ms(value: Any) -> float:
    """Return a time per output token in ms; refuse anything but a number above 0, inf for no limit."""
    if not (is_number(value) or (isinstance(value, float) and value == math.inf)) or not value > 0:
        raise BatchError(f"tpot_ms must be a number above 0, got {shown(value)}")
    return float(value)
