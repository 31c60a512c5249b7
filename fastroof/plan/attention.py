"""Attention of a plan's kinds of layers, each by itself; the plan's arena has their sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from fastroof.arrays import Bools, Flags, Floats, Ints
from fastroof.columns import ORIGIN_MODELLED
from fastroof.compiled import steps
from fastroof.compiled.grids import grid_latency_us
from fastroof.config import GpuSpec
from fastroof.engines import EngineProfile
from fastroof.errors import GpuError, LookupInputError
from fastroof.operators.attention_work import NO_PREFIX, HeadShape, PrefixUs, pairs_within, prefix_within
from fastroof.operators.calls import AttentionCall, MixerCall, MixerKernel
from fastroof.operators.ragged import LENGTHS, RaggedOperator, constant_block, sampled_block
from fastroof.operators.registry import OPERATORS
from fastroof.pack import SIZE_LIMIT
from fastroof.pack.keys import key_columns, nearest_key_starts
from fastroof.plan.step_attention import (
    NO_WINDOW,
    AttentionWork,
    GroupedHeads,
    QueryBound,
    StepAttention,
    Variance,
)
from fastroof.uncertainty.leave_one_out import LocalErrors, relative_variance
from fastroof.units import NS_PER_US, US_PER_S

if TYPE_CHECKING:
    from fastroof.operators.operator import Key
    from fastroof.plan.step_plan import StepPlan
    from fastroof.tables import Tables


KEY_BITS: Final = 2
"""Of the lengths of a grid's nodes of decodes, after their first: so that equal decodes are tabulated (see
:mod:`fastroof.plan.arena`). SGLang measured sparse attention at 1025, 1537, 2049 tokens: nodes are at
1024, 1536, 2048, where the table's law is looked up. Its points come back to 2e-5 at the median and 0.9 % in
99 of 100, on H100, H200 and B200."""


@dataclass(frozen=True)
class Mixer(StepAttention):
    """A kernel or block of one of the operators whose tables are no grid."""

    kernel: MixerKernel
    is_decode: bool
    window: int = 0

    @property
    def operator(self) -> str:
        """Whose tables have it."""
        return self.kernel.operator

    @property
    def _own(self) -> RaggedOperator:
        return cast(RaggedOperator, OPERATORS[self.kernel.operator])

    @property
    def is_modelled_unasked(self) -> bool:
        """Whether the datasheet model may stand for a kernel without ``allow_modelled``."""
        return self._own.is_modelled_unasked(self.kernel.key)

    def check(self, tables: Tables) -> None:
        """Raise MissingTableError if nothing measured stands for it."""
        self._own.step_kernels(tables, self.kernel.key)

    def block(self, tables: Tables, method: str) -> Floats:
        """Grid block of one layer: looked up at the sizes that were measured."""
        if method != "roofline":
            raise LookupInputError(
                f"method={method!r} times attention of grouped heads alone, and {self.operator} has none; "
                "method='roofline' would do"
            )
        own, key = self._own, self.kernel.key

        def latency(batch: Floats, length: Floats) -> tuple[Floats, Flags]:
            return own.step_latency(tables, key, self._sizes(batch, length))

        batch, length = self._nodes(tables)
        return sampled_block(latency, self._work_us(tables.gpu), batch, length)

    def _sizes(self, batch: Any, length: Any, prefix: Any = 0.0) -> dict[str, Floats]:
        at = (np.asarray(size, np.float64) for size in (batch, length, prefix))
        named = self._own.step_sizes(self.is_decode, *at)
        return {name: np.array(np.broadcast_to(v, np.shape(batch)), np.float64) for name, v in named.items()}

    def _nodes(self, tables: Tables) -> tuple[Floats, Floats]:
        """Batch sizes and lengths that any of its kernels was measured at, and where its cost caps."""
        batches: list[Any] = []
        lengths: list[Any] = [[float(self.window)]] if self.window else []
        for one in self._own.step_kernels(tables, self.kernel.key):
            rows = tables.rows(self._own, one.key)
            batches.append(rows["batch_size"])
            lengths.append(self._own.step_lengths(self.is_decode, rows))
        batch, length = (np.unique(np.concatenate(v)).astype(np.float64) for v in (batches, lengths))
        is_tabulated = not self.is_decode or key_columns(np.r_[0.0, length, SIZE_LIMIT]) is not None
        return batch, length if is_tabulated else nearest_key_starts(length, KEY_BITS)

    def _work_us(self, gpu: GpuSpec) -> Any:
        own = self._own
        work_us = own.work_us(self.kernel.key, gpu)

        def at(batch: Floats, length: Floats) -> Floats:
            sizes = self._sizes(batch, length)
            return np.asarray(work_us(*own.coordinates(sizes)))

        return at

    def datasheet_block(self, gpu: GpuSpec) -> Floats:
        """By its roofline: one layer's launch floor, and B at an efficiency."""
        kind, work_us = self._own.datasheet_of(self.kernel.key), self._work_us(gpu)
        if not np.isfinite(work_us(np.ones(1), np.ones(1))).all():
            have = ", ".join(sorted(gpu.peak_flops_per_s))
            raise GpuError(
                f"{gpu.title} has no peak of what a part of {self._own.name} computes in, as an indexer in "
                f"fp8; it has {have}"
            )

        def latency(batch: Floats, length: Floats) -> tuple[Floats, Flags]:
            us = kind.launch_us + work_us(batch, length) / kind.efficiency
            return us, np.full(len(us), ORIGIN_MODELLED, np.uint8)

        lengths = np.union1d(LENGTHS, [float(self.window)] if self.window else [])
        return sampled_block(latency, work_us, np.array([1.0]), lengths)

    def sources(self, tables: Tables) -> tuple[str, ...]:
        """Sources of its kernels."""
        kernels = self._own.step_kernels(tables, self.kernel.key)
        return tuple(tables.source_of(self.operator, one.key) for one in kernels)

    def prefix_us(self, tables: Tables) -> PrefixUs:
        """Price of a prefix, as its operator knows it."""
        return self._own.prefix_us(tables, self.kernel.key, self.window)

    def datasheet_prefix_us(self, gpu: GpuSpec) -> PrefixUs:
        """What B says of a prefix, at an efficiency."""
        prices = self._own.prefix_prices(self.kernel.key, gpu, self.window)
        return prices.times(1.0 / self._own.datasheet_of(self.kernel.key).efficiency)

    def lender(self, tables: Tables) -> Key:
        """Key of the first kernel that stands for it."""
        return self._own.step_kernels(tables, self.kernel.key)[0].key

    def variance(self, tables: Tables) -> Variance:
        """Local errors of its kernels, the largest, and of borrowing."""
        own = self._own
        kernels = own.step_kernels(tables, self.kernel.key)
        errors = tuple(own.local_errors(tables, one.key) for one in kernels)
        return MixerErrors(self, errors, max(one.error for one in kernels) ** 2)

    def at(self, batch: Floats, length: Floats) -> tuple[Floats, ...]:
        """Coordinates of grid points."""
        return tuple(np.asarray(c, np.float64) for c in self._own.coordinates(self._sizes(batch, length)))

    def work(self, gpu: GpuSpec, new: Any, kv_len: Any) -> AttentionWork:
        """Of one call over some requests, taken as equal ones: weights are read once."""
        new, kv_len = np.asarray(new, np.float64), np.asarray(kv_len, np.float64)
        total = float(new.sum())
        if self.is_decode:
            batch, length, prefix = float(len(new)), float(kv_len.mean()), 0.0
        else:
            length = float((new * (new + 1.0)).sum()) / total - 1.0
            batch, prefix = total / length, float((new * (kv_len - new)).sum()) / total
        one = self._work(gpu, self._sizes(np.array([batch]), np.array([length]), np.array([prefix])))
        return AttentionWork(np.asarray(one.flops[0]), np.asarray(one.moved_bytes[0]), float(one.peak[0]))

    def work_at(self, gpu: GpuSpec, batch: Floats, length: Floats) -> AttentionWork:
        """Of equal requests without a prefix."""
        return self._work(gpu, self._sizes(batch, length))

    def _work(self, gpu: GpuSpec, sizes: dict[str, Floats]) -> AttentionWork:
        own = self._own
        columns = own.columns_at(self.kernel.key, own.coordinates(sizes), None)
        flops = np.asarray(own.flops(columns), np.float64)
        with np.errstate(invalid="ignore"):
            # of no tokens at all
            peak = own.peaks(columns, gpu)[0]
        return AttentionWork(flops, np.asarray(own.moved_bytes(columns)), np.where(flops > 0.0, peak, 1.0))

    def query_bound(self, gpu: GpuSpec) -> QueryBound:
        """By differences of B at one sequence: of a token more, and of a sequence more."""
        verifying = self._own.verifying(self.kernel.key)
        if verifying is not None:
            sizes = {"batch_size": np.ones(2), "q_len": np.array([1.0, 2.0])}
            one, two = self._own.work_us(verifying, gpu)(*self._own.coordinates(sizes))
            return QueryBound(0.0, float(one), float(two - 2.0 * one), 0.0)
        bytes_us = US_PER_S / gpu.hbm_bytes_per_s
        batch, length = np.array([1.0, 1.0, 2.0]), np.array([16.0, 17.0, 16.0])
        work = self._work(gpu, self._sizes(batch, length))
        flops_us, moved_us = work.flops / work.peak * US_PER_S, work.moved_bytes * bytes_us
        pair_us, kv_us = (max(float(us[1] - us[0]), 0.0) for us in (flops_us, moved_us))
        a_sequence = float((flops_us + moved_us)[2] - (flops_us + moved_us)[0])
        query_us = max(a_sequence - 16.0 * (pair_us + kv_us), 0.0)
        return QueryBound(pair_us, query_us, kv_us, float(self.window or NO_WINDOW))


