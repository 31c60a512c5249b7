"""Layout constants that packing needs too; without numba, so that packing loads without it."""

from __future__ import annotations

__all__ = ["FORM_DECODE_RATE", "FORM_LATENCY", "FORM_PREFILL_RATE", "GUIDE_HEADER"]

GUIDE_HEADER = 6
"""Slots of an axis' header in its guides, see :mod:`fastroof.compiled.guides`."""

# A grid block's cells hold latencies, or work / latency.
FORM_LATENCY, FORM_DECODE_RATE, FORM_PREFILL_RATE = 0, 1, 2
