"""Per-point work of a lookup besides the table: check sizes, add a prefix's time, compute the MFU.

NumPy would read and write every point several times; these loops do it once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastroof.arrays import Flags, Floats
from fastroof.compiled.jit import jit
from fastroof.compiled.layout import MODELLED

AttentionPrices = tuple[float, float, float]
"""Prefix prices of causal attention, us: per (query, prefix token) pair, per prefix token, peak per pair."""


@jit
def copied_sizes(source: Any, least: float, largest: float, out: Floats) -> bool:
    """Copy numbers to ``out``. Returns whether all are integers from ``least`` to ``largest``."""
    good = True
    for p in range(len(out)):
        x = np.float64(source[p])
        good &= (x >= least) & (x <= largest) & (x == np.floor(x))
        out[p] = x
    return bool(good)


# MFU: the work in units of the operator's smallest, times what that is in us at the peak, over latency


@jit
def gemm_mfu(m: Floats, n: Floats, k: Floats, unit_us: float, latency_us: Floats, out: Floats) -> None:
    """Compute the MFU of GEMMs."""
    for p in range(len(out)):
        out[p] = m[p] * n[p] * k[p] * unit_us / latency_us[p]


@jit
def decode_mfu(batch: Floats, kv_len: Floats, unit_us: float, latency_us: Floats, out: Floats) -> None:
    """Compute the MFU of decode attention."""
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
    """Add the prefix's time to causal attention. Returns whether every kv_len includes the new tokens."""
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
    """Compute the MFU of operators with one size."""
    for p in range(len(out)):
        out[p] = x[p] * unit_us / latency_us[p]
