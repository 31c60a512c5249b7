"""Processors and memory that this process may use."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

_M_ARENA_MAX: Final = -8  # of malloc.h


def usable_processors() -> int:
    """Return how many processors a container's or ``taskset``'s limit lets this process use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_heaps(most: int) -> None:
    """Let threads share glibc's heaps, each of which holds what its threads no longer need."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, most)


def usable_memory_bytes() -> float:
    """Return the memory this process may still allocate: free memory within its limits; inf if unknown."""
    room = [math.inf]
    with suppress(OSError, ValueError, ImportError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            room.append(limit - pages * resource.getpagesize())
    with suppress(OSError, ValueError, KeyError):
        free = _counters("/proc/meminfo")
        room.append((free["MemAvailable:"] + free["SwapFree:"]) * 1024)
    with suppress(OSError, ValueError, KeyError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        # cached file pages count as used, but are freed on demand
        room.append(limit - _counters(str(group / "memory.stat"))["anon"])
    return max(min(room), 0)


def _counters(path: str) -> dict[str, int]:
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
