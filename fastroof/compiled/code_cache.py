"""Cache of compiled loops on disk: one file each, named by a digest of its inputs and checked when read.

Numba's own cache is unsafe in a folder shared by many processes: its index and its data are two files, so
two processes that compile one loop for two signatures may write the same data file; a truncated file raises
in every later process; and it unpickles whatever it finds.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Final

from numba.core import config

from fastroof.compiled.shipped_loops import compiler_versions
from fastroof.compiled.trusted_files import UntrustedFolder, cache_roots, opened, read_trusted, write_trusted

_UNUSED: Final = timedelta(days=30)
_FOLDER_NAME: Final = re.compile(r"loops-[0-9a-f]{16}")
_FILE_NAME: Final = re.compile(r".+\.loop(\.[0-9a-f]+|\.lock)?")


def code_version() -> str | None:
    """Return a digest of the loops' sources, the compiler and its settings; None without sources."""
    names = ("BOUNDSCHECK", "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "DEBUGINFO_DEFAULT")
    settings = [str(getattr(config, name, None)) for name in names]
    digest = hashlib.sha256(repr((compiler_versions(), settings)).encode())
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16] if sources else None


# now and not at the first call: after an edit in between, old code would be stored under the new version
VERSION: Final = code_version()


def cache_folders() -> tuple[Path, ...]:
    """Return the folders for this version's compiled code, best first; none needs to exist."""
    return tuple(root / f"loops-{VERSION}" for root in cache_roots()) if VERSION else ()


def cached_files(folders: tuple[Path, ...], name: str) -> Iterator[bytes]:
    """Read a cached file from each folder that has it, trusted and undamaged."""
    for folder in folders:
        with suppress(OSError, ValueError), opened(folder) as at:
            data = read_trusted(at, name)
            with suppress(OSError):
                os.utime(".", dir_fd=at)  # in use: see _remove_unused
            yield data


def store(folders: tuple[Path, ...], name: str, payload: bytes) -> None:
    """Write a cached file into the first folder that is trusted and can be written."""
    distrusted = ""
    for folder in folders:
        try:
            make_folder(folder)
            write_trusted(folder, name, payload)
            return
        except UntrustedFolder as error:
            distrusted = distrusted or str(error)
        except OSError:
            continue
    if distrusted:
        say_once(
            f"compiled code is not cached, so every start compiles it: {distrusted}; set "
            "FASTROOF_CACHE_DIR to a folder that is yours alone"
        )


def make_folder(folder: Path) -> None:
    """Make a folder unless it is there; a new one is of a new version, or of a new cache."""
    if not folder.is_dir():
        with opened(folder, create=True):
            pass
        with suppress(OSError), opened(folder.parent) as above:
            _remove_unused(above)


def _remove_unused(root: int) -> None:
    """Remove folders of other versions that have not been used for long, and nothing else."""
    oldest = time.time() - _UNUSED.total_seconds()
    with suppress(OSError), _listed(".", root) as folders:
        for folder in filter(_FOLDER_NAME.fullmatch, os.listdir(folders)):
            with suppress(OSError), _listed(folder, folders) as files:
                if os.fstat(files).st_mtime < oldest:
                    for file in filter(_FILE_NAME.fullmatch, os.listdir(files)):
                        os.unlink(file, dir_fd=files)
                    os.rmdir(folder, dir_fd=folders)


@contextmanager
def _listed(name: str, above: int) -> Iterator[int]:
    """Open a folder for reading; links are refused."""
    at = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        yield at
    finally:
        os.close(at)


@cache
def say_once(words: str) -> None:
    """Log once what costs seconds at every start; a log message, as a warning may be raised as an error."""
    logging.getLogger("fastroof").warning("fastroof: %s", words)
