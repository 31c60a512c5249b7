"""Drawn sessions: turns of calls whose prompts grow, with time to think and time of tools between them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.checks import is_number, shown
from fastroof.errors import TraceError
from fastroof.traces.trace import MOST_SECONDS, MOST_TOKENS, Sizes
from fastroof.traces.trace_sessions import NO_PARENT
from fastroof.traces.workload_lengths import NUMBER

DELAY_FORMS: Final = "seconds (2.5), exponential:MEAN, lognormal:MEAN:SIGMA or uniform:LEAST:MOST"


@dataclass(frozen=True)
class Delay:
    """A distribution of seconds: ``kind`` of two numbers."""

    kind: str
    first: float
    second: float = 0.0

    def drawn(self, generator: np.random.Generator, count: int) -> Floats:
        """Draw the seconds of each request."""
        if self.kind == "exponential":
            return self.first * generator.standard_exponential(count)
        if self.kind == "lognormal":
            exponent = (
                math.log(self.first) - self.second**2 / 2 + self.second * generator.standard_normal(count)
            )
            return np.minimum(np.exp(np.minimum(exponent, 700.0)), MOST_SECONDS)
        return self.first + (self.second - self.first) * generator.random(count)


NO_DELAY: Final = Delay("uniform", 0.0, 0.0)


def parse_delay(name: str, value: Any) -> Delay:
    """Parse seconds: a number, or a distribution of them."""
    if isinstance(value, Delay):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if is_number(value) or re.fullmatch(NUMBER, text):
        seconds = float(value)
        found: Delay | None = Delay("uniform", seconds, seconds)
    elif match := re.fullmatch(f"exponential:{NUMBER}", text):
        found = Delay("exponential", float(match[1]))
    elif match := re.fullmatch(f"(lognormal|uniform):{NUMBER}:{NUMBER}", text):
        found = Delay(match[1], float(match[2]), float(match[3]))
    else:
        found = None
    if found is None or not _is_valid(found):
        raise TraceError(f"{name} must be {DELAY_FORMS}, up to {MOST_SECONDS:g} s; got {shown(value)}")
    return found


def _is_valid(delay: Delay) -> bool:
    if delay.kind == "uniform":
        return 0 <= delay.first <= delay.second <= MOST_SECONDS
    least = 0 if delay.kind == "exponential" else 1e-9
    return least <= delay.first <= 1e6 and 0 <= delay.second <= 10


@dataclass(frozen=True)
class Turns:
    """Which session and turn each request is of: all requests of a session follow each other."""

    session: Longs
    is_first: Any
    """Whether a request is the first of its session."""
    is_turn: Any
    """Whether it is the first of a turn."""

    @classmethod
    def of(cls, turns: Sizes, calls: Sizes, requests: int) -> Turns:
        """Return the first ``requests`` of sessions with so many turns, of turns with so many calls."""
        session_of_turn = _owners(turns, requests)
        turn = _owners(calls[: len(session_of_turn)], requests)
        session = session_of_turn[turn]
        is_turn = np.diff(turn, prepend=-1) > 0
        return cls(session, np.diff(session, prepend=-1) > 0, is_turn)

    @property
    def count(self) -> int:
        """Number of sessions."""
        return int(self.session[-1]) + 1

    def grown(self, new_tokens: Sizes, outputs: Sizes, system_tokens: int) -> tuple[Sizes, Sizes]:
        """Return whole prompts, and how many of their tokens came before the new ones."""
        new, out = new_tokens.astype(np.int64), outputs.astype(np.int64)
        upto = np.cumsum(new + out)
        before = upto - new - out
        before -= before[np.flatnonzero(self.is_first)][self.session] - system_tokens
        longest = int((before + new).max())
        if longest > MOST_TOKENS:
            raise TraceError(
                f"prompts grow to {longest:,} tokens, above {MOST_TOKENS:,}: give fewer turns or shorter ones"
            )
        return (before + new).astype(np.int32), before.astype(np.int32)

    def links(self, think_s: Floats, tool_s: Floats) -> dict[str, Any]:
        """Return parents, delays and sessions as arguments of a Trace."""
        rows = np.arange(len(self.session))
        delay_s = np.where(self.is_turn, think_s, tool_s)
        return {
            "parents": np.where(self.is_first, NO_PARENT, rows - 1),
            "delay_s": np.where(self.is_first, 0.0, delay_s),
            "session": self.session,
        }


def _owners(counts: Sizes, most: int) -> Longs:
    """Return the owner of each of the first ``most`` things, of which the owners have so many."""
    counts = np.minimum(counts, most)
    owners = int(np.searchsorted(np.cumsum(counts, dtype=np.int64), most)) + 1
    return np.repeat(np.arange(len(counts[:owners])), counts[:owners])[:most]


def session_starts(unit: Callable[[int], Floats], turns: Turns) -> Floats:
    """Return the arrivals of all requests: those of sessions, 0 for the others."""
    arrival_s = np.zeros(len(turns.session))
    arrival_s[turns.is_first] = unit(turns.count)
    return arrival_s
