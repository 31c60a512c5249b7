"""Stage 1: files of measured rows to MeasuredTables; needs NumPy and pyarrow only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastroof.checks import shown
from fastroof.config.gpu import GpuSpec, load_gpu
from fastroof.errors import GpuError, TableError
from fastroof.file_access import is_file, matches
from fastroof.load.by_name import PACKAGE_PREFIX, convert_table, find_tables, find_tables_of, missing_tables
from fastroof.load.measured import MeasuredTable, MeasuredTables, PeakFinding, Progress, SourceChoice
from fastroof.load.scaled import with_scaled
from fastroof.load.sources import load_sources
from fastroof.load.trees import is_tree, load_tree

__all__ = [
    "MeasuredTable",
    "MeasuredTables",
    "PeakFinding",
    "SourceChoice",
    "load_measured",
    "load_measured_of",
]


def load_measured(
    name: str | Path, *, gpu: str | None = None, source: SourceChoice = None, progress: Progress | None = None
) -> MeasuredTables:
    """Load measured rows by GPU name or from a folder of any layout that is known.

    The arguments, and what is raised, are those of :func:`fastroof.load_tables`.
    """
    _check_types(name, gpu, source)
    measured = _load(name, gpu, source, progress)
    if gpu is not None and not _is_gpu(gpu, measured.gpu_spec):
        raise TableError(
            f"{name} has tables of {measured.gpu}, and gpu is {gpu!r}: leave gpu out, or name the tables of "
            f"that GPU"
        )
    return measured


def _check_types(name: object, gpu: object, source: object) -> None:
    if not isinstance(name, str | Path) or name == "":
        raise TableError(f"tables are a GPU's name or the path of a folder, got {shown(name, 80)}")
    if not isinstance(gpu, str | None):
        raise TableError(f"gpu must be the name of a GPU, got {shown(gpu, 80)}")
    is_choice = isinstance(source, Mapping) and all(
        isinstance(word, str) for pair in source.items() for word in pair
    )
    if not is_choice and not isinstance(source, str | None):
        raise TableError(
            f"source must be the name of one, or names by operator as in {{'allreduce': 'mine'}}, "
            f"got {shown(source, 80)}"
        )


def _is_gpu(name: str, spec: GpuSpec) -> bool:
    """Whether a name or alias is that of the tables' GPU."""
    if name in (spec.name, *spec.aliases):
        return True
    try:
        return load_gpu(name).name == spec.name
    except GpuError as error:
        raise TableError(f"gpu is {shown(name, 80)}, and the tables are of {spec.name}: {error}") from None


def load_measured_of(
    gpu: Any, *, source: SourceChoice = None, progress: Progress | None = None
) -> MeasuredTables | None:
    """Load what was measured on a GPU, given as :func:`fastroof.load_gpu` takes it, or on its donor.

    None if nothing was.
    """
    folders, spec, _ = find_tables_of(gpu, progress=progress)
    # what ships or was imported was checked when it was written
    is_checked = spec is not None
    own = load_sources(folders, source, when_needed=is_checked, convert=convert_table) if folders else None
    tables = _with_donor(own, gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu), source, progress)
    if tables is None and source is not None:
        name = spec.name if spec is not None else gpu
        raise TableError(f"{name} has no measured tables, so no source {source!r}; leave source out")
    return tables


def _with_donor(
    own: MeasuredTables | None, gpu: GpuSpec, source: SourceChoice, progress: Progress | None
) -> MeasuredTables | None:
    """Return a GPU's own tables with those of ``kernels_of`` behind them, scaled."""
    if not gpu.kernels_of or (own is not None and source is not None):
        return own
    donor = load_gpu(gpu.kernels_of)
    measured = load_measured_of(replace(donor, kernels_of=""), source=source, progress=progress)
    return own if measured is None else with_scaled(own, measured, gpu)


def _load(
    name: str | Path, gpu: str | None, source: SourceChoice, progress: Progress | None
) -> MeasuredTables:
    if isinstance(name, str) and name.startswith(PACKAGE_PREFIX):
        return _load_package(name, source)
    folders, spec, of_name = find_tables(name, progress=progress)
    if of_name is not None and source is not None:
        raise TableError(f"{name} names its source; leave source={source!r} out")
    if spec is not None:
        chosen = source if of_name is None else of_name
        own = load_sources(folders, chosen, when_needed=True, convert=convert_table) if folders else None
        tables = own if of_name is not None else _with_donor(own, spec, source, progress)
        if tables is None:
            raise TableError(missing_tables(spec.name))
        return tables
    (folder,) = folders
    if is_tree(folder):
        if source is not None:
            raise TableError(f"{folder} is one source; source={source!r} cannot be picked from it")
        return load_tree(folder, gpu)
    if not is_file(folder / "gpu.toml") and not is_file(folder / "provenance.toml"):
        names = [path.parent.name for path in matches(folder, "*/gpu.toml")]
        wanted = [one for one in names if gpu is not None and _is_gpu(gpu, load_gpu(folder / one))]
        if wanted:
            return load_sources(folder / wanted[0], source, convert=convert_table)
        if names:
            raise TableError(f"{folder} holds several GPUs: pass gpu= one of {', '.join(names)}")
    return load_sources(folder, source, convert=convert_table)


def _load_package(name: str, source: SourceChoice) -> MeasuredTables:
    from fastroof.load.aiconfigurator import import_aiconfigurator

    parts = name.removeprefix(PACKAGE_PREFIX).split("/")
    if len(parts) != 3 or not all(parts) or source is not None:
        raise TableError(f"{name!r} is not {PACKAGE_PREFIX}GPU/BACKEND/VERSION, as package:h200/vllm/0.24.0")
    gpu, backend, version = parts
    return import_aiconfigurator(gpu, backend, version)
