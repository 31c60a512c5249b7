"""Any table set by one word: a journal, a folder, a tree, a GPU's name or one of its sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from fastroof.arrays import Array
from fastroof.config.gpu import GPU_FILE, GpuSpec, load_gpu
from fastroof.errors import MeasureError
from fastroof.load import MeasuredTable, MeasuredTables, load_measured
from fastroof.load.sources import PROVENANCE_FILE
from fastroof.load.trees import is_tree
from fastroof.operators.registry import OPERATORS
from kernels_bench.journal import find_journals
from kernels_bench.output.provenance import provenance_of, recorded_gpu
from kernels_bench.output.recorded import read_journals
from kernels_bench.output.tables import spec_beside, usable_tables
from kernels_bench.protocol import Point

JOURNAL_ENDING: Final = ".jsonl"
TABLES_FOLDER: Final = "kernels_bench"


def load_table_set(word: str) -> MeasuredTables:
    """Load measured tables of any kind.

    >>> load_table_set("h100:aiconfigurator-vllm-0.25.0").gpu
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

    >>> journals_of("h100")
    []
    """
    path = Path(word)
    if path.suffix == JOURNAL_ENDING:
        return [path]
    if not path.is_dir() or (path / PROVENANCE_FILE).is_file():
        return []
    others = {source.parent.name for source in path.glob(f"*/{PROVENANCE_FILE}")} - {TABLES_FOLDER}
    # The journals of a run hold more than its tables; a GPU's folder with other sources is taken as such.
    return [] if others else find_journals(path)


def tables_of_journals(journals: Iterable[Path]) -> MeasuredTables:
    """Return journals as the tables that :func:`kernels_bench.output.tables.write_tables` would write."""
    paths = [Path(journal) for journal in journals]
    recorded = read_journals(paths)
    # A journal is in the GPU's folder, next to the folder of its tables.
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
    """Return the facts of the gpu.toml next to the tables, else of the GPU that fastroof knows by name."""
    for place in (tables.root, tables.root.resolve().parent):
        if (place / GPU_FILE).is_file() and (spec := load_gpu(place / GPU_FILE)).name == tables.gpu:
            return spec
    return load_gpu(tables.gpu)


def row_keys(operator: str, columns: Mapping[str, Array]) -> Iterator[str]:
    """Yield the key of each row's point, as :attr:`kernels_bench.protocol.Point.key` writes it."""
    schema = OPERATORS[operator]
    names = [c.name for c in (*schema.keys, *schema.axes)]
    for cells in zip(*(columns[name].tolist() for name in names), strict=True):
        yield Point(operator, dict(zip(names, cells, strict=True))).key
