"""Read fastroof's own tables: a GPU folder with one folder a source, or one source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array
from fastroof.columns import GPU, LATENCY, OPTIONAL_COLUMNS
from fastroof.config.gpu import GPU_FILE, GpuSpec, load_gpu
from fastroof.errors import TableError
from fastroof.load.measured import MeasuredTable, MeasuredTables, SourceChoice
from fastroof.load.rows import ENDINGS, read_columns
from fastroof.load.soundness import unsound_families
from fastroof.operators.registry import OPERATORS
from fastroof.units import DTYPE_BYTES, TFLOP, US_PER_S

__all__ = ["Source", "list_sources", "load_own"]


PROVENANCE_FILE: Final = "provenance.toml"
SERVING_FOLDER: Final = "serving"
DEFAULT_RANK: Final = 100


@dataclass(frozen=True)
class Source:
    """One source folder: where it lies, what it holds and how it ranks.

    Attributes
    ----------
    name : str
        Name of the folder.
    gpu : str
        GPU that the provenance names.
    folder : Path
        The folder.
    files : mapping of str to Path
        The table of each operator.
    provenance : mapping
        The folder's provenance.toml.
    ignored : mapping of str to str
        Files of the folder that are no tables, and why.
    """

    name: str
    gpu: str
    folder: Path
    files: Mapping[str, Path]
    provenance: Mapping[str, Any]
    ignored: Mapping[str, str] = field(default_factory=dict)

    def rank(self, operator: str) -> int:
        """Place of the source among those that have an operator: the lowest serves it."""
        own = self.provenance.get("operators", {}).get(operator, {})
        return int(own.get("rank", self.provenance.get("rank", DEFAULT_RANK)))


def list_sources(folder: Path) -> list[Source]:
    """List the sources of a GPU folder, or the one source that the folder is.

    Parameters
    ----------
    folder : Path
        A GPU folder (gpu.toml and one folder a source) or a source folder (provenance.toml).

    Returns
    -------
    list of Source
        By name.

    Raises
    ------
    TableError
        If there is none, or a provenance.toml is missing its gpu or is no TOML.
    """
    return _sources(Path(folder))[0]


def load_own(folder: Path, source: SourceChoice = None) -> MeasuredTables:
    """Load measured tables in fastroof's own schema.

    Parameters
    ----------
    folder : Path
        A GPU folder (gpu.toml and one folder a source) or a source folder (provenance.toml).
    source : str or mapping of str to str, optional
        Read this source and no other; or, by operator, the source that it comes from. All that is
        not named comes from the source of the lowest rank that has it: ``rank`` of
        ``[operators.<operator>]`` in its provenance.toml, else ``rank`` at the top, else 100; sources
        of one rank by name.

    Returns
    -------
    MeasuredTables
        One table an operator; what was not read, and why, is in ``ignored``.

    Raises
    ------
    TableError
        If the folder holds no such source or table (the error lists what there is), a file is not what
        :func:`fastroof.load.rows.read_columns` reads, a source mixes GPUs, or a latency is shorter
        than the peak of its dtype allows (an MFU above 1).
    GpuError
        If no gpu.toml describes the GPU.

    Notes
    -----
    The peak is that of the table's dtype for ``gemm`` and ``moe`` and that of bf16 for attention.
    MoE FLOPs are those of uniform routing; a sliding window limits what each query attends to.
    """
    folder = Path(folder)
    sources, ignored = _sources(folder)
    chosen: dict[str, Source] = {}
    if isinstance(source, str):
        sources = [_named(sources, source, folder)]
    elif source is not None:
        chosen = _chosen(sources, source, folder)
    gpus = {s.gpu: s.name for s in sources}
    if len(gpus) > 1:
        sources_by_gpu = ", ".join(f"{gpu} ({name})" for gpu, name in gpus.items())
        raise TableError(f"{folder} has sources of several GPUs: {sources_by_gpu}; keep one folder a GPU")
    ignored |= {f"{s.name}/{name}": reason for s in sources for name, reason in s.ignored.items()}
    gpu = _gpu_spec(sources[0], folder)
    tables = {}
    for operator in OPERATORS:
        having = [s for s in sources if operator in s.files]
        if having:
            serving = chosen.get(operator) or min(having, key=lambda s: (s.rank(operator), s.name))
            tables[operator] = _load_table(serving, operator, gpu)
    if not tables:
        known = ", ".join(OPERATORS)
        raise TableError(f"{folder} holds no table; need <operator>.parquet or .csv, operators are {known}")
    return MeasuredTables(gpu=gpu.name, tables=tables, root=folder, ignored=ignored, spec=gpu)


def _named(sources: list[Source], name: str, folder: Path) -> Source:
    for source in sources:
        if source.name == name:
            return source
    names = ", ".join(s.name for s in sources)
    raise TableError(f"{folder} has no source {name!r}; its sources are {names}")


def _chosen(sources: list[Source], names: Mapping[str, str], folder: Path) -> dict[str, Source]:
    """Return the source that was picked for each operator."""
    chosen = {}
    for operator, name in names.items():
        if operator not in OPERATORS:
            known = ", ".join(OPERATORS)
            raise TableError(f"source picks one for {operator!r}; the operators are {known}")
        chosen[operator] = _named(sources, name, folder)
        if operator not in chosen[operator].files:
            having = ", ".join(s.name for s in sources if operator in s.files) or "none"
            raise TableError(f"{folder}: source {name!r} has no {operator}; those that have it: {having}")
    return chosen


def _gpu_spec(source: Source, folder: Path) -> GpuSpec:
    """Return the GPU of the gpu.toml beside the sources, else the one that fastroof knows by name."""
    for place in (folder / GPU_FILE, source.folder.resolve().parent / GPU_FILE):
        if place.is_file():
            gpu = load_gpu(place)
            if source.gpu not in (gpu.name, *gpu.aliases):
                raise TableError(
                    f"{source.folder / PROVENANCE_FILE}: gpu is {source.gpu!r}, but {place} describes "
                    f"{gpu.name!r}; move the source to the folder of its GPU"
                )
            return gpu
    return load_gpu(source.gpu)


# -- folders -------------------------------------------------------------------------------------


def _sources(folder: Path) -> tuple[list[Source], dict[str, str]]:
    """Return the sources and what else the folder holds, with the reason it is not read."""
    if not folder.is_dir():
        raise TableError(f"{folder}: no such folder")
    if (folder / PROVENANCE_FILE).is_file():
        return [_source(folder)], {}
    sources, ignored = [], {}
    for entry in sorted(folder.iterdir()):
        if (entry / PROVENANCE_FILE).is_file():
            sources.append(_source(entry))
        elif entry.name == SERVING_FOLDER:
            ignored[entry.name] = "measured end to end, holds no kernels"
        elif entry.name != GPU_FILE:
            ignored[entry.name] = f"no source: no folder with a {PROVENANCE_FILE}"
    if not sources:
        raise TableError(
            f"{folder} holds no source; need {PROVENANCE_FILE} in it or in a folder in it, beside the tables"
        )
    return sources, ignored


def _source(folder: Path) -> Source:
    provenance = _provenance(folder / PROVENANCE_FILE)
    files: dict[str, Path] = {}
    ignored: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        if path.name == PROVENANCE_FILE:
            continue
        if path.stem not in OPERATORS or path.suffix not in ENDINGS:
            ignored[path.name] = "no <operator>.parquet or <operator>.csv"
        elif path.stem in files:
            raise TableError(f"{folder} has {files[path.stem].name} and {path.name}; keep one of them")
        else:
            files[path.stem] = path
    return Source(folder.resolve().name, provenance["gpu"], folder, files, provenance, ignored)


def _provenance(path: Path) -> dict[str, Any]:
    try:
        provenance = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: no TOML: {error}") from None
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
            raise TableError(f"{path}: {where}rank is {rank!r}; need a whole number, lower comes first")
    for operator in OPERATORS.keys() & operators.keys():
        try:
            unsound_families(provenance, operator)
        except TableError as error:
            raise TableError(f"{path}: {error}") from None
    return provenance


# -- tables --------------------------------------------------------------------------------------


def _load_table(source: Source, operator: str, gpu: GpuSpec) -> MeasuredTable:
    path = source.files[operator]
    schema = OPERATORS[operator]
    columns = read_columns(path, schema.required, OPTIONAL_COLUMNS)
    if GPU.name in columns:
        _refuse_other_gpus(path, columns[GPU.name], source.gpu)
    for column in schema.keys:
        if column.name in ("dtype", "kv_dtype"):
            _refuse_unknown_dtypes(path, column.name, columns[column.name])
    _refuse_mfu_above_one(path, operator, columns, gpu)
    return MeasuredTable(operator, columns, source.name, (path.name,), source.provenance)


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
        raise TableError(f"{path}, row {row + 1}, column {name}: found {dtypes[row]!r}, known are {known}")


def _refuse_mfu_above_one(path: Path, operator: str, columns: Mapping[str, Array], gpu: GpuSpec) -> None:
    work = OPERATORS[operator].flops(columns)
    _, limit_flops_per_s = OPERATORS[operator].peaks(columns, gpu)
    # Attention computes in bf16, or over an fp8 KV cache at most at the fp8 peak.
    dtypes = columns.get("dtype", columns.get("kv_dtype", np.full(len(work), "bf16", object)))
    no_units = np.isnan(limit_flops_per_s) & ~np.isnan(work)
    if no_units.any():
        row = int(np.argmax(no_units))
        raise TableError(
            f"{path}, row {row + 1}: {gpu.title} has no units for dtype {dtypes[row]!r}; "
            f"drop such rows, or name the dtype that they ran in"
        )
    mfu = work / (columns[LATENCY.name] / US_PER_S * limit_flops_per_s)
    too_fast = mfu > 1.0
    if too_fast.any():
        row = int(np.argmax(too_fast))
        shape = ", ".join(f"{c.name}={columns[c.name][row]}" for c in OPERATORS[operator].axes)
        raise TableError(
            f"{path}, row {row + 1} ({shape}): {columns[LATENCY.name][row]:.6g} us is an MFU of "
            f"{mfu[row]:.3f} of the {dtypes[row]} peak of {gpu.title} "
            f"({limit_flops_per_s[row] / TFLOP:g} TFLOP/s); no kernel is that fast, "
            f"so the dtype, the sizes, the unit or the GPU is not what the table says"
        )
