"""How many processors there are for threads."""

from __future__ import annotations

import os

__all__ = ["usable_processors"]


def usable_processors() -> int:
    """Processors that this process may run on, which a container or ``taskset`` makes fewer."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
