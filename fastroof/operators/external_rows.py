"""Rows of external programs as rows of an operator: files of aisimulate and of InferSim trees.

Each operator declares its files and converts their columns; :mod:`fastroof.load` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fastroof.arrays import Array, Bools
from fastroof.columns import LATENCY, MEASURED_US, Column
from fastroof.units import DTYPE_BYTES, US_PER_MS

Raw = Mapping[str, Array]
Heads = tuple[int, int, int]
"""The three numbers in the name of a tree's attention file: heads on one GPU."""

_RENAMED_DTYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8_e4m3": "fp8"}


@dataclass(frozen=True)
class ExternalRows:
    """Rows of one operator from an external program, and by reason the rows that are left out."""

    columns: dict[str, Array]
    left_out: dict[str, Bools]
    note: str = ""

    def with_columns(self, **columns: Array) -> ExternalRows:
        """Return the rows with more columns."""
        return ExternalRows(self.columns | columns, self.left_out)

    def without(self, reasons: Mapping[str, Bools]) -> ExternalRows:
        """Return the rows with more of them left out, by reason."""
        return ExternalRows(self.columns, {**self.left_out, **reasons})


def size_columns(*names: str, minimum: int = 1) -> tuple[Column, ...]:
    """Integer columns."""
    return tuple(Column(name, "int", "", "a size", minimum) for name in names)


def text_columns(*names: str) -> tuple[Column, ...]:
    """Text columns."""
    return tuple(Column(name, "text", "", "a name") for name in names)


def constant_text(word: str, rows: int) -> Array:
    """Text column with the same word in every row."""
    return np.full(rows, word, object)


LATENCY_MS: Final = Column(
    "latency", "float", "ms", "measured latency", within=(0.0, MEASURED_US[1] / US_PER_MS)
)
MEASURED: Final = (*text_columns("kernel_source"), LATENCY_MS)
"""Columns of every file of the package."""
RUN: Final = text_columns("device", "framework", "version")
"""Optional columns of the package's files."""
MFU: Final = Column("mfu", "float", "", "the file's own MFU", 0)
"""Optional column of tree files."""


@dataclass(frozen=True)
class PackageFile:
    """A file of aisimulate that holds rows of an operator; ``backend`` if all engines share it."""

    folder: str
    file: str
    columns: tuple[Column, ...]
    convert: Callable[[Raw], ExternalRows]
    optional: tuple[Column, ...] = RUN
    backend: str | None = None


@dataclass(frozen=True)
class TreeFile:
    """A CSV file of an InferSim or roofline V2 tree that holds rows of an operator.

    ``order`` lists the columns of a file without a header. ``named_by_heads``: one file per head shape
    instead of ``data.csv``. ``draws_tokens``: a row ran a random number of tokens around the given one.
    """

    kind: str
    phase: str
    required: tuple[Column, ...]
    optional: tuple[Column, ...]
    order: tuple[str, ...]
    convert: Callable[[Raw, Heads], dict[str, Array]]
    computes_in_any_dtype: bool = False
    named_by_heads: bool = True
    draws_tokens: bool = False


def attention_file(
    kind: str,
    phase: str,
    sizes: Sequence[Column],
    convert: Callable[[Raw, Heads], dict[str, Array]],
    *,
    computes_in_any_dtype: bool = False,
) -> TreeFile:
    """Tree file of attention: sizes, the latency and the file's own MFU, also in files without a header."""
    required = (*sizes, LATENCY)
    order = tuple(column.name for column in (*required, MFU))
    return TreeFile(kind, phase, required, (MFU,), order, convert, computes_in_any_dtype)


def dtype_names(words: Array) -> Array:
    """Rename the package's dtypes to fastroof's."""
    listed = words.tolist()
    names = {word: _RENAMED_DTYPES.get(word, word) for word in set(listed)}
    renamed: Array = np.empty(len(listed), object)
    renamed[:] = list(map(names.__getitem__, listed))
    return renamed


def others(what: str, words: Array, known: Container[str]) -> dict[str, Bools]:
    """Rows whose word is not among the known ones, by reason."""
    return {f"{what} {word}": words == word for word in sorted(set(words)) if word not in known}


def package_rows(raw: Raw, *same: str, **columns: str | Array) -> ExternalRows:
    """Rows of the package as columns: of the ``same`` name, of another name (a text), or made (an array).

    Latency and kernel are added, dtypes renamed, and rows of unknown dtypes left out.
    """
    made = {name: raw[name] for name in same}
    for name, value in columns.items():
        if not isinstance(value, str):
            made[name] = value
        else:
            made[name] = dtype_names(raw[value]) if name.endswith("dtype") else raw[value]
    if "latency_us" not in made:
        made["latency_us"] = raw["latency"] * US_PER_MS
    unknown: dict[str, Bools] = {}
    for name in ("dtype", "kv_dtype"):
        unknown |= others("dtype", made[name], DTYPE_BYTES) if name in made else {}
    return ExternalRows(made | {"kernel": raw["kernel_source"]}, unknown)


def tree_attention(read: Raw, heads: Heads, names: tuple[str, ...], **sizes: int) -> dict[str, Array]:
    """Columns of a tree's attention file, whose name holds the sizes ``names``: of one prompt, or decodes."""
    rows = len(read["latency_us"])
    named = {**dict(zip(names, heads, strict=True)), **sizes}
    columns = {name: np.full(rows, size, np.int64) for name, size in named.items()}
    if "seq_len" not in read:
        return columns | {name: read[name] for name in ("kv_dtype", "batch_size", "kv_len")}
    columns |= {"batch_size": np.ones(rows, np.int64), "q_len": read["seq_len"], "kv_len": read["seq_len"]}
    return columns | {"kv_dtype": read["dtype"]}


def version_order(version: str) -> tuple[int, ...]:
    """Return the numbers in a version, for comparison."""
    return tuple(int(number) for number in re.findall(r"\d+", version))