@dataclass(frozen=True)
class NoMixer(StepAttention):
    """A phase in which nothing runs."""

    is_decode: bool
    operator = ""
    window = 0

    def check(self, tables: Tables) -> None:
        """Nothing is asked for."""

    def block(self, tables: Tables, method: str) -> Floats:
        """No time."""
        return constant_block(0.0)

    def datasheet_block(self, gpu: GpuSpec) -> Floats:
        """No time."""
        return constant_block(0.0)

    def sources(self, tables: Tables) -> tuple[str, ...]:
        """None."""
        return ()

    def prefix_us(self, tables: Tables) -> PrefixUs:
        """Nothing."""
        return NO_PREFIX

    def datasheet_prefix_us(self, gpu: GpuSpec) -> PrefixUs:
        """Nothing."""
        return NO_PREFIX

    def lender(self, tables: Tables) -> Key:
        """None."""
        return ()

    def variance(self, tables: Tables) -> Variance:
        """No time has no error."""
        return _no_variance

    def work(self, gpu: GpuSpec, new: Any, kv_len: Any) -> AttentionWork:
        """None."""
        return AttentionWork(np.asarray(0.0), np.asarray(0.0), 1.0)

    def work_at(self, gpu: GpuSpec, batch: Floats, length: Floats) -> AttentionWork:
        """None."""
        nothing = np.zeros(len(batch))
        return AttentionWork(nothing, nothing, 1.0)

    def query_bound(self, gpu: GpuSpec) -> QueryBound:
        """Nothing."""
        return QueryBound(0.0, 0.0, 0.0, NO_WINDOW)


