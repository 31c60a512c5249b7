"""Read tables in fastroof's own schema: a GPU folder with a folder per source, or one source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array
from fastroof.atomic_files import is_unfinished
from fastroof.checks import shown
from fastroof.columns import GPU, LATENCY, OPTIONAL_COLUMNS
from fastroof.config.gpu import GPU_FILE, GpuSpec, load_gpu
from fastroof.documents import read_toml
from fastroof.errors import TableError
from fastroof.file_access import is_file, is_folder, names_in, resolved
from fastroof.load.measured import (
    FILES,
    MeasuredTable,
    MeasuredTables,
    RowsWhenNeeded,
    SourceChoice,
    WrittenTable,
    is_imported,
)
from fastroof.load.rows import ENDINGS, count_rows, impossible_sizes, read_columns
from fastroof.load.unsound import unsound_families
from fastroof.operators.operator import Operator, dtype_peaks
from fastroof.operators.registry import OPERATORS, unknown_operator
from fastroof.units import DTYPE_BYTES, TFLOP, US_PER_S

PROVENANCE_FILE: Final = "provenance.toml"
SERVING_FOLDER: Final = "serving"
DEFAULT_RANK: Final = 100
CUSTOM_RANK: Final = 50
"""Default rank of kernels-bench's tables: your own precede shipped ones."""
CUSTOM_TOOL: Final = "kernels_bench"

_DTYPES: Final = ("dtype", "attn_dtype", "kv_dtype")
"""Columns of dtypes."""

_HASHES: Final = ("sha256", "rows_sha256")
_SHA256: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Source:
    """One source folder: its files, provenance and rank."""

    name: str
    gpu: str
    folder: Path
    files: Mapping[str, Path]
    provenance: Mapping[str, Any]
    hashes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Whether kernels-bench measured it."""
        return is_own(self.provenance)

    def rank(self, operator: str) -> int:
        """Rank of the source for an operator; the lowest is preferred."""
        about = self.provenance.get("operators", {}).get(operator, {})
        default = CUSTOM_RANK if self.is_own else DEFAULT_RANK
        return int(about.get("rank", self.provenance.get("rank", default)))

    def num_rows(self, operator: str) -> int:
        """Rows of an operator; those of an imported table are in provenance."""
        rows = self.provenance.get("operators", {}).get(operator, {}).get("rows")
        return (
            rows if is_imported(self.provenance) and type(rows) is int else count_rows(self.files[operator])
        )


def is_own(provenance: Mapping[str, Any]) -> bool:
    """Whether kernels-bench measured a source."""
    return str(provenance.get("tool", "")).partition(" ")[0] == CUSTOM_TOOL


Convert = Callable[[Source, str], dict[str, Array]]
"""Converts a table of an imported source whose file is missing or damaged."""


def list_sources(folder: Path) -> list[Source]:
    """List the sources of a GPU folder, or the folder as one source."""
    return _sources(Path(folder))[0]


def load_sources(
    folder: Path | Sequence[Path],
    source: SourceChoice = None,
    when_needed: bool = False,
    convert: Convert | None = None,
) -> MeasuredTables:
    """Load measured tables in fastroof's own schema."""
    folders = [Path(folder)] if isinstance(folder, str | Path) else [Path(one) for one in folder]
    where = folders[0]
    sources, ignored = _all_sources(folders)
    chosen: dict[str, Source] = {}
    if isinstance(source, str):
        sources = _named(sources, source, where)
    elif source is not None:
        chosen = _chosen(sources, source, where)
        sources += [s for s in chosen.values() if s not in sources]
    gpus = {s.gpu: s.name for s in sources}
    if len(gpus) > 1:
        sources_by_gpu = ", ".join(f"{gpu} ({name})" for gpu, name in gpus.items())
        raise TableError(f"{where} has sources of several GPUs: {sources_by_gpu}; keep one folder per GPU")
    ignored |= {f"{s.name}/{name}": reason for s in sources for name, reason in s.ignored.items()}
    gpu = _gpu_spec(sources[0], where)
    tables, others = {}, {}
    for operator in OPERATORS:
        serving = [chosen[operator]] if operator in chosen else _serving(sources, operator)
        if serving:
            first, *rest = (_table(one, operator, gpu, when_needed, convert) for one in serving)
            tables[operator] = first
            if rest:
                others[operator] = tuple(rest)
    if not tables:
        raise TableError(f"{where} has no table; need <operator>.parquet or .csv, such as gemm.parquet")
    return MeasuredTables(gpu=gpu.name, tables=tables, root=where, ignored=ignored, spec=gpu, others=others)


