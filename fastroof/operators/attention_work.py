"""Work of attention: head shapes, FLOPs, compulsory bytes, rooflines, and the price of a prefix.

Attention computes in bf16 for every KV dtype.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import ORIGIN_EXTRAPOLATED, Column
from fastroof.config.gpu import GpuSpec
from fastroof.errors import LookupInputError
from fastroof.operators.elementwise import L2_MULTIPLE
from fastroof.operators.operator import Columns, Real, as_floats, dtype_peaks
from fastroof.pack import PackedGrid, grid_cells
from fastroof.pack.ragged import RaggedTable
from fastroof.units import ACTIVATION_BYTES, KV_BYTES, KV_SCALE_BYTES, US_PER_S

BATCH: Final = Column("batch_size", "int", "sequences", "sequences in the call")
PREFILL_AXES: Final = (
    BATCH,
    Column("q_len", "int", "tokens", "new tokens of each sequence"),
    Column("kv_len", "int", "tokens", "tokens of each sequence: prefix plus q_len"),
)
DECODE_AXES: Final = (
    BATCH,
    Column("kv_len", "int", "tokens", "tokens of each sequence, including the new one"),
)
PREFILL_ABOUT: Final = "q-len counts the new tokens of a sequence, kv-len the prefix and the new tokens."
SEQ_LEN: Final = Column("seq_len", "int", "tokens", "tokens of the one sequence")


NEAREST_KV: Final = dict.fromkeys(("nvfp4", "int8_per_token_head"), ("fp8", "bf16"))
"""Cache formats that no table has, and measured ones that they are modelled from, the nearest first."""


class HeadShape(NamedTuple):
    """Key of an attention kernel on one GPU, after tensor parallelism; window 0 is full attention."""

    kv_dtype: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 0

    @property
    def group_size(self) -> float:
        """Query heads that share one KV head."""
        return self.num_q_heads / self.num_kv_heads

    @property
    def kv_bytes(self) -> float:
        """Bytes of an element of the KV cache, with its share of the scales."""
        return KV_BYTES[self.kv_dtype] + KV_SCALE_BYTES.get(self.kv_dtype, 0) / self.head_dim

    def flops(self, q_len: Real, kv_len: Real) -> Floats:
        """FLOPs of a causal call of one sequence, window aside."""
        return attention_flops(self.num_q_heads, self.head_dim, q_len, kv_len)

    def moved_bytes(self, q_len: Real, kv_len: Real, batch_size: Real = 1) -> Floats:
        """Bytes of a call, window aside."""
        heads = (self.num_q_heads, self.num_kv_heads, self.head_dim)
        return attention_bytes(*heads, q_len, kv_len, batch_size, self.kv_bytes)

    @property
    def kind(self) -> tuple[int, str, int]:
        """head_dim, kv_dtype and window: shapes of one kind can be donors to each other."""
        return self.head_dim, self.kv_dtype, self.window

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return f"{self.num_q_heads}-{self.num_kv_heads}-{self.head_dim} ({self.kv_dtype} KV{window})"


def check_kv_len(q_len: Floats, kv_len: Floats) -> None:
    """Raise LookupInputError for a kv_len below q_len."""
    wrong = np.flatnonzero(kv_len < q_len)
    if len(wrong):
        raise LookupInputError(
            f"kv_len {int(kv_len[wrong[0]])} is less than q_len {int(q_len[wrong[0]])}: "
            "kv_len counts the prefix and the new tokens"
        )


def attention_flops(
    num_q_heads: Real, head_dim: Real, q_len: Real, kv_len: Real, batch_size: Real = 1
) -> Floats:
    """FLOPs of causal attention per sequence: ``4 nh dh (q ctx + q (q + 1) / 2)``, ctx = kv_len - q_len."""
    q = as_floats(q_len)
    pairs = q * (as_floats(kv_len) - q) + q * (q + 1.0) / 2.0
    return 4.0 * as_floats(num_q_heads) * as_floats(head_dim) * pairs * as_floats(batch_size)


def attention_bytes(
    num_q_heads: Real,
    num_kv_heads: Real,
    head_dim: Real,
    q_len: Real,
    kv_len: Real,
    batch_size: Real = 1,
    kv_bytes: float = 2,
) -> Floats:
    """Bytes of attention: queries and outputs in bf16, keys and values once."""
    q_and_o = 2.0 * ACTIVATION_BYTES * as_floats(q_len) * as_floats(num_q_heads)
    kv = 2.0 * kv_bytes * as_floats(kv_len) * as_floats(num_kv_heads)
    return (q_and_o + kv) * as_floats(head_dim) * as_floats(batch_size)


def decode_attention_flops(num_q_heads: Real, head_dim: Real, kv_len: Real, batch_size: Real) -> Floats:
    """FLOPs of decode attention: ``4 nh dh kv_len`` per sequence."""
    return attention_flops(num_q_heads, head_dim, 1, kv_len, batch_size)


def decode_attention_bytes(
    num_q_heads: Real,
    num_kv_heads: Real,
    head_dim: Real,
    kv_len: Real,
    batch_size: Real,
    kv_bytes: float = 2,
) -> Floats:
    """Bytes of decode attention: the KV cache once, one query and one output per sequence."""
    return attention_bytes(num_q_heads, num_kv_heads, head_dim, 1, kv_len, batch_size, kv_bytes)


def attention_flops_within(
    num_q_heads: Real, head_dim: Real, q_len: Real, kv_len: Real, batch_size: Real, window: Real
) -> Floats:
    """Causal FLOPs within a window (0: all tokens): a growing past, then the window."""
    q, kv = as_floats(q_len), as_floats(kv_len)
    reach = np.where(as_floats(window) > 0.0, window, kv)
    growing = np.clip(reach - (kv - q), 0.0, q)
    within = attention_flops(num_q_heads, head_dim, growing, kv - q + growing, batch_size)
    return within + decode_attention_flops(
        num_q_heads, head_dim, reach, (q - growing) * as_floats(batch_size)
    )


def attention_bytes_within(
    num_q_heads: Real,
    num_kv_heads: Real,
    head_dim: Real,
    q_len: Real,
    kv_len: Real,
    batch_size: Real,
    window: Real,
    kv_bytes: float = 2,
) -> Floats:
    """Bytes of attention within a window (0: all tokens): queries, outputs, and KV that any query reads."""
    kv = as_floats(kv_len)
    reach = np.where(as_floats(window) > 0.0, window, kv)
    seen = np.minimum(kv, reach + as_floats(q_len) - 1.0)
    return attention_bytes(num_q_heads, num_kv_heads, head_dim, q_len, seen, batch_size, kv_bytes)


def pairs_within(tokens: Real, window: Real) -> Floats:
    """(query, key) pairs of a sequence's first tokens, at most ``window`` per query."""
    within = np.minimum(as_floats(tokens), as_floats(window))
    return np.asarray(within * (within + 1.0) * 0.5 + (as_floats(tokens) - within) * as_floats(window))


