"""Loops that only move a workload's bytes: a lower limit of its time on one thread."""

from __future__ import annotations

from fastroof.arrays import Flags, Floats, Ints
from fastroof.compiled.jit import jit


@jit
def stream_decodes(batch_size: Ints, kv_len: Ints, out: Floats) -> None:
    """Read two sizes per step, write one float64."""
    for i in range(len(out)):
        out[i] = batch_size[i] + kv_len[i]


@jit
def stream_prefills(new_tokens: Ints, context_len: Ints, batch_size: Ints, out: Floats) -> None:
    """Read three sizes per step, write one float64."""
    for i in range(len(out)):
        out[i] = new_tokens[i] + context_len[i] + batch_size[i]


@jit
def stream_requests(new_tokens: Ints, context_len: Ints, offsets: Ints, out: Floats) -> None:
    """Read two sizes per request and one offset per step, write one float64 per step."""
    for i in range(len(out)):
        # slice indices start at 0: for others LLVM cannot prove that none is negative,
        # and the loop stays scalar and is four times slower
        new = new_tokens[offsets[i] : offsets[i + 1]]
        context = context_len[offsets[i] : offsets[i + 1]]
        total = 0
        for r in range(len(new)):
            total += new[r] + context[r]
        out[i] = total


@jit
def stream_out(value: float, out: Floats) -> None:
    """Write one float64 per point of a grid, whose axes stay in the cache."""
    for i in range(len(out)):
        out[i] = value


@jit
def stream_lookups(a: Ints, b: Ints, c: Ints, latency_us: Floats, mfu: Floats, origin: Flags) -> None:
    """Read up to three sizes per point (arrays may repeat), write what a lookup returns."""
    for i in range(len(latency_us)):
        total = a[i] + b[i] + c[i]
        latency_us[i] = total
        mfu[i] = total
        origin[i] = 1
