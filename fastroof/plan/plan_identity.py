"""What a plan of the command line is asked for, and by which code: cached plans are found by this text.

Files of models, GPUs, tables and engine profiles are not part of it: which ones matter is known only once a
plan is compiled. A cached plan has a record of what was read (fastroof.file_access), and counts as long as
that holds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastroof._version import __version__
from fastroof.config.paths import bench_data_root, user_tables_root
from fastroof.errors import FastroofError, PlanError

__all__ = ["KEEP_PLANS", "plan_identity"]

KEEP_PLANS: Final = "FASTROOF_KEEP_PLANS"
"""Environment variable: "never" keeps no plans, and takes none that were kept."""

FORMAT: Final = 2
"""Raised where what is kept of a plan becomes something else."""

MOST_FILES: Final = 10_000
"""Files of the package; with more, nothing is cached."""

SETTLED_NS: Final = 2 * 10**9
"""Code that changed more recently may not be the code that this process has imported."""

_PACKAGE: Final = "aiconfigurator_core"
_IMPORTS: Final = "FASTROOF_TABLES_IMPORT"


class _UncertainError(Exception):
    """The code of this process cannot be told cheaply."""


def plan_identity(
    model: str, gpu: str, tables: str | None, source: str | None, options: Mapping[str, Any]
) -> str | None:
    """Return what a plan answers, by what code, and where files are looked for."""
    setting = os.environ.get(KEEP_PLANS, "") or "auto"
    if setting not in ("auto", "never"):
        raise PlanError(f"{KEEP_PLANS} is {setting!r}; it may be auto or never")
    if setting == "never":
        return None
    try:
        parts = {
            "format": FORMAT,
            "version": __version__,
            "code": _code(Path(__file__).parents[1]),
            "machine": [sys.version, np.__version__, platform.machine(), _processor()],
            "tables": [str(bench_data_root()), _user_tables(), os.environ.get(_IMPORTS), *_package()],
            "asked": [model, gpu, tables, source, dict(options)],
        }
        return json.dumps(parts, sort_keys=True)
    except (_UncertainError, OSError, ValueError, TypeError, FastroofError):
        return None


def _user_tables() -> str | None:
    try:
        return str(user_tables_root())
    except FastroofError:
        return None


def _code(package: Path) -> str:
    """Digest of the status of every file of the package, apart from the tables that a wheel has in it."""
    files = sorted(_files(package, skips=("__pycache__", "bench_data")))
    if max(max(times) for _, _, times in files) + SETTLED_NS > time.time_ns():
        raise _UncertainError
    return hashlib.sha256(repr(files).encode()).hexdigest()


def _files(place: Path, skips: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Every file of a folder, in any order: its path, size and inode, and when it changed."""
    unread = [place]
    count = 0
    while unread:
        with os.scandir(unread.pop()) as scanned:
            entries = [*scanned]
        for entry in entries:
            count += 1
            if count > MOST_FILES:
                raise _UncertainError
            if entry.name in skips:
                continue
            if entry.is_dir():
                unread.append(Path(entry.path))
                continue
            status = entry.stat()
            yield entry.path, (status.st_size, status.st_ino), (status.st_mtime_ns, status.st_ctime_ns)


def _package() -> list[Any]:
    """The installed package whose tables are converted when a GPU is first asked for."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return []
    place = Path(spec.submodule_search_locations[0])
    return [str(place), *sorted(path.name for path in place.parent.glob(f"{_PACKAGE}-*.dist-info"))]


def _processor() -> list[str]:
    """What a processor is and can: machines may share a home, and sums may differ in their last bits."""
    told = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        # of the first processor alone: the file is long where there are many
        with open("/proc/cpuinfo", "rb", buffering=0) as file:
            words = file.read(8192).decode("ascii", "replace").partition("\n\n")[0]
    except OSError:
        return [platform.node()]
    return [line for line in words.splitlines() if line.startswith(told)]