class MixerErrors(NamedTuple):
    """How good the lookups of a mixer are: a :data:`Variance`."""

    mixer: Mixer
    errors: tuple[LocalErrors, ...]
    borrowed: float

    def __call__(self, batch: Floats, length: Floats) -> Floats:
        """Squared relative standard error at (batch, length)."""
        # a prefix of 0 has no octave
        at = [c + 1.0 for c in self.mixer.at(np.asarray(batch), np.asarray(length))]
        variances: Sequence[Floats] = [relative_variance(one, at) for one in self.errors]
        return np.asarray(np.max(variances, axis=0) + self.borrowed)


def _no_variance(batch: Floats, length: Floats) -> Floats:
    return np.zeros(np.shape(batch))


def step_attention(call: AttentionCall | MixerCall, is_decode: bool) -> StepAttention:
    """One phase of a call, as plans look it up."""
    if isinstance(call, AttentionCall):
        heads = (call.kv_dtype, call.num_q_heads, call.num_kv_heads, call.head_dim, call.window)
        return GroupedHeads(HeadShape(*heads), is_decode)
    kernel = call.decode if is_decode else call.prefill
    return NoMixer(is_decode) if kernel is None else Mixer(kernel, is_decode, call.window)


class PlanAttention(NamedTuple):
    """Attention of the layers of one kind."""

    call: AttentionCall | MixerCall
    before: int
    decode_block: Any
    prefill_block: Any
    prefix_us: PrefixUs
    sources: tuple[str, str]

    def phase(self, is_decode: bool) -> StepAttention:
        """Decodes or prompts, as tables know them."""
        return step_attention(self.call, is_decode)

    def prefixes_us(self, new_tokens: Any, context_len: Any) -> Any:
        """Price of each chunk's prefix in all of the layers, us."""
        price, window = self.prefix_us, self.call.window
        total = price.pair * (new_tokens * context_len) + price.token * context_len
        if window:
            pairs, tokens = prefix_within(new_tokens, new_tokens + context_len, window)
            total = total + (price.window_pair * pairs + price.window_token * tokens)
        return total

    def without_blocks(self) -> PlanAttention:
        """Itself as the only kind of a plan, whose arena has the blocks."""
        return self._replace(decode_block=None, prefill_block=None)


class AttentionTimes(NamedTuple):
    """Attention of the layers of one kind in some steps, us, without the price of prefixes."""

    own_us: Floats
    origin: Flags
    launch_us: float


