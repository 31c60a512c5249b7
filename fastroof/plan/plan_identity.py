"""All that a plan of the command line is made from, as one text: kept plans are found by it.

It is worked out without reading a table: a file is told by its size and times, a description besides by its
digest. What says that a file changed and did not costs a plan made anew; what changed is never missed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastroof._version import __version__
from fastroof.config.paths import TABLES_FOLDER, bench_data_root, user_tables_root
from fastroof.errors import FastroofError, PlanError

__all__ = ["KEEP_PLANS", "plan_identity"]

KEEP_PLANS: Final = "FASTROOF_KEEP_PLANS"
"""Environment variable: "never" keeps no plans, and takes none that were kept."""

FORMAT: Final = 1
"""Raised where what is kept of a plan becomes something else."""

MOST_FILES: Final = 10_000
LARGEST_DOCUMENT: Final = 4 * 2**20
"""Beyond these it is not worth it: nothing is kept."""

_DESCRIPTIONS: Final = ("gpu.toml", "provenance.toml")
_PACKAGE: Final = "aiconfigurator_core"
_SETTINGS: Final = (TABLES_FOLDER, "FASTROOF_TABLES_IMPORT")


class _TooMuch(Exception):
    """There is more to look at than reading the tables would cost."""


def plan_identity(
    model: str, gpu: str, tables: str | None, source: str | None, options: Mapping[str, Any]
) -> str | None:
    """Say what a plan is made from.

    Parameters
    ----------
    model : str
        As the command line has it: a name or a path.
    gpu : str
        A name or a path.
    tables : str, optional
        A folder of tables, or the name of a GPU, instead of the GPU's own.
    source : str, optional
        Which source of them.
    options : mapping
        All other arguments of :func:`fastroof.compile_plan`, as JSON can hold them.

    Returns
    -------
    str or None
        The same text for the same plan, by this version of fastroof on this kind of processor; None where
        it cannot be said cheaply, and where nothing is to be kept.

    Raises
    ------
    PlanError
        If ``FASTROOF_KEEP_PLANS`` is no setting.
    """
    setting = os.environ.get(KEEP_PLANS, "") or "auto"
    if setting not in ("auto", "never"):
        raise PlanError(f"{KEEP_PLANS} is {setting!r}; it may be auto or never")
    if setting == "never":
        return None
    try:
        parts = {
            "format": FORMAT,
            "version": __version__,
            "code": _digest(_files(Path(__file__).parents[1], skips=("__pycache__", "bench_data"))),
            "machine": [sys.version, np.__version__, platform.machine(), _processor()],
            "settings": {name: os.environ.get(name) for name in _SETTINGS},
            "package": _package(),
            "model": [model, _document(Path(model), "config.json", "hf_quant_config.json")],
            "gpu": [gpu, tables, source],
            "tables": [_digest(_files(folder)) for folder in _folders(gpu, tables)],
            "runtime": _document(Path(str(options.get("runtime")))),
            "options": dict(options),
        }
        return json.dumps(parts, sort_keys=True)
    except (_TooMuch, OSError, ValueError, TypeError, FastroofError):
        return None


def _folders(gpu: str, tables: str | None) -> Iterator[Path]:
    """Where tables of a GPU may lie: of a name and of a path of that spelling."""
    roots = [bench_data_root()]
    with suppress(FastroofError):
        roots.append(user_tables_root())
    for name in (gpu, *([] if tables is None else [tables])):
        path = Path(name)
        if path.exists():
            yield path.resolve() if path.is_dir() else path.resolve().parent
        folder = name
        if not (roots[0] / name / "gpu.toml").is_file():
            # another spelling
            from fastroof.config import load_gpu

            with suppress(FastroofError):
                folder = load_gpu(name).name
        for root in roots:
            yield root / folder


def _files(place: Path, skips: tuple[str, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every file of a folder, in any order: its path, size, times and, of a description, digest."""
    yield (str(place),)
    unread = [place]
    count = 0
    while unread:
        at = unread.pop()
        try:
            entries = [*os.scandir(at)]
        except FileNotFoundError:
            continue
        except NotADirectoryError:
            yield (str(at), *_stamp(os.stat(at)))
            continue
        for entry in entries:
            count += 1
            if count > MOST_FILES:
                raise _TooMuch
            if entry.name in skips:
                continue
            if entry.is_dir():
                unread.append(Path(entry.path))
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:
                # a link to nowhere
                yield (entry.path,)
                continue
            is_text = entry.name in _DESCRIPTIONS and stat.S_ISREG(status.st_mode)
            described = _read(entry.path) if is_text else ""
            yield (entry.path, *_stamp(status), described)


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    """Nobody sets the last of these times: it changes with the contents whatever a copy keeps."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _digest(files: Iterator[tuple[Any, ...]]) -> str:
    return hashlib.sha256(repr(sorted(files)).encode()).hexdigest()


def _read(path: str | Path) -> str:
    """Digest of a document."""
    with open(path, "rb") as file:
        data = file.read(LARGEST_DOCUMENT + 1)
    if len(data) > LARGEST_DOCUMENT:
        raise _TooMuch
    return hashlib.sha256(data).hexdigest()


def _document(path: Path, *names: str) -> list[str]:
    """A document that a name may be the path of, and those beside it that are read too; else nothing."""
    if not path.exists():
        return []
    found = path.resolve()
    folder = found if found.is_dir() else found.parent
    every = dict.fromkeys([*([] if found.is_dir() else [found]), *(folder / name for name in names)])
    return [str(found), *(f"{place} {_read(place)}" for place in every if place.is_file())]


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
