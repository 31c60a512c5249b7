"""What this process may use of its machine; the only module that asks Linux for what other systems lack."""

from __future__ import annotations

import errno
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


def cpu_facts() -> dict[str, str]:
    """Return what Linux says of the first processor, by name; empty elsewhere."""
    with suppress(OSError), open("/proc/cpuinfo", "rb", buffering=0) as file:
        # the file is long on large machines
        text = file.read(8192).decode("ascii", "replace").partition("\n\n")[0]
        pairs = (line.partition(":") for line in text.splitlines())
        return {name.strip(): value.strip() for name, _, value in pairs}
    return {}


def lengthen_pipe(fd: int, num_bytes: int) -> None:
    """Give a pipe a larger buffer, where the system can."""
    import fcntl

    with suppress(OSError, AttributeError):  # of Linux only, and of pipes
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, num_bytes)


def exchange_folders(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; return False where this is unsupported."""
    import ctypes

    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename(here, os.fsencode(one), here, os.fsencode(other), ctypes.c_uint(exchange)) == 0:
        return True
    if (error := ctypes.get_errno()) in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(error, os.strerror(error), str(one), None, str(other))
