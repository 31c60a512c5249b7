"""Latent, sparse and linear attention in steps: kernels whose tables are no grid.

What a kind of operator does otherwise it says in its own file, by these parts of
:class:`~fastroof.operators.ragged.RaggedOperator`: ``step_sizes`` (its axes at a grid's point),
``step_lengths`` (nodes), ``step_kernels`` (those whose times add up), ``step_look_up`` (one of them),
``step_latency`` (their sum, borrowed or not), ``prefix_us``, ``lent_sizes`` and ``datasheet_class``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from fastroof.arrays import Flags, Floats
from fastroof.columns import ORIGIN_MODELLED
from fastroof.config.gpu import GpuSpec
from fastroof.errors import GpuError, LookupInputError
from fastroof.operators.attention_work import HeadShape
from fastroof.operators.calls import AttentionCall, MixerCall, MixerKernel
from fastroof.operators.mixer_blocks import LENGTHS, constant_block, sampled_block
from fastroof.operators.prefix_price import NO_PREFIX, PrefixUs
from fastroof.operators.ragged import RaggedOperator
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
from fastroof.uncertainty.leave_one_out import LocalErrors
from fastroof.uncertainty.variance import relative_variance
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.operators.operator import Key
    from fastroof.tables import Tables

__all__ = ["Mixer", "MixerErrors", "NoMixer", "step_attention"]

KEY_BITS: Final = 2
"""Of the lengths of a grid's nodes of decodes, after their first: so that equal decodes are tabulated (see
:mod:`fastroof.plan.decode_lines`). SGLang measured sparse attention at 1025, 1537, 2049 tokens: nodes are at
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