def prefix_within(q_len: Real, kv_len: Real, window: Real) -> tuple[Floats, Floats]:
    """(query, prefix token) pairs of a sequence within a window, and prefix tokens that any query reads."""
    q, kv = as_floats(q_len), as_floats(kv_len)
    crossed = pairs_within(kv, window) - pairs_within(kv - q, window) - pairs_within(q, window)
    return crossed, np.minimum(kv - q, as_floats(window) - 1.0)


def prefix_bound_us(shape: HeadShape, gpu: GpuSpec) -> tuple[float, float]:
    """Roofline of a prefix in prefill: us per (query, prefix token) pair, and us per prefix token."""
    no_prefix, one = (float(shape.moved_bytes(1, kv)) for kv in (1, 2))
    pair_us = float(shape.flops(1, 1)) / gpu.peak("bf16") * US_PER_S
    return pair_us, (one - no_prefix) / gpu.hbm_bytes_per_s * US_PER_S


def reads_kv_peaks(columns: Columns, gpu: GpuSpec) -> tuple[Floats, Floats]:
    """Peaks of attention rows: bf16, and the KV dtype, in which some kernels compute."""
    words = columns["kv_dtype"]
    peak = np.full(len(words), dtype_peaks(np.array(["bf16"], object), gpu)[0])
    return peak, np.fmax(peak, dtype_peaks(words, gpu))


