"""A sweep's results as reports read them: which kind they are, and columns and rows on demand."""

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
"""Up to so many rows for each setting and load there is no curve over that load."""


class RateColumns:
    """Names of the two rates that a Pareto chart weighs, in both kinds of results."""

    USER: Final = "tokens_per_s_per_user"
    GPU: Final = "tokens_per_s_per_gpu"


class Derived(NamedTuple):
    """A column that is worked out from another one."""

    source: str
    unit: str
    meaning: str


_DERIVED: Final = {
    "tpot_ms": Derived("step_us", "ms", "time per output token: the step"),
    RateColumns.USER: Derived("step_us", "tokens/s", "output tokens that one request gets: 1 / step"),
}


@dataclass(frozen=True)
class ResultsKind:
    """What the columns of one kind of results are for."""

    name: str
    noun: str
    required: tuple[str, ...]
    settings: tuple[str, ...]
    workload: tuple[str, ...]
    loads: tuple[str, ...]
    curves: tuple[str, str]


_SETTINGS: Final = ("model", "gpu", "mode", "tp", "pp", "dp", "ep", "routing", "dtype", "kv_dtype", "runtime")
_LAYOUT: Final = ("replicas", "prefill_workers", "decode_workers", "total_gpus", "max_batched_tokens")

KINDS: Final = (
    ResultsKind(
        "deployments",
        "deployments",
        (
            "model",
            "gpu",
            "tp",
            "dtype",
            "concurrency",
            "ttft_ms",
            "tpot_ms",
            RateColumns.GPU,
            RateColumns.USER,
        ),
        (*_SETTINGS, *_LAYOUT),
        ("isl", "osl", "prefix_hit"),
        ("concurrency", "request_rate_per_s"),
        ("ttft_ms", "tpot_ms"),
    ),
    ResultsKind(
        "steps",
        "decode steps",
        ("model", "gpu", "tp", "dtype", "kv_len", "batch_size", "step_us", RateColumns.GPU),
        tuple(name for name in _SETTINGS if name != "mode"),
        ("kv_len",),
        ("batch_size", "kv_len"),
        ("tpot_ms", RateColumns.GPU),
    ),
)


