"""Stage 1, measured rows in files to MeasuredTables; NumPy and pyarrow only."""

from __future__ import annotations

import warnings
from pathlib import Path

from fastroof.config.gpu import load_gpu
from fastroof.errors import GpuError, TableError
from fastroof.load.by_name import ensure_imported, missing_tables, table_folders
from fastroof.load.measured import MeasuredTable, MeasuredTables, PeakFinding, SourceChoice
from fastroof.load.own import load_own
from fastroof.load.trees import is_tree, load_tree

__all__ = ["MeasuredTable", "MeasuredTables", "PeakFinding", "SourceChoice", "load_measured"]


def load_measured(name: str | Path, *, gpu: str | None = None, source: SourceChoice = None) -> MeasuredTables:
    """Load measured rows by GPU name or from a folder of any layout that is known.

    Parameters
    ----------
    name : str or Path
        A GPU of bench_data, or a folder: one GPU's, one source's, several GPUs', or a tree as InferSim
        or roofline V2 lay it out.
    gpu : str, optional
        Which GPU, where the folder holds several.
    source : str or mapping of str to str, optional
        Take only this source; or of the operators named their sources, and of the others the
        best-ranked ones, as in ``{"allreduce": "aiconfigurator-trtllm-1.3.0rc20"}``.

    Returns
    -------
    MeasuredTables
        One table an operator.

    Raises
    ------
    TableError
        If a file is malformed or must not be used, or there is no such source; the error lists those
        that there are.
    GpuError
        If the name is neither a known GPU nor a folder.
    """
    folder = Path(name)
    if isinstance(name, str) and "/" not in name:
        # a GPU's name means its shipped tables; a folder of that name is ./name
        try:
            return _load_by_name(load_gpu(name).name, source)
        except GpuError as error:
            if not folder.is_dir():
                raise GpuError(f"{error}; a path of a folder of tables would do too") from None
    if not folder.is_dir():
        raise TableError(f"{name} is not a folder: give a GPU's name or a folder of measured tables")
    if is_tree(folder):
        if source is not None:
            raise TableError(f"{folder} is one source; source={source!r} cannot be picked from it")
        return load_tree(folder, gpu)
    if not (folder / "gpu.toml").is_file() and not (folder / "provenance.toml").is_file():
        names = sorted(p.parent.name for p in folder.glob("*/gpu.toml"))
        if gpu in names:
            return load_own(folder / str(gpu), source)
        if names:
            raise TableError(f"{folder} holds several GPUs: pass gpu= one of {', '.join(names)}")
    return load_own(folder, source)


def _load_by_name(gpu: str, source: SourceChoice) -> MeasuredTables:
    try:
        ensure_imported(gpu)
    except TableError as error:
        if not table_folders(gpu):
            raise
        warnings.warn(f"{gpu} is served by the tables that are there: {error}", stacklevel=4)
    folders = table_folders(gpu)
    if not folders:
        raise TableError(missing_tables(gpu))
    # what ships or was imported was checked when it was written
    return load_own(folders, source, when_needed=True)
