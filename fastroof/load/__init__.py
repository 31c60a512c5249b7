"""Stage 1, measured rows in files to MeasuredTables; NumPy and pyarrow only."""

from __future__ import annotations

from pathlib import Path

from fastroof.config.gpu import load_gpu
from fastroof.config.paths import bench_data_root
from fastroof.errors import GpuError, TableError
from fastroof.load.measured import MeasuredTable, MeasuredTables, PeakFinding
from fastroof.load.own import load_own
from fastroof.load.trees import is_tree, load_tree

__all__ = ["MeasuredTable", "MeasuredTables", "PeakFinding", "load_measured"]


def load_measured(name: str | Path, *, gpu: str | None = None, source: str | None = None) -> MeasuredTables:
    """Load measured rows by GPU name or from a folder of any layout that is known.

    Parameters
    ----------
    name : str or Path
        A GPU of bench_data, or a folder: one GPU's, one source's, several GPUs', or a tree as InferSim
        or roofline V2 lay it out.
    gpu : str, optional
        Which GPU, where the folder holds several.
    source : str, optional
        Take only this source.

    Returns
    -------
    MeasuredTables
        One table an operator.

    Raises
    ------
    TableError
        If a file is malformed or must not be used.
    GpuError
        If the name is neither a known GPU nor a folder.
    """
    folder = Path(name)
    if not folder.is_dir():
        if isinstance(name, Path) or "/" in name:
            raise TableError(f"{name} is not a folder: give a GPU's name or a folder of measured tables")
        try:
            spec = load_gpu(name)
        except GpuError as error:
            raise GpuError(f"{error}; a path of a folder of tables would do too") from None
        return load_own(bench_data_root() / spec.name, source)
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
