"""Reader of a sweep's results for reports: their kind, with columns and rows on demand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastroof.arrays import Bools, Floats, Longs
from fastroof.documents import parse_json
from fastroof.errors import FastroofError
from fastroof.parquet import PARQUET_ERRORS, fault_of, open_parquet, read_parquet
from fastroof.units import US_PER_MS, US_PER_S

_FEW_ROWS_A_SERIES: Final = 1.5
"""Fewer rows than this per series make no curve over a load."""


class RateColumns:
    """Names of the two rates of a Pareto chart, in both kinds of results."""

    USER: Final = "tokens_per_s_per_user"
    GPU: Final = "tokens_per_s_per_gpu"


class Derived(NamedTuple):
    """A column that is computed from another one."""

    source: str
    unit: str
    meaning: str


_DERIVED: Final = {
    "tpot_ms": Derived("step_us", "ms", "time per output token: the step"),
    RateColumns.USER: Derived("step_us", "tokens/s", "output rate of one request: 1 / step"),
}


@dataclass(frozen=True)
class ResultsKind:
    """Roles of the columns of one kind of results."""

    name: str
    noun: str
    required: tuple[str, ...]
    settings: tuple[str, ...]
    workload: tuple[str, ...]
    curves: dict[str, tuple[str, str]]
    """Columns to draw over each load."""


_SETTINGS: Final = ("model", "gpu", "mode", "tp", "pp", "dp", "ep", "routing", "dtype", "kv_dtype", "engine")
_LAYOUT: Final = ("replicas", "prefill_workers", "decode_workers", "total_gpus", "max_num_batched_tokens")

KINDS: Final = (
    ResultsKind(
        "deployments",
        "deployments",
        (
            "model",
            "gpu",
            "tp",
            "dtype",
            "clients",
            "ttft_ms",
            "tpot_ms",
            RateColumns.GPU,
            RateColumns.USER,
        ),
        (*_SETTINGS, *_LAYOUT),
        ("isl", "osl", "prefix_hit"),
        dict.fromkeys(("clients", "request_rate_per_s"), ("ttft_ms", "tpot_ms")),
    ),
    ResultsKind(
        "steps",
        "decode steps",
        ("model", "gpu", "tp", "dtype", "kv_len", "batch_size", "step_us", RateColumns.GPU),
        tuple(name for name in _SETTINGS if name != "mode"),
        ("kv_len",),
        # over kv_len the best batch varies, and the time of its step jumps with it
        {"batch_size": ("tpot_ms", RateColumns.GPU), "kv_len": ("batch_size", RateColumns.GPU)},
    ),
)


@dataclass(frozen=True, eq=False)
class Results:
    """A results file whose columns are read on demand."""

    path: Path
    kind: ResultsKind
    num_rows: int
    columns: tuple[str, ...]
    metadata: dict[str, str]
    _schema: pa.Schema = field(repr=False)
    _read: dict[str, Any] = field(default_factory=dict, repr=False)

    def __contains__(self, name: str) -> bool:
        """Return whether the column exists."""
        return name in self.columns

    def have(self, names: Iterable[str]) -> list[str]:
        """Return the given columns that exist."""
        return [name for name in names if name in self.columns]

    def metadata_json(self, key: str) -> dict[str, Any]:
        """Return a metadata entry that is a JSON object; empty if missing or invalid."""
        try:
            value = parse_json(self.metadata.get(key, ""), key)
        except FastroofError:
            return {}
        return value if isinstance(value, dict) else {}

    def describe(self, name: str) -> tuple[str, str, str]:
        """Return the kind (int, float, text), unit and meaning of a column."""
        if name not in self._schema.names:
            return ("float", _DERIVED[name].unit, _DERIVED[name].meaning)
        column = self._schema.field(name)
        words = {k.decode(): v.decode() for k, v in (column.metadata or {}).items()}
        kind = "text" if _is_text(column.type) else "int" if pa.types.is_integer(column.type) else "float"
        return kind, words.get("unit", ""), words.get("meaning", "")

    def numbers(self, name: str) -> Floats:
        """Return a column of numbers, NaN where missing."""
        if name not in self._read:
            if name not in self._schema.names:
                source = self.numbers(_DERIVED[name].source)
                with np.errstate(divide="ignore"):
                    self._read[name] = source / US_PER_MS if name == "tpot_ms" else US_PER_S / source
            else:
                column = pc.fill_null(pc.cast(self._column(name), pa.float64()), float("nan"))
                self._read[name] = column.to_numpy()
        return np.asarray(self._read[name])

    def codes(self, name: str) -> tuple[Longs, list[Any]]:
        """Return a column as codes into its distinct values, -1 where missing, and these values."""
        key = f"codes of {name}"
        if key not in self._read:
            coded = self._column(name).combine_chunks().dictionary_encode()
            chunk = coded if isinstance(coded, pa.DictionaryArray) else coded.chunk(0)
            codes = pc.fill_null(chunk.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
            self._read[key] = codes, chunk.dictionary.to_pylist()
        codes, values = self._read[key]
        return codes, values

    def groups(self, names: Sequence[str]) -> Longs:
        """Number the distinct combinations of some columns' values, and return each row's number."""
        code, size = np.zeros(self.num_rows, np.int64), 1
        for name in names:
            codes, values = self.codes(name)
            if size * (len(values) + 1) >= 2**62:
                code = np.unique(code, return_inverse=True)[1]
                size = int(code.max()) + 1
            code = code * (len(values) + 1) + codes + 1
            size *= len(values) + 1
        return np.asarray(np.unique(code, return_inverse=True)[1])

    def rows_with(self, required: dict[str, Any]) -> Bools:
        """Return a mask of the rows whose columns have the given values, None where missing."""
        chosen = np.ones(self.num_rows, bool)
        for name, value in required.items():
            codes, values = self.codes(name)
            chosen &= codes == (values.index(value) if value in values else -1)
        return chosen

    def is_within(self) -> Bools:
        """Return a mask of the estimated rows within all limits."""
        within = np.isfinite(self.numbers(RateColumns.USER)) & np.isfinite(self.numbers(RateColumns.GPU))
        if "exceeds" in self:
            codes, words = self.codes("exceeds")
            empty = [-1, *(i for i, word in enumerate(words) if word == "")]
            within &= np.isin(codes, empty)
        return within

    def load(self) -> str:
        """Return the column that curves are drawn over."""
        if self.metadata_json("fastroof.spec").get("rate") and "request_rate_per_s" in self:
            return "request_rate_per_s"
        for name in self.have(self.kind.curves):
            series = int(self.groups(self.series(name)).max()) + 1
            if self.num_rows / series >= _FEW_ROWS_A_SERIES and len(self.codes(name)[1]) > 1:
                return name
        return next(iter(self.kind.curves))

    def start_workload(self) -> dict[str, Any]:
        """Return the value of each workload column that charts start with: workloads do not compete."""
        report_kv_len = self.metadata_json("fastroof.spec").get("report_kv_len")
        start = {}
        for name in self.have(self.kind.workload):
            values = sorted(value for value in self.codes(name)[1] if value is not None)
            near = isinstance(report_kv_len, int) and name == "kv_len"
            start[name] = (
                min(values, key=lambda value: abs(value - report_kv_len)) if near else (values or [None])[0]
            )
        return start

    def series(self, load: str) -> list[str]:
        """Return the columns whose values identify one curve over ``load``."""
        return [name for name in self.have((*self.kind.settings, *self.kind.workload)) if name != load]

    def rows(self, indices: Longs) -> dict[str, list[Any]]:
        """Read all columns of some rows, given in ascending order, without loading the others."""
        groups, start = [], 0
        with self._undamaged(), open_parquet(self.path) as file:
            for group in range(file.num_row_groups):
                stop = start + file.metadata.row_group(group).num_rows
                first, last = np.searchsorted(indices, (start, stop))
                if first < last:
                    groups.append(file.read_row_group(group).take(pa.array(indices[first:last] - start)))
                start = stop
        table = pa.concat_tables(groups).rename_columns(self._schema.names)
        columns = {name: table[name].to_pylist() for name in table.column_names}
        for name in self.columns:
            if name not in columns:
                columns[name] = self.numbers(name)[indices].tolist()
        return {name: columns[name] for name in self.columns}

    def _column(self, name: str) -> Any:
        with self._undamaged():
            return read_parquet(self.path, [name]).column(0)

    @contextmanager
    def _undamaged(self) -> Iterator[None]:
        """Describe what is wrong with a file that opens but cannot be read."""
        try:
            yield
        except PARQUET_ERRORS as error:
            advice = "" if isinstance(error, MemoryError) else ": run its sweep again"
            raise FastroofError(f"{self.path} {fault_of(error)}{advice}") from None


def read_results(path: str | Path) -> Results:
    """Open a results file of a sweep, and detect its kind.

    Parameters
    ----------
    path : str or Path
        A Parquet file from ``fastroof sweep``.

    Returns
    -------
    Results
        Columns are read on demand.

    Raises
    ------
    FastroofError
        If the file is not a results file, or has no rows.
    """
    path = Path(path)
    try:
        with open_parquet(path) as file:
            schema, num_rows = file.schema_arrow, file.metadata.num_rows
    except FileNotFoundError:
        raise FastroofError(f"{path} does not exist; fastroof sweep writes results") from None
    except PARQUET_ERRORS as error:
        why = "a folder" if path.is_dir() else f"not a Parquet file ({str(error).splitlines()[0]:.100})"
        raise FastroofError(f"{path} is {why}; need results of `fastroof sweep -o results.parquet`") from None
    kind = _kind(path, schema)
    if not num_rows:
        raise FastroofError(f"{path} has no rows: no candidate of its sweep was within the limits")
    derived = [name for name, d in _DERIVED.items() if name not in schema.names and d.source in schema.names]
    metadata = {k.decode(): v.decode(errors="replace") for k, v in (schema.metadata or {}).items()}
    return Results(
        path,
        kind,
        num_rows,
        (*schema.names, *derived),
        {key: value for key, value in metadata.items() if key.startswith("fastroof.")},
        schema,
    )


def _kind(path: Path, schema: pa.Schema) -> ResultsKind:
    """Return the kind whose required columns all exist, and check their types."""
    missing = {kind.name: [name for name in kind.required if name not in schema.names] for kind in KINDS}
    matching = [kind for kind in KINDS if not missing[kind.name]]
    if not matching:
        kind_name = (schema.metadata or {}).get(b"fastroof.kind", b"").decode(errors="replace")
        if kind_name.isalpha() and kind_name not in missing:
            raise FastroofError(f"{path} has {kind_name}; reports draw results of {' or '.join(missing)}")
        fewest = min(missing, key=lambda name: len(missing[name]))
        raise FastroofError(
            f"{path} is not a results file of fastroof sweep: for {fewest} it lacks the columns "
            f"{', '.join(missing[fewest])}"
        )
    kind = matching[0]
    texts = {"model", "gpu", "dtype"}
    for name in kind.required:
        column = schema.field(name).type
        number = pa.types.is_integer(column) or pa.types.is_floating(column)
        if not (_is_text(column) if name in texts else number):
            need = "text" if name in texts else "numbers"
            raise FastroofError(f"{path}: column {name} is {column}, need {need} as fastroof sweep writes")
    return kind


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
