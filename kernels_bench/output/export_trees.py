"""Write measured tables as the tree of CSV files that InferSim or roofline V2 reads.

The layout is that of ``bench_data`` in alibaba/InferSim (commit f2293da)::

    gemm/<gpu>/data.csv                             m,k,n,latency_us,mfu
    mha/prefill/<gpu>/<nh>-<nkv>-<dh>.csv           dtype,seq_len,latency_us,mfu
    mha/decode/<gpu>/<nh>-<nkv>-<dh>.csv            dtype,kv_dtype,batch_size,kv_len,latency_us,mfu
    mla/prefill/<gpu>/<nh>-<nope>-<rope>.csv        as mha/prefill
    mla/decode/<gpu>/<nh>-<kv_lora>-<rope>.csv      as mha/decode

Roofline V2 of inference-sim (commit 487017bc) has the first three, with heads before they are split over
GPUs: ``mha/decode/<gpu>/<nh>-<nkv>-<dh>-tp<T>.csv``. It finds decodes by the prefill of the same heads only.
"""

from __future__ import annotations

import contextlib
import csv
import io
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Bools, Floats
from fastroof.atomic_files import whole_folder, write_whole
from fastroof.config.gpu import GpuSpec
from fastroof.errors import MeasureError
from fastroof.load import MeasuredTable, MeasuredTables
from fastroof.load.families import codes_of, group_medians
from fastroof.load.write import toml_text
from fastroof.models.layout import TP_SIZES
from fastroof.operators.external_rows import TreeFile
from fastroof.operators.registry import OPERATORS
from fastroof.units import US_PER_S
from kernels_bench.output.table_sets import gpu_of

Columns = Mapping[str, Array]

ROUNDS_TO_ZERO: Final = 0.0005
"""InferSim rounds what it looks up to 3 decimals, and divides by it."""
INFERSIM: Final = "InferSim"
ROOFLINE_V2: Final = "roofline V2"
READ_AS_ZERO: Final = {
    INFERSIM: "rows have an MFU that InferSim rounds to 0.0 and divides by",
    ROOFLINE_V2: "sizes between those of a decode file have no row; roofline V2 reads an MFU of 0 there",
}
"""What :attr:`Export.read_as_zero` counts, by the program whose layout is written."""
GEMMS: Final = "gemm"
PREFILLS: Final = "mha/prefill"
DECODES: Final = "mha/decode"
PUBLISHED_FLOPS: Final = "FLOPs of S^2 / 2"
"""How the published files count a causal triangle, see :meth:`Operator.flops_conventions`."""


@dataclass(frozen=True)
class Export:
    """What :func:`export_tree` wrote."""

    root: Path
    # Name of the GPU's folders in it.
    gpu: str
    # Rows of each file, relative to the tree; roofline V2 has those of split heads in several files.
    rows: Mapping[str, int]
    # Rows that the program's files cannot hold, by reason.
    left_out: Mapping[str, int] = field(default_factory=dict)
    # Rows or sizes of which the program reads an MFU of 0, see READ_AS_ZERO.
    read_as_zero: int = 0


def export_tree(
    tables: MeasuredTables,
    root: Path,
    program: str = INFERSIM,
    *,
    gemm_dtype: str | None = None,
    overwrite: bool = False,
) -> Export:
    """Write a table set as the tree that InferSim or roofline V2 reads."""
    root, gpu = Path(root), gpu_of(tables)
    left_out: dict[str, int] = {}
    parts: list[_Part] = []
    for operator, table in tables.tables.items():
        # experts are in two files by the tokens of their GEMMs, which a fused kernel's rows are not
        files_of = OPERATORS[operator].tree_files
        file = files_of[0] if len(files_of) == 1 else None
        if file is None or (program == ROOFLINE_V2 and file.kind == "mla"):
            _count(left_out, f"{program} has no file for {operator}", table.num_rows)
        elif file.phase:
            parts += _attention_parts(file, table, gpu, program, left_out)
        else:
            parts += _gemm_parts(file, table, gpu, _gemm_dtype(table, program, gemm_dtype), left_out)
    for at, part in enumerate(parts):
        parts[at] = part._replace(columns=_medians(part.columns))
        repeats = _rows(part.columns) - _rows(parts[at].columns)
        _count(left_out, "repeats of a point, of which the median is written", repeats)
    if program == ROOFLINE_V2:
        parts = _over_gpus(parts, left_out)
    if not parts:
        need = "; it needs GEMMs, prefills and decodes of the same heads" if program == ROOFLINE_V2 else ""
        reasons = "; ".join(f"{count} rows: {why}" for why, count in left_out.items()) or "no rows"
        raise MeasureError(f"nothing of {tables.root} fits {program}'s files{need}: {reasons}")
    paths = [f"{part.folder}/{gpu.name}/{part.name}.csv" for part in parts]
    files = {path: _csv(part.header, part.columns) for path, part in zip(paths, parts, strict=True)}
    rows = {path: _rows(part.columns) for path, part in zip(paths, parts, strict=True)}
    zeros = sum(_read_as_zero(part, program) for part in parts)
    files[f"provenance-{gpu.name}.toml"] = _provenance(tables, gpu, program)
    _write(root, gpu.name, files, overwrite)
    return Export(root, gpu.name, rows, left_out, zeros)


