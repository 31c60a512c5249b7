"""Attention as steps ask for it, of whatever kind: one phase of one layer's attention on one GPU.

A plan holds grid blocks over (batch, kv_len) of decodes and (batch, q_len) of prompts. Grouped heads have
tables that are such grids (:mod:`fastroof.operators.attention`); latent, sparse and linear attention have
others, which are looked up at a grid's nodes (:mod:`fastroof.plan.attention`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fastroof.arrays import Floats
from fastroof.config import GpuSpec
from fastroof.operators.attention import ATTENTION, ATTENTION_PREFILL
from fastroof.operators.attention_blocks import PlannedAttention
from fastroof.operators.attention_grids import attention_variance
from fastroof.operators.attention_work import (
    HeadShape,
    PrefixUs,
    attention_bytes_within,
    attention_flops_within,
    decode_attention_bytes,
    prefix_bound_us,
)
from fastroof.units import DTYPE_BYTES, US_PER_S

if TYPE_CHECKING:
    from fastroof.operators.operator import Key
    from fastroof.tables import Tables

NO_WINDOW = 2.0**62
"""Longer than any context."""


class Variance(Protocol):
    """How good some attention's lookups are, without prefixes."""

    def __call__(self, batch: Floats, length: Floats, /) -> Floats:
        """Squared relative standard error at (batch, length)."""


class AttentionWork(NamedTuple):
    """What some attention does."""

    flops: Floats
    moved_bytes: Floats
    peak: Any


class QueryBound(NamedTuple):
    """Roofline of decode attention with several queries a sequence, less its launch floor, us."""

    pair: float
    query: float
    kv: float
    window: float


class StepAttention(ABC):
    """One phase of a layer's attention; equal ones are equal objects."""

    is_decode: bool

    @property
    @abstractmethod
    def operator(self) -> str:
        """Whose tables have it."""

    @property
    @abstractmethod
    def window(self) -> int:
        """Tokens beyond which a query costs no more; 0 where it always grows."""

    @property
    def is_modelled_unasked(self) -> bool:
        """Whether the datasheet model may stand for a kernel without ``allow_modelled``."""
        return False

    @abstractmethod
    def check(self, tables: Tables) -> None:
        """Raise MissingTableError if nothing measured stands for it."""

    @abstractmethod
    def block(self, tables: Tables, method: str) -> Floats:
        """Grid block of one layer, as :func:`fastroof.compiled.grids.grid_value` reads it."""

    def block_from_memory(self, tables: Tables) -> Floats:
        """The same where no call finds a KV cache in the L2; of what is no grid of decodes as measured."""
        return self.block(tables, "roofline")

    @abstractmethod
    def datasheet_block(self, gpu: GpuSpec) -> Floats:
        """The same by the datasheet model."""

    @abstractmethod
    def sources(self, tables: Tables) -> tuple[str, ...]:
        """Sources of the kernels that stand for it."""

    @abstractmethod
    def prefix_us(self, tables: Tables) -> PrefixUs:
        """Price of a prefix in one layer's prompts."""

    @abstractmethod
    def datasheet_prefix_us(self, gpu: GpuSpec) -> PrefixUs:
        """The same by the datasheet model."""

    @abstractmethod
    def lender(self, tables: Tables) -> Key:
        """Key of the first kernel that stands for it."""

    @abstractmethod
    def variance(self, tables: Tables) -> Variance:
        """How good its lookups are, without prefixes."""

    @abstractmethod
    def work(self, gpu: GpuSpec, new: Any, kv_len: Any) -> AttentionWork:
        """Of one call over some requests, of all together or of each."""

    @abstractmethod
    def work_at(self, gpu: GpuSpec, batch: Floats, length: Floats) -> AttentionWork:
        """Of equal requests without a prefix, at each of some grid points."""

    @abstractmethod
    def query_bound(self, gpu: GpuSpec) -> QueryBound:
        """Of decodes."""


@dataclass(frozen=True)
class GroupedHeads(StepAttention):
    """Attention of grouped heads."""

    heads: HeadShape
    is_decode: bool

    @property
    def operator(self) -> str:
        """Whose tables have it."""
        return "attention_decode" if self.is_decode else "attention_prefill"

    @property
    def window(self) -> int:
        """Tokens that a query attends to at most."""
        return self.heads.window

    @property
    def _tables_of(self) -> PlannedAttention:
        return ATTENTION[self.operator]

    def check(self, tables: Tables) -> None:
        """Raise MissingTableError if nothing measured stands for it."""
        self._tables_of.grid(tables, self.heads)

    def block(self, tables: Tables, method: str) -> Floats:
        """Grid block of one layer; borrowed nodes say so."""
        return self._tables_of.block(tables, method, self.heads)

    def block_from_memory(self, tables: Tables) -> Floats:
        """Of decodes whose KV cache is never in the L2; of prompts as measured."""
        if not self.is_decode:
            return self.block(tables, "roofline")
        return self._tables_of.block_from_memory(tables, self.heads)

    def datasheet_block(self, gpu: GpuSpec) -> Floats:
        """The same by the datasheet model."""
        return self._tables_of.datasheet_block(self.heads, gpu)

    def sources(self, tables: Tables) -> tuple[str, ...]:
        """Sources of the head shape, or of the shapes that it is borrowed from."""
        donors = self._tables_of.grid(tables, self.heads).donors
        return tuple(tables.source_of(self.operator, tuple(one)) for one in donors)

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

    def lender(self, tables: Tables) -> Key:
        """Key of the head shape, or of the first that it is borrowed from."""
        return tuple(self._tables_of.grid(tables, self.heads).donors[0])

    def variance(self, tables: Tables) -> Variance:
        """Local errors of the tables behind it, and of borrowing."""
        return partial(attention_variance, self._tables_of.local_errors(tables, self.heads))

    def _sizes(self) -> tuple[int, int, int]:
        return self.heads.num_q_heads, self.heads.num_kv_heads, self.heads.head_dim

    def work(self, gpu: GpuSpec, new: Any, kv_len: Any) -> AttentionWork:
        """Of one call over some requests, of each."""
        nh, nkv, dh = self._sizes()
        width, window = DTYPE_BYTES[self.heads.kv_dtype], self.heads.window
        flops = attention_flops_within(nh, dh, new, kv_len, 1, window)
        moved = attention_bytes_within(nh, nkv, dh, new, kv_len, 1, window, width)
        return AttentionWork(flops, moved, gpu.peak("bf16"))

    def work_at(self, gpu: GpuSpec, batch: Floats, length: Floats) -> AttentionWork:
        """Of equal requests without a prefix."""
        nh, nkv, dh = self._sizes()
        width, window = DTYPE_BYTES[self.heads.kv_dtype], self.heads.window
        q_len: Any = 1.0 if self.is_decode else length
        flops = attention_flops_within(nh, dh, q_len, length, batch, window)
        moved = attention_bytes_within(nh, nkv, dh, q_len, length, batch, window, width)
        return AttentionWork(flops, moved, gpu.peak("bf16"))

    def query_bound(self, gpu: GpuSpec) -> QueryBound:
        """FLOPs of a pair; bytes of a query and of a token."""
        pair_us, kv_us = prefix_bound_us(self.heads, gpu)
        width = DTYPE_BYTES[self.heads.kv_dtype]
        query_bytes = float(decode_attention_bytes(*self._sizes(), 0, 1, width))
        query_us = query_bytes / gpu.hbm_bytes_per_s * US_PER_S
        return QueryBound(pair_us, query_us, kv_us, float(self.heads.window or NO_WINDOW))
