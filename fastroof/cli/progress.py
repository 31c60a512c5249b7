"""How far a command is, on standard error: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import typer

from fastroof.cli.output import console, duration

__all__ = ["Progress", "shown_progress"]

LOG_EVERY_S: Final = 5.0
_MOST_REPORTS: Final = 256
_SCALES: Final = ((1e9, "billion"), (1e6, "million"), (1e3, "thousand"))

Progress = Callable[[int, int], None]


@contextmanager
def shown_progress(what: str, noun: str, *, quiet: bool) -> Iterator[Progress]:
    """Show how far something is: call what is yielded with how much is done and how much there is.

    Parameters
    ----------
    what : str
        What is running.
    noun : str
        What is counted, in the plural.
    quiet : bool
        Whether nothing is shown.
    """
    if quiet:
        yield lambda done, total: None
        return
    if not sys.stderr.isatty():
        yield _LineLog(what, noun)
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (
        TextColumn(what, markup=False), BarColumn(), TaskProgressColumn(),
        TextColumn("{task.fields[counted]}", markup=False),
    )  # fmt: skip
    began = time.monotonic()
    pace = Pace()
    with Progress(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task(what, total=None, counted="")

        def show(done: int, total: int) -> None:
            now = time.monotonic()
            counted = f"{done:,} of {total:,} {noun}, {_rate_words(done, now - began)}"
            counted += _left_words(pace.left_s(done, total, now))
            bar.update(task, completed=done, total=total, counted=counted)

        yield show


class Pace:
    """How long is left, by how fast the second half of the time went."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self._done: list[int] = []

    def left_s(self, done: int, total: int, now: float) -> float | None:
        """Take note of how far it is, and say how long is left."""
        if done and (not self._done or done > self._done[-1]):
            if len(self._at) == _MOST_REPORTS:
                del self._at[1::2], self._done[1::2]
            self._at.append(now)
            self._done.append(done)
        if len(self._at) < 3 or done >= total:
            return None
        half = max(bisect_right(self._at, (self._at[0] + now) / 2.0) - 1, 0)
        start = min(half, len(self._at) - 2)
        seconds, more = now - self._at[start], done - self._done[start]
        return seconds * (total - done) / more if more > 0 else None


def _left_words(left_s: float | None) -> str:
    return "" if left_s is None else f", {duration(left_s)} left"


def _rate_words(done: int, seconds: float) -> str:
    rate = done / max(seconds, 1e-9)
    for scale, word in _SCALES:
        if rate >= scale:
            return f"{rate / scale:.3g} {word} a second"
    return f"{rate:.3g} a second"


class _LineLog:
    """Progress as lines: one every few seconds, and the last."""

    def __init__(self, what: str, noun: str) -> None:
        self.what = what
        self.noun = noun
        self.began = time.monotonic()
        self.said_at = self.began
        self.said = -1
        self.pace = Pace()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        left_s = self.pace.left_s(done, total, now)
        if done == self.said or (done != total and now - self.said_at < LOG_EVERY_S):
            return
        self.said_at, self.said = now, done
        took = now - self.began
        line = f"{self.what}: {done:,} of {total:,} {self.noun}"
        if done:
            line += f", {_rate_words(done, took)}"
        line += _left_words(left_s)
        typer.echo(line, err=True)
