"""Read published trees of kernel tables: InferSim's, roofline V2's and similar ones.

Two orders of folders are supported::

    gemm/<gpu>/data.csv   mha/<phase>/<gpu>/<heads>.csv   grouped_gemm/<phase>/<gpu>/data.csv
    <gpu>/gemm/data.csv   <gpu>/mha/<phase>/<heads>.csv   <gpu>/grouped_gemm/<phase>/data.csv

``<heads>`` is ``<nh>-<nkv>-<dh>``, or ``<nh>-<nkv>-<dh>-tp<T>`` for rows of one GPU of T. Only a file's
latency is used; its ``mfu`` column is checked.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from fastroof.arrays import Array, Bools, Floats
from fastroof.columns import DTYPE, LATENCY, MEASURED_US
from fastroof.config.gpu import GpuSpec, gpu_names, load_gpu
from fastroof.errors import GpuError, MissingTableError, TableError
from fastroof.file_access import is_folder, matches, resolved
from fastroof.load.measured import MeasuredTable, MeasuredTables, PeakFinding
from fastroof.load.rows import beyond_limits, read_columns
from fastroof.operators.operator import RowWork
from fastroof.operators.registry import OPERATORS
from fastroof.units import PEAK_DTYPE, TFLOP, US_PER_S

RELATIVE_SLACK = 0.01
"""Relative tolerance of an mfu, for rounded latencies and peaks quoted as 989 or 989.5."""
ROUNDED_AWAY = 0.02
"""Relative rounding of an mfu above which a row does not show the peak."""
ENOUGH_ROWS = 0.75
"""Share of rows that a peak must reproduce."""
MOST_DECIMALS = 9


@dataclass(frozen=True)
class PeakFit:
    """Peak that a file used, and rows that contradict it."""

    finding: PeakFinding
    units: str | None
    expected_mfu: Floats
    contradicts: Bools


@dataclass(frozen=True)
class _Candidate:
    peak_flops_per_s: float
    gpu: str
    units: str
    convention: str
    flops: Floats


def rounding_unit(values: Array) -> float:
    """Step to which a column was rounded: 0.001 for 3 decimals."""
    # larger floats have no decimals, and rounding them overflows
    values = np.where(np.abs(values) < 2.0**52, values, 0.0)
    for decimals in range(MOST_DECIMALS):
        if np.abs(np.round(values, decimals) - values).max() < 0.1**MOST_DECIMALS:
            return float(10.0**-decimals)
    return float(10.0**-MOST_DECIMALS)


def fit_peak(
    operator: str, columns: Mapping[str, Array], gpu: GpuSpec, file: str, own_dtype: str | None
) -> PeakFit | None:
    """Find the peak and FLOP convention behind a file's mfu column."""
    mfu = columns.get("mfu")
    if mfu is None or not mfu.any():
        return None
    half_unit = rounding_unit(mfu) / 2.0
    seconds = columns["latency_us"] / US_PER_S
    own_units = None if own_dtype is None else PEAK_DTYPE.get(own_dtype)
    conventions = OPERATORS[operator].flops_conventions(columns)

    def contradicts(work: Floats, peak_flops_per_s: float) -> Bools:
        expected = work / (seconds * peak_flops_per_s)
        return np.asarray(np.abs(mfu - expected) > half_unit * (1 + 1e-6) + RELATIVE_SLACK * expected)

    sharp = mfu * ROUNDED_AWAY > half_unit

    def implied_peak(work: Floats) -> float:
        if sharp.any():
            return float(np.median(work[sharp] / (seconds[sharp] * mfu[sharp])))
        # rounding errors cancel in a sum, which includes rows of 0.0
        return float((work / seconds).sum() / mfu.sum())

    best: _Candidate | None = None
    fewest_off, nearest = int(len(mfu) * (1.0 - ENOUGH_ROWS)) + 1, 0.0
    for candidate in _candidates(conventions, gpu, own_units):
        if best is not None and best.gpu == gpu.name and not fewest_off:
            break
        off = int(contradicts(candidate.flops, candidate.peak_flops_per_s).sum())
        # 148 TFLOP/s with S^2 / 2 is within 1 % of 165 with S^2 / 1.8: of two other GPUs the nearer one
        distance = abs(implied_peak(candidate.flops) / candidate.peak_flops_per_s - 1.0)
        is_other_gpu = best is not None and best.gpu != gpu.name
        if off < fewest_off or (off == fewest_off and is_other_gpu and distance < nearest):
            best, fewest_off, nearest = candidate, off, distance
    convention, work = (best.convention, best.flops) if best else next(iter(conventions.items()))
    peak = implied_peak(work)
    if not sharp.any():
        sharp = np.ones(len(mfu), bool)

    used = best.peak_flops_per_s if best else peak
    is_gpu = best is not None and best.gpu == gpu.name
    finding = PeakFinding(
        file=file,
        peak_flops_per_s=peak,
        label=_label(best, gpu, peak) + (f"; {convention}" if convention else ""),
        agrees=is_gpu and (own_units is None or (best is not None and best.units == own_units)),
        rows=int(sharp.sum()),
    )
    units = best.units if best is not None and is_gpu else None
    return PeakFit(finding, units, work / (seconds * used), contradicts(work, used))


