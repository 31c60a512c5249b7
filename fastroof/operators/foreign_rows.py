"""How rows of other programs become rows of an operator: files of aiconfigurator-core and of trees.

Each operator says which files are its own and converts their columns; reading them is
:mod:`fastroof.load`'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from fastroof.arrays import Array, Bools
from fastroof.columns import MEASURED_US, Column
from fastroof.units import DTYPE_BYTES, US_PER_MS

Raw = Mapping[str, Array]
Heads = tuple[int, int, int]
"""The three numbers in the name of a tree's attention file, on one GPU."""

_RENAMED_DTYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8_e4m3": "fp8"}


@dataclass(frozen=True)
class ForeignRows:
    """Rows of one operator as another program measured them."""

    columns: dict[str, Array]
    left_out: dict[str, Bools]


@dataclass(frozen=True)
class PackageFile:
    """One file of aiconfigurator-core that holds rows of an operator."""

    folder: str
    file: str
    columns: tuple[Column, ...]
    convert: Callable[[Raw], ForeignRows]
    optional: tuple[Column, ...] = ()
    backend: str | None = None


@dataclass(frozen=True)
class TreeFile:
    """A CSV file of InferSim's and roofline V2's trees that holds rows of an operator."""

    kind: str
    phase: str
    required: tuple[Column, ...]
    optional: tuple[Column, ...]
    order: tuple[str, ...]
    convert: Callable[[Raw, Heads], dict[str, Array]]
    computes_in_any_dtype: bool = False
    named_by_heads: bool = True
    draws_tokens: bool = False


def size_columns(*names: str, minimum: int = 1) -> tuple[Column, ...]:
    """Columns of whole numbers."""
    return tuple(Column(name, "int", "", "a size", minimum) for name in names)


def text_columns(*names: str) -> tuple[Column, ...]:
    """Columns of words."""
    return tuple(Column(name, "text", "", "a name") for name in names)


LATENCY_MS: Final = Column(
    "latency", "float", "ms", "measured latency", within=(0.0, MEASURED_US[1] / US_PER_MS)
)
MEASURED: Final = (*text_columns("kernel_source"), LATENCY_MS)
"""What every file of the package has."""
RUN: Final = text_columns("device", "framework", "version")
"""What files of the package may have."""
MFU: Final = Column("mfu", "float", "", "the file's own MFU", 0)
"""What files of trees may have."""


def measured_us(raw: Raw) -> dict[str, Array]:
    """Latency and kernel of the package's rows."""
    return {"latency_us": raw["latency"] * US_PER_MS, "kernel": raw["kernel_source"]}


def dtype_names(words: Array) -> Array:
    """The package's dtypes by fastroof's names."""
    listed = words.tolist()
    names = {word: _RENAMED_DTYPES.get(word, word) for word in set(listed)}
    renamed: Array = np.empty(len(listed), object)
    renamed[:] = list(map(names.__getitem__, listed))
    return renamed


def unknown_dtypes(dtypes: Array) -> dict[str, Bools]:
    """Rows of dtypes that fastroof does not know, by reason."""
    return {f"dtype {d}": dtypes == d for d in sorted(set(dtypes)) if d not in DTYPE_BYTES}


def version_order(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, by which versions are compared."""
    return tuple(int(number) for number in re.findall(r"\d+", version))
