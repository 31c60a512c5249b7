"""What a lookup does at every point besides looking it up: check sizes, price a prefix, state the MFU.

In NumPy each of these reads and writes every point several times; here once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastroof.arrays import Flags, Floats
from fastroof.compiled.jit import jit
from fastroof.compiled.layout import MODELLED

AttentionPrices = tuple[float, float, float]
"""Of causal attention, us: a (query, prefix token) pair, a prefix token, and a pair at the peak."""


@jit
def copied_sizes(source: Any, least: float, largest: float, out: Floats) -> bool:
    """Copy numbers to ``out``; whether every one is a whole number from ``least`` to ``largest``."""
    good = True
    for p in range(len(out)):
        x = np.float64(source[p])
        good &= (x >= least) & (x <= largest) & (x == np.floor(x))
        out[p] = x
    return bool(good)


# MFU: the work in units of the operator's smallest, times what that is in us at the peak, over latency


@jit
def gemm_mfu(m: Floats, n: Floats, k: Floats, unit_us: float, latency_us: Floats, out: Floats) -> None:
    """MFU of GEMMs."""
    for p in range(len(out)):
        out[p] = m[p] * n[p] * k[p] * unit_us / latency_us[p]


@jit
def decode_mfu(batch: Floats, kv_len: Floats, unit_us: float, latency_us: Floats, out: Floats) -> None:
    """MFU of decode attention."""
    for p in range(len(out)):
        out[p] = batch[p] * kv_len[p] * unit_us / latency_us[p]


@jit
def prefill_us_and_mfu(
    batch: Floats,
    q_len: Floats,
    kv_len: Floats,
    prices: AttentionPrices,
    out: Floats,
    mfu: Floats,
    origin: Flags,
) -> bool:
    """Add the price of its prefix to causal attention; whether kv_len counts the new tokens everywhere."""
    good = True
    pair_us, token_us, unit_us = prices
    for p in range(len(out)):
        q = q_len[p]
        prefix = kv_len[p] - q
        good &= prefix >= 0.0
        us = out[p] + (pair_us * (batch[p] * q * prefix) + token_us * (batch[p] * prefix))
        out[p] = us
        mfu[p] = batch[p] * (q * prefix + q * (q + 1.0) * 0.5) * unit_us / us
        origin[p] = MODELLED if prefix > 0.0 else origin[p]
    return bool(good)


@jit
def curve_mfu(x: Floats, unit_us: float, latency_us: Floats, out: Floats) -> None:
    """MFU of what has one size."""
    for p in range(len(out)):
        out[p] = x[p] * unit_us / latency_us[p]