# -- rows ----------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """One file, without the name of its GPU."""

    folder: str
    name: str
    header: Sequence[str]
    columns: Columns


def _unfit(file: TreeFile, columns: Columns, program: str) -> list[tuple[str, Bools]]:
    """Return why rows do not fit an operator's files, and which."""
    unfit: list[tuple[str, Bools]] = []
    if "window" in columns:
        unfit.append(("with a sliding window", columns["window"] > 0))
    if "seq_len" in file.order:  # one prompt a row
        if "batch_size" in columns:
            unfit.append(("of several sequences", columns["batch_size"] > 1))
        if "kv_len" in columns:
            unfit.append(("after a prefix", columns["kv_len"] > columns["q_len"]))
    # roofline V2 reads the sizes of a row alone
    if "kv_dtype" in columns and ("kv_dtype" not in file.order or program == ROOFLINE_V2):
        unfit.append(("over a KV cache other than bf16", columns["kv_dtype"] != "bf16"))
    return unfit


def _gemm_dtype(table: MeasuredTable, program: str, dtype: str | None) -> str:
    """Return the one dtype of which GEMMs are written."""
    have = sorted(set(table.columns["dtype"].tolist()))
    if dtype is None:
        if len(have) > 1 and "bf16" not in have:
            raise MeasureError(
                f"the GEMMs are of {', '.join(have)} and {program}'s file holds one dtype: "
                f"choose one with --gemm-dtype {have[0]}"
            )
        dtype = "bf16" if "bf16" in have else have[0]
    if dtype not in have:
        raise MeasureError(f"no GEMM of dtype {dtype!r}; the tables have {', '.join(have)}")
    return dtype


def _gemm_parts(
    file: TreeFile, table: MeasuredTable, gpu: GpuSpec, dtype: str, left_out: dict[str, int]
) -> list[_Part]:
    dtypes = table.columns["dtype"]
    for other in sorted(set(dtypes.tolist()) - {dtype}):
        count = int((dtypes == other).sum())
        _count(left_out, f"gemm of {other}, the one GEMM file holds {dtype}", count)
    columns = {name: values[dtypes == dtype] for name, values in table.columns.items()}
    columns["mfu"] = _mfu(table.operator, columns, gpu)
    # InferSim's rows go by k, then n, then m.
    written = {name: columns[name] for name in ("k", "n", "m", "latency_us", "mfu")}
    return [_Part(file.kind, "data", file.order, written)]


def _attention_parts(
    file: TreeFile, table: MeasuredTable, gpu: GpuSpec, program: str, left_out: dict[str, int]
) -> list[_Part]:
    """Return one file a head shape."""
    operator = OPERATORS[table.operator]
    columns = dict(table.columns)
    kept = np.ones(table.num_rows, bool)
    for why, wrong in _unfit(file, columns, program):
        _count(left_out, f"{operator.name} {why}", int((kept & wrong).sum()))
        kept &= ~wrong
    columns = {name: values[kept] for name, values in columns.items()}
    if not _rows(columns):
        return []
    columns["mfu"] = _mfu(operator.name, columns, gpu)
    columns["seq_len"] = columns.get("q_len", columns["latency_us"])
    if "dtype" not in columns:
        # What attention computes in; the cache's dtype is in kv_dtype.
        columns["dtype"] = np.array(["bf16"] * _rows(columns), object)
    # rows with a window are left out, so a file's name has none
    heads = [key.name for key in operator.keys if key.kind == "int" and key.name != "window"]
    of_file = codes_of(columns[name] for name in heads)
    parts: list[_Part] = []
    for code in range(int(of_file.max()) + 1):
        mine = of_file == code
        name = "-".join(str(columns[head][mine][0]) for head in heads)
        rows = {column: columns[column][mine] for column in file.order}
        parts.append(_Part(f"{file.kind}/{file.phase}", name, file.order, rows))
    return parts


