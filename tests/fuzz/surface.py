"""What a surface is: a place where input comes in, with valid inputs, ways to spoil them, and a check."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

__all__ = ["SkippedError", "Surface", "Wrong", "all_finite"]


class Wrong(AssertionError):
    """An answer that no input may have: not finite, of the wrong length, another one than asked elsewhere."""


class SkippedError(Exception):
    """A case that is none: its arguments cannot be made."""


class Surface(ABC):
    """One place where input comes in. A case is bytes: a file, a message, or the text of a call.

    Attributes
    ----------
    name : str
        What it is called: the folder of its corpus, and ``--surface``.
    suffix : str
        Of a file of its corpus.
    limit_s : float
        Process seconds that one case may take.
    ci_cases : int
        Cases that the tests run.
    is_bytes : bool
        Whether any bytes are a case: none is evaluated, and none reaches a network.
    """

    name: ClassVar[str]
    suffix: ClassVar[str] = ".txt"
    limit_s: ClassVar[float] = 5.0
    ci_cases: ClassVar[int] = 200
    is_bytes: ClassVar[bool] = False

    def prepare(self, folder: Path) -> None:
        """Make what all cases need; ``folder`` is empty and the surface's own."""
        self.folder = folder

    @abstractmethod
    def case(self, random: Random) -> bytes:
        """Make one case; the same for the same state of ``random``."""

    @abstractmethod
    def check(self, case: bytes) -> None:
        """Hand the case over: return where it was answered well, raise FastroofError where it was refused.

        Everything else that it raises is a failure, but for SkippedError.
        """

    def examples(self) -> list[bytes]:
        """Return cases that are answered: what they compile and load, cases of wrong input need not."""
        return []

    def begin(self, folder: Path) -> None:
        """Prepare, and be answered the examples."""
        self.prepare(folder)
        for case in self.examples():
            self.check(case)

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of what ``prepare`` made."""


def all_finite(value: Any, where: str = "the answer") -> None:
    """Raise Wrong if there is a NaN or an infinity anywhere in what was answered."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Wrong(f"{where} is {value}")
    elif isinstance(value, np.ndarray):
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise Wrong(f"{where} has {value[~np.isfinite(value)][0]}")
    elif isinstance(value, dict):
        for key, inner in value.items():
            all_finite(inner, f"{where}[{key!r:.40}]")
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            all_finite(inner, f"{where}[{place}]")