def _candidates(conventions: dict[str, Floats], gpu: GpuSpec, own_units: str | None) -> Iterator[_Candidate]:
    """Yield candidate peaks, the GPU's own first."""
    own = sorted(gpu.peak_flops_per_s.items(), key=lambda item: (item[0] != own_units, item[1], item[0]))
    for convention, work in conventions.items():
        for units, peak in own:
            if own_units in (None, units):
                yield _Candidate(peak, gpu.name, units, convention, work)
    for card in (gpu, *(load_gpu(name) for name in gpu_names() if name != gpu.name)):
        for units, peak in sorted(card.peak_flops_per_s.items()):
            for convention, work in conventions.items():
                yield _Candidate(peak, card.name, units, convention, work)


def _label(best: _Candidate | None, gpu: GpuSpec, peak_flops_per_s: float) -> str:
    if best is None:
        return f"{peak_flops_per_s / TFLOP:.4g} TFLOP/s, no known peak"
    if best.gpu == gpu.name:
        return f"{best.units} peak of {gpu.name}"
    return f"{best.peak_flops_per_s / TFLOP:.4g} TFLOP/s ({best.gpu} {best.units})"


Columns = dict[str, Array]

FEWEST_DRAWN: Final = 0.7
"""Least share of the given tokens that the scripts of grouped GEMMs draw."""
PHASES: Final = ("prefill", "decode")
UNREAD_KINDS: Final = {
    "dsa": "sparse attention (DSA) is not supported in trees",
    "gdn": "linear attention (GDN) is not supported in trees",
}
_OPERATORS: Final = {
    (file.kind, file.phase): (o.name, file) for o in OPERATORS.values() for file in o.tree_files
}
"""Operator and layout of each kind of file, by folders."""


@dataclass(frozen=True)
class _TreeFile:
    path: Path
    name: str
    """Path relative to the root, with forward slashes."""
    folder: str
    """Name of the GPU's folder."""
    kind: str
    phase: str


def is_tree(root: Path) -> bool:
    """Whether a folder is such a tree, or contains one as ``bench_data``."""
    return bool(_tree_files(_tree_root(Path(root))))


def load_tree(root: Path, gpu: str | None = None) -> MeasuredTables:
    """Load all tables of one GPU from a tree."""
    root = _tree_root(Path(root))
    files = _tree_files(root)
    if not files:
        raise TableError(
            f"{root} is not a tree of kernel tables; need gemm/<gpu>/data.csv, "
            "mha/<phase>/<gpu>/<nh>-<nkv>-<dh>.csv or the same below <gpu>/"
        )
    spec, chosen = _of_one_gpu(root, files, gpu)
    source = _source_name(root, spec)
    ignored: dict[str, str] = {}
    findings: list[PeakFinding] = []
    parts: defaultdict[str, list[Columns]] = defaultdict(list)
    for file in chosen:
        if file.kind in UNREAD_KINDS:
            ignored[file.name] = UNREAD_KINDS[file.kind]
            continue
        heads = _heads(file)
        if isinstance(heads, str):
            ignored[file.name] = heads
            continue
        operator, columns, finding, left_out = _read_file(file, heads, spec)
        parts[operator].append(columns)
        if left_out:
            ignored[file.name] = left_out
        findings += [] if finding is None else [finding]
    if not parts:
        first = "; ".join(f"{name}: {why}" for name, why in list(ignored.items())[:3])
        raise TableError(f"{root}: nothing to load for {spec.name}: {first}")
    provenance = {
        "gpu": spec.name,
        "source": source,
        "layout": "<gpu>/<kind>" if chosen[0].name.startswith(chosen[0].folder + "/") else "<kind>/<gpu>",
        "licence": "unknown",
    }
    return MeasuredTables(
        gpu=spec.name,
        tables={name: _table(name, parts[name], source, provenance) for name in OPERATORS if name in parts},
        root=root,
        findings=tuple(findings),
        ignored=ignored,
    )


# -- folders -----------------------------------------------------------------------------------


def _tree_root(root: Path) -> Path:
    inner = root / "bench_data"
    return inner if is_folder(inner) and not _tree_files(root) else root