def _serving(sources: list[Source], operator: str) -> list[Source]:
    """Sources of an operator by rank; the first of equal names."""
    having = {s.name: s for s in reversed(sources) if operator in s.files}
    return sorted(having.values(), key=lambda s: (s.rank(operator), s.name))


def _named(sources: list[Source], name: str, folder: Path) -> list[Source]:
    matches = [source for source in sources if source.name == name]
    if not matches:
        raise unknown_source(folder, name, (s.name for s in sources))
    return matches


def unknown_source(folder: Path, name: str, known: Iterable[str]) -> TableError:
    """Return the error for a source that a folder lacks."""
    names = ", ".join(dict.fromkeys(known))
    return TableError(f"{folder} has no source {name!r}; its sources are {names}")


def _chosen(sources: list[Source], names: Mapping[str, str], folder: Path) -> dict[str, Source]:
    """Source chosen for each operator."""
    chosen = {}
    for operator, name in names.items():
        if operator not in OPERATORS:
            raise TableError(f"source: {unknown_operator(operator)}")
        is_path = "/" in name and is_file(Path(name) / PROVENANCE_FILE)
        found = [_source(Path(name))] if is_path else _named(sources, name, folder)
        having = [source for source in found if operator in source.files]
        if not having:
            able = ", ".join(dict.fromkeys(s.name for s in sources if operator in s.files)) or "none"
            raise TableError(f"{folder}: source {name!r} has no {operator}; those that have it: {able}")
        chosen[operator] = having[0]
    return chosen


def _gpu_spec(source: Source, folder: Path) -> GpuSpec:
    """GPU of the gpu.toml next to the sources, else the one with that name."""
    for place in (folder / GPU_FILE, resolved(source.folder).parent / GPU_FILE):
        if is_file(place):
            gpu = load_gpu(place)
            if source.gpu not in (gpu.name, *gpu.aliases):
                raise TableError(
                    f"{source.folder / PROVENANCE_FILE}: gpu is {source.gpu!r}, but {place} describes "
                    f"{gpu.name!r}; move the source to the folder of its GPU"
                )
            return gpu
    return load_gpu(source.gpu)


# -- folders -------------------------------------------------------------------------------------


def _all_sources(folders: Sequence[Path]) -> tuple[list[Source], dict[str, str]]:
    """Sources of several folders, and their ignored entries."""
    sources, ignored = _sources(folders[0])
    for folder in folders[1:]:
        more, left = _sources(folder)
        sources += more
        ignored |= {f"{folder.name}/{name}": reason for name, reason in left.items()}
    return sources, ignored


def _sources(folder: Path) -> tuple[list[Source], dict[str, str]]:
    """Sources of a folder, and its ignored entries with the reason."""
    if not is_folder(folder):
        raise TableError(f"{folder}: no such folder")
    if is_file(folder / PROVENANCE_FILE):
        return [_source(folder)], {}
    sources, ignored = [], {}
    for entry in (folder / name for name in names_in(folder)):
        if is_file(entry / PROVENANCE_FILE):
            sources.append(_source(entry))
        elif entry.name == SERVING_FOLDER:
            ignored[entry.name] = "measured end to end, holds no kernels"
        elif entry.name != GPU_FILE and not is_unfinished(entry):
            ignored[entry.name] = f"not a source: no folder with a {PROVENANCE_FILE}"
    if not sources:
        raise TableError(
            f"{folder} has no source; need {PROVENANCE_FILE} next to the tables, in it or in a subfolder"
        )
    return sources, ignored


