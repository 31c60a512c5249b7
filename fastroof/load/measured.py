"""Measured rows as columns of NumPy arrays with their provenance: the result of every loader."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Bools, Longs
from fastroof.caching import lazy_property
from fastroof.config.gpu import GpuSpec, load_gpu
from fastroof.file_access import file_sha256
from fastroof.load.spikes import Spikes, find_spikes
from fastroof.operators.operator import Operator
from fastroof.operators.registry import OPERATORS

FILES: Final = "files"
"""Table of provenance.toml with the SHA-256 of each file and of its rows."""

IMPORTED: Final = "imported"
"""Key of provenance.toml of sources imported by GPU name: what they are made from, as text."""

Progress = Callable[[int, int, str], None]
"""Called with files converted, all files and a file's name while a package's tables are imported."""

SourceChoice = str | Mapping[str, str] | None
"""One source for all operators, or a source per operator; None uses the ranks."""


@dataclass(frozen=True)
class PeakFinding:
    """Which peak and FLOP convention a file's own ``mfu`` column used, inferred from its latency.

    Attributes
    ----------
    file : str
        The file, relative to the tree.
    peak_flops_per_s : float
        Median of ``flops / (latency * mfu)`` over the rows whose mfu is not rounded away, FLOP/s.
    label : str
        Description of the peak: ``"fp8 peak of h100"``, ``"148 TFLOP/s (h20 bf16)"``.
    agrees : bool
        Whether that is the GPU's peak of the table's own dtype.
    rows : int
        Rows the inference used.
    """

    file: str
    peak_flops_per_s: float
    label: str
    agrees: bool
    rows: int


class WrittenTable(NamedTuple):
    """A table's file and its hashes in provenance.toml."""

    path: Path
    sha256: str
    rows_sha256: str


@dataclass(frozen=True)
class MeasuredTable:
    """All measured rows of one operator from one source.

    Attributes
    ----------
    operator : str
        A key of :data:`fastroof.operators.registry.OPERATORS`.
    columns : mapping of str to ndarray
        The schema's required columns, each of shape (rows,): int64 for sizes, float64 for
        latencies, str objects for text; optional columns if the file has them. Shipped and imported tables
        are read on first use.
    source : str
        Name of the source.
    files : tuple of str
        The files that the rows came from, relative to the source's folder.
    provenance : mapping
        The source's provenance.toml as a dict; ``provenance["operators"][operator]`` is about this operator.
    written : WrittenTable, optional
        The file with exactly these rows, if provenance has its hashes.
    """

    operator: str
    columns: Mapping[str, Array]
    source: str
    files: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    written: WrittenTable | None = None

    @property
    def schema(self) -> Operator:
        """The operator, which defines the columns and their meaning."""
        return OPERATORS[self.operator]

    @property
    def num_rows(self) -> int:
        """Measured rows in the table."""
        return len(self.columns["latency_us"])

    @property
    def engine(self) -> str:
        """Engine whose kernels were measured; empty if the source names none."""
        return str(self.provenance.get("framework", ""))

    @property
    def about(self) -> Mapping[str, Any]:
        """Part of the provenance that is about this operator."""
        about: Mapping[str, Any] = self.provenance.get("operators", {}).get(self.operator, {})
        return about

    @lazy_property
    def rows_sha256(self) -> str:
        """SHA-256 over all required columns; from provenance if the file's hash matches, or if imported."""
        if self.written is not None and (
            is_imported(self.provenance) or file_sha256(self.written.path) == self.written.sha256
        ):
            return self.written.rows_sha256
        return rows_sha256(self.operator, self.columns)

    @property
    def words_sha256(self) -> str:
        """SHA-256 of the optional columns that packing reads, or of the written file; empty if imported."""
        if self.written is not None and is_imported(self.provenance):
            return ""  # provenance has the SHA-256 of the package's files; the written bytes are pyarrow's
        if self.written is not None:
            return self.written.sha256
        words = (column for name in self.schema.packed_words for column in self.columns.get(name, ()))
        return hashlib.sha256("\0".join(words).encode()).hexdigest()

    @lazy_property
    def spikes(self) -> Spikes:
        """Isolated spikes, which lookups replace, see :mod:`fastroof.load.spikes`."""
        return find_spikes(self.schema, self.columns, self.groups())

    def renamed(self, source: str) -> MeasuredTable:
        """Return the table under another source name."""
        return replace(self, source=source)

    def some(self, rows: Bools | Longs) -> MeasuredTable:
        """Return the table with some of its rows, which no file has."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return replace(self, columns=columns, written=None)

    def groups(self) -> dict[tuple[Any, ...], Longs]:
        """Row indices by key: the values of ``schema.keys``, in the schema's order."""
        return self._groups

    @lazy_property
    def _groups(self) -> dict[tuple[Any, ...], Longs]:
        if not self.num_rows:
            return {}
        names = [c.name for c in self.schema.keys]
        columns = [self.columns[name] for name in names]
        # a kernel's rows are contiguous: sort runs of one key instead of rows
        is_first = np.zeros(self.num_rows, np.bool_)
        is_first[0] = True
        for values in columns:
            is_first[1:] |= values[1:] != values[:-1]
        firsts = np.flatnonzero(is_first)
        ends = np.r_[firsts[1:], self.num_rows]
        codes = np.zeros(len(firsts), np.int64)
        for values in columns:
            _, code = np.unique(values[firsts], return_inverse=True)
            codes = codes * (int(code.max()) + 1) + code
        order = np.argsort(codes, kind="stable")
        starts = np.flatnonzero(np.r_[True, np.diff(codes[order]) != 0])
        keys = zip(*(values[firsts[order[starts]]].tolist() for values in columns), strict=True)
        rows_by_key = {}
        for key, start, stop in zip(keys, starts, np.r_[starts[1:], len(order)], strict=True):
            runs = [np.arange(firsts[run], ends[run]) for run in order[start:stop]]
            rows_by_key[key] = runs[0] if len(runs) == 1 else np.concatenate(runs)
        return rows_by_key


