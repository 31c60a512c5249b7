"""Any table set by one word: a journal, a folder, a tree, a GPU's name or one of its sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from fastroof.arrays import Array, Floats, Longs
from fastroof.config.gpu import GPU_FILE, GpuSpec, load_gpu
from fastroof.errors import MeasureError
from fastroof.load import MeasuredTable, MeasuredTables, load_measured
from fastroof.load.own import PROVENANCE_FILE
from fastroof.load.trees import is_tree
from fastroof.operators.registry import OPERATORS
from kernels_bench.journal import find_journals
from kernels_bench.output.provenance import provenance_of, recorded_gpu
from kernels_bench.output.recorded import read_journals
from kernels_bench.output.tables import spec_beside, usable_tables
from kernels_bench.points import Point

__all__ = [
    "codes_of",
    "gpu_of",
    "group_medians",
    "journals_of",
    "load_table_set",
    "row_keys",
    "tables_of_journals",
]


JOURNAL_ENDING: Final = ".jsonl"
TABLES_FOLDER: Final = "kernels_bench"


def load_table_set(word: str) -> MeasuredTables:
    """Load measured tables of any kind.

    Parameters
    ----------
    word : str
        A journal (``.jsonl``), or the folder that a run wrote its journals to; a folder of tables as
        ``fastroof.load_tables`` takes it; the name of a GPU that ships with fastroof; or folder or name, a
        colon, and one of its sources (of a tree: one of its GPUs), as in ``h100:kernels_bench``.

    Returns
    -------
    MeasuredTables
        Of one GPU.

    Raises
    ------
    MeasureError
        If a journal is none or holds no row.
    TableError, GpuError
        If there is no such folder, GPU or source, or a table must not be used.

    Examples
    --------
    >>> load_table_set("h100:aiconfigurator-vllm-0.24.0").gpu
    'h100'
    """
    path = Path(word)
    if journals := journals_of(word):
        return tables_of_journals(journals)
    if path.is_dir():
        return load_measured(path)
    name, colon, part = word.rpartition(":")
    if not colon:
        return load_measured(word)
    if not name or not part:
        raise MeasureError(f"{word!r} names no table set; write a folder, a GPU, or gpu:source")
    folder = Path(name)
    if folder.is_dir() and is_tree(folder):
        return load_measured(folder, gpu=part)
    return load_measured(folder if folder.is_dir() else name, source=part)


def journals_of(word: str) -> list[Path]:
    """Return the journals that a word names, none where it names tables.

    Parameters
    ----------
    word : str
        As for :func:`load_table_set`.

    Examples
    --------
    >>> journals_of("h100")
    []
    """
    path = Path(word)
    if path.suffix == JOURNAL_ENDING:
        return [path]
    if not path.is_dir() or (path / PROVENANCE_FILE).is_file():
        return []
    others = {source.parent.name for source in path.glob(f"*/{PROVENANCE_FILE}")} - {TABLES_FOLDER}
    # The journals of a run say more than its tables; a GPU's folder with other sources is taken as such.
    return [] if others else find_journals(path)


def tables_of_journals(journals: Iterable[Path]) -> MeasuredTables:
    """Return journals as the tables that :func:`kernels_bench.output.tables.write_tables` would write.

    Parameters
    ----------
    journals : iterable of Path
        Journals of one GPU whose points are apart.

    Raises
    ------
    MeasureError
        As :func:`kernels_bench.output.recorded.read_journals`.
    """
    paths = [Path(journal) for journal in journals]
    recorded = read_journals(paths)
    # A journal lies in the GPU's folder, beside the folder of its tables.
    spec = spec_beside(paths[0].parent / TABLES_FOLDER, recorded_gpu(recorded))
    columns, left_out = usable_tables(recorded, spec)
    provenance = provenance_of(recorded, columns, left_out)
    names = tuple(path.name for path in paths)
    tables = {
        operator: MeasuredTable(operator, table, paths[0].stem, names, provenance)
        for operator, table in columns.items()
    }
    return MeasuredTables(gpu=recorded_gpu(recorded), tables=tables, root=paths[0].parent)


def gpu_of(tables: MeasuredTables) -> GpuSpec:
    """Return the facts of the gpu.toml beside the tables, else of the GPU that fastroof knows by name.

    Parameters
    ----------
    tables : MeasuredTables
        As :func:`load_table_set` returns it.

    Raises
    ------
    GpuError
        If neither is there.
    """
    for place in (tables.root, tables.root.resolve().parent):
        if (place / GPU_FILE).is_file() and (spec := load_gpu(place / GPU_FILE)).name == tables.gpu:
            return spec
    return load_gpu(tables.gpu)


def row_keys(operator: str, columns: Mapping[str, Array]) -> Iterator[str]:
    """Yield the key of each row's point, as :attr:`kernels_bench.points.Point.key` writes it."""
    schema = OPERATORS[operator]
    names = [c.name for c in (*schema.keys, *schema.axes)]
    for cells in zip(*(columns[name].tolist() for name in names), strict=True):
        yield Point(operator, dict(zip(names, cells, strict=True))).key


def codes_of(columns: Iterable[Array]) -> Longs:
    """Return one code for each combination of values, dense from 0 and in the order of the values.

    Examples
    --------
    >>> codes_of([np.array([2, 1, 2]), np.array([5, 5, 5])]).tolist()
    [1, 0, 1]
    """
    codes: Longs | None = None
    for column in columns:
        distinct, code = np.unique(column, return_inverse=True)
        if codes is not None:
            # Made dense again each time, so that the product never overflows.
            _, code = np.unique(codes * len(distinct) + code, return_inverse=True)
        codes = code.reshape(-1).astype(np.int64)
    if codes is None:
        raise ValueError("codes need at least one column")
    return codes


def group_medians(codes: Longs, values: Array) -> Floats:
    """Return the median of the values of each code, in the order of the codes.

    Parameters
    ----------
    codes : ndarray of int64, shape (rows,)
        Dense from 0, as :func:`codes_of` returns them.
    values : ndarray, shape (rows,)
        What to take medians of.

    Examples
    --------
    >>> group_medians(np.array([1, 0, 1]), np.array([4.0, 7.0, 2.0])).tolist()
    [7.0, 3.0]
    """
    order = np.lexsort((values, codes))
    counts = np.bincount(codes)
    starts = np.cumsum(counts) - counts
    ordered = np.asarray(values, np.float64)[order]
    low, high = ordered[starts + (counts - 1) // 2], ordered[starts + counts // 2]
    # Of one value its own bits, whatever its size.
    return np.asarray(np.where(low == high, low, (low + high) / 2.0), np.float64)