@dataclass(frozen=True, eq=False)
class Results:
    """A results file."""

    path: Path
    kind: ResultsKind
    num_rows: int
    columns: tuple[str, ...]
    metadata: dict[str, str]
    _schema: pa.Schema = field(repr=False)
    _read: dict[str, Any] = field(default_factory=dict, repr=False)

    def __contains__(self, name: str) -> bool:
        """Whether there is such a column."""
        return name in self.columns

    def have(self, names: Iterable[str]) -> list[str]:
        """Those of some columns that are in the file."""
        return [name for name in names if name in self.columns]

    def metadata_json(self, key: str) -> dict[str, Any]:
        """One entry of the metadata that holds a JSON object; empty if there is none."""
        try:
            value = parse_json(self.metadata.get(key, ""), key)
        except FastroofError:
            return {}
        return value if isinstance(value, dict) else {}

    def describe(self, name: str) -> tuple[str, str, str]:
        """Kind (int, float, text), unit and meaning of a column."""
        if name not in self._schema.names:
            return ("float", _DERIVED[name].unit, _DERIVED[name].meaning)
        column = self._schema.field(name)
        words = {k.decode(): v.decode() for k, v in (column.metadata or {}).items()}
        kind = "text" if _is_text(column.type) else "int" if pa.types.is_integer(column.type) else "float"
        return kind, words.get("unit", ""), words.get("meaning", "")

    def numbers(self, name: str) -> Floats:
        """A column of numbers, NaN where missing."""
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
        """A column as codes into the list of its distinct values; -1 where missing."""
        key = f"codes of {name}"
        if key not in self._read:
            coded = self._column(name).combine_chunks().dictionary_encode()
            chunk = coded if isinstance(coded, pa.DictionaryArray) else coded.chunk(0)
            codes = pc.fill_null(chunk.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
            self._read[key] = codes, chunk.dictionary.to_pylist()
        codes, values = self._read[key]
        return codes, values

    def groups(self, names: Sequence[str]) -> Longs:
        """Number the combinations of some columns' values: one number a row."""
        code, size = np.zeros(self.num_rows, np.int64), 1
        for name in names:
            codes, values = self.codes(name)
            if size * (len(values) + 1) >= 2**62:
                code = np.unique(code, return_inverse=True)[1]
                size = int(code.max()) + 1
            code = code * (len(values) + 1) + codes + 1
            size *= len(values) + 1
        return np.asarray(np.unique(code, return_inverse=True)[1])

    def is_within(self) -> Bools:
        """Which rows are estimates within every limit."""
        within = np.isfinite(self.numbers(RateColumns.USER)) & np.isfinite(self.numbers(RateColumns.GPU))
        if "exceeds" in self:
            codes, words = self.codes("exceeds")
            empty = [-1, *(i for i, word in enumerate(words) if word == "")]
            within &= np.isin(codes, empty)
        return within

    def load(self) -> str:
        """The column that curves run along."""
        if self.metadata_json("fastroof.spec").get("request_rate") and "request_rate_per_s" in self:
            return "request_rate_per_s"
        for name in self.have(self.kind.loads):
            series = int(self.groups(self.series(name)).max()) + 1
            if self.num_rows / series >= _FEW_ROWS_A_SERIES and len(self.codes(name)[1]) > 1:
                return name
        return self.kind.loads[0]

    def start_workload(self) -> dict[str, Any]:
        """One value of each workload's column, which charts start at: workloads do not compete."""
        wanted = self.metadata_json("fastroof.spec").get("report_kv_len")
        start = {}
        for name in self.have(self.kind.workload):
            values = sorted(value for value in self.codes(name)[1] if value is not None)
            near = isinstance(wanted, int) and name == "kv_len"
            start[name] = (
                min(values, key=lambda value: abs(value - wanted)) if near else (values or [None])[0]
            )
        return start

    def series(self, load: str) -> list[str]:
        """Columns whose values make one curve over ``load``."""
        return [name for name in self.have((*self.kind.settings, *self.kind.workload)) if name != load]

    def rows(self, indices: Longs) -> dict[str, list[Any]]:
        """Every column of some rows, given in ascending order, without the others in memory."""
        groups, start = [], 0
        with self._undamaged(), open_parquet(self.path) as file:
            for group in range(file.num_row_groups):
                stop = start + file.metadata.row_group(group).num_rows
                first, last = np.searchsorted(indices, (start, stop))
                if first < last:
                    groups.append(file.read_row_group(group).take(pa.array(indices[first:last] - start)))
                start = stop
        table = pa.concat_tables(groups)
        columns = {name: table[name].to_pylist() for name in table.column_names}
        for name in self.columns:
            if name not in columns:
                columns[name] = self.numbers(name)[indices].tolist()
        return {name: columns[name] for name in self.columns}

    def _column(self, name: str) -> Any:
        with self._undamaged():
            return read_parquet(self.path, [name])[name]

    @contextmanager
    def _undamaged(self) -> Iterator[None]:
        """Say of a file that opens and cannot be read what is wrong with it."""
        try:
            yield
        except PARQUET_ERRORS as error:
            advice = "" if isinstance(error, MemoryError) else ": run its sweep again"
            raise FastroofError(f"{self.path} {fault_of(error)}{advice}") from None


def read_results(path: str | Path) -> Results:
    """Open a results file of a sweep, and find out what it holds.

    Parameters
    ----------
    path : str or Path
        A Parquet file that ``fastroof sweep`` wrote.

    Returns
    -------
    Results
        Columns are read on demand.

    Raises
    ------
    FastroofError
        If it is not a results file, or has no rows.
    """
    path = Path(path)
    try:
        with open_parquet(path) as file:
            schema, num_rows = file.schema_arrow, file.metadata.num_rows
    except FileNotFoundError:
        raise FastroofError(f"{path} does not exist; fastroof sweep writes results") from None
    except PARQUET_ERRORS as error:
        why = "a folder" if path.is_dir() else f"no Parquet file ({str(error).splitlines()[0]:.100})"
        raise FastroofError(
            f"{path} is {why}; need the results of fastroof sweep -o results.parquet"
        ) from None
    kind = _kind(path, schema)
    if not num_rows:
        raise FastroofError(
            f"{path} has no rows: nothing of its sweep was within the limits, or it kept none"
        )
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
    """The kind that all the required columns are there of, with the types that they need."""
    missing = {kind.name: [name for name in kind.required if name not in schema.names] for kind in KINDS}
    matching = [kind for kind in KINDS if not missing[kind.name]]
    if not matching:
        fewest = min(missing, key=lambda name: len(missing[name]))
        raise FastroofError(
            f"{path} holds no results of fastroof sweep: of {fewest} it lacks the columns "
            f"{', '.join(missing[fewest])}"
        )
    kind = matching[0]
    texts = {"model", "gpu", "dtype"}
    for name in kind.required:
        column = schema.field(name).type
        number = pa.types.is_integer(column) or pa.types.is_floating(column)
        if not (_is_text(column) if name in texts else number):
            need = "text" if name in texts else "numbers"
            raise FastroofError(
                f"{path}: column {name} is {column}, need {need}: not what fastroof sweep writes"
            )
    return kind


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
