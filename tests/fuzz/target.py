"""A fuzz target: a place that takes input, with valid inputs, mutations and a check."""

from __future__ import annotations

import gzip
import math
from abc import ABC, abstractmethod
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

from tests.fuzz.mutators import mutated_text

CORPUS = Path(__file__).parent / "corpus"


class Wrong(AssertionError):
    """An invalid answer: not finite, of the wrong length, or unequal to another way to ask."""


class SkippedError(Exception):
    """The case's arguments cannot be made."""


class Target(ABC):
    """One place that takes input. A case is bytes: a file, a message, or the text of a call.

    Attributes
    ----------
    name : str
        Its corpus folder, and ``--target``.
    suffix : str
        Of its corpus files.
    limit_s : float
        Maximum processor seconds per case.
    ci_cases : int
        Number of cases in the test.
    is_bytes : bool
        Whether any bytes are a case: nothing is evaluated or reaches a network.
    is_one_line : bool
        Whether every error has one line.
    """

    name: ClassVar[str]
    suffix: ClassVar[str] = ".txt"
    limit_s: ClassVar[float] = 5.0
    ci_cases: ClassVar[int] = 200
    is_bytes: ClassVar[bool] = False
    is_one_line: ClassVar[bool] = True

    def prepare(self, folder: Path) -> None:
        """Make what all cases need, in an empty folder."""
        self.folder = folder

    @abstractmethod
    def case(self, random: Random) -> bytes:
        """Make one case; the same for the same state of ``random``."""

    @abstractmethod
    def check(self, case: bytes) -> None:
        """Run the case: return if the answer is right, raise FastroofError if it is refused.

        Any other exception but SkippedError is a failure.
        """

    def examples(self) -> list[bytes]:
        """Return valid cases: they compile and load what the others would be charged for."""
        return []

    def begin(self, folder: Path) -> None:
        """Prepare, and check the examples."""
        self.prepare(folder)
        for case in self.examples():
            self.check(case)

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release what ``prepare`` made."""

    def corpus(self) -> dict[str, bytes]:
        """Return the cases that failed once by the names of their files; long ones are compressed."""
        paths = sorted((CORPUS / self.name).glob("*"))
        contents = {path.name: path.read_bytes() for path in paths}
        return {
            name: gzip.decompress(content) if name.endswith(".gz") else content
            for name, content in contents.items()
        }


class TextFiles(Target):
    """Files of one kind: values replaced, lines removed, repeated, and borrowed from others."""

    is_bytes = True
    texts: list[bytes]
    """Files to mutate, the first two of them valid."""

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.path = folder / f"case{self.suffix}"

    def examples(self) -> list[bytes]:
        return self.texts[:2]

    def case(self, random: Random) -> bytes:
        return mutated_text(random.choice(self.texts), random, self.texts)

    def check(self, case: bytes) -> None:
        self.path.write_bytes(case)
        self.read()

    @abstractmethod
    def read(self) -> None:
        """Read the file, and check what was read."""


def all_finite(value: Any, where: str = "the answer") -> None:
    """Raise Wrong if the answer has a NaN or an infinity."""
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