def prefill_flops_conventions(columns: Columns, head_dim: Array, exact: Floats) -> dict[str, Floats]:
    """FLOPs of causal attention of whole prompts by each convention of published files."""
    s = columns["q_len"]
    square = decode_attention_flops(columns["num_q_heads"], head_dim, s, s)
    return {
        "FLOPs of S^2 / 2": square / 2.0,
        "exact causal FLOPs": exact,
        "FLOPs of S^2 / 1.8": square / 1.8,
        "FLOPs of S^2, not halved": square,
    }


class PrefixUs(NamedTuple):
    """Price of a prefix, us: per (query, prefix token) pair and per token; both also within a window."""

    pair: float = 0.0
    token: float = 0.0
    window_pair: float = 0.0
    window_token: float = 0.0

    def times(self, factor: float, within: float | None = None) -> PrefixUs:
        """Multiply the price, and its part within the window by another factor."""
        near = factor if within is None else within
        return PrefixUs(
            factor * self.pair, factor * self.token, near * self.window_pair, near * self.window_token
        )


NO_PREFIX: Final = PrefixUs()

CHUNK: Final = 128.0
"""Fewest new tokens that show the price of a prefix; launches hide it in shorter prompts."""


def measured_price(table: RaggedTable, prices: PrefixUs, window: int) -> tuple[float, float]:
    """Latency of measured prefixes over their roofline: beyond a window and within it, each at least 1."""
    batch, q_len, prefix = table.points()
    fresh_us, origin = np.empty(len(batch)), np.zeros(len(batch), np.uint8)
    table.latency((batch, q_len, np.zeros_like(prefix)), fresh_us, origin)
    far = batch * prefix * (prices.pair * q_len + prices.token)
    near = np.zeros_like(far)
    if window:
        pairs, tokens = prefix_within(q_len, q_len + prefix, window)
        near = batch * (prices.window_pair * pairs + prices.window_token * tokens)
    is_usable = (prefix > 0.0) & (q_len >= CHUNK)
    if not is_usable.any():
        return 1.0, 1.0
    shares: Floats = (np.stack([far, near], axis=1) / table.latency_us[:, None])[is_usable]
    paid = (1.0 - fresh_us / table.latency_us)[is_usable]
    beyond = max(1.0, float(np.linalg.lstsq(shares, paid, rcond=None)[0][0]))
    within = np.linalg.lstsq(shares[:, 1:], paid - beyond * shares[:, 0], rcond=None)[0]
    return beyond, max(1.0, float(within[0]))


def grid_from_memory(grid: PackedGrid, shape: HeadShape, l2_bytes: int) -> PackedGrid:
    """Return a decode grid in which no call finds its KV cache in L2.

    A node below the line through the first two batches' streaming nodes is moved onto it and marked
    extrapolated.
    """
    batch, kv_len = grid.y_axis[1:-1], grid.x_axis[1:-1]
    seen = np.minimum(kv_len, shape.window) if shape.window else kv_len
    moved = shape.moved_bytes(1, seen, batch[:, None])
    table, flags = grid.cells[..., 0].copy(), grid.flags.copy()
    for row, (call_us, call_bytes) in enumerate(zip(grid.cells[1:-1, 1:-1, 0], moved, strict=True), start=1):
        streams = np.flatnonzero(call_bytes >= L2_MULTIPLE * l2_bytes)
        if l2_bytes <= 0 or len(streams) < 2:
            continue
        near, far = streams[:2]
        if call_bytes[far] <= call_bytes[near]:
            continue
        byte_us = (call_us[far] - call_us[near]) / (call_bytes[far] - call_bytes[near])
        line_us = call_us[near] - byte_us * (call_bytes[near] - call_bytes)
        below = np.flatnonzero((np.arange(len(call_us)) < near) & (line_us > call_us))
        table[row, 1 + below] = line_us[below]
        flags[row, 1 + below] = np.maximum(flags[row, 1 + below], ORIGIN_EXTRAPOLATED)
    cells = grid_cells(grid.y_axis, grid.x_axis, table, grid.roofline)
    return PackedGrid(grid.y_axis, grid.x_axis, cells, flags, grid.roofline, grid.form)
