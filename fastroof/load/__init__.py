"""Stage 1: files of measured rows to MeasuredTables; needs NumPy and pyarrow only."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from fastroof.checks import shown
from fastroof.config.gpu import GpuSpec, gpu_named, load_gpu
from fastroof.errors import GpuError, TableError
from fastroof.file_access import exists, is_file, is_folder, matches
from fastroof.load.by_name import ensure_imported, missing_tables, table_folders
from fastroof.load.measured import MeasuredTable, MeasuredTables, PeakFinding, SourceChoice
from fastroof.load.own import load_own
from fastroof.load.trees import is_tree, load_tree

__all__ = ["MeasuredTable", "MeasuredTables", "PeakFinding", "SourceChoice", "load_measured"]


def load_measured(name: str | Path, *, gpu: str | None = None, source: SourceChoice = None) -> MeasuredTables:
    """Load measured rows by GPU name or from a folder of any supported layout.

    Parameters
    ----------
    name : str or Path
        A GPU of bench_data, or a folder: of one GPU, one source, several GPUs, or an InferSim or roofline V2
        tree.
    gpu : str, optional
        Which GPU, if the folder holds several; it must match if there is only one.
    source : str or mapping of str to str, optional
        Use only this source, or a source per operator (other operators use the best-ranked one), such as
        ``{"allreduce": "aiconfigurator-trtllm-1.3.0rc20"}``.

    Returns
    -------
    MeasuredTables
        One table per operator.

    Raises
    ------
    TableError
        If a file is malformed or must not be used, the source does not exist, or the tables are another GPU's
        than the requested one.
    GpuError
        If the name is neither a known GPU nor a folder.
    """
    _check_types(name, gpu, source)
    measured = _load(name, gpu, source)
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


def _load(name: str | Path, gpu: str | None, source: SourceChoice) -> MeasuredTables:
    folder = Path(name)
    if isinstance(name, str) and "/" not in name:
        # a GPU's name means its shipped tables; a folder of that name is ./name
        if (named := gpu_named(name)) is not None:
            return _load_by_name(named.name, source)
        if not exists(folder):
            try:
                load_gpu(name)
            except GpuError as error:
                raise GpuError(f"{error}; a path of a folder of tables would do too") from None
    if not is_folder(folder):
        raise TableError(f"{name} is not a folder: give a GPU's name or a folder of measured tables")
    if is_tree(folder):
        if source is not None:
            raise TableError(f"{folder} is one source; source={source!r} cannot be picked from it")
        return load_tree(folder, gpu)
    if not is_file(folder / "gpu.toml") and not is_file(folder / "provenance.toml"):
        names = [path.parent.name for path in matches(folder, "*/gpu.toml")]
        wanted = [one for one in names if gpu is not None and _is_gpu(gpu, load_gpu(folder / one))]
        if wanted:
            return load_own(folder / wanted[0], source)
        if names:
            raise TableError(f"{folder} holds several GPUs: pass gpu= one of {', '.join(names)}")
    return load_own(folder, source)


def _load_by_name(gpu: str, source: SourceChoice) -> MeasuredTables:
    try:
        ensure_imported(gpu)
    except TableError as error:
        if not table_folders(gpu):
            raise
        warnings.warn(f"{gpu} is served by the tables that are there: {error}", stacklevel=5)
    folders = table_folders(gpu)
    if not folders:
        raise TableError(missing_tables(gpu))
    # shipped and imported tables were checked when they were written
    return load_own(folders, source, when_needed=True)
