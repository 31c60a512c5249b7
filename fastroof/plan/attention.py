"""One phase (decode or prefill) of one layer's attention on one GPU.

A plan holds grid blocks over (batch, kv_len) for decode and (batch, q_len) for prefill. Tables of grouped
heads are such grids; latent, sparse and linear attention have other tables, sampled at the grid's nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, cast

import numpy as np

from fastroof.arrays import Flags, Floats
from fastroof.columns import ORIGIN_MODELLED
from fastroof.compiled.grids import FORM, cells_of
from fastroof.compiled.layout import FORM_LATENCY
from fastroof.config import GpuSpec
from fastroof.errors import GpuError, LookupInputError
from fastroof.operators.attention import ATTENTION, ATTENTION_PREFILL
from fastroof.operators.attention_blocks import PlannedAttention
from fastroof.operators.attention_grids import attention_variance, is_modelled, modelled_error
from fastroof.operators.attention_work import (
    NO_PREFIX,
    HeadShape,
    PrefixUs,
    attention_bytes_within,
    attention_flops_within,
    prefix_bound_us,
)
from fastroof.operators.calls import AttentionCall, MixerCall, MixerKernel
from fastroof.operators.operator import Key
from fastroof.operators.ragged import LENGTHS, RaggedOperator, constant_block, sampled_block
from fastroof.operators.registry import OPERATORS
from fastroof.pack import SIZE_LIMIT
from fastroof.pack.keys import key_columns, nearest_key_starts
from fastroof.tables import Tables
from fastroof.uncertainty.leave_one_out import LocalErrors, relative_variance
from fastroof.units import US_PER_S

NO_WINDOW = 2.0**62
"""A window longer than any context."""


KEY_BITS: Final = 2
"""Significant bits, after the first, of a decode grid's lengths, so that equal decodes can be tabulated.
SGLang measured sparse attention at 1025, 1537, 2049 tokens: nodes are at 1024, 1536, 2048. Its points come
back within 2e-5 (median) and 0.9 % (99 of 100), on H100, H200 and B200."""


class Variance(Protocol):
    """Error of some attention's lookups, without prefixes."""

    def __call__(self, batch: Floats, length: Floats, /) -> Floats:
        """Squared relative standard error at (batch, length)."""


class AttentionWork(NamedTuple):
    """FLOPs, compulsory bytes and peak FLOPs/s of some attention."""

    flops: Floats
    moved_bytes: Floats
    peak: Any


class QueryBound(NamedTuple):
    """Roofline of decode attention with several queries per sequence, without its launch floor, us."""

    pair: float
    query: float
    kv: float
    window: float


@dataclass(frozen=True)
class StepAttention:
    """One phase of a layer's attention, a key of cached blocks; this one runs nothing."""

    is_decode: bool

    @property
    def operator(self) -> str:
        """Name of the operator whose tables have it; empty if it runs nothing."""
        return ""

    @property
    def window(self) -> int:
        """Tokens beyond which a query costs no more; 0 if its cost always grows."""
        return 0

    @property
    def is_modelled_unasked(self) -> bool:
        """Whether the datasheet model may replace a kernel without ``allow_modelled``."""
        return False

    def donors(self, tables: Tables) -> tuple[Key, ...]:
        """Table keys of the kernels that provide its times; MissingTableError if nothing measured can."""
        return ()

    def sources(self, tables: Tables) -> tuple[str, ...]:
        """Sources of its kernels, or of those that replace it."""
        return tuple(tables.source_of(self.operator, key) for key in self.donors(tables))

    def block(self, tables: Tables, method: str) -> Floats:
        """Grid block of one layer, as :func:`fastroof.compiled.grids.grid_value` reads it."""
        return constant_block(0.0)

    def block_from_memory(self, tables: Tables) -> Floats:
        """The same with a KV cache that is never in L2; unchanged for anything but grouped-head decodes."""
        return self.block(tables, "roofline")

    def datasheet_block(self, gpu: GpuSpec) -> Floats:
        """The same from the datasheet model."""
        return constant_block(0.0)

    def modelled_from(self, tables: Tables) -> tuple[str, ...]:
        """What it is modelled from, with the error; empty if it is not."""
        return ()

    def prefix_us(self, tables: Tables) -> PrefixUs:
        """Time per pair and token of a prefix, in one layer's prefill."""
        return NO_PREFIX

    def datasheet_prefix_us(self, gpu: GpuSpec) -> PrefixUs:
        """The same from the datasheet model."""
        return NO_PREFIX

    def variance(self, tables: Tables) -> Variance:
        """Error of its lookups, without prefixes."""
        return lambda batch, length: np.zeros(np.shape(batch))

    def work(self, gpu: GpuSpec, new: Any, kv_len: Any) -> AttentionWork:
        """Work of one call over some requests, per request or in total."""
        return AttentionWork(np.asarray(0.0), np.asarray(0.0), 1.0)

    def work_at(self, gpu: GpuSpec, batch: Floats, length: Floats) -> AttentionWork:
        """Work of equal requests without a prefix, at grid points."""
        return AttentionWork(np.zeros(len(batch)), np.zeros(len(batch)), 1.0)

    def query_bound(self, gpu: GpuSpec) -> QueryBound:
        """Roofline terms of several queries per sequence."""
        return QueryBound(0.0, 0.0, 0.0, NO_WINDOW)