@dataclass(frozen=True)
class MeasuredTables:
    """Measured tables of one GPU: the preferred source of each operator, and others.

    Attributes
    ----------
    gpu : str
        Name of the GPU, a folder of bench_data: ``"h100"``.
    tables : mapping of str to MeasuredTable
        One table per operator.
    root : Path
        The folder that was read.
    findings : tuple of PeakFinding
        Peaks that the files' own mfu columns used, for trees with such a column.
    ignored : mapping of str to str
        Files that were not read, with the reason.
    spec : GpuSpec, optional
        The GPU from the gpu.toml next to the tables; default: the shipped one.
    others : mapping of str to tuple of MeasuredTable
        By operator, tables of other sources by rank, which serve kernels that the first one lacks; empty if
        a source was chosen by name.
    """

    gpu: str
    tables: Mapping[str, MeasuredTable]
    root: Path
    findings: tuple[PeakFinding, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    spec: GpuSpec | None = None
    others: Mapping[str, tuple[MeasuredTable, ...]] = field(default_factory=dict)

    @property
    def gpu_spec(self) -> GpuSpec:
        """The GPU that the rows were measured on."""
        return load_gpu(self.gpu) if self.spec is None else self.spec

    @property
    def sources(self) -> dict[str, str]:
        """Preferred source of each operator."""
        return {name: table.source for name, table in self.tables.items()}

    def candidates(self, operator: str) -> tuple[MeasuredTable, ...]:
        """All tables of an operator, the preferred one first; empty without any."""
        first = self.tables.get(operator)
        return () if first is None else (first, *self.others.get(operator, ()))

    @lazy_property
    def content_hash(self) -> str:
        """SHA-256 over all required columns of all preferred tables."""
        digest = hashlib.sha256(self.gpu.encode())
        for name in sorted(self.tables):
            digest.update(f"{name} {self.tables[name].rows_sha256}".encode())
        return digest.hexdigest()

    @lazy_property
    def sources_hash(self) -> str:
        """SHA-256 of everything that results depend on: rows and provenance of all sources, and the GPU.

        ``content_hash`` covers the preferred sources only; others serve other engines and missing kernels.
        """
        digest = hashlib.sha256(repr(self.gpu_spec).encode())
        for name in sorted(self.tables):
            for table in self.candidates(name):
                about = json.dumps(table.provenance, sort_keys=True, default=str)
                digest.update(f"{name} {table.source} {table.rows_sha256} {about}\n".encode())
                if table.schema.packed_words:
                    digest.update(table.words_sha256.encode())
        return digest.hexdigest()


def is_imported(provenance: Mapping[str, Any]) -> bool:
    """Whether a source was imported by GPU name, so that its tables can be converted again."""
    return isinstance(provenance.get(IMPORTED), str)


def rows_sha256(operator: str, columns: Mapping[str, Array]) -> str:
    """SHA-256 over all required columns of an operator's rows."""
    digest = hashlib.sha256(operator.encode())
    for column in OPERATORS[operator].required:
        digest.update(column.name.encode())
        values = columns[column.name]
        digest.update("\0".join(values).encode() if column.kind == "text" else values.tobytes())
    return digest.hexdigest()


class RowsWhenNeeded(Mapping[str, Array]):
    """Columns of a table that are read on first use; pickling reads them."""

    def __init__(self, read: Callable[[], Mapping[str, Array]]) -> None:
        self._read = read

    @lazy_property
    def _columns(self) -> Mapping[str, Array]:
        return self._read()

    def __getitem__(self, name: str) -> Array:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self._columns),)
