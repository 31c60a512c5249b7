"""Layout constants that packing needs too, and widths; without numba, so that packing loads without it."""

from __future__ import annotations

__all__ = ["FORM_DECODE_RATE", "FORM_LATENCY", "FORM_PREFILL_RATE", "GUIDE_HEADER", "LANES", "TILE"]

GUIDE_HEADER = 6
"""Slots of an axis' header in its guides, see :mod:`fastroof.compiled.guides`."""

# A grid block's cells hold latencies, or work / latency.
FORM_LATENCY, FORM_DECODE_RATE, FORM_PREFILL_RATE = 0, 1, 2

LANES = 8
"""Elements that ``line_lanes`` takes at once, see :mod:`fastroof.compiled.llvm`."""

TILE = 64
"""Requests that ``request_lanes`` takes at most, see :mod:`fastroof.compiled.request_lanes`."""
