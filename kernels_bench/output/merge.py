"""Several runs of the same points to one table: the median of their medians, with how far they are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastroof._version import __version__
from fastroof.arrays import Array, Longs
from fastroof.columns import GPU, KERNEL, LATENCY, PROVIDER, QUANTISES, SPREAD_COLUMNS
from fastroof.errors import MeasureError
from fastroof.load import MeasuredTables
from fastroof.load.families import codes_of, group_medians
from fastroof.load.write import Format, write_source
from fastroof.operators.registry import OPERATORS
from kernels_bench.output.provenance import of_engine, refuse_odd_provenance
from kernels_bench.output.table_sets import load_table_set, row_keys
from kernels_bench.output.tables import carry_gpu_file, known_columns

Columns = dict[str, Array]

NUM_RUNS: Final = "num_runs"
RUN_SPREAD: Final = "run_spread"
_QUARTILES: Final = ("p25_us", "p75_us")
_OF_ALL: Final = ("gpu", "sentinels", "operators")


@dataclass(frozen=True)
class Merged:
    """What :func:`merge_runs` returns."""

    gpu: str
    # For each operator its columns, and ``num_runs`` (runs behind the row) and ``run_spread`` (largest less
    # smallest latency over the median).
    tables: Mapping[str, Columns]
    provenance: Mapping[str, Any]
    notes: tuple[str, ...]
    # Folders of the runs and those around them: where a gpu.toml may lie.
    places: tuple[Path, ...] = ()


def merge_runs(runs: Sequence[str | Path], prefer: Sequence[str] = ()) -> Merged:
    """Merge several runs of one GPU."""
    if len(runs) < 2:
        raise MeasureError(f"merging takes at least two runs, got {len(runs)}")
    sets = {str(word): load_table_set(str(word)) for word in runs}
    if len(sets) < len(runs):
        raise MeasureError("a run is named twice; each counts once in a median")
    gpus = {word: tables.gpu for word, tables in sets.items()}
    if len(set(gpus.values())) > 1:
        listed = ", ".join(f"{word} is of {gpu}" for word, gpu in gpus.items())
        raise MeasureError(f"runs of several GPUs are not merged: {listed}")
    gpu = next(iter(gpus.values()))
    notes: list[str] = []
    tables = {
        operator: _merge(operator, [s for s in sets.values() if operator in s.tables], gpu, prefer, notes)
        for operator in OPERATORS
        if any(operator in s.tables for s in sets.values())
    }
    places = tuple(place for s in sets.values() for place in (s.root, s.root.resolve().parent))
    return Merged(gpu, tables, _provenance(gpu, sets, tables), tuple(notes), places)


def write_merged(
    merged: Merged,
    folder: Path,
    *,
    overwrite: bool = False,
    rank: int | None = None,
    engine: str = "",
    file_format: Format = "csv",
) -> Path:
    """Write merged runs as a source that ``fastroof.load_tables`` reads."""
    provenance = {**merged.provenance, **({} if rank is None else {"rank": rank})}
    if engine:
        provenance = of_engine(provenance, engine)
    tables = {operator: known_columns(operator, columns) for operator, columns in merged.tables.items()}
    try:
        write_source(folder, tables, provenance, format=file_format, overwrite=overwrite)
        carry_gpu_file(merged.gpu, merged.places, Path(folder))
    except OSError as error:
        raise MeasureError(f"{folder} cannot be written: {error.strerror or error}") from error
    return Path(folder)


# -- one operator --------------------------------------------------------------------------------


def _merge(
    operator: str, sets: Sequence[MeasuredTables], gpu: str, prefer: Sequence[str], notes: list[str]
) -> Columns:
    rows, run = _joined(operator, [dict(s.tables[operator].columns) for s in sets], notes)
    schema = OPERATORS[operator]
    point = codes_of(rows[c.name] for c in (*schema.keys, *schema.axes))
    if PROVIDER.name in rows:
        kept = _one_provider(operator, rows, point, prefer)
        rows, run, point = {name: v[kept] for name, v in rows.items()}, run[kept], point[kept]
    first = np.unique(point, return_index=True)[1]
    merged = {c.name: rows[c.name][first] for c in (*schema.keys, *schema.axes)}

    # A run that timed a point more than once has one voice all the same.
    voice = codes_of((point, run))
    of_voice = point[np.unique(voice, return_index=True)[1]]
    latency_us = group_medians(voice, rows[LATENCY.name])
    merged[LATENCY.name] = median_us = group_medians(of_voice, latency_us)
    merged[GPU.name] = np.array([gpu] * len(first), object)
    if PROVIDER.name in rows:
        merged[PROVIDER.name] = rows[PROVIDER.name][first]
    if KERNEL.name in rows:
        merged[KERNEL.name] = _names(point, rows[KERNEL.name])
    for name in _QUARTILES:
        if name in rows:
            merged[name] = group_medians(of_voice, group_medians(voice, rows[name]))
    if "min_us" in rows:
        merged["min_us"] = _reduced(np.minimum, point, rows["min_us"])
    if QUANTISES.name in rows:
        merged[QUANTISES.name] = _reduced(np.minimum, point, rows[QUANTISES.name])
    if "num_replays" in rows:
        merged["num_replays"] = _reduced(np.add, point, rows["num_replays"])
    merged[NUM_RUNS] = np.bincount(of_voice).astype(np.int64)
    spread_us = _reduced(np.maximum, of_voice, latency_us) - _reduced(np.minimum, of_voice, latency_us)
    merged[RUN_SPREAD] = spread_us / median_us
    return merged


def _joined(operator: str, parts: Sequence[Columns], notes: list[str]) -> tuple[Columns, Longs]:
    """Return the rows of all runs, and which run each is of; what one run lacks none keeps."""
    names = [c.name for c in OPERATORS[operator].required]
    for column in (PROVIDER, KERNEL, *SPREAD_COLUMNS):
        have = sum(column.name in part for part in parts)
        if have == len(parts):
            names.append(column.name)
        elif have:
            notes.append(f"{operator}: {column.name} is in {have} of {len(parts)} runs and is left out")
    run = np.repeat(np.arange(len(parts)), [len(part[LATENCY.name]) for part in parts])
    return {name: np.concatenate([part[name] for part in parts]) for name in names}, run


def _one_provider(operator: str, rows: Columns, point: Longs, prefer: Sequence[str]) -> Longs:
    """Return the rows to keep: at each point those of one provider."""
    # a library's own kernel and one that Inductor compiles are no runs of the same
    kernels = rows.get(KERNEL.name, rows[PROVIDER.name])
    compiled = np.array(
        [" by Inductor" if "inductor of torch" in kernel else "" for kernel in kernels], object
    )
    providers = rows[PROVIDER.name] + compiled
    places = {name: place for place, name in enumerate(prefer)}
    either = zip(providers, rows[PROVIDER.name], strict=True)
    place = np.array([places.get(a, places.get(b, len(prefer))) for a, b in either], np.int64)
    best = _reduced(np.minimum, point, place)
    kept = np.flatnonzero(place == best[point])
    each = codes_of((point[kept], providers[kept]))
    point_of_each = point[kept][np.unique(each, return_index=True)[1]]
    mixed = np.flatnonzero(np.bincount(point_of_each) > 1)
    if len(mixed):
        at = kept[point[kept] == mixed[0]]
        names = sorted(set(providers[at].tolist()))
        key = next(row_keys(operator, {name: values[at[:1]] for name, values in rows.items()}))
        raise MeasureError(
            f"{len(mixed)} points of {operator} were measured by different kernels, as {key} by "
            f"{' and '.join(names)}; their median would be the time of neither: "
            f"choose, for example --prefer '{','.join(names)}'"
        )
    return kept


def _reduced(ufunc: np.ufunc, codes: Longs, values: Array) -> Array:
    """Return one value a code: the minimum, maximum or sum."""
    order = np.argsort(codes, kind="stable")
    counts = np.bincount(codes)
    return np.asarray(ufunc.reduceat(values[order], np.cumsum(counts) - counts))


def _names(codes: Longs, words: Array) -> Array:
    """Return the different words of each code, joined."""
    each = codes_of((codes, words))
    first = np.unique(each, return_index=True)[1]
    words_of_code: dict[int, list[str]] = {}
    for code, word in zip(codes[first].tolist(), words[first].tolist(), strict=True):
        words_of_code.setdefault(code, []).append(word)
    return np.array([" | ".join(words_of_code[code]) for code in sorted(words_of_code)], object)


# -- provenance ----------------------------------------------------------------------------------


def _provenance(
    gpu: str, sets: Mapping[str, MeasuredTables], tables: Mapping[str, Columns]
) -> dict[str, Any]:
    return {
        "gpu": gpu,
        "name": "kernels_bench",
        "tool": f"kernels_bench {__version__}",
        "merged": "median over the runs of latency_us, p25_us and p75_us; min_us is the least",
        "rows": sum(len(columns[LATENCY.name]) for columns in tables.values()),
        "sentinels": [repeat for s in sets.values() for repeat in _of(s).get("sentinels", [])],
        "operators": {operator: _summary(operator, columns) for operator, columns in tables.items()},
        "merged_from": [
            # without what the merged one states for all
            {"run": Path(word).name, **{k: v for k, v in _of(s).items() if k not in _OF_ALL}}
            for word, s in sets.items()
        ],
    }


def _of(tables: MeasuredTables) -> Mapping[str, Any]:
    provenance = next(iter(tables.tables.values())).provenance
    if {"runs", "merged_from"} & set(provenance):  # other programs write anything
        refuse_odd_provenance(provenance)
        return provenance
    return {name: value for name, value in provenance.items() if name != "sentinels"}


def _summary(operator: str, columns: Columns) -> dict[str, Any]:
    spread, num_runs = columns[RUN_SPREAD], columns[NUM_RUNS]
    repeated = np.flatnonzero(num_runs > 1)
    summary: dict[str, Any] = {"rows": len(spread), "rows_of_several_runs": len(repeated)}
    for name in (PROVIDER.name, KERNEL.name):
        if name in columns:
            summary[f"{name}s"] = sorted(set(columns[name].tolist()))
    if len(repeated):
        worst = int(repeated[np.argmax(spread[repeated])])
        summary["run_spread"] = {
            "median": float(np.median(spread[repeated])),
            "p90": float(np.quantile(spread[repeated], 0.9)),
            "max": float(spread[worst]),
            "worst": next(row_keys(operator, {name: values[[worst]] for name, values in columns.items()})),
        }
    return summary