@dataclass(frozen=True)
class GroupedHeads(StepAttention):
    """Attention of grouped heads."""

    heads: HeadShape

    @property
    def operator(self) -> str:
        """Name of the operator whose tables have it."""
        return "attention_decode" if self.is_decode else "attention_prefill"

    @property
    def window(self) -> int:
        """Maximum number of tokens that a query attends to; 0 without a window."""
        return self.heads.window

    @property
    def _tables_of(self) -> PlannedAttention:
        return ATTENTION[self.operator]

    def donors(self, tables: Tables) -> tuple[Key, ...]:
        """The head shape, or its donors."""
        return tuple(tuple(donor) for donor in self._tables_of.grid(tables, self.heads).donors)

    def block(self, tables: Tables, method: str) -> Floats:
        """Grid block of one layer; borrowed nodes are flagged."""
        return self._tables_of.block(tables, method, self.heads)

    def block_from_memory(self, tables: Tables) -> Floats:
        """Grid block of decodes whose KV cache is never in L2; prefill unchanged."""
        if not self.is_decode:
            return self.block(tables, "roofline")
        return self._tables_of.block_from_memory(tables, self.heads)

    def datasheet_block(self, gpu: GpuSpec) -> Floats:
        """The same from the datasheet model."""
        return self._tables_of.datasheet_block(self.heads, gpu)

    def modelled_from(self, tables: Tables) -> tuple[str, ...]:
        """The head_dim or cache format of its donors and the error, if it differs from its own."""
        donor = self._tables_of.grid(tables, self.heads).donors[0]
        if not is_modelled(self.heads, donor):
            return ()
        kv = "" if donor.kv_dtype == self.heads.kv_dtype else f" with {donor.kv_dtype} KV"
        error = modelled_error(self.operator, self.heads, donor)
        return (f"(modelled from head_dim {donor.head_dim}{kv}, ±{error:.0%})",)

    def prefix_us(self, tables: Tables) -> PrefixUs:
        """See :meth:`fastroof.operators.attention.AttentionPrefill.prefix_us`."""
        return self._priced(ATTENTION_PREFILL.prefix_us(tables, self.heads))

    def datasheet_prefix_us(self, gpu: GpuSpec) -> PrefixUs:
        """Its roofline at prefill attention's efficiency."""
        efficiency = ATTENTION_PREFILL.datasheet.efficiency
        pair_us, token_us = prefix_bound_us(self.heads, gpu)
        return self._priced((pair_us / efficiency, token_us / efficiency))

    def _priced(self, prices: tuple[float, float]) -> PrefixUs:
        return PrefixUs(0.0, 0.0, *prices) if self.heads.window else PrefixUs(*prices)

    def variance(self, tables: Tables) -> Variance:
        """Local errors of its tables, and of borrowing."""
        return partial(attention_variance, self._tables_of.local_errors(tables, self.heads))

    def work(self, gpu: GpuSpec, new: Any, kv_len: Any) -> AttentionWork:
        """Work of one call over some requests, per request."""
        return self._work(gpu, new, kv_len, 1)

    def work_at(self, gpu: GpuSpec, batch: Floats, length: Floats) -> AttentionWork:
        """Work of equal requests without a prefix."""
        return self._work(gpu, 1.0 if self.is_decode else length, length, batch)

    def _work(self, gpu: GpuSpec, q_len: Any, kv_len: Any, batch: Any) -> AttentionWork:
        _, nh, nkv, dh, window = heads = self.heads
        flops = attention_flops_within(nh, dh, q_len, kv_len, batch, window)
        moved = attention_bytes_within(nh, nkv, dh, q_len, kv_len, batch, window, heads.kv_bytes)
        return AttentionWork(flops, moved, gpu.peak("bf16"))

    def query_bound(self, gpu: GpuSpec) -> QueryBound:
        """FLOPs per (query, key) pair, and bytes per query and per token, as us."""
        pair_us, kv_us = prefix_bound_us(self.heads, gpu)
        query_us = float(self.heads.moved_bytes(1, 0)) / gpu.hbm_bytes_per_s * US_PER_S
        return QueryBound(pair_us, query_us, kv_us, float(self.heads.window or NO_WINDOW))


