"""Output throughput that was published: engines given more requests at once than they can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from benchmarks.accuracy.rows import check_served, read_records
from fastroof.columns import Column
from fastroof.config.paths import bench_data_root
from fastroof.engines import serving_engines
from fastroof.load.own import SERVING_FOLDER
from fastroof.serving.evidence.rows import ServedAs

__all__ = [
    "SERVED_COLUMNS",
    "SERVED_DEFAULTS",
    "THROUGHPUT_COLUMNS",
    "ServedModel",
    "ThroughputRow",
    "read_throughput",
    "shipped_throughput",
]

THROUGHPUT_FOLDER: Final = "throughput"


@dataclass(frozen=True)
class ServedModel(ServedAs):
    """What was measured: a model as one engine served it.

    Attributes
    ----------
    dataset, row : str
        Which rows it is judged with, and its name among them.
    gpu, engine, engine_version : str
        What it was measured on.
    checkpoint, model : str
        The weights, and what :func:`fastroof.load_model` makes of them.
    dtype, kv_dtype, kv_dtype_from : str
        Of linear layers and KV cache, and how the latter is known.
    tp, pp, dp, ep : int
        Its layout.
    left_out : str
        Why it is not judged; empty where it is.
    """

    dataset: str
    row: str
    gpu: str
    engine: str
    engine_version: str
    checkpoint: str
    model: str
    dtype: str
    kv_dtype: str
    kv_dtype_from: str
    tp: int
    pp: int
    dp: int
    ep: int
    left_out: str


@dataclass(frozen=True)
class ThroughputRow(ServedModel):
    """One published throughput: requests of equal lengths that are all there from the start.

    Attributes
    ----------
    isl, osl : int
        Tokens of each prompt and output.
    requests : int
        How many there were.
    max_concurrency : int
        How many the engine runs at once at most.
    concurrency_from : str
        How it is known how many ran.
    output_tokens_per_s : float
        Output tokens of all GPUs a second.
    """

    isl: int
    osl: int
    requests: int
    max_concurrency: int
    concurrency_from: str
    output_tokens_per_s: float


def _column(name: str, kind: Any, unit: str, meaning: str, minimum: int = 1) -> Column:
    return Column(name, kind, unit, meaning, minimum)


SERVED_COLUMNS: Final = (
    _column("dataset", "text", "", "rows that are judged together"),
    _column("row", "text", "", "name of the row"),
    _column("gpu", "text", "", "GPU that it was measured on"),
    _column("engine", "text", "", f"serving engine: {', '.join(serving_engines())}"),
    _column("engine_version", "text", "", "its version"),
    _column("checkpoint", "text", "", "model that was served, as the source names it"),
    _column("model", "text", "", "fastroof's preset of it, or a config.json"),
    _column("dtype", "text", "", "dtype of the linear layers"),
    _column("kv_dtype", "text", "", "dtype of the KV cache"),
    _column("kv_dtype_from", "text", "", "how kv_dtype is known"),
    _column("tp", "int", "GPUs", "tensor-parallel size", 1),
    _column("pp", "int", "", "pipeline stages", 1),
    _column("dp", "int", "", "ranks of attention data parallelism", 1),
    _column("ep", "int", "", "groups of experts", 1),
    _column("left_out", "text", "", "why the row is not judged; empty where it is"),
)
"""Columns of every kind of file of :class:`ServedModel`."""

THROUGHPUT_COLUMNS: Final = (
    *SERVED_COLUMNS,
    _column("isl", "int", "tokens", "length of each prompt", 1),
    _column("osl", "int", "tokens", "length of each output", 1),
    _column("requests", "int", "", "requests that were all there from the start", 1),
    _column("max_concurrency", "int", "", "requests that run at once at most", 1),
    _column("concurrency_from", "text", "", "how it is known how many ran at once"),
    _column("output_tokens_per_s", "float", "tokens/s", "output tokens of all GPUs"),
)
"""The columns of a file of published throughput."""

SERVED_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {"checkpoint": "", "kv_dtype_from": "", "pp": 1, "dp": 1, "ep": 1, "left_out": ""}
)
"""What a column that a file lacks, or an empty cell of it, stands for."""


def read_throughput(path: str | Path) -> tuple[ThroughputRow, ...]:
    """Read a CSV of published throughput.

    Parameters
    ----------
    path : str or Path
        A file with the columns of :data:`THROUGHPUT_COLUMNS`.

    Returns
    -------
    tuple of ThroughputRow
        In the order of the file.

    Raises
    ------
    TableError
        If it is no such file, or a cell is not what its column holds.
    """
    rows = []
    for where, values in read_records(path, THROUGHPUT_COLUMNS, SERVED_DEFAULTS, "published throughput"):
        row = ThroughputRow(**values)
        check_served(where, row)
        rows.append(row)
    return tuple(rows)


def shipped_throughput(gpu: str, root: Path | None = None) -> tuple[ThroughputRow, ...]:
    """Read the published throughput that ships with a GPU.

    Parameters
    ----------
    gpu : str
        Name of the GPU.
    root : Path, optional
        Folder that holds one folder a GPU, instead of the shipped one.

    Returns
    -------
    tuple of ThroughputRow
        Of all files of ``<gpu>/serving/throughput`` by name.

    Examples
    --------
    >>> len(shipped_throughput("h100"))
    112
    """
    folder = (bench_data_root() if root is None else root) / gpu / SERVING_FOLDER / THROUGHPUT_FOLDER
    return tuple(row for path in sorted(folder.glob("*.csv")) for row in read_throughput(path))
