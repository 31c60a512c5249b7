"""Where bench_data lies: inside an installed wheel, or beside the package in a clone."""

from __future__ import annotations

from pathlib import Path

from fastroof.errors import FastroofError

__all__ = ["bench_data_root"]


def bench_data_root() -> Path:
    """Return the folder that holds one folder a GPU.

    A wheel carries it inside the package; a clone or an editable install has it at the top level.

    Raises
    ------
    FastroofError
        If neither place has it.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "bench_data", package.parent / "bench_data"):
        if folder.is_dir():
            return folder
    raise FastroofError(
        f"no bench_data folder in {package} or {package.parent}: "
        "reinstall fastroof, or give load_tables a path"
    )
