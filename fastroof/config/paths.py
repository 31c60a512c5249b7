"""Location of measured tables: shipped ones in the wheel or next to the package, and the user's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from fastroof.errors import FastroofError, TableError

TABLES_FOLDER: Final = "FASTROOF_TABLES"
"""Environment variable that sets another folder for the user's tables."""


def bench_data_root() -> Path:
    """Return the folder that contains one folder per GPU."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "bench_data", package.parent / "bench_data"):
        if folder.is_dir():
            return folder
    raise FastroofError(
        f"no bench_data folder in {package} or {package.parent}: "
        "reinstall fastroof, or give load_tables a path"
    )


def user_tables_root() -> Path:
    """Return the folder of the user's and imported tables: one folder per GPU, as in bench_data."""
    given = os.environ.get(TABLES_FOLDER)
    if given:
        return Path(given).absolute()
    root = _user_data_root()
    # without a home some versions of platformdirs return "~/.local/share", below the working directory
    if not root.is_absolute():
        raise TableError(f"no home folder for tables; set {TABLES_FOLDER} to a folder")
    return root / "tables"


def is_never(variable: str, error: type[FastroofError]) -> bool:
    """Return whether an environment variable is never; auto and empty are its other values."""
    setting = os.environ.get(variable, "") or "auto"
    if setting not in ("auto", "never"):
        raise error(f"{variable} must be auto or never, got {setting!r}")
    return setting == "never"


def _user_data_root() -> Path:
    """Return the user's data folder as platformdirs defines it; on Linux also without platformdirs."""
    try:
        # imported here, so that GPU specifications need only the standard library
        import platformdirs
    except ImportError:
        if sys.platform != "linux":
            raise TableError(
                f"platformdirs is not installed: pip install platformdirs, or set {TABLES_FOLDER} to a folder"
            ) from None
        given = Path(os.environ.get("XDG_DATA_HOME", ""))
        return (given if given.is_absolute() else Path(os.path.expanduser("~/.local/share"))) / "fastroof"
    try:
        return Path(platformdirs.user_data_dir("fastroof"))
    except RuntimeError:  # other releases raise it without a home
        return Path()