def _tree_files(root: Path) -> list[_TreeFile]:
    """Files of all GPUs in both orders of folders, sorted by name."""
    files = []
    unread = [(kind, phase) for kind in UNREAD_KINDS for phase in PHASES]
    for kind, phase in (*_OPERATORS, *unread):
        layout = _OPERATORS.get((kind, phase))
        file = "*.csv" if layout is None or layout[1].named_by_heads else "data.csv"
        kind_first, gpu_first = f"{kind}/{phase}/*/{file}", f"*/{kind}/{phase}/{file}"
        for pattern, place in ((kind_first, -2), (gpu_first, 0)):
            for path in matches(root, pattern.replace("//", "/")):
                inside = path.relative_to(root)
                files.append(_TreeFile(path, inside.as_posix(), inside.parts[place], kind, phase))
    return sorted(files, key=lambda f: f.name)


def _of_one_gpu(root: Path, files: list[_TreeFile], gpu: str | None) -> tuple[GpuSpec, list[_TreeFile]]:
    by_gpu: defaultdict[str, list[_TreeFile]] = defaultdict(list)
    for file in files:
        by_gpu[_canonical(file.folder)].append(file)
    name = gpu_of_tree(root, sorted(by_gpu), None if gpu is None else _canonical(gpu))
    return load_gpu(name), by_gpu[name]


def gpu_of_tree(root: Path, have: Sequence[str], gpu: str | None) -> str:
    """Return the GPU whose tables to read: the given one, or the only one."""
    if gpu is None and len(have) > 1:
        raise TableError(f"{root} has tables of several GPUs ({', '.join(have)}): choose one with gpu=")
    if gpu is not None and gpu not in have:
        raise MissingTableError(f"{root} has no tables of gpu {gpu!r}; it has {', '.join(have)}")
    return have[0] if gpu is None else gpu


def _canonical(name: str) -> str:
    try:
        return load_gpu(name).name
    except GpuError:
        return name.lower()


def _source_name(root: Path, gpu: GpuSpec) -> str:
    """Name of the source: the root folder without common parts."""
    root = resolved(root)
    folder = root.parent.name if root.name == "bench_data" else root.name
    name = folder.lower().removesuffix("_bench_data").removeprefix(f"{gpu.name}_")
    return name or "tree"


# -- one file ----------------------------------------------------------------------------------


