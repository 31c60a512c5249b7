"""The present phase of long work, as one line: redrawn in place on a terminal, else printed now and then.

Phases nest, and the innermost one is shown. The line appears after a second of phases without a longer break.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Self

DELAY_S: Final = 1.0
"""Seconds of work after which the line is shown: what takes less needs no words."""

REDRAW_S: Final = 0.3
LOG_EVERY_S: Final = 5.0

_MOST_REPORTS: Final = 256
_BAR: Final = 24


class Pace:
    """Estimate of the time left, from the speed of the second half."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self._done: list[int] = []
        self._of: tuple[int, float] = (0, 0.0)
        self._end = 0.0

    def left_s(self, done: int, total: float, now: float) -> float | None:
        """Record the progress and return the time left; None if it is not known, or over."""
        if done and (not self._done or done > self._done[-1]):
            if len(self._at) == _MOST_REPORTS:
                del self._at[1::2], self._done[1::2]
            self._at.append(now)
            self._done.append(done)
        if len(self._at) < 3 or done >= total:
            return None
        if (done, total) == self._of:
            return self._end - now if now < self._end else None
        half = max(bisect_right(self._at, (self._at[0] + now) / 2.0) - 1, 0)
        start = min(half, len(self._at) - 2)
        seconds, more = now - self._at[start], done - self._done[start]
        if more <= 0:
            return None
        left_s = seconds * (total - done) / more
        self._of, self._end = (done, total), now + left_s
        return left_s


class Phase:
    """A phase of work, shown while its block runs; call it with what is done, the total and what counts."""

    of = "of"
    rest = 0.0
    """Work after the last item, as a share of the total."""

    def __init__(self, words: str, noun: str = "") -> None:
        self.words, self.noun = words, noun
        self.done = self.total = 0
        self.began = time.monotonic()
        self._pace = Pace()

    def __call__(self, done: int, total: int, noun: str = "") -> None:
        """Report what is done and in all."""
        if noun and noun != self.noun:
            self.noun, self.began, self._pace = noun, time.monotonic(), Pace()
        self.done, self.total = done, total

    def __enter__(self) -> Self:
        """Show it instead of the phase that it is a part of."""
        _line.open(self)
        return self

    def __exit__(self, *error: object) -> None:
        """Show it no longer."""
        _line.close(self)

    def counted(self) -> tuple[int, int]:
        """Return what is done, and the total."""
        return self.done, self.total

    def line(self, now: float, bar: int = 0) -> str:
        """Return what is shown, with a bar of a number of characters."""
        done, total = self.counted()
        left_s = self._pace.left_s(done, total * (1.0 + self.rest), now)
        times = _seconds(now - self.began) if left_s is None else f"{_seconds(left_s)} left"
        if not total:
            return f"{self.words}: {'starting, ' if self.noun else ''}{times}"
        noun = f" {self.noun}" if self.noun else ""
        drawn = f"  [{('#' * (bar * done // total)).ljust(bar, '-')}]" if bar else ""
        return f"{self.words}: {done:,} {self.of} {total:,}{noun}, {times}{drawn}"


class _Lines(Phase):
    """Progress as lines: one every few seconds, and a last one."""

    def __init__(self, words: str, noun: str) -> None:
        super().__init__(words, noun)
        self._printed_at, self._printed = self.began, (0, 0)

    def __call__(self, done: int, total: int, noun: str = "") -> None:
        super().__call__(done, total, noun)
        now = time.monotonic()
        line = self.line(now)
        is_due = done == total or now - self._printed_at >= LOG_EVERY_S
        if done and is_due and (done, total) != self._printed:
            self._printed_at, self._printed = now, (done, total)
            sys.stderr.write(f"{line}\n")


class CommandPhase(Phase):
    """A command, shown until it prints; whatever it prints removes the line first."""

    def __enter__(self) -> Self:
        """Show the command, and watch what is printed."""
        self._streams: list[Any] = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
        for stream in self._streams if is_terminal() else ():
            stream.write = partial(self._print, stream.write)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        """Show it no longer."""
        super().__exit__()
        for stream in self._streams:
            vars(stream).pop("write", None)

    def _print(self, write: Callable[[str], int], text: str) -> int:
        _line.close(self)
        _line.draw("")
        return write(text)


def shown_progress(words: str, noun: str, *, quiet: bool = False) -> Phase:
    """Return a phase that is printed as lines, unless ``quiet``, where there is no terminal."""
    return Phase(words, noun) if quiet or is_terminal() else _Lines(words, noun)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60.0:.0f} min"


class _Line:
    """The terminal's line. A thread redraws it: while loops compile, nothing else runs here."""

    def __init__(self) -> None:
        self.is_muted = self._is_drawn = False
        self._phases: list[Phase] = []
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        self._lock = threading.RLock()  # Ctrl-C may remove the line while this thread does
        self._opened = self._closed = -math.inf

    def open(self, phase: Phase) -> None:
        """Show a phase, the last one that is open."""
        self._phases.append(phase)
        if self._thread is None and is_terminal():
            now = time.monotonic()
            if now - self._closed > DELAY_S:  # else it goes on with the work before it
                self._opened = now
            self._end.clear()
            self._thread = threading.Thread(target=self._redraw, daemon=True)
            self._thread.start()

    def close(self, phase: Phase) -> None:
        """End a phase, and with the last one the line."""
        if phase in self._phases:
            self._phases.remove(phase)
        if not self._phases and self._thread is not None:
            self._end.set()
            self._thread.join()
            self._thread = None
            self._closed = time.monotonic()
            self.draw("")

    def draw(self, text: str) -> None:
        """Replace the line; without text there is none until the next."""
        with suppress(OSError, ValueError), self._lock:
            if text or self._is_drawn:
                at = sys.stderr.fileno()
                columns = os.get_terminal_size(at).columns or 80
                # CommandPhase replaces write
                os.write(at, f"\r\x1b[K{text[: columns - 1]}".encode("ascii", "replace"))
                self._is_drawn = bool(text)

    def _redraw(self) -> None:
        while not self._end.wait(REDRAW_S):
            now = time.monotonic()
            for phase in self._phases[-1:]:
                if now - self._opened > DELAY_S and not self.is_muted:
                    self.draw(phase.line(now, _BAR))


_line: Final = _Line()
# a child has no thread that redraws, and its copy of the lock may be taken
os.register_at_fork(after_in_child=_line.__init__)  # type: ignore[misc]


def is_terminal() -> bool:
    """Whether standard error is a terminal that a person watches."""
    is_watched = not os.environ.get("CI") and os.environ.get("TERM") != "dumb"
    with suppress(AttributeError, ValueError):  # none, or closed
        return is_watched and sys.stderr.isatty()
    return False


remove_line: Final = partial(_line.draw, "")
"""Remove the line from the terminal, until it is drawn again."""


def mute() -> None:
    """Show no phase in this process."""
    _line.is_muted = True
