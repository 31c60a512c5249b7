"""Loops as the plain Python that they are written in, for a process that asks little.

A command that times one step waits longer for numba to be imported than for the step, and much longer where
the loops were not compiled yet. Loops are Python that means the same uncompiled, to the last bit.
"""

from __future__ import annotations

import sys

__all__ = ["is_plain", "run_plain"]

_chosen: list[bool] = []


def run_plain() -> bool:
    """Have all loops of this process run as Python, unless some were imported as what is compiled."""
    if f"{__package__}.jit" not in sys.modules:
        _chosen[:] = [True]
    return is_plain()


def is_plain() -> bool:
    """Whether :func:`run_plain` had this process's loops run as Python."""
    return bool(_chosen)