def _heads(file: _TreeFile) -> tuple[int, int, int] | str:
    """The three numbers in an attention file's name on one GPU, or the reason why it has none."""
    if not _OPERATORS[file.kind, file.phase][1].named_by_heads:
        return (0, 0, 0)
    match = re.fullmatch(r"([1-9]\d*)-([1-9]\d*)-([1-9]\d*)(?:-tp([1-9]\d*))?", file.path.stem)
    if match is None:
        return "the name is not <nh>-<nkv>-<dh>.csv or <nh>-<nkv>-<dh>-tp<T>.csv"
    first, second, third = (int(g) for g in match.groups()[:3])
    tp = int(match[4] or 1)
    if first % tp or (file.kind == "mha" and second % tp and tp % second):
        raise TableError(f"{file.name}: {first} and {second} heads cannot be split over {tp} GPUs")
    return (first // tp, max(1, second // tp) if file.kind == "mha" else second, third)


def _read_file(
    file: _TreeFile, heads: tuple[int, int, int], gpu: GpuSpec
) -> tuple[str, Columns, PeakFinding | None, str]:
    operator, layout = _OPERATORS[file.kind, file.phase]
    names = layout.order if _lacks_header(file.path) else None
    read = read_columns(file.path, layout.required, layout.optional, names=names, label=file.name)
    columns: Columns = {name: read[name] for name in ("latency_us", "mfu") if name in read}
    try:
        columns |= layout.convert(read, heads)
    except TableError as error:
        raise TableError(f"{file.name}, {error}") from None
    outside = beyond_limits(LATENCY, columns["latency_us"])
    if outside.any():  # of a sum of several columns
        row = int(np.argmax(outside))
        raise TableError(
            f"{file.name}, row {row + 1}: its latency is {columns['latency_us'][row]:g} us, "
            f"need {MEASURED_US[0]:g} to {MEASURED_US[1]:g}"
        )
    if DTYPE in layout.optional or layout.draws_tokens:
        fit = _fit_dtype(file, operator, columns, gpu)
    else:
        _check_dtype(file, "dtype", read["dtype"], compute_only=not layout.computes_in_any_dtype)
        if "kv_dtype" in columns:
            _check_dtype(file, "kv_dtype", columns["kv_dtype"], compute_only=False)
        fit = fit_peak(operator, columns, gpu, file.name, str(read["dtype"][0]))
    left_out = ""
    if layout.draws_tokens:
        columns, left_out = _possible_rows(operator, columns, gpu)
    _check_mfu(file, operator, columns, gpu, None if fit is None else fit.finding)
    columns["file"] = _repeat(file.name, len(columns["latency_us"]))
    return operator, columns, None if fit is None else fit.finding, left_out


def _possible_rows(operator: str, columns: Columns, gpu: GpuSpec) -> tuple[Columns, str]:
    """Drop rows that ran fewer tokens than given, with a note; rows that no draw explains stay."""
    mfu = _mfu(OPERATORS[operator].work(columns, gpu), columns)
    possible = (mfu <= 1.0) | (mfu > 1.0 / FEWEST_DRAWN)
    if possible.all():
        return columns, ""
    note = f"{(~possible).sum()} of {len(possible)} rows: faster than the peak for the tokens they name"
    return {name: column[possible] for name, column in columns.items()}, note


def _mfu(work: RowWork, columns: Columns) -> Floats:
    return np.asarray(work.flops * US_PER_S / (columns["latency_us"] * work.limit_flops_per_s))


def _lacks_header(path: Path) -> bool:
    """Whether the first line is a row: a header has no numeric cell."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return False
    return any(re.fullmatch(r"\s*[-+]?\d+(\.\d*)?\s*", cell) for cell in first)


def _fit_dtype(file: _TreeFile, operator: str, columns: Columns, gpu: GpuSpec) -> PeakFit | None:
    """Fit the peak; a file without a dtype column gets the dtype of its peak."""
    if "dtype" in columns:
        _check_dtype(file, "dtype", columns["dtype"], compute_only=False)
        dtypes = np.unique(columns["dtype"])
        return fit_peak(operator, columns, gpu, file.name, str(dtypes[0])) if len(dtypes) == 1 else None
    fit = fit_peak(operator, columns, gpu, file.name, None)
    if fit is None or fit.units is None:
        mfu_column = (
            "no mfu column either" if fit is None else f"an mfu column divided by {fit.finding.label}"
        )
        peaks = ", ".join(f"{units} {p / TFLOP:.4g}" for units, p in sorted(gpu.peak_flops_per_s.items()))
        raise TableError(
            f"{file.name}: no dtype column, and {mfu_column}: the dtype is unknown; "
            f"add a dtype column, or an mfu column of one of the peaks of {gpu.name} ({peaks} TFLOP/s)"
        )
    columns["dtype"] = _repeat(fit.units, len(columns["latency_us"]))
    return fit


def _check_dtype(file: _TreeFile, column: str, words: Array, compute_only: bool) -> None:
    """Reject an unknown dtype, and for attention one that does not compute in bf16."""
    known = ("bf16", "fp16") if compute_only else tuple(PEAK_DTYPE)
    wrong = ~np.isin(words.astype(str), known)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise TableError(
            f"{file.name}, row {row + 1}, column {column}: found {words[row]!r}, need {' or '.join(known)}"
        )


def _check_mfu(
    file: _TreeFile, operator: str, columns: Columns, gpu: GpuSpec, finding: PeakFinding | None
) -> None:
    """Reject a table that is too fast for its dtype."""
    work = OPERATORS[operator].work(columns, gpu)
    if np.isnan(work.peak_flops_per_s).any():
        row = int(np.argmax(np.isnan(work.peak_flops_per_s)))
        have = ", ".join(sorted(gpu.peak_flops_per_s))
        raise TableError(
            f"{file.name}, row {row + 1}: found dtype {columns['dtype'][row]!r}, "
            f"but {gpu.name} computes only in {have}"
        )
    mfu = _mfu(work, columns)
    if (mfu > 1.0).any():
        row = int(np.argmax(mfu))
        sizes = ", ".join(f"{c.name} {columns[c.name][row]}" for c in OPERATORS[operator].axes)
        dtype = str(columns["kv_dtype" if "kv_dtype" in columns else "dtype"][row])
        claim = "" if finding is None else f" (its mfu column was divided by the {finding.label})"
        raise TableError(
            f"{file.name}, row {row + 1}: {columns['latency_us'][row]} us for {sizes} means an MFU of "
            f"{mfu[row]:.3f} of the {work.limit_flops_per_s[row] / TFLOP:.4g} TFLOP/s that {gpu.name} has "
            f"for {dtype}{claim}: a wrong unit, dtype or GPU; correct the table"
        )


# -- one table ---------------------------------------------------------------------------------


def _table(operator: str, parts: list[Columns], source: str, provenance: dict[str, str]) -> MeasuredTable:
    """Join the files of one operator; a missing mfu is NaN."""
    schema = OPERATORS[operator]
    names = [c.name for c in schema.required] + ["file"]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in names}
    if any("mfu" in part for part in parts):
        columns["mfu"] = np.concatenate(
            [part.get("mfu", np.full(len(part["latency_us"]), np.nan)) for part in parts]
        )
    files = tuple(str(part["file"][0]) for part in parts)
    return MeasuredTable(operator, columns, source, files, provenance)


def _repeat(word: str, rows: int) -> Array:
    return np.array([word] * rows, dtype=object)
