"""Lengths of a workload's requests: how they are given, and how they are drawn."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.checks import is_whole_number, shown
from fastroof.errors import TraceError
from fastroof.traces.trace import MOST_TOKENS, Sizes, Trace
from fastroof.traces.trace_files import load_lengths

LENGTH_FORMS: Final = (
    "a number (8), lognormal:MEAN:SIGMA[:MOST] (sigma of the logarithm; cut to MOST), "
    "uniform:LEAST:MOST (both included) or file:PATH (drawn from a trace)"
)
NUMBER: Final = r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,2})?)"
_WHOLE: Final = r"([0-9]{1,12})"


@dataclass(frozen=True)
class LognormalLength:
    """Lognormal tokens: ``mean`` of the tokens, ``sigma``, the standard deviation of their logarithm."""

    mean: float
    sigma: float
    most: int = MOST_TOKENS

    def drawn(self, unit: Draws) -> Sizes:
        """Draw the tokens of each request."""
        exponent = math.log(self.mean) - self.sigma**2 / 2 + self.sigma * unit.normal()
        # larger numbers are cut anyway
        tokens = np.exp(np.minimum(exponent, math.log(MOST_TOKENS) + 1))
        return np.clip(np.rint(tokens), 1, self.most).astype(np.int32)


@dataclass(frozen=True)
class UniformLength:
    """Uniform integer tokens from ``least`` to ``most``, inclusive."""

    least: int
    most: int

    def drawn(self, unit: Draws) -> Sizes:
        """Draw the tokens of each request."""
        # a product of floats may round up to the number of choices
        steps = np.minimum(unit.uniform() * (self.most - self.least + 1), self.most - self.least)
        return (self.least + steps.astype(np.int64)).astype(np.int32)


@dataclass(frozen=True)
class RecordedLength:
    """Tokens of a trace's requests, drawn with replacement."""

    trace: Trace
    source: object
    """Identity of the trace: if two lengths are of one trace, a request's are drawn from one row."""

    def drawn(self, unit: Draws, name: str = "input_tokens") -> Sizes:
        """Draw the tokens of each request from the trace's ``name``."""
        rows = np.minimum(unit.uniform() * len(self.trace), len(self.trace) - 1).astype(np.int64)
        recorded: Sizes = getattr(self.trace, name)[rows]
        return recorded


@dataclass(frozen=True)
class CachedShare:
    """A share of each prompt, rounded down."""

    share: float

    def of(self, input_tokens: Sizes) -> Sizes:
        """Return each request's tokens in the prefix cache."""
        cached: Sizes = np.floor(self.share * input_tokens).astype(np.int32)
        return cached


Lengths = LognormalLength | UniformLength | RecordedLength


@dataclass(frozen=True)
class Draws:
    """One stream of random numbers; every call returns the same draws."""

    count: int
    generator: Callable[[], np.random.Generator]

    def uniform(self) -> Floats:
        """Draw uniform numbers in [0, 1)."""
        return self.generator().random(self.count)

    def normal(self) -> Floats:
        """Draw standard normal numbers."""
        return self.generator().standard_normal(self.count)


def parse_lengths(name: str, value: Any, least: int = 1) -> Lengths:
    """Parse a workload's lengths."""
    if isinstance(value, Lengths):
        return value
    if isinstance(value, Trace):
        return RecordedLength(value, id(value))
    if isinstance(value, Mapping):
        return RecordedLength(load_lengths(value), id(value))
    if isinstance(value, str):
        return _parse_text(name, value.strip(), least)
    if not is_whole_number(value, least, MOST_TOKENS):
        raise TraceError(_wrong(name, value, least))
    return UniformLength(int(value), int(value))


def _parse_text(name: str, text: str, least: int) -> Lengths:
    if text.startswith("file:"):
        path = text.removeprefix("file:")
        return RecordedLength(load_lengths(path), str(Path(path)))
    if match := re.fullmatch(_WHOLE, text):
        length: Lengths = UniformLength(int(match[1]), int(match[1]))
        sizes = [int(match[1])]
    elif match := re.fullmatch(f"lognormal:{NUMBER}:{NUMBER}(?::{_WHOLE})?", text):
        most = int(match[3]) if match[3] else MOST_TOKENS
        length = LognormalLength(float(match[1]), float(match[2]), most)
        sizes = [most]
        if not (1 <= length.mean <= MOST_TOKENS and length.sigma <= 10):
            raise TraceError(f"{name} {text}: need a mean from 1 to {MOST_TOKENS:,}, and a sigma up to 10")
    elif match := re.fullmatch(f"uniform:{_WHOLE}:{_WHOLE}", text):
        length = UniformLength(int(match[1]), int(match[2]))
        sizes = [length.least, length.most]
        if length.least > length.most:
            raise TraceError(f"{name} {text}: the minimum is above the maximum")
    else:
        raise TraceError(_wrong(name, text, least))
    wrong = [tokens for tokens in sizes if not least <= tokens <= MOST_TOKENS]
    if wrong:
        raise TraceError(
            f"{name} {text}: need {_counted(name)} from {least} to {MOST_TOKENS:,}, got {wrong[0]:,}"
        )
    return length


def _wrong(name: str, value: object, least: int) -> str:
    most = f"{MOST_TOKENS:,} {_counted(name)}"
    return f"{name} must be {LENGTH_FORMS}, from {least} to {most}; got {shown(value)}"


def _counted(name: str) -> str:
    """Return what a length counts: turns and calls of sessions are drawn as tokens are."""
    return name if name in ("turns", "calls") else "tokens"


def parse_cached(value: Any) -> Lengths | CachedShare:
    """Parse the tokens of prompts that are cached: lengths, or a share of each prompt."""
    if isinstance(value, CachedShare):
        return value
    if isinstance(value, str) and value.strip().startswith("share:"):
        text = value.strip().removeprefix("share:")
        try:
            share = float(text)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise TraceError(f"cached_tokens {shown(value)}: a share of the prompt must be from 0 to 1")
        return CachedShare(share)
    if is_whole_number(value, 0, MOST_TOKENS) or not isinstance(value, int | float):
        return parse_lengths("cached_tokens", value, 0)
    raise TraceError(f"cached_tokens must be whole tokens from 0, got {shown(value)}")
