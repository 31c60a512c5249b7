"""What of the machine this process may use: processors for its threads, and memory."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path


def usable_processors() -> int:
    """Processors that this process may run on, which a container or ``taskset`` makes fewer."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_memory_bytes() -> float:
    """Memory that this process may still take: what is free, or what a limit leaves; inf if nothing says."""
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
        # files that were read count as used, and make room
        room.append(limit - _counters(str(group / "memory.stat"))["anon"])
    return max(min(room), 0)


def _counters(path: str) -> dict[str, int]:
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
