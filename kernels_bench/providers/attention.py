"""Attention inputs for every provider: heads, contiguous or paged KV, and what is checked of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fastroof.arrays import Longs
from fastroof.operators.attention_work import attention_bytes
from fastroof.units import DTYPE_BYTES
from kernels_bench.protocol import Point
from kernels_bench.providers import references
from kernels_bench.providers.device import Device, take
from kernels_bench.providers.paging import PagedBatch, ragged_offsets
from kernels_bench.providers.random_inputs import InputMaker
from kernels_bench.providers.rotating import RotatingCalls, count_sets, sample

CHECKED_SEQUENCES: Final = 4
CHECKED_HEADS: Final = 4
CHECKED_QUERIES: Final = 32


@dataclass(frozen=True)
class Heads:
    """Head shape of one GPU."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    # Tokens that a query attends to, itself included; 0 for all.
    window: int = 0

    @classmethod
    def of(cls, point: Point) -> Heads:
        """Take the head shape from a point's columns."""
        values = point.values
        window = int(values.get("window", 0))
        return cls(int(values["num_q_heads"]), int(values["num_kv_heads"]), int(values["head_dim"]), window)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Query heads, KV heads, width of one."""
        return self.num_q_heads, self.num_kv_heads, self.head_dim

    @property
    def window_left(self) -> int:
        """Tokens before its own that a query attends to, as kernels count a window; -1 for all."""
        return self.window - 1

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return float(self.head_dim**-0.5)


def refuses_heads(point: Point) -> str | None:
    """Return why an attention point's heads are not measured by any provider; None where they are."""
    heads = Heads.of(point)
    if heads.num_q_heads % heads.num_kv_heads:
        return f"{heads.num_q_heads} query heads do not divide by {heads.num_kv_heads} KV heads"
    if int(point.values.get("q_len", 1)) > int(point.values["kv_len"]):
        return f"{point.values['q_len']} new tokens are more than the {point.values['kv_len']} attended to"
    return None


@dataclass(frozen=True)
class AttentionSets:
    """Input sets of one attention point."""

    heads: Heads
    new_tokens: Longs
    kv_lens: Longs
    # Shape (sets, tokens, num_q_heads, head_dim).
    q: Any
    out: Any
    # Contiguous: shape (sets, KV tokens, num_kv_heads, head_dim). Paged: shape (sets, pages, page_size,
    # num_kv_heads, head_dim), each set its own slice of one pool, so that all sets share one page table.
    k: Any
    v: Any
    # Pages of the sequences; None where K and V are contiguous.
    batch: PagedBatch | None
    rotated_bytes: int

    @property
    def num_sets(self) -> int:
        """Input sets."""
        return int(self.q.shape[0])

    @property
    def paged(self) -> PagedBatch:
        """Pages of the sequences, of sets that :func:`paged_sets` made."""
        assert self.batch is not None
        return self.batch

    def each(self, attend: Callable[[Any, Any, Any, Any], None]) -> Callable[[int], None]:
        """Return the launch that calls ``attend(q, k, v, out)`` on the set of an index."""
        return lambda i: attend(self.q[i], self.k[i], self.v[i], self.out[i])

    def sequence_kv(self, index: int, sequence: int, kv_head: int) -> tuple[Any, Any]:
        """Return K and V of one head of one sequence, each of shape (kv_len, head_dim)."""
        kv_len = int(self.kv_lens[sequence])
        if self.batch is None:
            start = int(ragged_offsets(self.kv_lens)[sequence])
            rows = slice(start, start + kv_len)
            return self.k[index, rows, kv_head], self.v[index, rows, kv_head]
        import torch

        pages = torch.as_tensor(self.batch.pages_of(sequence), dtype=torch.int64, device=self.k.device)
        k = take(self.k[index, :, :, kv_head], pages).flatten(0, 1)
        v = take(self.v[index, :, :, kv_head], pages).flatten(0, 1)
        return k[:kv_len], v[:kv_len]


def batch_of(point: Point) -> tuple[Longs, Longs]:
    """Return new tokens and KV lengths of a point's sequences."""
    values = point.values
    batch_size, kv_len = int(values["batch_size"]), int(values["kv_len"])
    return np.full(batch_size, int(values.get("q_len", 1)), np.int64), np.full(batch_size, kv_len, np.int64)


def _num_sets(
    heads: Heads, new_tokens: Longs, kv_tokens: int, kv_dtype: str, device: Device, max_bytes: int
) -> tuple[int, int]:
    """Return how many sets, and the bytes of one: of ``kv_tokens`` in all, pages' ends included."""
    set_bytes = int(attention_bytes(*heads.sizes, new_tokens.sum(), kv_tokens, 1, DTYPE_BYTES[kv_dtype]))
    return count_sets(set_bytes, device.rotated_bytes, max_bytes), set_bytes


