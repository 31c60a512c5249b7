"""Compiled loops on disk: one file each, named by everything that decides its code, checked when read.

Numba's own cache does not fit a folder that many processes share: its index and its data are two files,
so two processes that compile one loop for two signatures at once may both take the same data file; a
truncated file raises in every later process; and it loads, with pickle, whatever lies there.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import llvmlite
import numba
import platformdirs
from numba.core import config
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

__all__ = ["LoopCache", "cache_folders", "code_version"]

_UNUSED: Final = timedelta(days=30)
_FOLDER_NAME: Final = re.compile(r"loops-[0-9a-f]{16}")
_DIGEST_BYTES: Final = hashlib.sha256().digest_size

# numba has no types for these
_rebuild: Any = CompileResult._rebuild
_pickled: Any = dumps


def code_version() -> str | None:
    """Digest of the loops' sources, the compiler and its settings; None where the sources are not there.

    All sources and not a loop's own file: a loop holds the code of those that it calls.
    """
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
    """Folders of this version's compiled code, the best first; none of them needs to exist.

    ``FASTROOF_CACHE_DIR`` if it is set, then the user's cache. Code is read from all of them and written to
    the first that takes it, so that a cache made beforehand may be read-only and lack some of the loops.
    """
    given = os.environ.get("FASTROOF_CACHE_DIR")
    # platformdirs answers "~/.cache" where there is no home: no name for a folder of the working directory
    users = Path(platformdirs.user_cache_dir("fastroof"))
    roots = [*([Path(given)] if given else []), *([users] if users.is_absolute() else [])]
    return tuple(root / f"loops-{_VERSION}" for root in roots) if _VERSION else ()


class LoopCache(NullCache):
    """What Numba asks for compiled code, and gives it to: the files of one loop.

    Numba calls it under its compiler lock. No failure to read or write gets out: the loop is compiled.

    Parameters
    ----------
    function : callable
        The loop, as Python.
    folders : callable
        Returns where code is kept, as :func:`cache_folders` does; called when code is first needed.
    """

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
                stored, parts = pickle.loads(_read(folder / self._file_name(key)))
                if stored == key:
                    with suppress(OSError):
                        os.utime(folder)  # in use: see _remove_unused
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
        for folder in self._folders():
            with suppress(OSError):
                _write(folder, self._file_name(key), payload)
                return

    def _key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        function = self._function
        cells = _pickled(tuple(cell.cell_contents for cell in function.__closure__ or ()))
        place = (function.__module__, function.__qualname__, function.__code__.co_firstlineno)
        # the magic tuple names the CPU and its features: machines may share a home
        return (*place, hashlib.sha256(cells).hexdigest(), signature, codegen.magic_tuple())

    def _file_name(self, key: tuple[Any, ...]) -> str:
        name = self._function.__qualname__.rpartition(".")[2]
        return f"{name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.loop"


def _is_ours(status: os.stat_result) -> bool:
    """Whether nobody but this user and root wrote it: what is unpickled runs."""
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid in (os.geteuid(), 0) and not others_write


def _open_at_once(path: str, flags: int) -> int:
    """Open a file, and do not wait for the other end if somebody has put a pipe there."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read(path: Path) -> bytes:
    """The payload of a file, once it is known to be ours and whole."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not _is_ours(os.fstat(file.fileno())):
            raise PermissionError(f"{path} may be somebody else's")
        data = file.read()
    payload = data[_DIGEST_BYTES:]
    # damaged machine code would not raise, it would run
    if hashlib.sha256(payload).digest() != data[:_DIGEST_BYTES]:
        raise ValueError(f"{path} is damaged")
    return payload


def _write(folder: Path, name: str, payload: bytes) -> None:
    """Write a file that other processes see whole or not at all."""
    is_new = not folder.is_dir()
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    if is_new:
        _remove_unused(folder.parent)
    unfinished = folder / f"{name}.{secrets.token_hex(8)}"
    try:
        # writable by nobody else, whatever the umask
        with open(unfinished, "xb", opener=partial(os.open, mode=0o644)) as file:
            file.write(hashlib.sha256(payload).digest() + payload)
        unfinished.replace(folder / name)
    finally:
        unfinished.unlink(missing_ok=True)


def _remove_unused(root: Path) -> None:
    """Remove folders of other versions from which nothing was loaded for long, and nothing else.

    A process that is still at work there compiles again what it misses, and makes the folder again.
    """
    oldest = time.time() - _UNUSED.total_seconds()
    for folder in root.glob("loops-*"):
        with suppress(OSError):
            if _FOLDER_NAME.fullmatch(folder.name) and folder.lstat().st_mtime < oldest:
                for path in folder.glob("*.loop*"):
                    path.unlink(missing_ok=True)
                folder.rmdir()
