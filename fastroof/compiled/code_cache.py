"""Compiled loops on disk: one file each, named by everything that decides its code, checked when read.

Numba's own cache does not fit a folder that many processes share: its index and its data are two files,
so two processes that compile one loop for two signatures at once may both take the same data file; a
truncated file raises in every later process; and it loads, with pickle, whatever lies there.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final

import llvmlite
import numba
from numba.core import config
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

from fastroof.compiled.trusted_files import UntrustedFolder, cache_roots, opened, read_kept, write_kept

_UNUSED: Final = timedelta(days=30)
_FOLDER_NAME: Final = re.compile(r"loops-[0-9a-f]{16}")
_FILE_NAME: Final = re.compile(r".+\.loop(\.[0-9a-f]+)?")

# numba has no types for these
_rebuild: Any = CompileResult._rebuild
_pickled: Any = dumps


def code_version() -> str | None:
    """Digest of the loops' sources, the compiler and its settings; None where the sources are not there."""
    names = ("BOUNDSCHECK", "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "DEBUGINFO_DEFAULT")
    settings = [str(getattr(config, name, None)) for name in names]
    digest = hashlib.sha256(repr((numba.__version__, llvmlite.__version__, sys.version, settings)).encode())
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16] if sources else None


# Now and not at the first call: an edit in between would keep old code under the new version.
_VERSION: Final = code_version()


def cache_folders() -> tuple[Path, ...]:
    """Folders of this version's compiled code, the best first; none of them needs to exist."""
    return tuple(root / f"loops-{_VERSION}" for root in cache_roots()) if _VERSION else ()


class LoopCache(NullCache):
    """What Numba asks for compiled code, and gives it to: the files of one loop."""

    def __init__(
        self, function: Callable[..., Any], folders: Callable[[], tuple[Path, ...]] = cache_folders
    ) -> None:
        self._function: Any = function
        self._folders = folders

    @property
    def cache_path(self) -> str | None:
        """Where code is kept, for Numba's statistics."""
        return next(map(str, self._folders()), None)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Return the code kept for a signature on this CPU, or None."""
        # Numba refreshes the context here, which imports all it can compile, SciPy too: 0.2 s. Compiled
        # code needs only the runtime it links to, and compiling refreshes the context itself.
        rtsys.initialize(target_context)
        key = self._key(signature, target_context.codegen())
        for folder in self._folders():
            try:
                with opened(folder) as at:
                    stored, parts = pickle.loads(read_kept(at, self._file_name(key)))
                    if stored == key:
                        with suppress(OSError):
                            os.utime(".", dir_fd=at)  # in use: see _remove_unused
                        return _rebuild(target_context, *parts)
            except Exception:  # no such file, or whatever a damaged one may lead to
                continue
        return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep the code compiled for a signature."""
        if compiled.library.has_dynamic_globals:  # addresses of this process
            return
        key = self._key(signature, compiled.codegen)
        payload = _pickled((key, compiled._reduce()))
        distrusted = ""
        for folder in self._folders():
            try:
                is_new = not folder.is_dir()
                write_kept(folder, self._file_name(key), payload)
                if is_new:
                    with suppress(OSError), opened(folder.parent) as above:
                        _remove_unused(above)
                return
            except UntrustedFolder as error:
                distrusted = distrusted or str(error)
            except OSError:
                continue
        if distrusted:
            _say_once(
                f"compiled loops are not kept, so every start compiles them: {distrusted}; set "
                "FASTROOF_CACHE_DIR to a folder that is yours alone"
            )

    def _key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        function = self._function
        cells = _pickled(tuple(cell.cell_contents for cell in function.__closure__ or ()))
        place = (function.__module__, function.__qualname__, function.__code__.co_firstlineno)
        # the magic tuple names the CPU and its features: machines may share a home
        return (*place, hashlib.sha256(cells).hexdigest(), signature, codegen.magic_tuple())

    def _file_name(self, key: tuple[Any, ...]) -> str:
        name = self._function.__qualname__.rpartition(".")[2]
        return f"{name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.loop"


def _remove_unused(root: int) -> None:
    """Remove folders of other versions from which nothing was loaded for long, and nothing else."""
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
    """Open a folder to be read, and no link to one."""
    at = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        yield at
    finally:
        os.close(at)


@cache
def _say_once(words: str) -> None:
    """Tell a person what costs seconds at every start; unlike a warning it is never raised."""
    logging.getLogger("fastroof").warning("fastroof: %s", words)