def contiguous_sets(point: Point, device: Device, seed: int, max_bytes: int) -> AttentionSets:
    """Make sets whose K and V lie contiguous, one sequence after the other."""
    heads = Heads.of(point)
    new_tokens, kv_lens = batch_of(point)
    tokens, kv_tokens = int(new_tokens.sum()), int(kv_lens.sum())
    sets, set_bytes = _num_sets(heads, new_tokens, kv_tokens, "bf16", device, max_bytes)
    make = InputMaker(device, seed)
    q_shape = (sets, tokens, heads.num_q_heads, heads.head_dim)
    kv_shape = (sets, kv_tokens, heads.num_kv_heads, heads.head_dim)
    return AttentionSets(
        heads=heads,
        new_tokens=new_tokens,
        kv_lens=kv_lens,
        q=make.normal(*q_shape),
        out=make.poisoned(*q_shape),
        k=make.normal(*kv_shape),
        v=make.normal(*kv_shape),
        batch=None,
        rotated_bytes=sets * set_bytes,
    )


def paged_sets(
    point: Point, device: Device, seed: int, max_bytes: int, *, packed: bool, q_dtype: str = "bf16"
) -> AttentionSets:
    """Make sets whose K and V lie in pages of one pool."""
    heads = Heads.of(point)
    new_tokens, kv_lens = batch_of(point)
    batch = PagedBatch.make(new_tokens, kv_lens, seed, window=heads.window)
    kv_dtype = "fp8" if point.values["kv_dtype"] == "fp8" else "bf16"
    page = batch.page_size
    sets, set_bytes = _num_sets(heads, new_tokens, batch.num_pages * page, kv_dtype, device, max_bytes)
    make = InputMaker(device, seed)
    q_shape = (sets, batch.num_tokens, heads.num_q_heads, heads.head_dim)
    if packed:
        pool = make.normal(
            sets, batch.num_pages, page, heads.num_kv_heads, 2 * heads.head_dim, dtype=kv_dtype
        )
        k, v = pool.split(heads.head_dim, dim=-1)
    else:
        pool = make.normal(sets, batch.num_pages, 2, page, heads.num_kv_heads, heads.head_dim, dtype=kv_dtype)
        k, v = pool.unbind(dim=2)
    return AttentionSets(
        heads=heads,
        new_tokens=new_tokens,
        kv_lens=kv_lens,
        q=make.normal(*q_shape, dtype=q_dtype),
        out=make.poisoned(*q_shape),
        k=k,
        v=v,
        batch=batch,
        rotated_bytes=sets * set_bytes,
    )


def prepare_attention(
    sets: AttentionSets, kernel: str, launch: Callable[[int], None], seed: int
) -> RotatingCalls:
    """Bind an attention launch to its sets and to what is checked of it."""
    starts = ragged_offsets(sets.new_tokens)
    chosen = [
        (int(sequence), int(head), sample(int(sets.new_tokens[sequence]), CHECKED_QUERIES, seed + 2))
        for sequence in _checked_sequences(sets.kv_lens, seed)
        for head in sample(sets.heads.num_q_heads, CHECKED_HEADS, seed + 1)
    ]

    def read(index: int) -> Any:
        import torch

        outputs = [sets.out[index, int(starts[s]) + torch.as_tensor(rows), head] for s, head, rows in chosen]
        return torch.cat(outputs)

    def expect(index: int) -> Any:
        import torch

        outputs = []
        for sequence, head, rows in chosen:
            k, v = sets.sequence_kv(index, sequence, head // sets.heads.group_size)
            tokens = torch.as_tensor(int(starts[sequence]) + rows, device=sets.q.device)
            q = take(sets.q[index, :, head], tokens)
            before = int(sets.kv_lens[sequence] - sets.new_tokens[sequence])
            positions = torch.as_tensor(rows + before, device=q.device)
            heads = sets.heads
            outputs.append(references.attention_rows(q, k, v, positions, heads.scale, heads.window))
        return torch.cat(outputs)

    return RotatingCalls(kernel, sets.num_sets, sets.rotated_bytes, launch, read, expect)


def _checked_sequences(kv_lens: Longs, seed: int) -> list[int]:
    """First, last, shortest and longest, and a random one if there are more."""
    count = len(kv_lens)
    always = [0, count - 1, int(kv_lens.argmin()), int(kv_lens.argmax())]
    return sorted({*always, *sample(count, 3, seed).tolist()})[: CHECKED_SEQUENCES + 1]