def _source(folder: Path) -> Source:
    provenance = _provenance(folder / PROVENANCE_FILE)
    hashes = _hashes(folder / PROVENANCE_FILE, provenance.pop(FILES, {}))
    files: dict[str, Path] = {}
    ignored: dict[str, str] = {}
    # files of an imported source appear when they are needed
    names = sorted(hashes) if is_imported(provenance) and hashes else names_in(folder)
    for path in (folder / name for name in names):
        if path.name == PROVENANCE_FILE:
            continue
        if path.stem not in OPERATORS or path.suffix not in ENDINGS:
            ignored[path.name] = "not <operator>.parquet or <operator>.csv"
        elif path.stem in files:
            raise TableError(f"{folder} has {files[path.stem].name} and {path.name}; keep one of them")
        else:
            files[path.stem] = path
    return Source(resolved(folder).name, provenance["gpu"], folder, files, provenance, hashes, ignored)


def _provenance(path: Path) -> dict[str, Any]:
    provenance = read_toml(path, TableError)
    gpu = provenance.get("gpu")
    if not isinstance(gpu, str) or not gpu:
        raise TableError(f'{path}: gpu is {gpu!r}; need the name of the GPU that was measured, as in "h100"')
    operators = provenance.get("operators", {})
    if not isinstance(operators, dict) or not all(isinstance(v, dict) for v in operators.values()):
        raise TableError(f"{path}: operators is {operators!r}; need one table [operators.<operator>] each")
    for owner, values in {"": provenance, **operators}.items():
        rank = values.get("rank", DEFAULT_RANK)
        if type(rank) is not int:
            where = f"[operators.{owner}] " if owner else ""
            raise TableError(f"{path}: {where}rank must be an integer (lowest first), got {rank!r}")
    for operator in OPERATORS.keys() & operators.keys():
        try:
            unsound_families(provenance, operator)
        except TableError as error:
            raise TableError(f"{path}: {error}") from None
    return provenance


def _hashes(path: Path, entries: Any) -> dict[str, dict[str, str]]:
    """Hashes of files from provenance; rows of other files are hashed on demand."""
    hashes: dict[str, dict[str, str]] = {}
    for name, one in entries.items() if isinstance(entries, Mapping) else [("", entries)]:
        known = {key: str(one.get(key)) for key in _HASHES} if isinstance(one, Mapping) else {}
        if not known or not all(map(_SHA256.fullmatch, known.values())):
            raise TableError(
                f'{path}: [{FILES}."{name}"] is {shown(one, 120)}; need {" and ".join(_HASHES)} of the file, '
                f"64 hex digits each, as kernels-bench writes them, or no such table"
            )
        hashes[name] = known
    return hashes


def _written_again(source: Source, path: Path) -> str:
    """SHA-256 of a table that was rewritten with the same rows since it was listed; else empty."""
    before = source.hashes.get(path.name, {})
    now = _source(source.folder).hashes.get(path.name, {})
    is_same = before.get("rows_sha256") == now.get("rows_sha256") and before != now
    return now["sha256"] if is_same else ""


# -- tables --------------------------------------------------------------------------------------


def _table(
    source: Source, operator: str, gpu: GpuSpec, when_needed: bool, convert: Convert | None
) -> MeasuredTable:
    path = source.files[operator]
    convert = convert if is_imported(source.provenance) else None

    def read() -> dict[str, Array]:
        return _read_table(source, operator, gpu, convert)

    columns: Mapping[str, Array] = RowsWhenNeeded(read) if when_needed or convert is not None else read()
    known = source.hashes.get(path.name, {})
    written = WrittenTable(path, known["sha256"], known["rows_sha256"]) if known else None
    return MeasuredTable(operator, columns, source.name, (path.name,), source.provenance, written)


def read_written(source: Source, operator: str) -> dict[str, Array]:
    """Read a table's file, and check it against its hash."""
    path = source.files[operator]
    read = partial(read_columns, path, OPERATORS[operator].required, OPTIONAL_COLUMNS)
    try:
        return read(sha256=source.hashes.get(path.name, {}).get("sha256", ""))
    except TableError:
        sha256 = _written_again(source, path)
        if not sha256:
            raise
        return read(sha256=sha256)


