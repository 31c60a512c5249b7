"""Waiting in tests for work that another thread or process ends."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so; work that nothing ends takes minutes."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < 60.0
        time.sleep(0.01)


def is_idle(seconds: float = 0.5) -> bool:
    """Whether this process takes less than a third of a processor."""
    began, spent = time.monotonic(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - spent) / (time.monotonic() - began) < 1 / 3