class WindowPoints(NamedTuple):
    """Where layers within a window are looked up for requests of different lengths."""

    batch: Floats
    x: Floats
    is_other: Bools


def heads_of(call: AttentionCall) -> HeadShape:
    """What the tables of attention are keyed by."""
    return HeadShape(call.kv_dtype, call.num_q_heads, call.num_kv_heads, call.head_dim, call.window)


def window_points(
    window: int, is_decode: bool, batch: Any, x: Any, new_sum: Any, seen_sum: Any
) -> WindowPoints:
    """Find where steps of decodes, or of chunks, are looked up by layers within a window."""
    batch, x = np.asarray(batch, np.float64), np.asarray(x, np.float64)
    new, seen = np.asarray(new_sum, np.float64), np.asarray(seen_sum, np.float64)
    if is_decode:
        mean_seen = seen / new
        is_other = mean_seen != np.minimum(x, window)
        return WindowPoints(batch, np.where(is_other, mean_seen, x), is_other)
    is_other = batch * pairs_within(x, window) != seen
    # as fastroof.compiled.request_sums.window_chunks
    q_len = 2.0 * seen / new - 1.0
    long = q_len > window
    short_of_window = np.where(long, window - seen / new, 1.0)
    q_len = np.where(long, 0.5 * window * (window - 1.0) / short_of_window, q_len)
    return WindowPoints(np.where(is_other, new / q_len, batch), np.where(is_other, q_len, x), is_other)


def attention_times(
    plan: StepPlan, number: int, is_decode: bool, batch: Any, x: Any, within: WindowPoints | None = None
) -> AttentionTimes:
    """Look up one kind's attention at (batch, kv_len or q_len)."""
    part = plan.attention[number]
    block = part.decode_block if is_decode else part.prefill_block
    if block is None:
        slot = steps.DECODE_AT if is_decode else steps.PREFILL_AT
        block = plan.arena[int(plan.arena[slot]) :]
    own_us, origin = _look_up(block, np.r_[np.asarray(batch, np.float64), 0.0], np.r_[np.asarray(x), 1.0])
    launch_us = float(own_us[-1]) / part.call.times
    own_us, origin = own_us[:-1], origin[:-1]
    if part.call.window and within is not None and within.is_other.any():
        # as the step loops: a step of all layers' sizes, and the difference of two within the window
        there = _look_up(block, within.batch, within.x)
        instead = np.minimum(x, part.call.window) if is_decode else np.asarray(x)
        more_us = there[0] - _look_up(block, np.asarray(batch), instead)[0]
        own_us = own_us + np.where(within.is_other, more_us, 0.0)
        origin = np.where(within.is_other, np.maximum(origin, there[1]), origin)
    return AttentionTimes(own_us, origin, launch_us)


def _look_up(block: Floats, batch: Any, x: Any) -> tuple[Floats, Flags]:
    own_us, origin = np.empty(len(batch)), np.empty(len(batch), np.uint8)
    grid_latency_us(block, batch.astype(np.float64), x.astype(np.float64), own_us, origin)
    return own_us, origin


def mixed_kv_us(
    calls: Sequence[AttentionCall | MixerCall], engine: EngineProfile, gpu: GpuSpec
) -> tuple[float, float]:
    """Price of a KV token beside prefill in layers of some calls."""
    full_us = windowed_us = 0.0
    for call in calls:
        ns = 0.0
        if isinstance(call, AttentionCall):
            ns = engine.kernels.mixed_attention_ns(gpu.name, call.head_dim, call.kv_dtype)
        if ns == 0.0 or not isinstance(call, AttentionCall):
            return 0.0, 0.0
        price_us = ns / NS_PER_US * call.num_q_heads * call.times
        if call.window:
            windowed_us += price_us
        else:
            full_us += price_us
    return full_us, windowed_us


def kinds_beside_prefill(
    plan: StepPlan, kv_len: Ints, kinds: Sequence[AttentionTimes]
) -> list[AttentionTimes]:
    """Decode attention of each kind of layers in one step that prefills too."""
    least_us = []
    for part in plan.attention:
        full_us, windowed_us = mixed_kv_us([part.call], plan.engine, plan.gpu)
        if full_us == windowed_us == 0.0:
            return list(kinds)
        seen = np.minimum(kv_len, part.call.window) if part.call.window else kv_len
        least_us.append((full_us + windowed_us) * float(seen.sum()))
    if sum(least_us) <= sum(float(kind.own_us[0]) for kind in kinds):
        return list(kinds)
    return [
        kind._replace(own_us=np.array([least]), origin=np.full_like(kind.origin, ORIGIN_MODELLED))
        for kind, least in zip(kinds, least_us, strict=True)
    ]