@dataclass(frozen=True)
class Mixer(StepAttention):
    """A kernel of an operator whose tables are not grids: latent, sparse or linear attention."""

    kernel: MixerKernel
    window: int = 0

    @property
    def operator(self) -> str:
        """Name of the operator whose tables have it."""
        return self.kernel.operator

    @property
    def _own(self) -> RaggedOperator:
        return cast(RaggedOperator, OPERATORS[self.kernel.operator])

    @property
    def is_modelled_unasked(self) -> bool:
        """Whether the datasheet model may replace a kernel without ``allow_modelled``."""
        return self._own.is_modelled_unasked(self.kernel.key)

    def donors(self, tables: Tables) -> tuple[Key, ...]:
        """Its kernels, or their donors."""
        return tuple(one.key for one in self._own.step_kernels(tables, self.kernel.key))

    def block(self, tables: Tables, method: str) -> Floats:
        """Grid block of one layer, sampled at the measured sizes."""
        if method != "roofline":
            raise LookupInputError(
                f"method={method!r} times grouped-head attention only, and {self.operator} has none; "
                "use method='roofline'"
            )
        operator, key = self._own, self.kernel.key

        def latency(batch: Floats, length: Floats) -> tuple[Floats, Flags]:
            return operator.step_latency(tables, key, self._sizes(batch, length))

        batch, length = self._nodes(tables)
        return sampled_block(latency, self._work_us(tables.gpu), batch, length)

    def _sizes(self, batch: Any, length: Any, prefix: Any = 0.0) -> dict[str, Floats]:
        at = (np.asarray(size, np.float64) for size in (batch, length, prefix))
        sizes = self._own.step_sizes(self.is_decode, *at)
        return {name: np.array(np.broadcast_to(v, np.shape(batch)), np.float64) for name, v in sizes.items()}

    def _nodes(self, tables: Tables) -> tuple[Floats, Floats]:
        """Batch sizes and lengths at which any of its kernels was measured, and its window."""
        batches: list[Any] = []
        lengths: list[Any] = [[float(self.window)]] if self.window else []
        for key in self.donors(tables):
            rows = tables.rows(self._own, key)
            batches.append(rows["batch_size"])
            lengths.append(self._own.step_lengths(self.is_decode, rows))
        batch, length = (np.unique(np.concatenate(v)).astype(np.float64) for v in (batches, lengths))
        is_tabulated = not self.is_decode or key_columns(np.r_[0.0, length, SIZE_LIMIT]) is not None
        return batch, length if is_tabulated else nearest_key_starts(length, KEY_BITS)

    def _work_us(self, gpu: GpuSpec) -> Any:
        operator = self._own
        work_us = operator.work_us(self.kernel.key, gpu)

        def at(batch: Floats, length: Floats) -> Floats:
            sizes = self._sizes(batch, length)
            return np.asarray(work_us(*operator.coordinates(sizes)))

        return at

    def datasheet_block(self, gpu: GpuSpec) -> Floats:
        """Grid block of one layer from its roofline: launch floor plus B at an efficiency."""
        kind, work_us = self._own.datasheet_of(self.kernel.key), self._work_us(gpu)
        if not np.isfinite(work_us(np.ones(1), np.ones(1))).all():
            have = ", ".join(sorted(gpu.peak_flops_per_s))
            raise GpuError(
                f"{gpu.title} has no peak for a format that {self._own.name} computes in (an indexer may "
                f"need fp8); it has {have}"
            )

        def latency(batch: Floats, length: Floats) -> tuple[Floats, Flags]:
            us = kind.launch_us + work_us(batch, length) / kind.efficiency
            return us, np.full(len(us), ORIGIN_MODELLED, np.uint8)

        lengths = np.union1d(LENGTHS, [float(self.window)] if self.window else [])
        return sampled_block(latency, work_us, np.array([1.0]), lengths)

    def prefix_us(self, tables: Tables) -> PrefixUs:
        """Time per pair and token of a prefix, from its operator."""
        return self._own.prefix_us(tables, self.kernel.key, self.window)

    def datasheet_prefix_us(self, gpu: GpuSpec) -> PrefixUs:
        """Time per pair and token of a prefix, from B at an efficiency."""
        prices = self._own.prefix_prices(self.kernel.key, gpu, self.window)
        return prices.times(1.0 / self._own.datasheet_of(self.kernel.key).efficiency)

    def variance(self, tables: Tables) -> Variance:
        """The largest local error of its kernels, and of borrowing."""
        operator = self._own
        kernels = operator.step_kernels(tables, self.kernel.key)
        errors = tuple(operator.local_errors(tables, one.key) for one in kernels)
        return MixerErrors(self, errors, max(one.error for one in kernels) ** 2)

    def at(self, batch: Floats, length: Floats) -> tuple[Floats, ...]:
        """Table coordinates of grid points."""
        return tuple(np.asarray(c, np.float64) for c in self._own.coordinates(self._sizes(batch, length)))

    def work(self, gpu: GpuSpec, new: Any, kv_len: Any) -> AttentionWork:
        """Work of one call over some requests, taken as equal: weights are read once."""
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
        """Work of equal requests without a prefix."""
        return self._work(gpu, self._sizes(batch, length))

    def _work(self, gpu: GpuSpec, sizes: dict[str, Floats]) -> AttentionWork:
        op = self._own
        columns = op.columns_at(self.kernel.key, op.coordinates(sizes), None)
        flops = np.asarray(op.flops(columns), np.float64)
        with np.errstate(invalid="ignore"):
            # no tokens at all
            peak = op.peaks(columns, gpu)[0]
        return AttentionWork(flops, np.asarray(op.moved_bytes(columns)), np.where(flops > 0.0, peak, 1.0))

    def query_bound(self, gpu: GpuSpec) -> QueryBound:
        """By differences of B: one token more, and one sequence more."""
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