def _over_gpus(parts: list[_Part], left_out: dict[str, int]) -> list[_Part]:
    """Name decodes by the heads of each measured prefill, and by the GPUs that those are split over."""
    decodes = {part.name: part for part in parts if part.folder == DECODES}
    named = [part for part in parts if part.folder not in (PREFILLS, DECODES)]
    unused = dict(decodes)
    for prefill in (part for part in parts if part.folder == PREFILLS):
        nh, nkv, width = map(int, prefill.name.split("-"))
        splits = [tp for tp in TP_SIZES if not nh % tp and (not nkv % tp or not tp % nkv)]
        heads = {tp: f"{nh // tp}-{max(1, nkv // tp)}-{width}" for tp in splits}
        served = {tp: decodes[name] for tp, name in heads.items() if name in decodes}
        if not served:
            _count(left_out, "attention_prefill of heads without a decode", _rows(prefill.columns))
            continue
        named.append(prefill)
        for tp, part in served.items():
            unused.pop(part.name, None)
            named.append(part._replace(name=f"{prefill.name}-tp{tp}"))
    for part in unused.values():
        _count(left_out, "attention_decode of heads without a prefill", _rows(part.columns))
    return named if {GEMMS, DECODES} <= {part.folder for part in named} else []


def _read_as_zero(part: _Part, program: str) -> int:
    """Return what :data:`READ_AS_ZERO` counts in one file."""
    if program == INFERSIM:
        return int((part.columns["mfu"] < ROUNDS_TO_ZERO).sum())
    if part.folder != DECODES:
        return 0
    batches, lengths = (len(np.unique(part.columns[axis])) for axis in ("batch_size", "kv_len"))
    return batches * lengths - _rows(part.columns)


def _mfu(operator: str, columns: Columns, gpu: GpuSpec) -> Floats:
    """Return MFUs as the published tables count: of S^2 / 2 where a triangle has S (S + 1) / 2."""
    work = OPERATORS[operator].work(columns, gpu)
    flops = OPERATORS[operator].flops_conventions(columns).get(PUBLISHED_FLOPS, work.flops)
    return np.asarray(flops * US_PER_S / (columns["latency_us"] * work.peak_flops_per_s), np.float64)


def _medians(columns: Mapping[str, Array]) -> dict[str, Array]:
    """Return one row a point, sorted: InferSim scans files in order and stops at the first larger size."""
    sizes = [name for name in columns if name not in ("latency_us", "mfu")]
    codes = codes_of(columns[name] for name in sizes)
    first = np.unique(codes, return_index=True)[1]
    latency_us = group_medians(codes, columns["latency_us"])
    # FLOPs do not change within a point, so its MFU goes by 1 / latency.
    scale = columns["latency_us"][first] / latency_us
    distinct = {name: columns[name][first] for name in sizes}
    return distinct | {"latency_us": latency_us, "mfu": columns["mfu"][first] * scale}


def _csv(header: Sequence[str], columns: Mapping[str, Array]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    # Python writes the shortest digits that read back to the same float64.
    writer.writerows(zip(*(columns[name].tolist() for name in header), strict=True))
    return out.getvalue()


def _rows(columns: Mapping[str, Array]) -> int:
    return len(columns["latency_us"])


def _count(counts: dict[str, int], why: str, rows: int) -> None:
    if rows:
        counts[why] = counts.get(why, 0) + rows


# -- files ---------------------------------------------------------------------------------------


def _provenance(tables: MeasuredTables, gpu: GpuSpec, program: str) -> str:
    """Return where the rows came from: whose they are goes with them."""
    sources = {table.source: dict(table.provenance) for table in tables.tables.values()}
    return toml_text({"gpu": gpu.name, "layout": f"{program} bench_data", "sources": sources})


def _write(root: Path, gpu: str, files: Mapping[str, str], overwrite: bool) -> None:
    """Write all files of the GPU first, then move the folders to their places."""
    folders = sorted({PurePosixPath(name).parent for name in files if "/" in name})
    stale = [p for kind in ("gemm", "mha/*", "mla/*") for p in root.glob(f"{kind}/{gpu}") if p.is_dir()]
    if stale and not overwrite:
        raise MeasureError(f"{stale[0]} exists; --overwrite replaces the folders of {gpu} in {root}")
    try:
        with contextlib.ExitStack() as unfinished:
            places = {folder: unfinished.enter_context(whole_folder(root / folder)) for folder in folders}
            for name, text in files.items():
                path = PurePosixPath(name)
                if path.parent in places:
                    write_whole(places[path.parent] / path.name, text)
        for old in stale:
            if PurePosixPath(old.relative_to(root)) not in places:
                shutil.rmtree(old)
        for name in files:
            if "/" not in name:
                write_whole(root / name, files[name])
    except OSError as error:
        raise MeasureError(f"{root} cannot be written: {error.strerror or error}") from error