def _read_or_convert(source: Source, operator: str, convert: Convert | None) -> dict[str, Array]:
    if convert is None:
        return read_written(source, operator)
    # not through file_access: whether a table was converted before decides no result
    if not source.files[operator].is_file():
        return convert(source, operator)
    try:
        return read_written(source, operator)
    except TableError:
        return convert(source, operator)


def _read_table(source: Source, operator: str, gpu: GpuSpec, convert: Convert | None) -> dict[str, Array]:
    path = source.files[operator]
    schema = OPERATORS[operator]
    columns = dict(schema.as_keyed(_read_or_convert(source, operator, convert)))
    if GPU.name in columns:
        _refuse_other_gpus(path, columns[GPU.name], source.gpu)
    for column in schema.keys:
        if column.name in _DTYPES:
            _refuse_unknown_dtypes(path, column.name, columns[column.name])
    _refuse_impossible_sizes(path, schema, columns)
    _refuse_mfu_above_one(path, operator, columns, gpu)
    return columns


def _refuse_other_gpus(path: Path, gpus: Array, gpu: str) -> None:
    wrong = gpus != gpu
    if wrong.any():
        row = int(np.argmax(wrong))
        raise TableError(
            f"{path}, row {row + 1}, column gpu: found {gpus[row]!r}, need {gpu!r} as in {PROVENANCE_FILE}; "
            f"one source holds one GPU"
        )


def _refuse_unknown_dtypes(path: Path, name: str, dtypes: Array) -> None:
    unknown = set(dtypes) - set(DTYPE_BYTES)
    if unknown:
        row = int(np.argmax(np.isin(dtypes, list(unknown))))
        known = ", ".join(DTYPE_BYTES)
        raise TableError(f"{path}, row {row + 1}, column {name}: unknown {dtypes[row]!r}; use one of {known}")


def _refuse_impossible_sizes(path: Path, schema: Operator, columns: Mapping[str, Array]) -> None:
    for one in impossible_sizes(schema, columns):
        row = int(np.argmax(one.rows))
        raise TableError(
            f"{path}, row {row + 1}: {one.size} is {columns[one.size][row]}, more than {one.largest} "
            f"{columns[one.largest][row]}: {one.why}"
        )


def _refuse_mfu_above_one(path: Path, operator: str, columns: Mapping[str, Array], gpu: GpuSpec) -> None:
    work, own_flops_per_s, limit_flops_per_s = OPERATORS[operator].flops_and_peaks(columns, gpu)
    # attention computes in bf16, over an fp8 KV cache at most at the fp8 peak
    dtypes = columns.get("dtype", columns.get("kv_dtype", np.full(len(work), "bf16", object)))
    no_units = (np.isnan(own_flops_per_s) | np.isnan(limit_flops_per_s)) & ~np.isnan(work)
    if no_units.any():
        row = int(np.argmax(no_units))
        words = {name: columns[name][row : row + 1] for name in _DTYPES if name in columns}
        without = [name for name, word in words.items() if np.isnan(dtype_peaks(word, gpu)[0])]
        name = without[0] if without else "dtype"
        raise TableError(
            f"{path}, row {row + 1}: {gpu.title} has no units for {name} {columns.get(name, dtypes)[row]!r}; "
            f"remove these rows or correct the dtype"
        )
    mfu = work / (columns[LATENCY.name] / US_PER_S * limit_flops_per_s)
    too_fast = mfu > 1.0
    if too_fast.any():
        row = int(np.argmax(too_fast))
        shape = ", ".join(f"{c.name}={columns[c.name][row]}" for c in OPERATORS[operator].axes)
        raise TableError(
            f"{path}, row {row + 1} ({shape}): {columns[LATENCY.name][row]:.6g} us is an MFU of "
            f"{mfu[row]:.3f} of the {dtypes[row]} peak of {gpu.title} "
            f"({limit_flops_per_s[row] / TFLOP:g} TFLOP/s): wrong dtype, sizes, unit or GPU"
        )