class MixerErrors(NamedTuple):
    """Errors of a mixer's lookups: a :data:`Variance`."""

    mixer: Mixer
    errors: tuple[LocalErrors, ...]
    borrowed: float

    def __call__(self, batch: Floats, length: Floats) -> Floats:
        """Squared relative standard error at (batch, length)."""
        # log of a prefix of 0
        at = [c + 1.0 for c in self.mixer.at(np.asarray(batch), np.asarray(length))]
        variances: Sequence[Floats] = [relative_variance(one, at) for one in self.errors]
        return np.asarray(np.max(variances, axis=0) + self.borrowed)


def scaled_block(block: Floats, num_layers: float) -> Floats:
    """Scale a block of one call to all layers, or to a share; cells are latencies, or work / latency."""
    scaled = block.copy()
    cells = scaled[cells_of(scaled)]
    if block[FORM] == FORM_LATENCY:
        cells *= num_layers
    else:
        cells /= num_layers
    return scaled


def modelled_block(block: Floats, factor: float) -> Floats:
    """Return a block of ``factor`` times the latency whose every node is modelled."""
    modelled = scaled_block(block, factor)
    modelled[cells_of(block).stop :] = ORIGIN_MODELLED
    return modelled


def step_attention(call: AttentionCall | MixerCall, is_decode: bool) -> StepAttention:
    """Return one phase of a call."""
    if isinstance(call, AttentionCall):
        return GroupedHeads(is_decode, heads_of(call))
    kernel = call.decode if is_decode else call.prefill
    return StepAttention(is_decode) if kernel is None else Mixer(is_decode, kernel, call.window)


def heads_of(call: AttentionCall) -> HeadShape:
    """Return a call's head shape, the key of attention tables."""
    return HeadShape(call.kv_dtype, call.num_q_heads, call.num_kv_heads, call.head_dim, call.window)
