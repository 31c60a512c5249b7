"""Table sets by one word: a GPU, one of its sources, a folder, or tables of a package as they lie there."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastroof.errors import GpuError, TableError
from fastroof.load import load_measured
from fastroof.load.aiconfigurator import import_aiconfigurator
from fastroof.load.measured import MeasuredTables

__all__ = ["NAMED_WORDS", "PACKAGE_PREFIX", "load_named"]

PACKAGE_PREFIX: Final = "package:"

NAMED_WORDS: Final = "GPU, GPU/SOURCE, a folder, or package:GPU/BACKEND/VERSION"
"""What :func:`load_named` takes, for helps and errors."""


def load_named(word: str) -> MeasuredTables:
    """Load measured tables that a word names."""
    if word.startswith(PACKAGE_PREFIX):
        parts = word.removeprefix(PACKAGE_PREFIX).split("/")
        if len(parts) != 3 or not all(parts):
            raise TableError(f"{word!r} names no tables of the package; write package:h200/vllm/0.24.0")
        gpu, backend, version = parts
        return import_aiconfigurator(gpu, backend, version)
    if Path(word).is_dir():
        return load_measured(Path(word))
    gpu, slash, source = word.partition("/")
    if slash and gpu and source and "/" not in source:
        try:
            return load_measured(gpu, source=source)
        except GpuError:
            raise TableError(f"{word!r} is neither a folder nor GPU/SOURCE; need {NAMED_WORDS}") from None
    return load_measured(word)
